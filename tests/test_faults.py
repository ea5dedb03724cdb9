"""A stage that dies, or is told that the disk is full, at its first, second, third ... touch of a file: what was stays whole, a rerun completes.

A touch is a file opened for writing, renamed, linked, removed, cut or a folder made, below the project, seen by Python's audit hook.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from source_trees import contents, from_folder, pictures, png, write_tree

from tasks.core.artifacts import DatasetRef, ImageCache, ValidationReport
from tasks.core.config import PrepareConfig, ValidateConfig
from tasks.ingest import ingest
from tasks.prepare import prepare
from tasks.validate import validate

LOOSE = ValidateConfig(min_images_per_class=1, min_decodable_share=0.5)
CONFIG = PrepareConfig(image_size=8, val_share=0.25, test_share=0.25)
ENCODED = CONFIG.model_copy(update={"cache": "encoded"})
ORDER = ("ingest", "validate", "prepare")
TOUCHES = {"os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DIED, REFUSED, UNTOUCHED = 9, 10, 11


def stage(name: str, root: Path) -> None:
    """Run a stage on the project ``root`` as it stands, whose source lies in ``root``/source."""
    if name == "ingest":
        ingest(from_folder(root / "source", shard_mb=0.003), root)
    elif name == "validate":
        validate(DatasetRef.load(root), LOOSE, CONFIG, root)
    else:
        prepare(DatasetRef.load(root), ValidationReport.load(root), ENCODED if name == "prepare encoded" else CONFIG, root)


def whole(name: str, root: Path) -> str:
    """The digest of the stage's artifact, every file of it verified; "" where there is none."""
    kind: Any = {"ingest": DatasetRef, "validate": ValidationReport, "prepare": ImageCache}[name.split()[0]]
    return str(kind.load(root).verify().digest) if kind.exists(root) else ""


def hit(name: str, root: Path, touch: int, dies: bool) -> int:
    """Run the stage in a child process that dies, or whose call fails with ENOSPC, at its ``touch``-th touch; how the child ended: 0 where
    the stage completed all the same, UNTOUCHED where it has no such touch."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code, left = 0, [touch]
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
        sys.addaudithook(_hook(str(root), left, dies))
        stage(name, root)
        code = UNTOUCHED if left[0] > 0 else 0
    except OSError as error:
        code = REFUSED if error.errno == errno.ENOSPC else 1
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def _hook(root: str, left: list[int], dies: bool) -> Callable[[str, tuple[Any, ...]], None]:
    """Counts ``left`` down; strikes at 0."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if not (writes or event in TOUCHES) or not str(arguments[0]).startswith(root):
            return
        left[0] -= 1
        if left[0] == 0:
            if dies:
                os._exit(DIED)
            raise OSError(errno.ENOSPC, "No space left on device")

    return hook


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with data, report and cache of a first version, whose source has grown, lost an image and moved another since."""
    root = tmp_path_factory.mktemp("grown") / "project"
    source = write_tree(root / "source", pictures(cat=20, dog=20))
    for name in ORDER:
        stage(name, root)
    write_tree(source, {**pictures(first=1, cat=4, dog=4), "cat/broken.png": png(500)[:100]})
    (source / "cat" / "0000.png").rename(source / "dog" / "moved.png")
    return root


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "disk full"])
@pytest.mark.parametrize("name", [*ORDER, "prepare encoded"])
def test_whatever_write_is_the_last_nothing_is_half_and_a_rerun_completes(name: str, dies: bool, grown: Path, tmp_path: Path) -> None:
    start = Path(shutil.copytree(grown, tmp_path / "start"))
    for before in ORDER[: ORDER.index(name.split()[0])]:
        stage(before, start)
    unbroken = Path(shutil.copytree(start, tmp_path / "unbroken"))
    stage(name, unbroken)
    old, new = whole(name, start), whole(name, unbroken)
    assert old
    assert old != new
    ends: list[int] = []
    seen: set[str] = set()
    while len(ends) < 300:
        root = Path(shutil.copytree(start, tmp_path / "hit"))
        ends.append(hit(name, root, len(ends) + 1, dies))
        if ends[-1] == UNTOUCHED:
            break
        found = whole(name, root)
        assert found == new or ends[-1] in (DIED, REFUSED), "a stage that did not do its work said that it did"
        seen.add(found)
        assert found in ({old, new} if name != "validate" else {old, new, ""}), f"touch {len(ends)}"
        if len(ends) % (5 if name == "validate" else 1) == 0:  # its rerun takes a second
            stage(name, root)
            assert whole(name, root) == new
            folder = root / ("data" if name == "ingest" else "artifacts")
            assert contents(folder) == contents(unbroken / folder.name), f"touch {len(ends)}"
        shutil.rmtree(root)
    assert ends[-1] == UNTOUCHED
    assert old in seen
    assert set(ends[:-1]) <= {DIED if dies else REFUSED, 0}, ends
    assert ends.count(DIED if dies else REFUSED) > 6, ends
