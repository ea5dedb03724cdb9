"""Secrets of a source: from the environment or a real server's Secret block, to the stage alone, never to a log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from own_server import prefect_server
from ruamel.yaml import YAML

from flows.secrets import masked, secrets_of
from tasks.core.config import Params, apply_overrides
from tasks.core.errors import BadInput
from tasks.core.process import QUIET

ROOT = Path(__file__).parents[1]
SECRET = "kept-from-all-logs-4711"
SAVE = f"""
from prefect.blocks.system import Secret
Secret(value={SECRET!r}).save("of-the-store")
Secret(value={{"not": "text"}}).save("no-text")
"""
RUN = """
import sys
from pathlib import Path
from prefect import flow
from flows import bindings
from flows.secrets import secrets_of

@flow(name="secrets-test")
def told(root):
    say = "import os; print('the store has', len(os.environ['STORE_KEY']), 'letters:', os.environ['STORE_KEY'])"
    for line in bindings._run([sys.executable, "-c", say], Path(root), "ingest", secrets=secrets_of(Path(root))):
        print("line", line)

told(sys.argv[1])
"""


def project(root: Path, **secrets: str) -> Path:
    yaml = YAML()
    with (root / "params.yaml").open("w", encoding="utf-8") as handle:
        yaml.dump(yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8")), handle)
    apply_overrides({"ingest": {"secrets": secrets}}, root / "params.yaml")
    return root


def python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_") and key != "STORE_KEY"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env={**clean, **QUIET, "PREFECT_API_URL": prefect_server(), **env}, capture_output=True, text=True)


@pytest.mark.slow
def test_a_block_of_the_server_reaches_the_stage_and_no_log(tmp_path: Path) -> None:
    saved = python(SAVE)
    assert saved.returncode == 0, saved.stderr
    done = python(RUN, str(project(tmp_path, STORE_KEY="of-the-store")))
    assert done.returncode == 0, done.stderr
    assert f"line the store has {len(SECRET)} letters: ***" in done.stdout
    assert SECRET not in done.stdout + done.stderr
    logs = httpx.post(f"{prefect_server()}/logs/filter", json={}, timeout=30).json()
    assert any("the store has" in entry["message"] for entry in logs)
    assert not any(SECRET in entry["message"] for entry in logs)
    own = python(RUN, str(tmp_path), STORE_KEY="my-own-key")
    assert "letters: ***" in own.stdout
    assert f"has {len('my-own-key')} " in own.stdout
    for block, said in (("nowhere", "no such Secret block"), ("no-text", "holds no text")):
        refused = python(RUN, str(project(tmp_path, STORE_KEY=block)))
        assert refused.returncode != 0
        assert f"error[unknown_block]: {said}" in refused.stdout + refused.stderr or said in refused.stderr


def test_without_a_server_the_variable_must_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    root = project(tmp_path, STORE_KEY="of-the-store")
    monkeypatch.setenv("STORE_KEY", "mine")
    assert secrets_of(root) == {"STORE_KEY": "mine"}
    monkeypatch.delenv("STORE_KEY")
    with pytest.raises(BadInput, match="no Prefect server") as caught:
        secrets_of(root)
    assert caught.value.code == "unknown_block"


def test_names_are_checked_and_short_secrets_blot_nothing_out() -> None:
    with pytest.raises(ValueError, match="secrets"):
        Params.model_validate({"ingest": {"secrets": {"not a name": "x"}}})
    assert masked("a line with a secret in it", ["secret", "a"]) == "a line with a *** in it"
