"""Small image sources made in a temporary folder, for the tests of sources, ingest, shards and validate."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from tasks.core.artifacts import DatasetRef
from tasks.core.config import IngestConfig
from tasks.core.png import encode_png
from tasks.images.shards import iter_rows


def png(seed: int, side: int = 10) -> bytes:
    """A random RGB PNG of ``side`` x ``side`` pixels."""
    return encode_png(random.Random(seed).randbytes(3 * side * side), side, side, 3)


def pictures(*, first: int = 0, side: int = 10, **counts: int) -> dict[str, bytes]:
    """``cat=2`` as {"cat/000.png": ..., "cat/001.png": ...}; all pictures differ, and differ from those of another ``first``."""
    files, seed = {}, 1000 * first
    for label, count in counts.items():
        for index in range(count):
            seed += 1
            files[f"{label}/{first}{index:03d}.png"] = png(seed, side)
    return files


def write_tree(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` (relative name -> content) below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def from_folder(folder: Path, **changes: object) -> IngestConfig:
    """The config that ingests ``folder``."""
    return IngestConfig.model_validate({"source": "folder", "location": str(folder), **changes})


def labels_of(ref: DatasetRef) -> dict[str, str]:
    """Stored name -> class of every image of a data version."""
    return {row.path: row.label for row in iter_rows(ref)}


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Name -> (content, time of change in ns) of every file below ``folder``."""
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    """Name -> content of every file below ``folder``."""
    return {name: data for name, (data, _) in snapshot(folder).items()}
