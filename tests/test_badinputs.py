"""The catalogue of bad and odd inputs, all kinds but images: each comes out as it says, in its time, leaving nothing behind.

Looked for in $TRAINYARD_BADINPUTS or ../shared/badinputs; skipped where it is absent. The image kinds are in test_decode.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tasks.backends.dvc_repo import open_repo
from tasks.core.artifacts import DatasetRef, ValidationReport
from tasks.core.config import IngestConfig, PrepareConfig, ValidateConfig, load_params, read_yaml
from tasks.core.errors import BadInput
from tasks.images.shards import iter_rows
from tasks.ingest import ingest
from tasks.sources.__main__ import dry_run
from tasks.sources.layout import printable
from tasks.training.checkpoint import Checkpoints
from tasks.training.models import start_from
from tasks.validate import validate

CATALOGUE = Path(os.environ.get("TRAINYARD_BADINPUTS", Path(__file__).parents[2] / "shared" / "badinputs"))
READERS = ("folder", "archive", "splits")
LENIENT = ValidateConfig(min_side_px=1, min_images_per_class=1, min_decodable_share=0.0)

pytestmark = [
    pytest.mark.skipif(not (CATALOGUE / "cases.json").is_file(), reason="no catalogue in $TRAINYARD_BADINPUTS or ../shared/badinputs"),
    pytest.mark.timeout(60),
]


TABLES = {"csv": "table", "parquet": "parquet"}
SUITE = {"class_single_image_stratified": "the suite's bound of the split; a dry run does not run the suite"}


def catalogue(readers: tuple[str, ...] = READERS) -> list[dict[str, Any]]:
    if not (CATALOGUE / "cases.json").is_file():
        return []
    cases: list[dict[str, Any]] = json.loads((CATALOGUE / "cases.json").read_text(encoding="utf-8"))["cases"]
    return [case for case in cases if case["reader"] in readers]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked cases; it holds a FIFO, link loops and names that are not UTF-8, so it never lies in a repository."""
    folder = tmp_path_factory.mktemp("badinputs")
    with tarfile.open(CATALOGUE / "tree.tar.gz", errors="surrogateescape") as archive:
        archive.extractall(folder, filter="fully_trusted")
    return folder


def everything_below(folder: Path) -> set[str]:
    return {os.fsencode(path).decode("utf-8", "backslashreplace") for path in folder.rglob("*")}


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in catalogue()])
def test_case(case: dict[str, Any], tree: Path, tmp_path: Path) -> None:
    if case["needs"] == "a user who is not root" and os.geteuid() == 0:
        pytest.skip("root reads every file")
    entry = tree / case["entry"]
    if case["reader"] == "folder":
        entry.mkdir(exist_ok=True)  # an empty folder is not in the tree
    if case["id"] == "unreadable":
        (entry / "cat" / "secret.png").chmod(0)
    before, root = everything_below(tree), tmp_path / "project"
    root.mkdir()
    config = IngestConfig(source="archive" if case["reader"] == "archive" else "folder", location=str(entry))
    start = time.monotonic()
    refusal: BadInput | None = None
    ref: DatasetRef | None = None
    try:
        ref = ingest(config, root)
        if case["behaviour"] == "reject":
            validate(ref, LENIENT, PrepareConfig(), root)
    except BadInput as error:
        refusal = error
    seconds = time.monotonic() - start
    assert everything_below(tree) == before, "something was written beside the source"
    assert [path.name for path in tmp_path.iterdir()] == ["project"]
    if ref is None:
        assert [path.name for path in root.iterdir()] == [".trainyard"]
        assert seconds < case["limits"].get("max_seconds", 20)
    if case["behaviour"] == "reject":
        assert refusal is not None, "it was taken"
        assert refusal.code == case["code"]
        assert "\n" not in str(refusal)
        for name in case["expect"].get("error_names", ()):
            assert name in str(refusal)
        return
    assert refusal is None
    assert ref is not None
    expect = case["expect"]
    with contextlib.suppress(BadInput):  # some cases are too small to be split
        validate(ref, LENIENT, PrepareConfig(), root)
    report = ValidationReport.load(root)
    assert list(ref.classes) == expect["classes"]
    assert report.sound == expect["accepted"]
    assert ref.ignored >= expect.get("ignored_min", 0)
    aside = {(item.name, item.code) for item in (*ref.set_aside, *report.quarantined)}
    assert aside == {(printable(name), code) for name, code in expect.get("quarantined", ())}


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    return {"classes": case["config"]["classes"]} if "classes" in case["config"] else {}


