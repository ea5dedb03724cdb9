"""Attacks tasks.images.former: a cache made by copying must equal one made anew byte for byte, whatever was kept, damaged or held."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prepare import CLASSES, CONFIG, images, project

from tasks.core.artifacts import ImageCache, lineage
from tasks.core.config import PrepareConfig
from tasks.core.files import STATE, file_lock
from tasks.core.process import QUIET
from tasks.images import decode, former, shards
from tasks.prepare import prepare

REUSING = CONFIG.model_copy(update={"reuse_mb": 10.0})


class Counted:
    """Counts the images that are decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded = 0
        real = decode.load_pixels

        def load_pixels(data: bytes, spec: decode.Spec) -> object:
            self.decoded += 1
            return real(data, spec)

        monkeypatch.setattr(decode, "load_pixels", load_pixels)

    def __call__(self, root: Path, rows: list[shards.ImageRow], config: PrepareConfig = REUSING, bad: dict[str, str] | None = None) -> int:
        """Images decoded by a prepare whose former output is gone, as DVC has it."""
        shutil.rmtree(root / "artifacts" / "cache", ignore_errors=True)
        before = self.decoded
        prepare(*project(root, rows, bad), config, root)
        return self.decoded - before


def cache_bytes(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / ImageCache.PATH).parent.iterdir()}


def fresh(root: Path, rows: list[shards.ImageRow], bad: dict[str, str] | None = None) -> dict[str, bytes]:
    """The cache of a project that never kept anything."""
    shutil.rmtree(root, ignore_errors=True)
    prepare(*project(root, rows, bad), CONFIG, root)
    return cache_bytes(root)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_whatever_the_history_the_bytes_are_those_of_a_fresh_prepare(tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: data that grow, shrink, change labels, splits, groups and quarantine; runs of rows cut at every length."""
    rng = random.Random(11)
    pool = images(140)
    for round_ in range(12):
        monkeypatch.setattr(former, "STEP", rng.choice((1, 8 * 8 * 3 * 3, 8 << 20)))
        rows = rng.sample(pool, rng.randint(60, len(pool)))
        for index in rng.sample(range(len(rows)), 8):
            rows[index] = rows[index]._replace(label=rng.choice(CLASSES), split=rng.choice(("train", None)), group=rng.choice((None, "g")))
        bad = {row.sha256: "image_corrupt" for row in rng.sample(rows, 3)}
        decoded = counted(tmp_path / "p", rows, bad=bad)
        assert cache_bytes(tmp_path / "p") == fresh(tmp_path / "fresh", rows, bad)
        assert decoded < len(rows) or round_ == 0


def test_a_batch_costs_only_itself(tmp_path: Path, counted: Counted) -> None:
    rows = images(100)
    assert counted(tmp_path, rows[:90]) == 90
    assert counted(tmp_path, rows[:90]) == 0
    assert counted(tmp_path, rows) == 10
    assert counted(tmp_path, rows[20:]) == 0
    assert cache_bytes(tmp_path) == fresh(tmp_path / "fresh", rows[20:])


def test_other_pixels_are_never_taken(tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: another size, policy, background, limit, version of Pillow; each must decode all, and each key stands beside the others."""
    rows = images(40)
    assert counted(tmp_path, rows) == 40
    for change in ({"resize": "crop"}, {"image_size": 16}, {"decode": CONFIG.decode.model_copy(update={"background": (0, 0, 0)})}):
        assert counted(tmp_path, rows, REUSING.model_copy(update=change)) == 40
    assert counted(tmp_path, rows) == 0
    monkeypatch.setattr("PIL.__version__", "0.0")
    assert counted(tmp_path, rows) == 40


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "index", "foreign"])
def test_a_damaged_store_is_ignored_and_made_anew(damage: str, tmp_path: Path, counted: Counted) -> None:
    rows = images(40)
    counted(tmp_path, rows)
    folder = next((tmp_path / former.PIXELS).iterdir()) / "artifacts" / "cache"
    pixels, index = folder / "000001-00000.u8", folder / "index.json"
    data = pixels.read_bytes()
    changed = {"bit": data[:50] + bytes([data[50] ^ 1]) + data[51:], "cut": data[:-1]}.get(damage, data)
    pixels.unlink()  # the file may be artifacts/cache's too
    if damage != "gone":
        pixels.write_bytes(changed)
    if damage in ("index", "foreign"):
        text = index.read_text()
        index.unlink()
        index.write_text("{" if damage == "index" else text.replace('"image_size": 8', '"image_size": 9'))
    assert counted(tmp_path, rows) == 40
    assert cache_bytes(tmp_path) == fresh(tmp_path / "fresh", rows)
    assert counted(tmp_path, rows) == 0


def test_a_store_that_is_held_is_neither_waited_for_nor_written(tmp_path: Path, counted: Counted) -> None:
    rows = images(50)
    counted(tmp_path, rows[:40])
    with file_lock(tmp_path / former.LOCK, 1.0, "the test"):
        assert counted(tmp_path, rows) == 50
    assert counted(tmp_path, rows) == 10


def test_worktrees_share_what_their_project_keeps(tmp_path: Path, counted: Counted) -> None:
    rows = images(40)
    counted(tmp_path / "home", rows)
    worktree = tmp_path / "home" / STATE / "worktrees" / "one"
    (worktree / STATE).mkdir(parents=True)
    (worktree / STATE / "home").symlink_to(tmp_path / "home")
    assert counted(worktree, rows) == 0
    assert not (worktree / former.PIXELS).exists()


