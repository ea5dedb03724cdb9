"""The image table: one row for each image of a data version, with what decoding it showed.

Every image is decoded wholly, a few at a time; only the table is held in memory. Images of one shape are measured together: over small
ones most of the time would go to the calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tasks.core.artifacts import SetAside
from tasks.images.decode import BadImage, DecodePolicy, ImageFacts, examine, to_square
from tasks.images.likeness import Likeness, likenesses, luma_of
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
QUARANTINE_SCHEMA = pa.schema([(name, pa.string()) for name in ("stage", "path", "label", "sha256", "code", "reason")])
THUMBNAIL_PX = 48
BATCH_IMAGES, BATCH_PIXELS = 256, 1 << 19
"""Images are taken together until there are so many, or their pixels are."""


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
    """An image's record; where the image is sound its likeness and, where that was asked for, a small picture (uint8 [H, W, 3])."""

    record: ImageRecord
    thumbnail: np.ndarray | None
    likeness: Likeness | None


class _Decoded(NamedTuple):
    """An image on its way through ``inspect_all``: ``pixels`` where it decodes, ``code`` and ``reason`` where it is not sound."""

    row: ImageRow
    facts: ImageFacts | None
    pixels: np.ndarray | None
    code: str
    reason: str
    shows: bool


def _decoded(row: ImageRow, bounds: Bounds, shows: bool) -> _Decoded:
    facts, found = examine(row.data, bounds.policy)
    if isinstance(found, BadImage):
        return _Decoded(row, facts, None, found.code, str(found), shows)
    return _Decoded(row, facts, found, *_check_sides(found, bounds), shows)


def _check_sides(pixels: np.ndarray, bounds: Bounds) -> tuple[str, str]:
    height, width = pixels.shape[:2]
    if min(width, height) < bounds.min_side_px:
        return "image_too_small", f"the image is {width} x {height} pixels; each side must have at least {bounds.min_side_px}"
    if max(width, height) > bounds.max_side_px:
        return "image_too_large", f"the image is {width} x {height} pixels; each side must have at most {bounds.max_side_px}"
    return "", ""


def inspect_all(rows: Iterable[ImageRow], bounds: Bounds, samples: int | None = None) -> Iterator[Inspected]:
    """Decode every image wholly and say what it is, in order; thumbnails for the first ``samples`` of each class, or for all.

    At most BATCH_IMAGES are held at once, and hardly more than BATCH_PIXELS or the pixels of one image.
    """
    seen: Counter[str] = Counter()
    held: list[_Decoded] = []
    size = 0
    for row in rows:
        seen[row.label] += 1
        held.append(_decoded(row, bounds, samples is None or seen[row.label] <= samples))
        pixels = held[-1].pixels
        size += 0 if pixels is None else pixels.shape[0] * pixels.shape[1]
        if len(held) >= BATCH_IMAGES or size >= BATCH_PIXELS:
            yield from _inspected(held)
            held, size = [], 0
    yield from _inspected(held)


def _inspected(held: list[_Decoded]) -> Iterator[Inspected]:
    """Measure the sound images of ``held``, those of one shape together."""
    shapes: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, image in enumerate(held):
        if image.pixels is not None and not image.code:
            shapes[image.pixels.shape].append(place)
    measured: dict[int, tuple[Likeness, Statistics]] = {}
    for places in shapes.values():
        first = held[places[0]].pixels
        assert first is not None
        stack = np.stack([held[place].pixels for place in places]) if len(places) > 1 else first[None]  # type: ignore[misc]
        lumas = luma_of(stack)
        measured.update(zip(places, zip(likenesses(stack, lumas), statistics(lumas), strict=True), strict=True))
    for place, image in enumerate(held):
        alike, numbers = measured.get(place, (None, None))
        yield Inspected(_record(image, alike, numbers), _thumbnail(image) if image.shows else None, alike)


def _record(image: _Decoded, alike: Likeness | None, numbers: Statistics | None) -> ImageRecord:
    row = image.row
    width, height, mode, kind = image.facts[:4] if image.facts else (None, None, None, None)
    stored = (row.path, row.label, row.split, row.group, row.sha256)
    phash = f"{alike.hash:016x}" if alike and alike.hash is not None else None
    brightness, contrast, sharpness, entropy, aspect = numbers or (None, None, None, None, None)
    seen = (brightness, contrast, sharpness, entropy, aspect)
    return ImageRecord(*stored, width, height, mode, kind, len(row.data), image.pixels is not None, image.reason, phash, *seen, image.code)


def _thumbnail(image: _Decoded) -> np.ndarray | None:
    if image.pixels is None or image.code:
        return None
    return image.pixels if max(image.pixels.shape) <= THUMBNAIL_PX else to_square(image.pixels, THUMBNAIL_PX, "crop")


def image_table(records: list[ImageRecord]) -> pa.Table:
    """images.parquet as a table."""
    return pa.table([pa.array([getattr(record, field.name) for record in records], field.type) for field in SCHEMA], schema=SCHEMA)


def quarantine_table(set_aside: Sequence[SetAside], records: list[ImageRecord]) -> pa.Table:
    """quarantine/reasons.parquet as a table: what ingest set aside, then the records that are not sound."""
    rows = [dict.fromkeys(QUARANTINE_SCHEMA.names) | {"stage": "ingest", "path": item.name, "code": item.code} for item in set_aside]
    for record in records:
        if record.code:
            rows.append({"stage": "validate"} | {name: getattr(record, name) for name in QUARANTINE_SCHEMA.names[1:]})
    return pa.Table.from_pylist(rows, QUARANTINE_SCHEMA)
