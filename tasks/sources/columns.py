"""Which columns of a table hold what, and what a cell of them says: shared by every source that reads rows."""

from __future__ import annotations

import difflib
import unicodedata
from typing import Any

from pydantic import Field

from tasks.core.artifacts import Split
from tasks.core.config import Section
from tasks.core.errors import BadInput
from tasks.sources.layout import SPLIT_NAMES

USUAL: dict[str, tuple[str, ...]] = {
    "image": ("path", "image", "img", "file", "filename", "file_name", "filepath", "file_path", "image_path", "url", "image_url"),
    "label": ("label", "labels", "class", "class_name", "category"),
    "split": ("split", "subset", "partition"),
    "group": ("group", "group_id"),
}


class Columns(Section):
    """Names of columns. An empty one is found by its usual names (letter case aside); split and group may be absent."""

    image: str = Field("", description="column of images; empty: one of the usual names, such as path, image, file_name or url")
    label: str = Field("", description="column of labels; empty: label, labels, class, class_name or category")
    split: str = Field("", description="column of splits; empty: split, subset or partition, where there is one")
    group: str = Field("", description="column of groups; empty: group or group_id, where there is one")

    def used(self) -> tuple[str, str, str, str]:
        """The four names, in the order of the fields."""
        return self.image, self.label, self.split, self.group


def choose(header: list[str], asked: Columns, table: str) -> Columns:
    """The columns of ``header`` that are used; raises BadInput ``missing_column`` or ``duplicate_column``, naming ``table``."""
    found = {}
    for role, usual in USUAL.items():
        name = getattr(asked, role)
        hits = [column for column in header if (column == name if name else column.strip().casefold() in usual)]
        if len(hits) > 1:
            what, must = f"{table} has more than one column for the {role}", "one, or named"
            raise BadInput("duplicate_column", what, value=", ".join(hits), constraint=must, knob=f"ingest.options.{role}")
        if not hits and (name or role in ("image", "label")):
            raise _missing(header, role, name, table)
        found[role] = hits[0] if hits else ""
    return Columns(**found)


def _missing(header: list[str], role: str, name: str, table: str) -> BadInput:
    shown = ", ".join(header[:12])[:200]
    if name:
        near = difflib.get_close_matches(name, header, n=1, cutoff=0.4)
        return BadInput(
            "missing_column",
            f"{table} has no column {name!r}",
            value=shown,
            constraint=near[0] if near else "one of them",
            knob=f"ingest.options.{role}",
        )
    separator = next((mark for mark in (";", "\t", "|") if len(header) == 1 and mark in header[0]), "")
    what = f"{table} has no column for the {role}" + (f": its cells are separated by {separator!r}, not by a comma" if separator else "")
    knob = f"ingest.options.{'delimiter' if separator else role}"
    return BadInput("missing_column", what, value=shown, constraint="columns such as path and label", knob=knob)


def label_text(cell: Any, class_names: tuple[str, ...] = ()) -> str | None:
    """The label that a cell states, in NFC and trimmed; "" where it is empty, None where it can be none (a fraction, a list).

    A whole number is the class of that number where ``class_names`` are known (a negative one is no label), else its digits.
    """
    if cell is None:
        return ""
    if isinstance(cell, int) and not isinstance(cell, bool):
        if class_names:
            return class_names[cell] if 0 <= cell < len(class_names) else "" if cell < 0 else None
        return str(cell)
    return unicodedata.normalize("NFC", cell).strip() if isinstance(cell, str) else None


def split_of(cell: Any, where: str) -> Split | None:
    """The split that a cell states; None where it is empty. Raises BadInput ``unknown_split`` naming ``where``."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return None
    split = SPLIT_NAMES.get(cell.strip().casefold()) if isinstance(cell, str) else None
    if split is None:
        raise BadInput("unknown_split", f"{where} names an unknown split", value=repr(cell)[:80], constraint="train, val or test")
    return split
