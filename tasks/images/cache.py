"""The packed pixel cache: one raw file of uint8 pixels for each split, memory-mapped by its readers.

Row order is ascending sha256: it depends on the images alone, never on shard order, ingest order or worker timing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from tasks.core.artifacts import SPLITS, DecodeSpec, ImageCache, Split, file_digests
from tasks.core.errors import BadInput
from tasks.core.files import canonical_json, digest_of, publish_dir, write_atomic

if TYPE_CHECKING:
    import numpy as np

KNOB = "dvc repro --force prepare"
FILES = tuple(f"{split}.{kind}" for split in SPLITS for kind in ("u8", "parquet"))
COLUMNS = ["row", "sha256", "path", "label_index"]


class SplitView(NamedTuple):
    """One split: pixels uint8 [N, S, S, 3] (read-only memory map), labels int64 [N], sha256 and paths of the N images."""

    pixels: np.ndarray
    labels: np.ndarray
    sha256: list[str]
    paths: list[str]


class Entry(NamedTuple):
    """One image of a split."""

    sha256: str
    path: str
    label_index: int


def open_split(cache: ImageCache, split: Split) -> SplitView:
    """Map a split's pixels read-only; nothing is read until it is used.

    Raises BadInput ``artifact_missing`` or ``artifact_edited`` where a file's size, rows or labels do not fit the index
    (the digests of the files are ``cache.verify()``'s business).
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    size, count = cache.decode.image_size, cache.counts[split]
    pixels, table = cache.path(f"{split}.u8"), cache.path(f"{split}.parquet")
    for path in (pixels, table):
        if not path.is_file():
            raise BadInput("artifact_missing", "ImageCache: a file is gone", value=path, knob=f"dvc checkout, or {KNOB}")
    expected, found = count * size * size * 3, pixels.stat().st_size
    if found != expected:
        raise _edited(pixels, f"{found} bytes", f"{expected} bytes")
    try:
        with pq.ParquetFile(table) as reader:  # read_table would also import pandas
            columns = reader.read().to_pydict()
    except (pa.ArrowException, OSError):
        raise _edited(table, "no Parquet file", "a table of the cache") from None
    if list(columns) != COLUMNS:
        raise _edited(table, f"columns {', '.join(columns)}", ", ".join(COLUMNS))
    if columns["row"] != list(range(count)):
        raise _edited(table, f"{len(columns['row'])} rows", f"rows 0 to {count - 1} in order")
    labels = np.asarray(columns["label_index"], np.int64)
    if count and not (labels.min() >= 0 and labels.max() < len(cache.classes)):
        raise _edited(table, f"label index {labels.max()}", f"below {len(cache.classes)}")
    shape = (count, size, size, 3)
    mapped = np.memmap(pixels, np.uint8, "r", shape=shape) if count else np.empty(shape, np.uint8)
    return SplitView(mapped, labels, columns["sha256"], columns["path"])


def _edited(path: Path, value: str, constraint: str) -> BadInput:
    return BadInput("artifact_edited", f"{path} was changed after it was written", value=value, constraint=constraint, knob=KNOB)


def digest_of_labels(entries: Sequence[Entry], classes: Sequence[str]) -> str:
    """``test_digest``: over the sorted (sha256, label) pairs."""
    return digest_of(sorted([entry.sha256, classes[entry.label_index]] for entry in entries))


def publish_cache(
    root: Path,
    entries: Mapping[Split, list[Entry]],
    classes: tuple[str, ...],
    decode: DecodeSpec,
    made_from: dict[str, str],
    fill: Callable[[CacheWriter], None],
) -> ImageCache:
    """Write artifacts/cache below ``root``: all of it, index.json last, or nothing. ``fill`` puts the pixels of every entry; each
    split's entries are sorted."""
    with publish_dir((root / ImageCache.PATH).parent) as folder:
        with CacheWriter(folder, decode.image_size, entries) as writer:
            fill(writer)
            writer.write_tables()
        cache = ImageCache(
            made_from=made_from,
            files=file_digests(folder, *FILES),
            classes=classes,
            counts={split: len(entries[split]) for split in SPLITS},
            decode=decode,
            test_digest=digest_of_labels(entries["test"], classes),
        )
        cache = cache.model_copy(update={"digest": digest_of(cache.content())})
        write_atomic(folder / Path(ImageCache.PATH).name, canonical_json(cache.model_dump(mode="json")))
    return ImageCache.load(root)


class CacheWriter:
    """Fills a folder with the files of a cache. A context manager; ``put`` may be called from many threads, in any order.

    Pixels are written at their row with pwrite: memory stays flat, and a full disk is an error instead of the SIGBUS that a
    memory map would give.
    """

    def __init__(self, folder: Path, size: int, entries: Mapping[Split, list[Entry]]) -> None:
        self.folder = folder
        self.row_bytes = size * size * 3
        self.entries = entries
        self.place = {entry.sha256: (split, row) for split in SPLITS for row, entry in enumerate(entries[split])}
        self._missing = set(self.place)
        self._files: dict[Split, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for split in SPLITS:
            file = self._stack.enter_context((self.folder / f"{split}.u8").open("wb"))
            os.ftruncate(file.fileno(), len(self.entries[split]) * self.row_bytes)
            self._files[split] = file.fileno()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def put(self, sha256: str, pixels: np.ndarray) -> None:
        """Store the pixels (uint8 [S, S, 3]) of one of the entries."""
        self.put_rows([sha256], pixels.tobytes())

    def put_rows(self, sha256: Sequence[str], pixels: bytes) -> None:
        """Store the pixels of entries whose rows follow each other, given together."""
        split, row = self.place[sha256[0]]
        data, at = memoryview(pixels), row * self.row_bytes
        assert len(data) == self.row_bytes * len(sha256), f"{len(data)} bytes of pixels, {self.row_bytes * len(sha256)} expected"
        while data:
            written = os.pwrite(self._files[split], data, at)
            data, at = data[written:], at + written
        self._missing.difference_update(sha256)

    def lacks(self, sha256: str) -> bool:
        """Whether it is an entry whose pixels have not been put."""
        return sha256 in self._missing

    def missing(self) -> list[str]:
        """The entries whose pixels have not been put, by sha256."""
        return sorted(self._missing)

    def write_tables(self) -> None:
        """Write {split}.parquet: row int64, sha256 string, path string, label_index int32."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        for split in SPLITS:
            entries = self.entries[split]
            table = pa.table(
                {
                    "row": pa.array(range(len(entries)), pa.int64()),
                    "sha256": pa.array([entry.sha256 for entry in entries], pa.string()),
                    "path": pa.array([entry.path for entry in entries], pa.string()),
                    "label_index": pa.array([entry.label_index for entry in entries], pa.int32()),
                }
            )
            pq.write_table(table, self.folder / f"{split}.parquet", compression="none")
