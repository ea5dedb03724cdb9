"""Attacks tasks.images.cache: cut, edited and foreign files must be refused when a split is opened, and views are read-only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.core.artifacts import SPLITS, DecodeSpec, ImageCache, Split
from tasks.core.errors import BadInput
from tasks.images.cache import CacheWriter, Entry, digest_of_labels, open_split

SIZE = 4
ROW = SIZE * SIZE * 3
DECODE = DecodeSpec(image_size=SIZE, resize="stretch", max_pixels=100, max_bytes=100, background=(0, 0, 0))


FILE = "000001-00000.u8"


def make(root: Path, counts: dict[Split, int] | None = None, shards: int = 1) -> ImageCache:
    """A cache whose images lie in ``shards`` files in turn."""
    counts = counts or {"train": 5, "val": 2, "test": 3}
    folder = root / "artifacts" / "cache"
    folder.mkdir(parents=True)
    entries: dict[Split, list[Entry]] = {
        split: [Entry(f"{split}{row:03d}", f"{split}/{row}.png", row % 2, f"{row % shards + 1:06d}-00000") for row in range(counts[split])]
        for split in SPLITS
    }
    with CacheWriter(folder, SIZE, entries) as writer:
        for split in reversed(SPLITS):
            for row in reversed(range(counts[split])):
                writer.put(f"{split}{row:03d}", np.full((SIZE, SIZE, 3), 10 * SPLITS.index(split) + row, np.uint8))
        assert writer.missing() == []
        writer.write_tables()
    files, sizes = writer.files(), writer.sizes()
    return ImageCache(classes=("a", "b"), counts=dict(counts), decode=DECODE, test_digest="", files=files, shards=sizes).save(root)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_rows_lie_where_they_belong_whatever_the_order_of_writing(shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.images.cache.OPEN_FILES", 1)
    cache = make(tmp_path, shards=shards)
    assert len(cache.shards) == shards
    assert sum(cache.shards.values()) == 10 * SIZE * SIZE * 3
    for split in SPLITS:
        view = open_split(cache, split)
        assert view.pixels[:][:, 0, 0, 0].tolist() == [10 * SPLITS.index(split) + row for row in range(cache.counts[split])]
        assert view.labels.tolist() == [row % 2 for row in range(cache.counts[split])]
        for rows in (0, -1, slice(1, None), np.array([1, 0, 1]), np.array([], np.int64)):
            assert np.array_equal(view.pixels[rows], view.pixels[:][rows])
        assert view.paths[0] == f"{split}/0.png"
        assert view.sha256[-1] == f"{split}{cache.counts[split] - 1:03d}"


def test_a_view_cannot_change_the_cache(tmp_path: Path) -> None:
    view = open_split(make(tmp_path), "train")
    before = view.pixels[:].copy()
    view.pixels[:][:] = 1
    assert np.array_equal(view.pixels[:], before)
    with pytest.raises(TypeError):
        view.pixels[0] = 1  # type: ignore[index]


def test_an_empty_split_opens_as_no_rows(tmp_path: Path) -> None:
    view = open_split(make(tmp_path, {"train": 2, "val": 0, "test": 2}), "val")
    assert view.pixels.shape == (0, SIZE, SIZE, 3)
    assert len(view.labels) == 0


@pytest.mark.parametrize("change", [-1, 1, -SIZE * SIZE * 3])
def test_a_cut_or_longer_pixel_file_is_refused(tmp_path: Path, change: int) -> None:
    cache = make(tmp_path)
    path = cache.path(FILE)
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"x")
    with pytest.raises(BadInput, match=f"{len(data)} bytes") as caught:
        open_split(cache, "test")
    assert caught.value.code == "artifact_edited"


@pytest.mark.parametrize("name", [FILE, "train.parquet"])
def test_a_lost_file_is_named(tmp_path: Path, name: str) -> None:
    cache = make(tmp_path)
    cache.path(name).unlink()
    with pytest.raises(BadInput, match=name) as caught:
        open_split(cache, "train")
    assert caught.value.code == "artifact_missing"


@pytest.mark.parametrize(
    "attack", ["cut", "fewer rows", "other order", "no such class", "no such column", "no such shard", "beyond", "before", "between", "long"]
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, attack: str) -> None:
    cache = make(tmp_path)
    path = cache.path("train.parquet")
    table = pq.read_table(path)
    starts = table["start"].to_pylist()
    if attack == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        changed = {
            "fewer rows": table.slice(0, 3),
            "other order": table.take(pa.array([1, 0, 2, 3, 4])),
            "no such class": table.set_column(3, "label_index", pa.array([0, 1, 2, 0, 1], pa.int32())),
            "no such column": table.drop_columns(["sha256"]),
            "no such shard": table.set_column(4, "shard", pa.array([*table["shard"].to_pylist()[1:], "000002-00000"])),
            "beyond": table.set_column(5, "start", pa.array([*starts[1:], 10 * ROW])),
            "before": table.set_column(5, "start", pa.array([-ROW, *starts[1:]])),
            "between": table.set_column(5, "start", pa.array([1, *starts[1:]])),
            "long": table.set_column(6, "bytes", pa.array([2 * ROW, *[ROW] * 4])),
        }[attack]
        pq.write_table(changed, path)
    with pytest.raises(BadInput) as caught:
        open_split(cache, "train")
    assert caught.value.code == "artifact_edited"


def test_the_label_digest_follows_images_and_truth_not_their_order() -> None:
    entries = [Entry("a1", "x", 0), Entry("b2", "y", 1)]
    expected = digest_of_labels(entries, ("cat", "dog"))
    assert digest_of_labels(entries[::-1], ("cat", "dog")) == expected
    assert digest_of_labels([entry._replace(path="moved") for entry in entries], ("cat", "dog")) == expected
    assert digest_of_labels([Entry("a1", "x", 1), Entry("b2", "y", 0)], ("dog", "cat")) == expected, "the class name counts, not its index"
    assert digest_of_labels([Entry("a1", "x", 1), entries[1]], ("cat", "dog")) != expected


def test_a_writer_knows_what_it_lacks(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, SIZE, {"train": [Entry("a", "a", 0), Entry("b", "b", 0)], "val": [], "test": []}) as writer:
        writer.put("b", np.zeros((SIZE, SIZE, 3), np.uint8))
        assert writer.missing() == ["a"]