def test_what_is_kept_is_bounded(tmp_path: Path, counted: Counted) -> None:
    """40 images of 8 x 8 are 8 kB of pixels and some more of tables; a budget for two caches holds the newest two, 0 holds none."""
    rows = images(40)
    counted(tmp_path, rows)
    size = sum(map(len, cache_bytes(tmp_path).values()))
    tight = REUSING.model_copy(update={"reuse_mb": 2.5 * size / 1e6})
    for resize in ("stretch", "crop", "letterbox"):
        counted(tmp_path, rows, tight.model_copy(update={"resize": resize}))
    assert len(list((tmp_path / former.PIXELS).iterdir())) == 2
    assert counted(tmp_path, rows, tight.model_copy(update={"resize": "crop"})) == 0
    counted(tmp_path, rows, REUSING.model_copy(update={"reuse_mb": 0.0}))
    assert list((tmp_path / former.PIXELS).iterdir()) == []


def test_changing_the_cache_in_place_changes_nothing_that_is_taken(tmp_path: Path, counted: Counted) -> None:
    """Attack: artifacts/cache shares its bytes with the store where it is a hard link; an edit there must not come back."""
    rows = images(40)
    counted(tmp_path, rows)
    pixels = tmp_path / "artifacts" / "cache" / "000001-00000.u8"
    with pixels.open("r+b") as file:
        file.write(bytes(64))
    counted(tmp_path, rows)
    assert cache_bytes(tmp_path) == fresh(tmp_path / "fresh", rows)


def batches(root: Path, parts: list[list[shards.ImageRow]], form: str, bad: dict[str, str] | None = None) -> ImageCache:
    """The cache of data that came in batches, a shard each, its former output gone."""
    rows = [row for part in parts for row in part]
    ref, report = project(root, rows, bad)
    written = [shard for number, part in enumerate(parts, 1) for shard in shards.write_shards(root / "data", number, part, 10**9, "test")]
    ref = ref.model_copy(update={"shards": tuple(written)}).save(root)
    report = report.model_copy(update={"made_from": lineage(ref)}).save(root)
    shutil.rmtree(root / "artifacts" / "cache", ignore_errors=True)
    return prepare(ref, report, REUSING.model_copy(update={"cache": form}), root)


@pytest.mark.parametrize("form", ["pixels", "encoded"])
def test_a_batch_is_a_file_and_the_others_are_the_former_ones(form: str, tmp_path: Path, counted: Counted) -> None:
    """Their bytes are neither written nor, by DVC, stored again; an image that leaves changes its own batch's file alone."""
    rows = images(150)
    parts = [rows[:60], rows[60:100], rows[100:]]
    first = batches(tmp_path, parts[:2], form)
    kept = {name: first.path(name).stat().st_ino for name in first.files if not name.endswith(".parquet")}
    before = counted.decoded
    second = batches(tmp_path, parts, form).verify()
    assert counted.decoded - before == (50 if form == "pixels" else 0)
    assert list(second.shards) == ["000001-00000", "000002-00000", "000003-00000"]
    assert {name: second.path(name).stat().st_ino for name in kept} == kept
    assert cache_bytes(tmp_path) == {path.name: path.read_bytes() for path in batches(tmp_path / "fresh", parts, form).folder.iterdir()}
    third = batches(tmp_path, parts, form, bad={rows[70].sha256: "leak_near"})
    assert counted.decoded - before == (50 + 150 if form == "pixels" else 0), "150 of the fresh one"
    same = {name for name in second.files if name in third.files and third.files[name] == second.files[name] and not name.endswith(".parquet")}
    assert len(same) == 2
    assert cache_bytes(tmp_path) == {
        path.name: path.read_bytes() for path in batches(tmp_path / "fresh", parts, form, {rows[70].sha256: "leak_near"}).folder.iterdir()
    }


def test_dvc_stores_of_a_batch_its_own_file_and_the_tables(tmp_path: Path) -> None:
    rows = images(150)
    parts = [rows[:100], rows[100:]]

    def stored() -> list[int]:
        subprocess.run([sys.executable, "-m", "dvc", "add", "-q", "artifacts/cache"], cwd=tmp_path, check=True, env={**os.environ, **QUIET})
        return sorted(path.stat().st_size for path in (tmp_path / ".dvc" / "cache" / "files").rglob("*") if path.is_file())

    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], cwd=tmp_path, check=True, env={**os.environ, **QUIET})
    batches(tmp_path, parts[:1], "pixels")
    before = stored()
    cache = batches(tmp_path, parts, "pixels")
    new = Counter(stored()) - Counter(before)
    assert new.total() == 1 + 3 + 2, "the batch's file, the tables, the index and DVC's list"
    assert cache.shards["000002-00000"] in new
    assert cache.shards["000001-00000"] not in new


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_any_history_of_batches_gives_the_cache_of_a_fresh_prepare(data: st.DataObject) -> None:
    """Attack: batches that come, and images that leave and return, in either form."""
    pool = images(90)
    form = data.draw(st.sampled_from(["pixels", "encoded"]))
    with TemporaryDirectory() as folder:
        for step in range(data.draw(st.integers(2, 4))):
            parts = [pool[:40], pool[40:70], pool[70:80], pool[80:]][: min(4, step + 1)]
            out = data.draw(st.sets(st.integers(0, sum(map(len, parts)) - 1), max_size=3))
            bad = {pool[number].sha256: "leak_near" for number in out}
            batches(Path(folder) / "p", parts, form, bad)
            fresh_one = batches(Path(folder) / f"fresh{step}", parts, form, bad)
            assert cache_bytes(Path(folder) / "p") == {path.name: path.read_bytes() for path in fresh_one.folder.iterdir()}
