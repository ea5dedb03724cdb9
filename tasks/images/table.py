"""The image table: one row for each image of a data version, with what decoding it showed.

Every image is decoded wholly, one at a time; only the table is held in memory. (Threads did not pay: 60,000 JPEGs of 32 x 32
took 21 s on one thread and 26 s on two, 2026-12-01, Pillow 13.0, 2 cores.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tasks.images.decode import BadImage, DecodePolicy, ImageFacts, decode, probe, to_square
from tasks.images.likeness import Likeness, likeness, luma_of
from tasks.images.shards import ImageRow
from tasks.images.statistics import NAMES as STATISTICS
from tasks.images.statistics import Statistics, statistics

SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("label", pa.string()),
        ("split", pa.string()),
        ("group", pa.string()),
        ("sha256", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("mode", pa.string()),
        ("format", pa.string()),
        ("bytes", pa.int64()),
        ("decodes", pa.bool_()),
        ("reason", pa.string()),
        ("phash", pa.string()),
        *((name, pa.float64()) for name in STATISTICS),
    ]
)
QUARANTINE_SCHEMA = pa.schema([(name, pa.string()) for name in ("path", "label", "sha256", "code", "reason")])
THUMBNAIL_PX = 48


class ImageRecord(NamedTuple):
    """A row of images.parquet, and ``code``: "" where the image is sound. ``width`` and ``height`` are pixels as stored.

    ``phash`` is the gradient hash in hex, None where the image has none (tasks/images/likeness.py). The five statistics
    (tasks/images/statistics.py) are None where it does not decode or a side is out of bounds.
    """

    path: str
    label: str
    split: str | None
    group: str | None
    sha256: str
    width: int | None
    height: int | None
    mode: str | None
    format: str | None
    bytes: int
    decodes: bool
    reason: str
    phash: str | None
    brightness: float | None
    contrast: float | None
    sharpness: float | None
    entropy: float | None
    aspect: float | None
    code: str


@dataclass(frozen=True)
class Bounds:
    """What an image must satisfy: the decoder's limits, and the shortest and longest side in pixels."""

    policy: DecodePolicy
    min_side_px: int
    max_side_px: int


class Inspected(NamedTuple):
    """An image's record; where the image is sound its likeness and, where that was asked for, a small picture of it (uint8 [H, W, 3])."""

    record: ImageRecord
    thumbnail: np.ndarray | None
    likeness: Likeness | None


def inspect(row: ImageRow, bounds: Bounds, thumbnail: bool = False) -> Inspected:
    """Decode one image wholly and say what it is."""
    try:
        facts: ImageFacts | None = probe(row.data, bounds.policy)
    except BadImage:
        facts = None
    small: np.ndarray | None = None
    alike: Likeness | None = None
    numbers: Statistics | None = None
    try:
        pixels = decode(row.data, bounds.policy)
    except BadImage as error:
        decodes, code, reason = False, error.code, str(error)
    else:
        decodes = True
        code, reason = _check_sides(pixels, bounds)
        if not code:
            luma = luma_of(pixels)
            alike, numbers = likeness(pixels, luma), statistics(np.asarray(luma))
        if thumbnail and not code:
            small = pixels if max(pixels.shape) <= THUMBNAIL_PX else to_square(pixels, THUMBNAIL_PX, "crop")
    width, height, mode, kind = facts[:4] if facts else (None, None, None, None)
    stored = (row.path, row.label, row.split, row.group, row.sha256)
    phash = f"{alike.hash:016x}" if alike and alike.hash is not None else None
    brightness, contrast, sharpness, entropy, aspect = numbers or (None, None, None, None, None)
    shown = (brightness, contrast, sharpness, entropy, aspect)
    record = ImageRecord(*stored, width, height, mode, kind, len(row.data), decodes, reason, phash, *shown, code)
    return Inspected(record, small, alike)


def _check_sides(pixels: np.ndarray, bounds: Bounds) -> tuple[str, str]:
    height, width = pixels.shape[:2]
    if min(width, height) < bounds.min_side_px:
        return "image_too_small", f"the image is {width} x {height} pixels; each side must have at least {bounds.min_side_px}"
    if max(width, height) > bounds.max_side_px:
        return "image_too_large", f"the image is {width} x {height} pixels; each side must have at most {bounds.max_side_px}"
    return "", ""


def inspect_all(rows: Iterable[ImageRow], bounds: Bounds, samples: int) -> Iterator[Inspected]:
    """``inspect`` every row, in order, holding one at a time; thumbnails for the first ``samples`` of each class."""
    seen: Counter[str] = Counter()
    for row in rows:
        seen[row.label] += 1
        yield inspect(row, bounds, thumbnail=seen[row.label] <= samples)


def image_table(records: list[ImageRecord]) -> pa.Table:
    """images.parquet as a table."""
    return pa.table([pa.array([getattr(record, field.name) for record in records], field.type) for field in SCHEMA], schema=SCHEMA)


def quarantine_table(records: list[ImageRecord]) -> pa.Table:
    """quarantine.parquet as a table: the records that are not sound."""
    bad = [record for record in records if record.code]
    return pa.table([pa.array([getattr(record, field.name) for record in bad], field.type) for field in QUARANTINE_SCHEMA], schema=QUARANTINE_SCHEMA)
