"""Reading and writing data/: order, layers, look-up by digest, bounded row groups, and shards that are lost or damaged."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from source_trees import contents, png

from tasks.core.artifacts import DatasetRef, Shard
from tasks.core.errors import BadInput
from tasks.images import shards
from tasks.images.shards import ImageRow, Standing, find_rows, iter_rows, standings, write_layer, write_shards


def row(index: int, data: bytes | None = None, **changes: Any) -> ImageRow:
    content = png(index) if data is None else data
    plain = ImageRow(content, f"{index:04d}.png", "ab"[index % 2], hashlib.sha256(content).hexdigest(), None, None)
    return plain._replace(**changes)


def version(root: Path, rows: list[ImageRow], shard_bytes: int = 10**9, *layers: dict[str, Standing]) -> DatasetRef:
    written = write_shards(root / "data", 1, rows, shard_bytes, "test")
    laid = tuple(write_layer(root / "data", 2 + index, layer, "test") for index, layer in enumerate(layers))
    files = {shard.file: shard.sha256 for shard in (*written, *laid)}
    return DatasetRef(classes=("a", "b"), counts={}, splits={}, shards=tuple(written), layers=laid, files=files).save(root)


def test_rows_come_back_as_they_were_in_order_over_shards_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "GROUP_BYTES", 1000)
    rows = [row(0, split="train", group="patient 1"), row(1, path="odd\nname \u202e.png", label="NA"), *(row(index) for index in range(2, 40))]
    ref = version(tmp_path, rows, 4000)
    assert len(ref.shards) > 2
    assert sum(shard.rows for shard in ref.shards) == 40
    assert list(iter_rows(ref)) == rows
    for shard in ref.shards:
        with pq.ParquetFile(ref.path(shard.file)) as table:
            groups = [table.read_row_group(index) for index in range(table.num_row_groups)]
        assert len(groups) > 1
        assert all(sum(map(len, group["image"].combine_chunks().field("bytes").to_pylist())) <= 1000 for group in groups)


def test_an_image_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    rows = [row(0), row(1, b"x" * 5000), row(2)]
    ref = version(tmp_path, rows, 1000)
    assert [shard.rows for shard in ref.shards] == [1, 1, 1]
    assert list(iter_rows(ref)) == rows


def test_equal_rows_give_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        version(tmp_path / name, [row(index) for index in range(30)], 3000, {row(1).sha256: Standing("", "a", None)})
    assert contents(tmp_path / "one" / "data") == contents(tmp_path / "two" / "data")


def test_layers_relabel_remove_and_bring_back_in_their_order(tmp_path: Path) -> None:
    rows = [row(index) for index in range(4)]
    first = {rows[0].sha256: Standing("", "b", "test"), rows[1].sha256: Standing("", None, None), rows[2].sha256: Standing("", None, None)}
    ref = version(tmp_path, rows, 10**9, first, {rows[2].sha256: Standing("", "b", None)})
    assert [(found.path, found.label, found.split) for found in iter_rows(ref)] == [
        ("0000.png", "b", "test"),
        ("0002.png", "b", None),
        ("0003.png", "b", None),
    ]
    assert standings(ref)[rows[1].sha256] == Standing("0001.png", None, None)
    assert list(standings(ref)) == [each.sha256 for each in rows]


def test_images_are_found_by_digest_wherever_they_lie_and_removed_or_unknown_ones_are_absent(tmp_path: Path) -> None:
    rows = [row(index) for index in range(40)]
    ref = version(tmp_path, rows, 4000, {rows[5].sha256: Standing("", None, None), rows[39].sha256: Standing("", "a", None)})
    found = find_rows(ref, [rows[0].sha256, rows[5].sha256, rows[39].sha256, "f" * 64])
    assert found == {rows[0].sha256: rows[0], rows[39].sha256: rows[39]._replace(label="a")}
    assert find_rows(ref, []) == {}


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    ref = version(tmp_path, [row(0), row(1)])
    ref.path(ref.shards[0].file).unlink()
    for read in (lambda: list(iter_rows(ref)), lambda: find_rows(ref, ["0"]), lambda: standings(ref)):
        with pytest.raises(BadInput, match="000001-00000") as caught:
            read()
        assert caught.value.code == "artifact_missing"


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" * len(data)])
def test_a_damaged_shard_is_named_and_not_read_in_part(damage: object, tmp_path: Path) -> None:
    assert callable(damage)
    ref = version(tmp_path, [row(index) for index in range(10)])
    path = ref.path(ref.shards[0].file)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInput, match="000001-00000") as caught:
        list(iter_rows(ref))
    assert caught.value.code == "artifact_edited"


def test_a_shard_is_whole_or_absent(tmp_path: Path) -> None:
    """A source that fails in the middle leaves no file under a shard's name and no part of one."""

    def failing() -> object:
        yield row(0)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        write_shards(tmp_path, 1, failing(), 10**9, "test")  # type: ignore[arg-type]
    assert contents(tmp_path) == {}


def test_shard_records_are_true(tmp_path: Path) -> None:
    [shard] = write_shards(tmp_path, 7, [row(0), row(1)], 10**9, "folder")
    data = (tmp_path / "shards" / "000007-00000.parquet").read_bytes()
    assert shard == Shard(file="shards/000007-00000.parquet", sha256=hashlib.sha256(data).hexdigest(), rows=2, source="folder")
