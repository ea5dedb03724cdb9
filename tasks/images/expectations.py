"""expectations.yaml: what a project expects of its images beyond the built-in checks, written without Python (docs/validation.md)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from tasks.core.artifacts import SPLITS, Split
from tasks.core.config import read_yaml
from tasks.core.errors import BadInput

Frame = Literal["images", "classes", "whole"]
KEYS = ("name", "on", "expect", "severity", "where")
WHERE: dict[str, tuple[str, ...]] = {"images": ("class", "split"), "classes": ("class",), "whole": ()}
COLUMNS = ("column", "column_A", "column_B", "column_list")
MOST = 500
"""Expectations in a suite."""


class Expectation(NamedTuple):
    """One entry: Great Expectations' class ``expect`` with ``arguments`` on the rows of ``frame`` that ``of_class`` and ``split`` leave."""

    name: str
    frame: Frame
    expect: str
    arguments: dict[str, Any]
    severity: Literal["fail", "warn"] = "fail"
    of_class: str | None = None
    split: Split | None = None


def read_suite(
    path: Path, known: Mapping[str, Sequence[str]], columns: Mapping[str, Sequence[str]], classes: Iterable[str], taken: Iterable[str]
) -> list[Expectation]:
    """The entries of the suite at ``path``.

    ``known``: expectation -> its arguments; ``columns``: frame -> its columns; ``taken``: names of other checks.
    Raises BadInput ``suite_invalid`` that names the entry, what is wrong with it and the nearest right name.
    """
    if not path.is_file():
        _refuse("no such file", path, "a file", "validate.suite to the suite's path, or to nothing")
    try:
        tree = read_yaml(path)
    except BadInput as error:
        raise BadInput("suite_invalid", error.what, value=error.value, constraint=error.constraint) from None
    entries = tree.get("expectations", []) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not isinstance(entries, list) or set(tree) - {"expectations"}:
        _refuse(f"{path} is no suite", _shown(tree), "one key, expectations, that holds a list")
    if len(entries) > MOST:
        _refuse(f"{path} is too long", f"{len(entries)} expectations", f"at most {MOST}")
    suite: list[Expectation] = []
    names = set(taken)
    for number, entry in enumerate(entries, 1):
        found = _expectation(f"{path}: expectation {number}", entry, known, columns, list(classes))
        if found.name in names:
            _refuse(f"{path}: expectation {number}: another check has its name", found.name, "a name of its own", "name")
        names.add(found.name)
        suite.append(found)
    return suite


def _expectation(where: str, entry: Any, known: Mapping[str, Sequence[str]], columns: Mapping[str, Sequence[str]], classes: list[str]) -> Expectation:
    if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
        _refuse(f"{where}: not a mapping", _shown(entry), "keys and values, with on and expect")
    for key in ("on", "expect"):
        if key not in entry:
            _refuse(f"{where}: a missing key", key, "there", key)
    frame: Frame = _choice(f"{where}: on", entry["on"], columns)
    expect = _choice(f"{where}: expect", _camel(entry["expect"], known), known)
    severity: Literal["fail", "warn"] = _choice(f"{where}: severity", entry.get("severity", "fail"), ("fail", "warn"))
    arguments = {key: value for key, value in entry.items() if key not in KEYS}
    for key in arguments:
        _choice(f"{where}: unknown key", key, (*known[expect], *KEYS))
    for key in COLUMNS:
        if key in arguments:
            for column in arguments[key] if isinstance(arguments[key], list) else [arguments[key]]:
                _choice(f"{where}: {key}", column, columns[frame])
    rows = entry.get("where") or {}
    if not isinstance(rows, dict):
        _refuse(f"{where}: where", _shown(rows), f"a mapping of {' and '.join(WHERE[frame]) or 'nothing'}")
    for key in rows:
        if not WHERE[frame]:
            _refuse(f"{where}: where on {frame}", key, "left out: there is one row", "on")
        _choice(f"{where}: where", key, WHERE[frame])
    of_class = _choice(f"{where}: where.class", rows["class"], classes) if "class" in rows else None
    split: Split | None = _choice(f"{where}: where.split", rows["split"], SPLITS) if "split" in rows else None
    name = entry.get("name") or _named(expect, arguments, of_class, split)
    if not isinstance(name, str) or len(name) > 200 or not name.isprintable():
        _refuse(f"{where}: name", _shown(name), "text of one line, at most 200 characters", "name")
    return Expectation(name, frame, expect, arguments, severity, of_class, split)


def _named(expect: str, arguments: dict[str, Any], of_class: str | None, split: str | None) -> str:
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", expect.removeprefix("Expect").removeprefix("Column")).lower()
    column = f"{arguments['column']}: " if isinstance(arguments.get("column"), str) else ""
    return f"{column}{words}" + "".join(f", {part}" for part in (of_class, split) if part)


def _camel(name: Any, known: Iterable[str]) -> Any:
    """expect_column_max_to_be_between as ExpectColumnMaxToBeBetween; what is no such name as it stands."""
    if not isinstance(name, str):
        return name
    return {one.lower(): one for one in known}.get(name.replace("_", "").lower(), name)


def _choice(what: str, value: Any, choices: Iterable[str]) -> Any:
    """``value`` if it is one of ``choices``; else BadInput with the nearest."""
    named = list(choices)
    if isinstance(value, str) and value in named:
        return value
    close = difflib.get_close_matches(str(value), named, n=1, cutoff=0.5)
    _refuse(what, _shown(value), close[0] if close else f"one of {', '.join(named[:30])}{' ...' if len(named) > 30 else ''}")


def _shown(value: Any) -> str:
    return value[:200] if isinstance(value, str) else repr(value)[:200]


def _refuse(what: str, value: object, constraint: str, knob: str = "") -> NoReturn:
    raise BadInput("suite_invalid", what, value=value, constraint=constraint, knob=knob)
