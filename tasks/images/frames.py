"""The pandas frames that a validation suite looks at: the images, the classes, and the whole in one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.core.artifacts import SPLITS, DatasetRef
from tasks.images.statistics import NAMES as STATISTICS
from tasks.images.table import SCHEMA, ImageRecord

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

HARMLESS = frozenset({"duplicate", "leak_exact", "leak_near", "not_an_image"})
"""Codes of what is set aside without a word against the data: copies, and files that never claimed to be images."""
MEDIANS = ("width", "height", "bytes", *STATISTICS)
COLUMNS: dict[str, tuple[str, ...]] = {
    "images": tuple(SCHEMA.names),
    "classes": ("path", "class", "images", "in_train", "split", *MEDIANS),
    "whole": ("path", "images", "classes", "class_ratio", "sound_share", "leaks"),
}


def frames(ref: DatasetRef, records: Sequence[ImageRecord], table: pa.Table, leaks: int = 0) -> dict[str, pd.DataFrame]:
    """The frames by name, with COLUMNS: every image, every class (its sound images, and medians over them), and the whole.

    ``table`` holds ``records``; ``leaks`` is how many images are copies of one in another split.
    """
    import pandas as pd

    images = table.to_pandas()
    sound = [record for record in records if not record.code]
    count = Counter(record.label for record in sound)
    placed = Counter((record.label, record.split) for record in sound)
    classes = sorted({*ref.classes, *count})
    rows = [
        {
            "path": f"class {name!r} ({count[name]} sound images)",
            "class": name,
            "images": count[name],
            "in_train": not count[name] or bool(placed[name, "train"] + placed[name, None]),
            "split": not _is_short(frozenset(ref.splits), *(placed[name, split] for split in (*SPLITS, None))),
        }
        for name in classes
    ]
    medians = images[images["reason"] == ""].groupby("label")[list(MEDIANS)].median().reindex(classes)
    of_classes = pd.DataFrame(rows, columns=list(COLUMNS["classes"][:5])).assign(**{name: medians[name].to_numpy() for name in MEDIANS})
    lost = sum(item.code not in HARMLESS for item in ref.set_aside)
    whole = {
        "path": "data",
        "images": len(sound),
        "classes": sum(count[name] > 0 for name in classes),
        "class_ratio": max(count.values(), default=0) / max(1, min(count[name] for name in classes)) if classes else 0.0,
        "sound_share": len(sound) / max(1, sum(record.code not in HARMLESS or not record.decodes for record in records) + lost),
        "leaks": leaks,
    }
    return {"images": images, "classes": of_classes, "whole": pd.DataFrame([whole])}


def rows_of(tables: dict[str, pd.DataFrame], frame: str, of_class: str | None, split: str | None, splits: Sequence[str | None]) -> pd.DataFrame:
    """The rows of a frame that an expectation of the suite file is about: of images the sound ones.

    ``splits`` is the split of each image, in the table's order.
    """
    table: Any = tables[frame]
    if frame == "images":
        table = table[[reason == "" and split in (None, one) for reason, one in zip(table["reason"], splits, strict=True)]]
    if of_class is not None:
        table = table[table["label" if frame == "images" else "class"] == of_class]
    return table.reset_index(drop=True)


def _is_short(named: frozenset[str], train: int, val: int, test: int, free: int) -> bool:
    """Whether a class lacks the images to stand in each split: ``free`` ones may go anywhere, train's where a split is not named.

    What is enough here can still fall badly when the sticky split is drawn; prepare says so then.
    """
    if test == 0 and "test" in named and free == 0:
        return True
    needed = 1 + (test == 0) + (val == 0 and "val" not in named)
    return train + free < needed and val + test + train + free > 0
