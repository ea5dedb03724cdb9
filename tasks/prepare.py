"""Split the sound images for good and decode each once into the packed pixel cache, or keep them encoded there.

python -m tasks.prepare      in a project's root; reads data/ and artifacts/validation, writes artifacts/cache
"""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core import errors
from tasks.core.artifacts import SPLITS, CacheForm, DatasetRef, DecodeSpec, ImageCache, Split, ValidationReport, lineage
from tasks.core.config import PrepareConfig, load_params
from tasks.core.errors import BadInput
from tasks.core.files import home_of
from tasks.core.process import die_with_parent, quiet_environment

if TYPE_CHECKING:
    from tasks.images.cache import CacheWriter, Entry
    from tasks.images.shards import ImageRow

KNOB = "dvc repro validate"
THREADS_FROM, THREADS_FROM_EACH = 4_000_000, 16_000
"""Bytes of all images, and of the mean image, from which threads pay: Pillow lets go of the interpreter lock while it decodes
and resizes, but with small pictures most of the time goes to Python itself."""
CHUNK_IMAGES, CHUNK_BYTES = 32, 1_000_000
"""A thread takes images until either is reached."""


def prepare(ref: DatasetRef, report: ValidationReport, config: PrepareConfig, out: Path) -> ImageCache:
    """Write artifacts/cache below ``out``: all of it, index.json last, or nothing.

    Every sound image of ``report``'s table gets its sticky split (tasks.images.splits) and is decoded and resized once, or taken from
    a former cache of the same decode spec (tasks.images.former), which changes no byte. Or its bytes are kept as they are, where
    ``config.cache`` says so or its size does (``form_of``). The table is held in memory, pixels and encoded bytes are not.
    Raises BadInput ``validation_failed``, ``artifact_foreign``, ``artifact_edited``, ``class_too_small``, ``class_not_in_train``,
    ``group_straddles``, or an image's own code where it no longer decodes.
    """
    from tasks.images import former
    from tasks.images.cache import publish_cache

    report.require_made_from(ref)
    if not report.success:
        failed = ", ".join(check.name for check in report.checks if not check.passed and check.severity == "fail")
        raise BadInput("validation_failed", "the data failed its validation", value=failed or None, constraint="a passed report", knob="the data")
    report.verify()
    decode = DecodeSpec(image_size=config.image_size, resize=config.resize, **config.decode.model_dump())
    entries = _entries(ref, report, config)

    form = form_of(config, [one.bytes for split in SPLITS for one in entries[split]])

    def fill(writer: CacheWriter) -> None:
        former.copy_former(home_of(out), decode, writer)
        if form == "pixels":
            _decode_all(ref, decode, writer)
        else:
            for chunk in _chunks(ref, writer):
                for row in chunk:
                    writer.put_rows([row.sha256], row.data)
        _require(writer.missing())

    cache = publish_cache(out, entries, ref.classes, decode, lineage(ref, report), fill, form)
    former.keep(home_of(out), cache, config.reuse_mb)
    return cache


def form_of(config: PrepareConfig, lengths: Sequence[int]) -> CacheForm:
    """What a cache keeps of images of these lengths in bytes: the same for the same data and params on any machine."""
    if config.cache != "auto":
        return config.cache
    pixels = len(lengths) * config.image_size**2 * 3
    return "encoded" if pixels > config.pixels_mb * 1e6 and sum(lengths) < pixels else "pixels"


