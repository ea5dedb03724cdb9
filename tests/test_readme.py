"""The README as a newcomer reads it: its commands exist, its tree is the tree, its pictures and links are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from reference import errors_page, params_page
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
    return [line for line in lines if line]


def test_every_make_verb_exists_and_is_listed_by_make_alone() -> None:
    listed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for verb in {*re.findall(r"\bmake ([a-z]+)\b", README), "setup", "run", "test", "lint", "bench", "serve", "stop", "clean"} - {"alone"}:
        assert re.search(rf"^  make {verb} ", listed, re.MULTILINE), verb


def test_every_command_is_known() -> None:
    known = (
        "make ",
        "dvc repro",
        "dvc pull",
        "dvc metrics show",
        "source .venv/bin/activate",
        "prefect ",
        "python -m flows.",
        "cp presets/",
        "curl ",
    )
    assert commands()
    for command in commands():
        assert command.startswith(known), command


def test_prefect_commands_name_deployments_and_the_pool_of_prefect_yaml() -> None:
    tree = YAML(typ="safe", pure=True).load(ROOT / "prefect.yaml")
    deployments = {f"{entry['entrypoint'].split(':')[1]}/{entry['name']}" for entry in tree["deployments"]}
    assert set(re.findall(r"`?'?(retrain/[a-z-]+)", README)) <= deployments
    assert {entry["work_pool"]["name"] for entry in tree["deployments"]} == {"trainyard"}
    assert "prefect worker start --pool trainyard" in README


def test_the_tree_is_the_tree() -> None:
    tree = next(block for kind, block in BLOCKS if kind == "" and block.startswith("flows/"))
    parents: list[str] = []
    named = set()
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0].rstrip("/")
        parents = [*parents[:depth], name]
        named.add("/".join(parents))
        if "(git-ignored)" not in line:
            assert (ROOT / "/".join(parents)).is_dir(), line
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {path.split("/")[0] for path in listed if "/" in path and not path.startswith(".")}
    assert top <= named
    assert {f"tasks/{path.split('/')[1]}" for path in listed if path.count("/") == 2 and path.startswith("tasks/")} <= named


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)h#][^)]*)\)", README))))
def test_links_and_pictures_are_there(target: str) -> None:
    assert (ROOT / target).exists()


def test_no_marker_was_left_unfilled() -> None:
    assert "@@" not in README


def test_generated_pages_are_in_step_with_the_code() -> None:
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == errors_page(), "run: python docs/reference.py"
    assert (ROOT / "docs" / "params.md").read_text(encoding="utf-8") == params_page(), "run: python docs/reference.py"


def test_every_stage_and_artifact_of_the_table_exists() -> None:
    from tasks.core import artifacts

    for name, stage in re.findall(r"^\| (\w+) \| .* \| (\w+) \| .* \|$", README, re.MULTILINE):
        if name != "artifact":
            assert stage == getattr(artifacts, name).STAGE
