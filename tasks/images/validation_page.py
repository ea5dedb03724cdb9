"""report.html of a validation: one self-contained page, without script or network, equal for equal data on every machine."""

from __future__ import annotations

import base64
import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tasks.core.artifacts import SPLITS, CheckResult, DatasetRef, ValidationReport
from tasks.core.png import encode_png
from tasks.images.charts import histogram, number, strip
from tasks.images.table import ImageRecord

TEMPLATE = Path(__file__).with_suffix(".html")
MOST_CLASSES = 200
"""Classes that get a bar; the largest ones are shown."""
MOST_SAMPLED = 40
"""Classes whose samples are shown, the first by name."""
MOST_LISTED = 200
"""Names in each list of files that were set aside."""
MOST_PAIRS = 24
"""Pairs of copies that are shown side by side."""
BINS = 12
ODD_ONES = 6
"""Pictures of each extreme."""
LOOKS: tuple[tuple[str, str, bool, str], ...] = (
    ("brightness", "brightness, 0-255", False, "mean luma"),
    ("contrast", "contrast, 0-128", False, "standard deviation of luma"),
    ("sharpness", "sharpness, logarithmic", True, "variance of the Laplacian"),
    ("entropy", "entropy, bits", False, "of the luma histogram"),
    ("aspect", "width over height, logarithmic", True, "as it is shown"),
)
"""Statistic, title, whether its scale is logarithmic, and what it is."""
EXTREMES: tuple[tuple[str, str, int], ...] = (
    ("darkest", "brightness", 1),
    ("brightest", "brightness", -1),
    ("least contrast", "contrast", 1),
    ("blurriest", "sharpness", 1),
    ("sharpest, or noise", "sharpness", -1),
    ("least in them", "entropy", 1),
    ("tallest", "aspect", 1),
    ("widest", "aspect", -1),
)
"""What is shown of the ends: its title, the statistic, and 1 for the least or -1 for the largest."""


class Extreme(NamedTuple):
    """A title, and place in the records and value of the images that are the most so, the most extreme first."""

    title: str
    ends: list[tuple[int, float]]