def rows_set_aside(case: dict[str, Any], manifest: Path) -> list[tuple[str, str]]:
    """(name, code) of each row that the catalogue sets aside by its line: its path, or the line where it has no path that could be told."""
    lines = manifest.read_text(encoding="utf-8").splitlines()
    found = []
    for line, code in case["expect"].get("quarantined_rows", ()):
        path = re.sub("//[^/@]*@", "//***@", lines[line - 1].split(",")[0])
        found.append((path if code != "bad_row" else f"{manifest.name} line {line}", code))
    return sorted(found)


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in catalogue(tuple(TABLES))])
def test_case_of_a_table(case: dict[str, Any], tree: Path, tmp_path: Path) -> None:
    """The same verdict and code from ingest, which stores it, and from a dry run, which stores nothing."""
    entry, kind = tree / case["entry"], TABLES[case["reader"]]
    before, expect = everything_below(tree), case["expect"]
    told = dry_run(kind, str(entry), tmp_path, options_of(case))
    assert not list(tmp_path.iterdir())
    config = IngestConfig(source=kind, location=str(entry), options=options_of(case))
    if case["behaviour"] == "reject":
        with pytest.raises(BadInput) as caught:
            ingest(config, tmp_path)
        assert caught.value.code == case["code"] == told["rejected"]["code"]
        assert str(caught.value) == told["rejected"]["message"]
        assert "\n" not in str(caught.value)
        assert all(name in str(caught.value) for name in expect.get("error_names", ()))
        assert not DatasetRef.exists(tmp_path)
        assert everything_below(tree) == before
        return
    ref = ingest(config, tmp_path)
    assert everything_below(tree) == before
    assert sorted((row.path, row.label) for row in iter_rows(ref)) == sorted(map(tuple, expect["rows"]))
    aside = rows_set_aside(case, entry)
    assert {(item.name, item.code) for item in ref.set_aside} == set(aside)
    assert sorted((item["name"], item["code"]) for item in told["quarantined"]) == aside
    assert told["accepted"] == len(expect["rows"])
    assert sum(told["classes"].values()) == told["accepted"]
    notices = {notice["code"]: notice["what"] for notice in told["notices"]}
    assert case["notice"] is None or case["notice"] in notices
    assert str(expect.get("duplicates", "")) in notices.get("duplicate_rows", "")
    assert expect.get("hint", "") in notices.get("missing_file", "")


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in catalogue(("sql",))])
def test_case_of_a_database(case: dict[str, Any], tree: Path, tmp_path: Path) -> None:
    """The rows that the catalogue names by id are set aside with its codes, by ingest or by decoding; nothing is written beside the database."""
    entry, stated, expect = tree / case["entry"], case["config"], case["expect"]
    before = everything_below(tree)
    location = stated["url"].replace("sqlite:///", f"sqlite:///{entry.parent}/")
    options = {"table": stated["table"], "image": stated["image_column"], "label": stated["label_column"]}
    told = dry_run("sql", location, tmp_path, options)
    assert list(told["classes"]) == expect["classes"]
    assert told["accepted"] == expect["accepted"]
    aside = {(f"{stated['table']}/{key}", code) for key, code in expect.get("quarantined_ids", ())}
    assert {(item["name"], item["code"]) for item in told["quarantined"]} == aside
    ref = ingest(IngestConfig(source="sql", location=location, options=options), tmp_path)
    assert {(item.name, item.code) for item in ref.set_aside} == aside
    assert len(list(iter_rows(ref))) == expect["accepted"]
    assert everything_below(tree) == before


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in catalogue()])
def test_a_dry_run_of_a_tree_says_what_ingest_and_validate_would(case: dict[str, Any], tree: Path, tmp_path: Path) -> None:
    if case["id"] in SUITE:
        pytest.skip(SUITE[case["id"]])
    if case["needs"] == "a user who is not root" and os.geteuid() == 0:
        pytest.skip("root reads every file")
    entry = tree / case["entry"]
    if case["reader"] == "folder":
        entry.mkdir(exist_ok=True)
    told = dry_run("archive" if case["reader"] == "archive" else "folder", str(entry), tmp_path, {})
    assert not list(tmp_path.iterdir())
    if case["behaviour"] == "reject":
        assert told["rejected"]["code"] == case["code"]
        return
    expect = case["expect"]
    assert list(told["classes"]) == expect["classes"]
    assert told["accepted"] == expect["accepted"]
    assert told["ignored"] >= expect.get("ignored_min", 0)
    assert {(item["name"], item["code"]) for item in told["quarantined"]} == {(printable(name), code) for name, code in expect.get("quarantined", ())}


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in catalogue(("config",))])
def test_configuration(case: dict[str, Any], tree: Path, tmp_path: Path) -> None:
    path, start = tree / case["entry"], time.monotonic()
    if case["behaviour"] == "accept":
        found = read_yaml(path)
        assert found == {"train": {"lr": 0.001}}
        assert isinstance(found["train"]["lr"], float)
        return
    with pytest.raises(BadInput) as caught:
        if path.name == "dvc.lock":
            (tmp_path / "dvc.lock").write_bytes(path.read_bytes())
            with open_repo(tmp_path):
                pass
        else:
            load_params(path)
    assert caught.value.code == case["code"]
    assert caught.value.knob or path.name != "dvc.lock", "the error says how to mend it"
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in catalogue(("checkpoint",))])
def test_checkpoint(case: dict[str, Any], tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As starting weights, and among checkpoints, where the one before it is taken."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as caught:
        start_from(nn.Linear(2, 2), tree / case["entry"], print)
    assert caught.value.code == case["code"]
    data = (tree / case["entry"]).read_bytes()
    said: list[str] = []
    for name in (hashlib.sha256(data).hexdigest(), "0" * 64):
        path = tmp_path / f"epoch-000001.{name}.pt"
        path.write_bytes(data)
        assert Checkpoints(tmp_path, said.append).newest() is None
        assert not path.exists()
    assert len(said) == 2
    assert list(tmp_path.iterdir()) == [], "nothing in it was run"
