"""The Parquet shards of data/: read row by row with the label layers applied, or written once and never again.

A shard's columns are those that Hugging Face ``datasets`` reads as an image data set. Bytes of images are held one row
group at a time, both ways. The bytes of a shard depend on its rows and on the version of pyarrow (in requirements.lock).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.core.artifacts import DatasetRef, Shard
from tasks.core.errors import BadInput
from tasks.core.files import fsync_dir, sha256_file

GROUP_BYTES = 8_000_000
GROUP_ROWS = 4096
"""A row group ends at either; it is what a reader holds."""
REVIEW = "labelstudio"
"""The source whose labels are people's second look at stored images: what other sources say of these does not undo them."""

_TEXT = {"dtype": "string", "_type": "Value"}
_FEATURES = {"image": {"_type": "Image"}, "label": _TEXT, "sha256": _TEXT, "split": _TEXT, "group": _TEXT}
SCHEMA = pa.schema(
    [
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("label", pa.string()),
        ("sha256", pa.string()),
        ("split", pa.string()),
        ("group", pa.string()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}}, sort_keys=True)},
)
LAYER_SCHEMA = pa.schema([("sha256", pa.string()), ("label", pa.string()), ("split", pa.string())])


class ImageRow(NamedTuple):
    """One stored image: encoded bytes as they came, name in its source, class, hex sha256 of the bytes, split and group or None."""

    data: bytes
    path: str
    label: str
    sha256: str
    split: str | None
    group: str | None


class Standing(NamedTuple):
    """What a data version says of a stored image; ``label`` None means that a layer removed it."""

    path: str
    label: str | None
    split: str | None


def iter_rows(ref: DatasetRef, wanted: Callable[[str], bool] | None = None) -> Iterator[ImageRow]:
    """Every image of a data version in shard order, label layers applied, removed ones left out.

    Holds one row group at a time. With ``wanted``, asked of the sha256s in a row group, groups that hold none of those wanted
    are not read; of the others all rows come. Raises BadInput ``artifact_missing`` or ``artifact_edited`` for a lost or damaged shard.
    """
    changes = _changes(ref)
    for shard in ref.shards:
        with _reading(ref, shard.file) as table:
            for group in range(table.num_row_groups):
                if wanted is None or any(map(wanted, table.read_row_group(group, columns=["sha256"])["sha256"].to_pylist())):
                    yield from _apply(table.read_row_group(group), changes)


def find_rows(ref: DatasetRef, wanted: Iterable[str]) -> dict[str, ImageRow]:
    """The images of these sha256s, by sha256; those that the data version lacks (or removed) are absent.

    Reads only the row groups that hold one of them. Raises as ``iter_rows``.
    """
    missing = set(wanted)
    changes = _changes(ref)
    found: dict[str, ImageRow] = {}
    for shard in ref.shards:
        if not missing:
            break
        with _reading(ref, shard.file) as table:
            for group in range(table.num_row_groups):
                names = table.read_row_group(group, columns=["sha256"])["sha256"].to_pylist()
                if missing.isdisjoint(names):
                    continue
                here = {row.sha256: row for row in _apply(table.read_row_group(group), changes) if row.sha256 in missing}
                found |= here
                missing -= set(names)
    return found


def names_by_shard(ref: DatasetRef) -> Iterator[tuple[str, list[str]]]:
    """Each shard (000001-00000) with the sha256s of all its images, removed ones too; reads no image bytes. Raises as ``iter_rows``."""
    for shard in ref.shards:
        with _reading(ref, shard.file) as table:
            yield Path(shard.file).stem, table.read(columns=["sha256"])["sha256"].to_pylist()


def standings(ref: DatasetRef) -> dict[str, Standing]:
    """sha256 -> what the data version says of it, removed images too, in shard order; reads no image bytes."""
    changes = _changes(ref)
    found: dict[str, Standing] = {}
    for shard in ref.shards:
        with _reading(ref, shard.file) as table:
            for batch in table.iter_batches(columns=["image.path", "label", "sha256", "split"]):
                columns = (batch["image"].field("path"), batch["label"], batch["sha256"], batch["split"])
                for path, label, sha256, split in zip(*(column.to_pylist() for column in columns), strict=True):
                    found[sha256] = Standing(path, *changes.get(sha256, (label, split)))
    return found


def reviewed(ref: DatasetRef) -> set[str]:
    """The sha256 of every image whose last layer came of people's answers (REVIEW), and that it did not remove."""
    found: dict[str, bool] = {}
    for layer in ref.layers:
        with _reading(ref, layer.file) as table:
            columns = table.read(["sha256", "label"]).to_pydict()
            found |= {sha256: layer.source == REVIEW and label is not None for sha256, label in zip(*columns.values(), strict=True)}
    return {sha256 for sha256, is_reviewed in found.items() if is_reviewed}


