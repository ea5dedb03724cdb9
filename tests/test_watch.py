"""The source is watched: what moves its fingerprint and what does not, and what the flow makes of it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import make_project
from real_server import Deployed, until
from source_trees import pictures, write_tree

from tasks.core.errors import BadInput
from tasks.sources import Source, fingerprint, fingerprint_of, source

LOOK = """
import json
from flows.watch import ingest
state = ingest(return_state=True)
print("ENDED", json.dumps([state.name, state.message]))
"""


def test_a_folder_moves_by_a_name_a_size_or_a_time_and_by_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    for name in ("a/1.png", "b/1.png"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"x")
    seen = [fingerprint_of("folder", "images", tmp_path)]
    assert fingerprint_of("folder", str(folder), Path("/elsewhere")) == seen[0]
    (folder / "a" / "Thumbs.db").write_bytes(b"junk")
    assert fingerprint_of("folder", "images", tmp_path) == seen[0]
    for change in (
        lambda: (folder / "a" / "2.png").write_bytes(b"x"),
        lambda: (folder / "a" / "2.png").rename(folder / "b" / "2.png"),
        lambda: (folder / "b" / "2.png").write_bytes(b"xx"),
        lambda: os.utime(folder / "b" / "2.png", ns=(1, 1)),
        lambda: (folder / "b" / "2.png").unlink(),
        lambda: (folder / "c").mkdir(),
        lambda: (folder / "a" / "link.png").symlink_to(folder / "a" / "1.png"),
    ):
        change()
        seen.append(fingerprint_of("folder", "images", tmp_path))
        if len(seen) != 6:  # the fifth change takes the second file away again: as at first
            assert seen[-1] not in seen[:-1]
    assert seen[5] == seen[0]
    with pytest.raises(BadInput, match="does not exist"):
        fingerprint_of("folder", "nowhere", tmp_path)


def test_a_small_archive_moves_by_its_content_and_a_large_one_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "images.zip"
    path.write_bytes(b"one")
    first = fingerprint_of("archive", "images.zip", tmp_path)
    os.utime(path, ns=(1, 1))
    assert fingerprint_of("archive", "images.zip", tmp_path) == first
    path.write_bytes(b"two")
    assert fingerprint_of("archive", "images.zip", tmp_path) != first
    monkeypatch.setattr("tasks.sources.archive.SMALL", 2)
    large = fingerprint_of("archive", "images.zip", tmp_path)
    os.utime(path, ns=(1, 1))
    assert fingerprint_of("archive", "images.zip", tmp_path) != large


def test_a_source_brings_its_own_fingerprint_and_may_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.sources._OPENERS", {})
    monkeypatch.setattr("tasks.sources._FINGERPRINTS", {})
    source("rows")(lambda location, root, limits: Source(items=()))
    assert fingerprint_of("rows", "", tmp_path) == ""
    fingerprint("rows")(lambda location, root: f"{location}: highest id 41")
    assert fingerprint_of("rows", "db", tmp_path) == "db: highest id 41"
    with pytest.raises(BadInput, match="no such source"):
        fingerprint_of("row", "", tmp_path)


def test_ten_thousand_files_are_looked_at_in_two_seconds(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "0.png").write_bytes(b"x")
        for number in range(1, 5_000):
            os.link(tmp_path / "images" / name / "0.png", tmp_path / "images" / name / f"{number}.png")
    start = time.monotonic()
    fingerprint_of("folder", "images", tmp_path)
    assert time.monotonic() - start < 2


@pytest.mark.slow
def test_new_data_is_said_once_bad_data_is_refused_once_and_no_move_is_cheap(deployed: Deployed, tmp_path: Path) -> None:
    """A real ingest and validation of a growing folder, on a real server."""
    images = tmp_path / "images"
    project = make_project(tmp_path / "project", ingest={"source": "folder", "location": str(images)}, register={"model_name": "watched"})
    write_tree(images, pictures(left=12, right=12))

    def look() -> tuple[str, str]:
        said = project.python("-c", LOOK, env=deployed.env).stdout.splitlines()
        name, message = json.loads(next(line for line in said if line.startswith("ENDED")).removeprefix("ENDED"))
        return name, message

    def version() -> str:
        return (project.root / "data.dvc").read_text(encoding="utf-8")

    before = version()
    assert look()[0] == "Completed"
    assert version() != before
    (event,) = until(lambda: events_of(deployed, 1), "event of new data", 30, deployed)
    assert event["payload"]["images"] == event["payload"]["new"] == 24
    assert event["payload"]["version"] in version()

    start = time.monotonic()
    assert look() == ("Unchanged", "the source did not move (watching the source)")
    assert time.monotonic() - start < 60

    for number in range(30):  # half of what is there now does not decode
        (images / "left" / f"bad{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes([number]) * 50)
    name, message = look()
    assert name == "Failed"
    assert "error[validation_failed]" in message
    name, message = look()
    assert name == "Unchanged"
    assert "error[validation_failed]" in message

    seen = json.loads((project.root / ".trainyard" / "watch" / "watched.json").read_text())
    assert "validation_failed" in seen["refused"]
    assert seen["version"] == event["payload"]["version"]  # what was announced last


def events_of(deployed: Deployed, count: int) -> list[dict[str, Any]] | None:
    found = deployed.post("events/filter", filter={"resource": {"id": ["trainyard.pipeline.watched"]}})["events"]
    return found if len(found) >= count else None
