"""Which files of a source were read before, and what they held, so that a file that did not change is not read again.

Kept below .trainyard for each source; a file that is gone or damaged costs only the reading. A digest from here counts only
where data/ holds that image.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.core.files import write_atomic

SCHEMA = pa.schema([("name", pa.string()), ("version", pa.string()), ("sha256", pa.string())])


class Known:
    """(name, version) -> hex sha256 of what was read under that name, as the last ingest that completed left it at ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._former = _load(path)
        self._now: dict[str, tuple[str, str]] = {}

    def digest(self, name: str, version: str) -> str | None:
        """What the file ``name`` in that version is known to hold."""
        former, sha256 = self._former.get(name, ("", ""))
        return sha256 if version and former == version else None

    def note(self, name: str, version: str, sha256: str) -> None:
        """Remember it for the next time; without a version nothing is remembered."""
        if version:
            self._now[name] = (version, sha256)

    def save(self) -> None:
        """Write what was noted, and nothing else, where it differs from what was there."""
        if self._now == self._former:
            return
        columns = [list(self._now), [version for version, _ in self._now.values()], [sha256 for _, sha256 in self._now.values()]]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns, schema=SCHEMA), sink, compression="zstd")
        write_atomic(self._path, sink.getvalue())


def _load(path: Path) -> dict[str, tuple[str, str]]:
    try:
        with pq.ParquetFile(path) as file:
            if file.schema_arrow.names != SCHEMA.names:
                return {}
            names, versions, digests = (column.to_pylist() for column in file.read().columns)
    except (OSError, pa.ArrowException):
        return {}
    return dict(zip(names, zip(versions, digests, strict=True), strict=True))
