"""Parquet shards in Hugging Face's image layout: a file, a folder or a glob of them, read in small batches of rows.

image: struct<bytes: binary, path: string>      or plain binary
label: string                                   or the number of a class, whose names the schema's metadata holds
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput
from tasks.sources import Item, Limits, Source, fingerprint, source
from tasks.sources.columns import Columns, choose, label_text, split_of
from tasks.sources.layout import globbed, located, printable

ROWS = 64
"""Rows that are in memory at once."""
LARGEST_ROW_GROUP = 4 << 30
"""Bytes, unpacked, of the largest row group that is opened: Parquet states it in its footer."""


class ParquetOptions(Columns):
    """Names of the columns, where they are not the usual ones, and names of the classes, where the schema has none."""

    class_names: list[str] = Field([], description="names of the classes 0, 1, 2 ...; empty: from the schema's metadata, else the numbers")


class Shard(NamedTuple):
    """An opened file: its path, and the columns of its schema that are used."""

    path: Path
    columns: Columns
    class_names: tuple[str, ...]
    rows: int


@source("parquet", options=ParquetOptions)
def parquet(location: str, root: Path, limits: Limits, options: ParquetOptions) -> Source:
    """Open every shard's footer; rows come in the order of the shards' names, then of their rows.

    Raises BadInput ``source_unavailable``, ``manifest_corrupt``, ``missing_column``, ``duplicate_column``, ``empty_manifest``,
    and ``unknown_split`` while it is read.
    """
    shards = [open_shard(path, options, options.class_names) for path in _files(location, root)]
    if not sum(shard.rows for shard in shards):
        raise BadInput("empty_manifest", "the Parquet files have no rows", value=location, constraint="at least 1 row", knob="ingest.location")
    labels = {name for shard in shards for name in shard.class_names}
    return Source(_items(shards, limits), tuple(sorted(labels)) if options.class_names else ())


@fingerprint("parquet")
def parquet_fingerprint(location: str, root: Path, options: ParquetOptions) -> str:
    """Names, sizes and times of modification (ns) of the shards: none is opened. Raises BadInput ``source_unavailable``."""
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _files(location, root)]
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()


def _files(location: str, root: Path) -> list[Path]:
    kind = "a Parquet file, a folder or a glob of them"
    if any(letter in location for letter in "*?["):
        found = globbed(location, root, kind)
    else:
        path = located(location, root, kind)
        found = list(path.rglob("*.parquet")) if path.is_dir() else [path]
    files = sorted(path for path in found if path.is_file() and not path.name.startswith("."))
    if not files:
        raise BadInput("source_unavailable", "no Parquet file is there", value=location, constraint=kind, knob="ingest.location")
    return files


def open_shard(path: Path, options: Columns, class_names: list[str]) -> Shard:
    """Read the footer of ``path`` and choose its columns. Raises BadInput as ``parquet`` does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema, facts = file.schema_arrow, file.metadata
            groups = [facts.row_group(index).total_byte_size for index in range(facts.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise corrupt(path, error) from None
    if max(groups, default=0) > LARGEST_ROW_GROUP:
        value, bound = f"{max(groups)} bytes", f"at most {LARGEST_ROW_GROUP}"
        raise BadInput("too_large", f"a row group of {path.name} is too large", value=value, constraint=bound, knob="smaller row groups")
    columns = choose(list(schema.names), options, path.name)
    names = tuple(class_names or _named_by(schema.metadata or {}, columns.label))
    return Shard(path, columns, names, facts.num_rows)


def corrupt(path: Path, error: Exception) -> BadInput:
    """BadInput ``manifest_corrupt`` of a Parquet file."""
    return BadInput(
        "manifest_corrupt", f"{path.name} cannot be read", value=str(error)[:200], constraint="a whole Parquet file", knob="ingest.location"
    )


def _named_by(metadata: dict[bytes, bytes], label: str) -> list[str]:
    """The names of the classes that Hugging Face's datasets library writes beside a schema."""
    try:
        names = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def rows_of(shard: Shard) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, the used cells by column) of every row. Raises BadInput ``manifest_corrupt``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    used = list(dict.fromkeys(name for name in shard.columns.used() if name))
    number = 0
    try:
        with pq.ParquetFile(shard.path) as file:
            for batch in file.iter_batches(batch_size=ROWS, columns=used, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError, ValueError) as error:
        raise corrupt(shard.path, error) from None


def _items(shards: list[Shard], limits: Limits) -> Iterator[Item | SetAside]:
    for shard in shards:
        for number, row in rows_of(shard):
            yield _item(shard, number, row, limits)


def _item(shard: Shard, number: int, row: dict[str, Any], limits: Limits) -> Item | SetAside:
    columns, cell = shard.columns, row[shard.columns.image]
    data, inner = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
    name = f"{shard.path.name}/{number:08d}" + (f"-{inner.rsplit('/', 1)[-1]}" if isinstance(inner, str) and inner else "")
    label = label_text(row[columns.label], shard.class_names)
    if not label:
        return SetAside(name=printable(name), code="missing_label" if label is not None else "bad_row")
    if not isinstance(data, bytes):
        return SetAside(name=printable(name), code="empty_file" if data is None else "bad_row")
    if len(data) > limits.max_file_bytes:
        return SetAside(name=printable(name), code="image_too_large")
    group = row[columns.group] if columns.group else None
    split = split_of(row[columns.split], f"{shard.path.name} row {number}") if columns.split else None
    return Item(name, label, data, split, str(group) if group is not None else None)