def _entries(ref: DatasetRef, report: ValidationReport, config: PrepareConfig) -> dict[Split, list[Entry]]:
    """The sound images of the validation table by split, each split in the cache's row order."""
    import pyarrow.parquet as pq

    from tasks.images.cache import Entry
    from tasks.images.shards import names_by_shard
    from tasks.images.splits import Member, check_classes, splitter

    index = {name: position for position, name in enumerate(ref.classes)}
    assign = splitter(ref, config)
    shard_of = {sha256: shard for shard, names in names_by_shard(ref) for sha256 in names}
    entries: dict[Split, list[Entry]] = {split: [] for split in SPLITS}
    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    seen: set[str] = set()
    table = pq.ParquetFile(report.path("images.parquet"))
    for batch in table.iter_batches(columns=["path", "label", "split", "group", "sha256", "bytes", "reason"]):
        for row in batch.to_pylist():
            if row["reason"]:
                continue
            if row["label"] not in index:
                raise BadInput("artifact_foreign", "the validation report names a class that the data lacks", value=row["label"], knob=KNOB)
            if row["sha256"] in seen:
                raise BadInput("conflicting_label", "the data hold an image twice", value=row["path"], constraint="each image once", knob=KNOB)
            seen.add(row["sha256"])
            if row["sha256"] not in shard_of:
                _require([row["sha256"]])
            split = assign.split_of(Member(row["sha256"], row["group"], row["split"]))
            entries[split].append(Entry(row["sha256"], row["path"], index[row["label"]], shard_of[row["sha256"]], row["bytes"]))
            counts[split][row["label"]] += 1
    check_classes(ref.classes, counts, frozenset(ref.splits))
    for split in SPLITS:
        entries[split].sort()
    return entries


def _decode_all(ref: DatasetRef, decode: DecodeSpec, writer: CacheWriter) -> None:
    """Decode every entry of ``writer``, by threads where there is enough to do; at most a few chunks are held at once."""
    stored, images = sum((ref.folder / shard.file).stat().st_size for shard in ref.shards), sum(shard.rows for shard in ref.shards)
    threads = (
        (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        if stored >= max(THREADS_FROM, images * THREADS_FROM_EACH)
        else 1
    )
    chunks = _chunks(ref, writer)
    if threads == 1:
        for chunk in chunks:
            _decode_chunk(chunk, decode, writer)
    else:
        with ThreadPoolExecutor(threads, "decode") as pool:
            waiting: deque[Future[None]] = deque()
            try:
                for chunk in chunks:
                    waiting.append(pool.submit(_decode_chunk, chunk, decode, writer))
                    while len(waiting) > 2 * threads:
                        waiting.popleft().result()
                while waiting:
                    waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


def _require(missing: list[str]) -> None:
    """Refuse a report that names images which the data lack."""
    if missing:
        raise BadInput(
            "artifact_foreign",
            "the validation report names images that the data lacks",
            value=f"{len(missing)}, such as {missing[0][:12]}",
            knob=KNOB,
        )


def _chunks(ref: DatasetRef, writer: CacheWriter) -> Iterator[list[ImageRow]]:
    """The rows of the data that the cache lacks, some at a time."""
    from tasks.images.shards import iter_rows

    chunk: list[ImageRow] = []
    size = 0
    for row in iter_rows(ref, writer.lacks):
        if writer.lacks(row.sha256):
            chunk.append(row)
            size += len(row.data)
            if len(chunk) >= CHUNK_IMAGES or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def _decode_chunk(chunk: list[ImageRow], decode: DecodeSpec, writer: CacheWriter) -> None:
    from tasks.images.decode import BadImage, load_pixels

    for row in chunk:
        try:
            pixels = load_pixels(row.data, decode)
        except BadImage as error:
            raise BadInput(error.code, f"{row.path} was sound when it was validated: {error}", knob="dvc repro --force validate") from None
        writer.put(row.sha256, pixels)


def main() -> None:
    die_with_parent()
    quiet_environment()
    root = Path()
    cache = prepare(DatasetRef.load(root), ValidationReport.load(root), load_params().prepare, root)
    size = cache.decode.image_size
    kept = f"images of {size} x {size}" if cache.form == "pixels" else f"encoded images, to be decoded to {size} x {size},"
    print(f"prepare: {', '.join(f'{count} {split}' for split, count in cache.counts.items())} {kept} in {cache.folder}")


if __name__ == "__main__":
    sys.exit(errors.run(main))
