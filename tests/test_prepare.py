"""Attacks tasks.prepare: what it refuses, what it leaves out, its row order, its determinism, and that a failure leaves nothing."""

from __future__ import annotations

import hashlib
import io
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tasks.core.artifacts import SPLITS, CheckResult, DatasetRef, ImageCache, SetAside, ValidationReport, file_digests, lineage
from tasks.core.config import PrepareConfig
from tasks.core.errors import BadInput
from tasks.core.files import digest_of
from tasks.images import shards
from tasks.images.cache import open_split
from tasks.images.decode import decode, policy_of, to_square
from tasks.prepare import prepare

ROOT = Path(__file__).parents[1]
CONFIG = PrepareConfig(image_size=8, val_share=0.25, test_share=0.25, reuse_mb=0.0)
CLASSES = ("ant", "bee")


def picture(number: int, side: int = 12, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (side, side + 1, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def images(count: int = 60, *, side: int = 12, kind: str = "PNG") -> list[shards.ImageRow]:
    found = []
    for number in range(count):
        data = picture(number, side, kind)
        found.append(shards.ImageRow(data, f"{CLASSES[number % 2]}/{number}", CLASSES[number % 2], hashlib.sha256(data).hexdigest(), None, None))
    return found


def project(root: Path, rows: list[shards.ImageRow], bad: dict[str, str] | None = None, **report: Any) -> tuple[DatasetRef, ValidationReport]:
    """data/ and a validation report as ingest and validate leave them; ``bad`` is sha256 -> reason."""
    bad = bad or {}
    written = shards.write_shards(root / "data", 1, rows, 10**9, "test")
    splits = {split: sum(row.split == split for row in rows) for split in SPLITS if any(row.split == split for row in rows)}
    ref = DatasetRef(classes=CLASSES, counts={}, splits=splits, shards=tuple(written)).save(root)
    folder = root / "artifacts" / "validation"
    folder.mkdir(parents=True, exist_ok=True)
    columns = {name: pa.array([getattr(row, name) for row in rows], pa.string()) for name in ("path", "label", "split", "group", "sha256")}
    lengths = pa.array([len(row.data) for row in rows], pa.int64())
    pq.write_table(pa.table({**columns, "bytes": lengths, "reason": [bad.get(row.sha256, "") for row in rows]}), folder / "images.parquet")
    fields = {
        "success": True,
        "images": len(rows),
        "sound": len(rows) - len(bad),
        "checks": (),
        "quarantined": tuple(SetAside(name=sha, code=reason) for sha, reason in bad.items()),
        "made_from": lineage(ref),
        "files": file_digests(folder, "images.parquet"),
    }
    return ref, ValidationReport(**{**fields, **report}).save(root)


def nothing_written(root: Path) -> bool:
    return not (root / "artifacts" / "cache").exists() and not list((root / "artifacts").glob(".cache*"))


def test_the_cache_holds_every_image_once_with_its_own_pixels_and_label(tmp_path: Path) -> None:
    rows = images()
    cache = prepare(*project(tmp_path, rows), CONFIG, tmp_path)
    cache.verify()
    assert cache.classes == CLASSES
    assert sum(cache.counts.values()) == len(rows)
    by_sha = {row.sha256: row for row in rows}
    met: list[str] = []
    for split in SPLITS:
        view = open_split(cache, split)
        assert view.pixels.shape == (cache.counts[split], 8, 8, 3)
        assert view.labels.dtype == np.int64
        assert view.sha256 == sorted(view.sha256)
        for pixels, label, sha, path in zip(view.pixels[:], *view[1:], strict=True):
            row = by_sha[sha]
            assert (CLASSES[label], path) == (row.label, row.path)
            assert np.array_equal(pixels, to_square(decode(row.data, policy_of(CONFIG.decode)), 8, "stretch"))
        met += view.sha256
    assert sorted(met) == sorted(by_sha)


def test_the_same_images_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    """Row order and digests must not follow the shards' order; only made_from may differ."""
    rows = images()
    first = prepare(*project(tmp_path / "a", rows), CONFIG, tmp_path / "a")
    again = prepare(*project(tmp_path / "b", rows), CONFIG, tmp_path / "b")
    assert (tmp_path / "a" / ImageCache.PATH).read_bytes() == (tmp_path / "b" / ImageCache.PATH).read_bytes()
    random.Random(0).shuffle(rows)
    shuffled = prepare(*project(tmp_path / "c", rows), CONFIG, tmp_path / "c")
    assert first.digest == again.digest
    assert shuffled.files == first.files
    assert shuffled.test_digest == first.test_digest


def test_the_test_digest_is_of_the_images_and_their_truth_whatever_the_size(tmp_path: Path) -> None:
    rows = images()
    ref, report = project(tmp_path, rows)
    cache = prepare(ref, report, CONFIG, tmp_path)
    view = open_split(cache, "test")
    assert cache.test_digest == digest_of([[sha, CLASSES[label]] for sha, label in zip(view.sha256, view.labels, strict=True)])
    larger = prepare(ref, report, CONFIG.model_copy(update={"image_size": 16, "resize": "crop"}), tmp_path)
    assert larger.test_digest == cache.test_digest
    assert larger.digest != cache.digest
    other = CLASSES[1 - view.labels[0]]
    relabelled = [row._replace(label=other) if row.sha256 == view.sha256[0] else row for row in rows]
    assert prepare(*project(tmp_path / "other", relabelled), CONFIG, tmp_path / "other").test_digest != cache.test_digest


def test_quarantined_images_are_left_out(tmp_path: Path) -> None:
    rows = images()
    broken = rows[3]._replace(data=rows[3].data[:50])
    rows[3] = broken._replace(sha256=hashlib.sha256(broken.data).hexdigest())
    cache = prepare(*project(tmp_path, rows, {rows[3].sha256: "image_truncated", rows[8].sha256: "image_too_large"}), CONFIG, tmp_path)
    held = {sha for split in SPLITS for sha in open_split(cache, split).sha256}
    assert held == {row.sha256 for row in rows} - {rows[3].sha256, rows[8].sha256}


def test_growing_the_data_moves_no_image(tmp_path: Path) -> None:
    small = prepare(*project(tmp_path / "a", images(50)), CONFIG, tmp_path / "a")
    large = prepare(*project(tmp_path / "b", images(90)), CONFIG, tmp_path / "b")
    for split in SPLITS:
        assert set(open_split(small, split).sha256) <= set(open_split(large, split).sha256)


def test_groups_and_a_sources_own_split_are_kept(tmp_path: Path) -> None:
    grouped = [row._replace(group=f"plant {number // 4}") for number, row in enumerate(images(120))]
    cache = prepare(*project(tmp_path / "a", grouped), CONFIG, tmp_path / "a")
    where = {sha: split for split in SPLITS for sha in open_split(cache, split).sha256}
    groups: dict[str | None, set[str]] = {}
    for row in grouped:
        groups.setdefault(row.group, set()).add(where[row.sha256])
    assert all(len(splits) == 1 for splits in groups.values())
    own = [row._replace(split="test" if number % 4 < 2 else "train") for number, row in enumerate(images(120))]
    cache = prepare(*project(tmp_path / "b", own), CONFIG, tmp_path / "b")
    assert set(open_split(cache, "test").sha256) == {row.sha256 for row in own if row.split == "test"}
    assert cache.counts["val"] > 0


def test_without_a_passed_report_of_these_very_data_nothing_is_made(tmp_path: Path) -> None:
    rows = images()
    failed = CheckResult(name="share that decodes", value=0.5, bound=">= 0.99", passed=False)
    ref, report = project(tmp_path, rows, success=False, checks=(failed,))
    with pytest.raises(BadInput, match="share that decodes") as caught:
        prepare(ref, report, CONFIG, tmp_path)
    assert caught.value.code == "validation_failed"
    ref, report = project(tmp_path, rows, made_from={"DatasetRef": "0" * 64})
    with pytest.raises(BadInput) as caught:
        prepare(ref, report, CONFIG, tmp_path)
    assert caught.value.code == "artifact_foreign"
    ref, report = project(tmp_path, rows)
    table = tmp_path / "artifacts" / "validation" / "images.parquet"
    table.write_bytes(table.read_bytes()[:-1] + b"x")
    with pytest.raises(BadInput) as caught:
        prepare(ref, report, CONFIG, tmp_path)
    assert caught.value.code == "artifact_edited"
    assert nothing_written(tmp_path)


def test_a_class_too_small_for_the_splits_is_named(tmp_path: Path) -> None:
    rows = images(60)
    bees = [row for row in rows if row.label == "bee"]
    kept = [row for row in rows if row.label == "ant"] + bees[:1]
    with pytest.raises(BadInput, match="'bee'.*1 sound images") as caught:
        prepare(*project(tmp_path / "a", kept), CONFIG, tmp_path / "a")
    assert caught.value.code in ("class_too_small", "class_not_in_train")
    with pytest.raises(BadInput, match="'bee'.*0 sound images") as caught:
        prepare(*project(tmp_path / "b", rows, {row.sha256: "image_corrupt" for row in bees}), CONFIG, tmp_path / "b")
    assert caught.value.code == "class_too_small"
    assert nothing_written(tmp_path / "a")
    assert nothing_written(tmp_path / "b")


@pytest.mark.parametrize("side", [12, 200], ids=["one thread", "many threads"])
def test_a_failure_half_way_leaves_the_old_cache_and_no_litter(tmp_path: Path, side: int) -> None:
    """Attack: an image that no longer decodes (as with a lowered limit), seen after others were written."""
    rows = images(60, side=side, kind="BMP")
    ref, report = project(tmp_path, rows)
    before = prepare(ref, report, CONFIG, tmp_path)
    lowered = CONFIG.model_copy(update={"decode": CONFIG.decode.model_copy(update={"max_pixels": 100})})
    with pytest.raises(BadInput, match="was sound when it was validated") as caught:
        prepare(ref, report, lowered, tmp_path)
    assert caught.value.code == "image_too_large"
    assert ImageCache.load(tmp_path).verify().digest == before.digest
    assert sorted(path.name for path in (tmp_path / "artifacts").iterdir()) == ["cache", "validation"]


def test_threads_and_one_thread_give_the_same_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = images(70, side=100, kind="BMP")
    ref, report = project(tmp_path, rows)
    monkeypatch.setattr("tasks.prepare.THREADS_FROM", 10**15)
    alone = prepare(ref, report, CONFIG, tmp_path)
    monkeypatch.setattr("tasks.prepare.THREADS_FROM", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(5)))
    assert prepare(ref, report, CONFIG, tmp_path).digest == alone.digest


def test_an_image_that_the_data_lost_is_named(tmp_path: Path) -> None:
    rows = images()
    ref, report = project(tmp_path, rows)
    lost = shards.write_shards(tmp_path / "data", 1, rows[:-1], 10**9, "test")
    ref = ref.model_copy(update={"shards": tuple(lost)}).save(tmp_path)
    report = report.model_copy(update={"made_from": lineage(ref)}).save(tmp_path)
    with pytest.raises(BadInput, match=rows[-1].sha256[:12]) as caught:
        prepare(ref, report, CONFIG, tmp_path)
    assert caught.value.code == "artifact_foreign"
    assert nothing_written(tmp_path)


@pytest.mark.parametrize("form", ["pixels", "encoded"])
def test_memory_does_not_grow_with_the_images(form: str, tmp_path: Path) -> None:
    """60 MB of encoded images pass through; the peak of Python's own memory stays at a few row groups."""
    rows = images(200, side=320, kind="BMP")
    ref, report = project(tmp_path, rows)
    total = sum(len(row.data) for row in rows)
    del rows
    config = CONFIG.model_copy(update={"cache": form})
    prepare(ref, report, config, tmp_path)
    tracemalloc.start()
    prepare(ref, report, config, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 60e6
    assert peak < 30e6, f"{peak / 1e6:.0f} MB"


def test_the_command_prints_one_line_and_a_bad_one_ends_with_a_coded_line(tmp_path: Path) -> None:
    project(tmp_path, images())
    (tmp_path / "params.yaml").write_text((ROOT / "presets" / "digits.yaml").read_text())
    command = [sys.executable, "-m", "tasks.prepare"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("prepare: ")
    assert done.stdout.count("\n") == 1
    (tmp_path / "artifacts" / "validation" / "report.json").unlink()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error[artifact_missing]")
    assert done.stderr.count("\n") == 1