def render_page(
    ref: DatasetRef,
    report: ValidationReport,
    records: Sequence[ImageRecord],
    thumbnails: Mapping[str, Sequence[np.ndarray]],
    pairs: Sequence[tuple[int, int, str]] = (),
    odd: Sequence[Extreme] = (),
    pictures: Mapping[int, np.ndarray] = MappingProxyType({}),
) -> str:
    """The page as HTML. Every name from the data is escaped.

    ``thumbnails``: class -> small pictures, uint8 [H, W, 3]. ``pairs``: places in ``records`` of two images that are copies,
    and a code; ``odd``: of ``odd_ones``; ``pictures``: place -> small picture, of all ``pictured`` places.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["count"] = lambda number: f"{number:,}"
    environment.filters["visible"] = visible
    environment.filters["number"] = number
    sampled = [(name, [data_uri(picture) for picture in thumbnails[name]]) for name in ref.classes if thumbnails.get(name)]
    page: str = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        checks=[(check, shown(check)) for check in report.checks],
        failed=[check.name for check in report.checks if not check.passed and check.severity == "fail"],
        warned=[check.name for check in report.checks if not check.passed and check.severity == "warn"],
        digest=ref.digest,
        total_bytes=megabytes(sum(record.bytes for record in records)),
        classes=_class_bars(ref, records),
        class_total=len(ref.classes),
        splits=[(split, ref.splits[split]) for split in SPLITS if split in ref.splits],
        sampled=sampled[:MOST_SAMPLED],
        unsampled=max(0, len(sampled) - MOST_SAMPLED),
        histograms=_histograms(records),
        looks=_looks(records),
        class_looks=_class_looks(records),
        odd=[(title, [(records[place], value, data_uri(pictures[place])) for place, value in ends]) for title, ends in odd],
        formats=Counter(f"{record.format}, {record.mode}" for record in records if record.format).most_common(),
        copies=[(code, [(records[place], data_uri(pictures[place])) for place in (one, other)]) for one, other, code in pairs[:MOST_PAIRS]],
        copies_total=len(pairs),
        quarantined=[record for record in records if record.code][:MOST_LISTED],
        quarantined_codes=sorted(Counter(item.code for item in report.quarantined).items()),
        set_aside=ref.set_aside[:MOST_LISTED],
        set_aside_total=len(ref.set_aside),
        set_aside_codes=sorted(Counter(item.code for item in ref.set_aside).items()),
        ignored=ref.ignored,
        listed=MOST_LISTED,
    )
    return page


def pictured(pairs: Sequence[tuple[int, int, str]], odd: Sequence[Extreme]) -> set[int]:
    """Places in the records of the images of which the page shows a small picture beside the samples."""
    return {place for pair in pairs[:MOST_PAIRS] for place in pair[:2]} | {place for extreme in odd for place, _ in extreme.ends}


def odd_ones(records: Sequence[ImageRecord]) -> list[Extreme]:
    """The extremes among the sound images of ``records``; none of what all share."""
    found = []
    for title, name, sign in EXTREMES:
        places, values = _values(records, name)
        if values and min(values) != max(values):
            ends = heapq.nsmallest(ODD_ONES, zip(values, places, strict=True), key=lambda one: (sign * one[0], records[one[1]].path))
            found.append(Extreme(title, [(place, value) for value, place in ends]))
    return found


def _values(records: Sequence[ImageRecord], name: str) -> tuple[list[int], list[float]]:
    """Places of the sound images that have the statistic ``name``, and its values."""
    column: Callable[[ImageRecord], Any] = attrgetter(name)
    places = [place for place, record in enumerate(records) if not record.code and column(record) is not None]
    return places, [column(records[place]) for place in places]


def _looks(records: Sequence[ImageRecord]) -> list[dict[str, Any]]:
    found = []
    for name, title, log, what in LOOKS:
        _, values = _values(records, name)
        if values:
            found.append({"title": title, "what": what, **histogram(values, log)._asdict()})
    return found


def _class_looks(records: Sequence[ImageRecord]) -> dict[str, Any]:
    """For brightness, contrast and sharpness the range of each class on one scale: ``columns`` (title, low, high) and ``rows``."""
    columns, strips = [], []
    for name, title, log, _ in LOOKS[:3]:
        of_class: dict[str, list[float]] = {}
        for place, value in zip(*_values(records, name), strict=True):
            of_class.setdefault(records[place].label, []).append(value)
        every = [value for values in of_class.values() for value in values]
        if every:
            columns.append((title, min(every), max(every)))
            strips.append({label: strip(values, min(every), max(every), log) for label, values in of_class.items()})
    labels = sorted({label for column in strips for label in column})
    rows = [(label, [column.get(label, "") for column in strips]) for label in labels[:MOST_SAMPLED]]
    return {"columns": columns, "rows": rows, "more": max(0, len(labels) - MOST_SAMPLED)}


def visible(text: str) -> str:
    """A name with control and direction characters spelled out, so that it looks like what it is."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def shown(check: CheckResult) -> str:
    """A check's value for people."""
    if isinstance(check.value, float):
        return f"{check.value:,.4f}".rstrip("0").rstrip(".")
    if check.value is None:
        return "none"
    return f"{check.value:,}" if isinstance(check.value, int) else check.value


def megabytes(size: int) -> str:
    """``size`` in bytes, as kB or MB (powers of ten)."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def data_uri(picture: np.ndarray) -> str:
    """A small picture (uint8 [H, W, 3]) as a data: URI."""
    height, width, channels = picture.shape
    png = encode_png(np.ascontiguousarray(picture).tobytes(), width, height, channels)
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _class_bars(ref: DatasetRef, records: Sequence[ImageRecord]) -> list[dict[str, Any]]:
    sound = Counter(record.label for record in records if not record.code)
    bad = Counter(record.label for record in records if record.code)
    names = sorted({*ref.classes, *sound, *bad})
    kept = set(sorted(names, key=lambda name: -sound[name])[:MOST_CLASSES])
    top = max(sound.values(), default=1)
    return [{"name": name, "images": sound[name], "percent": 100 * sound[name] / top, "bad": bad[name]} for name in names if name in kept]


def _histograms(records: Sequence[ImageRecord]) -> list[dict[str, Any]]:
    sizes = {
        "width, px": [record.width for record in records if record.width],
        "height, px": [record.height for record in records if record.height],
        "file size, bytes": [record.bytes for record in records if record.bytes],
    }
    return [{"title": title, **_histogram(values)} for title, values in sizes.items() if values]


def _histogram(values: Sequence[int]) -> dict[str, Any]:
    """Equal-width bins; one bin where all values are equal."""
    low, high = min(values), max(values)
    width = max(1, math.ceil((high - low + 1) / BINS))
    counts = Counter((value - low) // width for value in values)
    top = max(counts.values())
    bins = [
        {"from": low + index * width, "to": min(high, low + (index + 1) * width - 1), "count": counts[index], "percent": 100 * counts[index] / top}
        for index in range((high - low) // width + 1)
    ]
    return {"low": low, "high": high, "median": sorted(values)[len(values) // 2], "bins": bins}
