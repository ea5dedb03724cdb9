"""The embedded data set: 1,797 handwritten digits of 8 x 8 pixels that come inside the scikit-learn package.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (test half), UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from tasks.core.errors import BadInput
from tasks.core.png import encode_png
from tasks.sources import Item, Limits, Source, fingerprint, source

SIDE = 8
TOP = 16
"""Grey levels run from 0 to 16."""


@source("digits")
def digits(location: str, root: Path, limits: Limits) -> Source:
    """The digits as grey PNG files named like 0007-3.png (the eighth image, a three). Takes no location and gives no split."""
    if location:
        raise BadInput("source_unavailable", "the source digits has no location", value=location, constraint="empty", knob="ingest.location")
    return Source(_items(_table()), tuple("0123456789"))


@fingerprint("digits")
def digits_fingerprint(location: str, root: Path) -> str:
    """The digits never change."""
    return "1797 digits"


def _table() -> Path:
    """The file that sklearn.datasets.load_digits reads. Importing sklearn for it would cost a second at each start."""
    spec = importlib.util.find_spec("sklearn")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders if (path := Path(folder) / "datasets" / "data" / "digits.csv.gz").is_file()]
    if not found:
        raise BadInput("source_unavailable", "scikit-learn's digits are not installed", knob="pip install scikit-learn, or ingest.source")
    return found[0]


def _items(table: Path) -> Iterator[Item]:
    with gzip.open(table, "rt", encoding="ascii", newline="") as lines:
        for index, row in enumerate(csv.reader(lines)):
            *levels, label = (int(cell) for cell in row)
            pixels = bytes((level * 255 + TOP // 2) // TOP for level in levels)  # rounded to 0..255
            yield Item(f"{index:04d}-{label}.png", str(label), encode_png(pixels, SIDE, SIDE, 1))
