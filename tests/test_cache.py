"""Attacks tasks.images.cache: cut, edited and foreign files must be refused when a split is opened, and views are read-only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.core.artifacts import SPLITS, DecodeSpec, ImageCache, Split, file_digests
from tasks.core.errors import BadInput
from tasks.images.cache import CacheWriter, Entry, digest_of_labels, open_split

SIZE = 4
DECODE = DecodeSpec(image_size=SIZE, resize="stretch", max_pixels=100, max_bytes=100, background=(0, 0, 0))


def make(root: Path, counts: dict[Split, int] | None = None) -> ImageCache:
    counts = counts or {"train": 5, "val": 2, "test": 3}
    folder = root / "artifacts" / "cache"
    folder.mkdir(parents=True)
    entries: dict[Split, list[Entry]] = {
        split: [Entry(f"{split}{row:03d}", f"{split}/{row}.png", row % 2) for row in range(counts[split])] for split in SPLITS
    }
    with CacheWriter(folder, SIZE, entries) as writer:
        for split in reversed(SPLITS):
            for row in reversed(range(counts[split])):
                writer.put(f"{split}{row:03d}", np.full((SIZE, SIZE, 3), 10 * SPLITS.index(split) + row, np.uint8))
        assert writer.missing() == []
        writer.write_tables()
    names = [f"{split}.{kind}" for split in SPLITS for kind in ("u8", "parquet")]
    return ImageCache(classes=("a", "b"), counts=dict(counts), decode=DECODE, test_digest="", files=file_digests(folder, *names)).save(root)


def test_rows_lie_where_they_belong_whatever_the_order_of_writing(tmp_path: Path) -> None:
    cache = make(tmp_path)
    for split in SPLITS:
        view = open_split(cache, split)
        assert view.pixels[:, 0, 0, 0].tolist() == [10 * SPLITS.index(split) + row for row in range(cache.counts[split])]
        assert view.labels.tolist() == [row % 2 for row in range(cache.counts[split])]
        assert view.paths[0] == f"{split}/0.png"
        assert view.sha256[-1] == f"{split}{cache.counts[split] - 1:03d}"


def test_a_view_cannot_change_the_cache(tmp_path: Path) -> None:
    view = open_split(make(tmp_path), "train")
    assert isinstance(view.pixels, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        view.pixels[0] = 1


def test_an_empty_split_opens_as_no_rows(tmp_path: Path) -> None:
    view = open_split(make(tmp_path, {"train": 2, "val": 0, "test": 2}), "val")
    assert view.pixels.shape == (0, SIZE, SIZE, 3)
    assert len(view.labels) == 0


@pytest.mark.parametrize("change", [-1, 1, -SIZE * SIZE * 3])
def test_a_cut_or_longer_pixel_file_is_refused(tmp_path: Path, change: int) -> None:
    cache = make(tmp_path)
    path = cache.path("test.u8")
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"x")
    with pytest.raises(BadInput, match=f"{len(data)} bytes") as caught:
        open_split(cache, "test")
    assert caught.value.code == "artifact_edited"


@pytest.mark.parametrize("name", ["train.u8", "train.parquet"])
def test_a_lost_file_is_named(tmp_path: Path, name: str) -> None:
    cache = make(tmp_path)
    cache.path(name).unlink()
    with pytest.raises(BadInput, match=name) as caught:
        open_split(cache, "train")
    assert caught.value.code == "artifact_missing"


@pytest.mark.parametrize("attack", ["cut", "fewer rows", "other order", "no such class", "no such column"])
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, attack: str) -> None:
    cache = make(tmp_path)
    path = cache.path("train.parquet")
    table = pq.read_table(path)
    if attack == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        changed = {
            "fewer rows": table.slice(0, 3),
            "other order": table.take(pa.array([1, 0, 2, 3, 4])),
            "no such class": table.set_column(3, "label_index", pa.array([0, 1, 2, 0, 1], pa.int32())),
            "no such column": table.drop_columns(["sha256"]),
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