def write_shards(folder: Path, batch: int, rows: Iterable[ImageRow], shard_bytes: int, source: str) -> list[Shard]:
    """Write ``rows`` in order as shards/BATCH-PART.parquet below ``folder``, each of at most ``shard_bytes`` bytes of images.

    Each shard is written aside, fsynced and renamed. A single image larger than ``shard_bytes`` gets a shard of its own.
    """
    shards: list[Shard] = []
    waiting = iter(rows)
    row = next(waiting, None)
    while row is not None:
        file = f"shards/{batch:06d}-{len(shards):05d}.parquet"
        count = size = 0
        with _writing(folder / file, SCHEMA) as writer:
            group: list[ImageRow] = []
            group_bytes = 0
            while row is not None and (count == 0 or size + len(row.data) <= shard_bytes):
                if group and (group_bytes + len(row.data) > GROUP_BYTES or len(group) >= GROUP_ROWS):
                    writer.write_table(_table(group))
                    group, group_bytes = [], 0
                group.append(row)
                group_bytes += len(row.data)
                count, size = count + 1, size + len(row.data)
                row = next(waiting, None)
            writer.write_table(_table(group))
        shards.append(Shard(file=file, sha256=sha256_file(folder / file), rows=count, source=source))
    return shards


def write_layer(folder: Path, batch: int, changes: dict[str, Standing], source: str) -> Shard:
    """Write labels/BATCH.parquet below ``folder``: for each sha256 its label (None removes the image) and split from now on."""
    file = f"labels/{batch:06d}.parquet"
    order = sorted(changes)
    columns = [order, [changes[sha256].label for sha256 in order], [changes[sha256].split for sha256 in order]]
    with _writing(folder / file, LAYER_SCHEMA) as writer:
        writer.write_table(pa.table([pa.array(column, pa.string()) for column in columns], schema=LAYER_SCHEMA))
    return Shard(file=file, sha256=sha256_file(folder / file), rows=len(order), source=source)


@contextmanager
def _reading(ref: DatasetRef, file: str) -> Iterator[pq.ParquetFile]:
    path = ref.folder / file
    try:
        with pq.ParquetFile(path) as table:
            yield table
    except FileNotFoundError:
        raise BadInput("artifact_missing", "a shard of data/ is gone", value=path, knob="dvc checkout data.dvc") from None
    except (pa.ArrowException, OSError) as error:
        raise BadInput("artifact_edited", "a shard of data/ cannot be read", value=path, knob="dvc checkout --force data.dvc") from error


@contextmanager
def _writing(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A Parquet file that is written aside and takes its name only when it is whole and durable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            with pq.ParquetWriter(handle, schema, compression="none", use_dictionary=["label", "split", "group"], write_statistics=False) as writer:
                yield writer
            handle.flush()
            os.fsync(descriptor)
            os.fchmod(descriptor, 0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def _table(rows: list[ImageRow]) -> pa.Table:
    image = pa.StructArray.from_arrays(
        [pa.array([row.data for row in rows], pa.binary()), pa.array([row.path for row in rows], pa.string())],
        fields=list(SCHEMA.field("image").type),
    )
    texts = [pa.array([getattr(row, name) for row in rows], pa.string()) for name in ("label", "sha256", "split", "group")]
    return pa.table([image, *texts], schema=SCHEMA)


def _changes(ref: DatasetRef) -> dict[str, tuple[str | None, str | None]]:
    """sha256 -> (label, split) of the last layer that names it."""
    changes: dict[str, tuple[str | None, str | None]] = {}
    for layer in ref.layers:
        with _reading(ref, layer.file) as table:
            columns = table.read().to_pydict()
            changes.update(zip(columns["sha256"], zip(columns["label"], columns["split"], strict=True), strict=True))
    return changes


def _apply(table: pa.Table, changes: dict[str, tuple[str | None, str | None]]) -> Iterator[ImageRow]:
    image = table["image"].combine_chunks()
    texts = (table[name].to_pylist() for name in ("label", "sha256", "split", "group"))
    columns = zip(image.field("bytes"), image.field("path").to_pylist(), *texts, strict=True)
    for data, path, label, sha256, split, group in columns:
        label, split = changes.get(sha256, (label, split))
        if label is not None:
            yield ImageRow(data.as_py(), path, label, sha256, split, group)
