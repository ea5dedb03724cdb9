"""The image cache: the pixels of each shard of data/ in a file of their own, and a table for each split that says where its images lie.

Row order of a split is ascending sha256, and so is the order in a file: both depend on the images alone, never on ingest order or worker
timing. A file depends on its shard alone, so a batch of new images is one new file; the others are linked from a former cache
(tasks/images/former.py), and DVC stores and pushes none of them twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tasks.core.artifacts import SPLITS, CacheForm, DecodeSpec, ImageCache, Split, file_digests
from tasks.core.errors import BadInput
from tasks.core.files import canonical_json, digest_of, link_or_copy, publish_dir, write_atomic

if TYPE_CHECKING:
    import numpy as np

    from tasks.images.pixels import Pixels

KNOB = "dvc repro --force prepare"
SUFFIX: dict[CacheForm, str] = {"pixels": "u8", "encoded": "images"}
COLUMNS = ["row", "sha256", "path", "label_index", "shard", "start", "bytes"]
OPEN_FILES = 64
"""Files that a writer holds open at once."""


class SplitView(NamedTuple):
    """One split: pixels uint8 [N, S, S, 3] (read, or decoded, where they are indexed), labels int64 [N], sha256 and paths of the N images."""

    pixels: np.ndarray | Pixels
    labels: np.ndarray
    sha256: list[str]
    paths: list[str]


class Entry(NamedTuple):
    """One image of a split: its ``shard`` (000001-00000) and the length of its encoded ``bytes``, which a cache of pixels does not need."""

    sha256: str
    path: str
    label_index: int
    shard: str = "000001-00000"
    bytes: int = 0


def open_split(cache: ImageCache, split: Split, threads: int = 0) -> SplitView:
    """Map a split's pixels read-only; nothing is read until it is used. Encoded images are decoded by ``threads``, 0 takes the cores.

    Raises BadInput ``artifact_missing`` or ``artifact_edited`` where a file's size, rows or labels do not fit the index
    (the digests of the files are ``cache.verify()``'s business).
    """
    import numpy as np

    from tasks.images.pixels import EncodedPixels, Layout, PackedPixels

    path, count, size = cache.path(f"{split}.parquet"), cache.counts[split], cache.decode.image_size
    table = _table(path)
    if list(table) != COLUMNS:
        raise _edited(path, f"columns {', '.join(table)}", ", ".join(COLUMNS))
    if table["row"] != list(range(count)):
        raise _edited(path, f"{len(table['row'])} rows", f"rows 0 to {count - 1} in order")
    labels, start, length = (np.asarray(table[name], np.int64) for name in ("label_index", "start", "bytes"))
    if count and not (labels.min() >= 0 and labels.max() < len(cache.classes)):
        raise _edited(path, f"label index {labels.max()}", f"below {len(cache.classes)}")
    names = {shard: number for number, shard in enumerate(sorted(set(table["shard"])))}
    if unknown := names.keys() - cache.shards.keys():
        raise _edited(path, f"shard {min(unknown)}", "one of the index")
    file = np.asarray([names[shard] for shard in table["shard"]], np.int64)
    files = [cache.path(file_of(shard, cache.form)) for shard in names]
    ends = np.asarray([cache.shards[shard] for shard in names], np.int64)
    for found, end in zip(files, ends.tolist(), strict=True):
        if not found.is_file():
            raise BadInput("artifact_missing", "ImageCache: a file is gone", value=found, knob=f"dvc checkout, or {KNOB}")
        if found.stat().st_size != end:
            raise _edited(found, f"{found.stat().st_size} bytes", f"{end} bytes")
    row_bytes = size * size * 3
    fits = (start >= 0) & (length > 0) & (start + length <= ends[file])
    if cache.form == "pixels":
        fits &= (length == row_bytes) & (start % row_bytes == 0) & (ends[file] % row_bytes == 0)
    if not fits.all():
        raise _edited(path, f"{start[~fits][0]} + {length[~fits][0]} bytes", "a place of an image in its file")
    layout = Layout(files, file, start, length)
    pixels = PackedPixels(layout, size) if cache.form == "pixels" else EncodedPixels(layout, cache.decode, table["path"], threads)
    return SplitView(pixels, labels, table["sha256"], table["path"])


def entries_of(cache: ImageCache, split: Split) -> list[Entry]:
    """What a split holds, in its order. Raises as ``open_split``."""
    table = _table(cache.path(f"{split}.parquet"))
    columns = (table[name] for name in ("sha256", "path", "label_index", "shard", "bytes"))
    return [Entry(*row) for row in zip(*columns, strict=True)]


def members_of(cache: ImageCache) -> dict[str, list[str]]:
    """The sha256 of the images in each file, in its order, by shard. Raises as ``open_split``."""
    found: dict[str, list[tuple[int, str]]] = {shard: [] for shard in cache.shards}
    for split in SPLITS:
        table = _table(cache.path(f"{split}.parquet"))
        for shard, start, sha256 in zip(table["shard"], table["start"], table["sha256"], strict=True):
            found[shard].append((start, sha256))
    return {shard: [sha256 for _, sha256 in sorted(rows)] for shard, rows in found.items()}


def file_of(shard: str, form: CacheForm) -> str:
    """The name of a shard's file."""
    return f"{shard}.{SUFFIX[form]}"


def _table(path: Path) -> dict[str, list[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise BadInput("artifact_missing", "ImageCache: a file is gone", value=path, knob=f"dvc checkout, or {KNOB}")
    try:
        with pq.ParquetFile(path) as reader:  # read_table would also import pandas
            columns: dict[str, list[Any]] = reader.read().to_pydict()
    except (pa.ArrowException, OSError):
        raise _edited(path, "no Parquet file", "a table of the cache") from None
    return columns


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
    form: CacheForm = "pixels",
) -> ImageCache:
    """Write artifacts/cache below ``root``: all of it, index.json last, or nothing. ``fill`` puts what is kept of every entry; each
    split's entries are sorted."""
    with publish_dir((root / ImageCache.PATH).parent) as folder:
        with CacheWriter(folder, decode.image_size, entries, form) as writer:
            fill(writer)
            writer.write_tables()
        cache = ImageCache(
            made_from=made_from,
            files=writer.files(),
            classes=classes,
            counts={split: len(entries[split]) for split in SPLITS},
            decode=decode,
            form=form,
            shards=writer.sizes(),
            test_digest=digest_of_labels(entries["test"], classes),
        )
        cache = cache.model_copy(update={"digest": digest_of(cache.content())})
        write_atomic(folder / Path(ImageCache.PATH).name, canonical_json(cache.model_dump(mode="json")))
    return ImageCache.load(root)


class CacheWriter:
    """Fills a folder with the files of a cache. A context manager; ``put`` may be called from many threads, in any order.

    Everything is written at its place with pwrite: memory stays flat, and a full disk is an error instead of the SIGBUS that a
    memory map would give. ``row_bytes`` is what the pixels of an image take, ``members`` the sha256 of each shard's images in the
    order of its file.
    """

    def __init__(self, folder: Path, size: int, entries: Mapping[Split, list[Entry]], form: CacheForm = "pixels") -> None:
        self.folder = folder
        self.form = form
        self.row_bytes = size * size * 3
        self.entries = entries
        shards: dict[str, list[Entry]] = {}
        for entry in sorted(entry for split in SPLITS for entry in entries[split]):
            shards.setdefault(entry.shard, []).append(entry)
        self.members = {shard: [entry.sha256 for entry in shards[shard]] for shard in sorted(shards)}
        self._starts = {shard: self._ends(shards[shard]) for shard in self.members}
        self.place = {sha256: (shard, row) for shard, names in self.members.items() for row, sha256 in enumerate(names)}
        self._missing = set(self.place)
        self._linked: dict[str, str] = {}
        self._open: dict[str, int] = {}
        self._lock = Lock()

    def _ends(self, entries: list[Entry]) -> list[int]:
        """0, and where each image of a file ends."""
        ends = [0]
        for entry in entries:
            ends.append(ends[-1] + (entry.bytes if self.form == "encoded" else self.row_bytes))
        return ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def put(self, sha256: str, pixels: np.ndarray) -> None:
        """Store the pixels (uint8 [S, S, 3]) of one of the entries."""
        self.put_rows([sha256], pixels.tobytes())

    def put_rows(self, sha256: Sequence[str], stored: bytes) -> None:
        """Store what is kept of entries that follow each other in a file, given together.

        Raises BadInput ``artifact_foreign`` where that is not as long as its place.
        """
        shard, row = self.place[sha256[0]]
        data, at, end = memoryview(stored), self._starts[shard][row], self._starts[shard][row + len(sha256)]
        if len(data) != end - at:
            what = f"image {sha256[0][:12]} is another one than was validated"
            raise BadInput("artifact_foreign", what, value=f"{len(data)} bytes", constraint=f"{end - at} bytes", knob="dvc repro --force validate")
        with self._lock:
            file = self._file(shard)
            while data:
                written = os.pwrite(file, data, at)
                data, at = data[written:], at + written
            self._missing.difference_update(sha256)

    def _file(self, shard: str) -> int:
        """The descriptor of a shard's file; the one opened first is closed where there are too many."""
        assert shard not in self._linked, f"{shard} is another cache's file too"
        if shard not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[shard] = os.open(self.folder / file_of(shard, self.form), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._open[shard], self._starts[shard][-1])
        return self._open[shard]

    def link(self, shard: str, path: Path, sha256: str) -> None:
        """Take a file of another cache, whose images are the ``members`` of ``shard`` and whose digest is ``sha256``, under a second name."""
        link_or_copy(path, self.folder / file_of(shard, self.form))
        self._linked[shard] = sha256
        self._missing.difference_update(self.members[shard])

    def lacks(self, sha256: str) -> bool:
        """Whether it is an entry of which nothing has been put."""
        return sha256 in self._missing

    def missing(self) -> list[str]:
        """The entries of which nothing has been put, by sha256."""
        return sorted(self._missing)

    def sizes(self) -> dict[str, int]:
        """Bytes of each shard's file."""
        return {shard: starts[-1] for shard, starts in self._starts.items()}

    def files(self) -> dict[str, str]:
        """File -> sha256 of its bytes, once all are written; linked ones are not read again."""
        linked = {file_of(shard, self.form): sha256 for shard, sha256 in self._linked.items()}
        own = (file_of(shard, self.form) for shard in self.members if shard not in self._linked)
        return linked | file_digests(self.folder, *own, *(f"{split}.parquet" for split in SPLITS))

    def write_tables(self) -> None:
        """Write {split}.parquet: row int64, sha256 string, path string, label_index int32, shard string, start int64, bytes int64."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        for split in SPLITS:
            entries = self.entries[split]
            places = [self.place[entry.sha256] for entry in entries]
            starts = [self._starts[shard][row] for shard, row in places]
            ends = [self._starts[shard][row + 1] for shard, row in places]
            table = pa.table(
                {
                    "row": pa.array(range(len(entries)), pa.int64()),
                    "sha256": pa.array([entry.sha256 for entry in entries], pa.string()),
                    "path": pa.array([entry.path for entry in entries], pa.string()),
                    "label_index": pa.array([entry.label_index for entry in entries], pa.int32()),
                    "shard": pa.array([entry.shard for entry in entries], pa.string()),
                    "start": pa.array(starts, pa.int64()),
                    "bytes": pa.array([end - start for start, end in zip(starts, ends, strict=True)], pa.int64()),
                }
            )
            pq.write_table(table, self.folder / f"{split}.parquet", compression="none")
