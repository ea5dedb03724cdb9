"""A manifest: CSV, TSV, JSON Lines or Parquet, one row for each image, with its path, its label, and maybe its split and group.

    path,label                  paths are relative to the manifest's folder and never lead out of it
    images/a.png,cat            (a Parquet manifest may hold the image's bytes instead of a path)

A URL is fetched where the option ``web`` allows it (tasks/sources/web.py); relative paths of a manifest in a store, or on the web, are
read from there.

A manifest is read twice: the first time every row is checked, nothing is opened, and only paths and labels are kept (a million
rows fit in some hundred MB); the second time the images are read, one by one, in the order of the rows.
"""

from __future__ import annotations

import csv
import itertools
import json
import posixpath
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from urllib.parse import quote, urljoin

from pydantic import Field

from tasks.core.artifacts import SetAside, Split
from tasks.core.errors import BadInput, TrainyardError
from tasks.core.files import digest_of, sha256_file
from tasks.sources import Item, Limits, Notice, Source, fingerprint, remote, source
from tasks.sources.columns import Columns, choose, label_text, split_of
from tasks.sources.folder import read_file
from tasks.sources.layout import located, printable, refuse_collisions
from tasks.sources.parquet import open_shard, rows_of
from tasks.sources.paths import URL, Abroad, Folders, Stores, refused
from tasks.sources.remote import is_url
from tasks.sources.web import WebPolicy, copy_of, masked, version

KIND = "a CSV, TSV, JSON Lines or Parquet manifest"
FORMATS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
LINE_MAX = 1 << 20
"""Characters of one line, above which it is a bad row."""
CELL_MAX = 4096
"""Characters of a path or URL: what Linux takes (PATH_MAX), or more."""
SMALL = 64 << 20
"""Bytes up to which a manifest is read whole for its fingerprint."""
AHEAD = 8
"""URLs that are fetched ahead of the one that is due; as many files may be in memory."""
HINTS = 20
"""Near matches that are told, of paths that are not there."""
_USER = re.compile(r"//[^/@]*@")
"""A user and password in a URL, which no report may show."""


class TableOptions(Columns):
    """How the manifest is written, where its name does not say it, and which classes there are."""

    format: Literal["", "csv", "tsv", "jsonl", "parquet"] = Field("", description="empty: by the ending of the name")
    delimiter: str = Field("", max_length=1, description="between a CSV's cells; empty: a comma, or a tab in TSV")
    classes: list[str] = Field([], description="the classes there are; another label is set aside. Empty: whatever labels stand there")
    web: WebPolicy | None = Field(None, description="what may be fetched where cells are URLs; without it they are set aside")
    stores: Stores = ()


class Row(NamedTuple):
    """A row by its line (or its number, in Parquet), and its cells; ``image`` is None where it is a bad row."""

    line: int
    image: Any
    label: Any = None
    split: Any = None
    group: Any = None


class _Said(NamedTuple):
    """What the manifest says of one path."""

    line: int
    label: str
    split: Split | None
    group: str | None


@source("table", options=TableOptions)
def table(location: str, root: Path, limits: Limits, options: TableOptions) -> Source:
    """Open and check the manifest at ``location``. Rows that repeat a path are one image; rows that contradict each other are set aside.

    Raises BadInput ``source_unavailable``, ``missing_column``, ``duplicate_column``, ``empty_manifest``, ``manifest_encoding``,
    ``manifest_corrupt``, ``class_name_collision``, ``unknown_split``, or ``leak_exact`` where one path stands in two splits.
    """
    web = _on_the_web(location, options)
    path, form = _manifest(location, root, options, limits.max_unpacked_bytes)
    check = Check(path.name, options.classes, Abroad(web or options.web, options.stores))
    try:
        for row in _rows(path, form, options):
            check.add(row if web is None else _absolute(row, location, check.abroad))
    except UnicodeDecodeError:
        raise _encoding(path) from None
    check.finish()
    read = _beside(location, limits) if _in_a_store(location) else _below(path.parent, check, limits)
    items: Iterator[Item | SetAside] = items_of(check, read, limits)
    if check.bytes_rows:
        items = itertools.chain(items, _items_of_bytes(path, form, options, limits))
    return Source(items, tuple(options.classes), notices=check.notices)


@fingerprint("table")
def table_fingerprint(location: str, root: Path, options: TableOptions) -> str:
    """The sha256 of a small manifest, else its size and time of modification (ns): a manifest whose files change says nothing of it."""
    web = _on_the_web(location, options)
    if web is not None:
        return version(location, web)
    path, _ = _manifest(location, root, options)
    facts = path.stat()
    return sha256_file(path) if facts.st_size <= SMALL else f"{facts.st_size} bytes, modified {facts.st_mtime_ns}"


def _on_the_web(location: str, options: TableOptions) -> WebPolicy | None:
    """The policy by which a manifest on a web server, and what it names beside it, is fetched; None for one that lies elsewhere."""
    return (options.web or WebPolicy()) if location.lower().startswith(("http://", "https://")) else None


def _in_a_store(location: str) -> bool:
    return is_url(location) and not location.lower().startswith(("file:", "http://", "https://"))


def _absolute(row: Row, location: str, abroad: Abroad) -> Row:
    """``row`` with the URL of the image that it names beside the manifest; one that leads elsewhere stays, and is refused as it is from a folder."""
    name = _name(row.image)
    if name is None or URL.match(name) or refused(name, abroad):
        return row
    return row._replace(image=urljoin(location, quote(posixpath.normpath(name))))


def _manifest(location: str, root: Path, options: TableOptions, max_bytes: int = 1 << 40) -> tuple[Path, str]:
    web = _on_the_web(location, options)
    path = located(location, root, KIND) if web is None else copy_of(location, web, root, max_bytes)
    if not path.is_file():
        raise BadInput("source_unavailable", "the manifest is no file", value=location, constraint=KIND, knob="ingest.location")
    form = options.format or FORMATS.get(path.suffix.casefold(), "")
    if not form:
        ends = ", ".join(FORMATS)
        raise BadInput(
            "source_unavailable", "the manifest's format is unknown", value=path.name, constraint=f"one of {ends}", knob="ingest.options.format"
        )
    return path, form


class Check:
    """The first reading: what stands in the list ``name``, once for each path or URL, and what is set aside."""

    def __init__(self, name: str, classes: Iterable[str], abroad: Abroad) -> None:
        self._name, self._classes, self.abroad = name, frozenset(classes), abroad
        self._labels: dict[str, str] = {}
        self._rows = self._repeats = self._trimmed = 0
        self.said: dict[str, _Said] = {}
        self.aside: list[SetAside] = []
        self.bytes_rows = False
        self.conflicts: set[str] = set()
        self.notices: list[Notice] = []

    def add(self, row: Row) -> None:
        """Take a row; raises BadInput ``unknown_split`` or ``leak_exact``."""
        self._rows += 1
        where = f"{self._name} line {row.line}"
        name = _name(row.image)
        if name is None:
            if _bytes_of(row.image) is not None:
                self.bytes_rows = True
                name = ""
            else:
                self._set_aside(where, "bad_row")
                return
        split = split_of(row.split, where)
        label = label_text(row.label)
        code = refused(name, self.abroad) or ("bad_row" if label is None else "" if label else "missing_label")
        if not code and self._classes and label not in self._classes:
            code = "unknown_class"
        if code or label is None:
            self._set_aside(name or where, code)
            return
        label = self._labels.setdefault(label, label)
        self._trimmed += isinstance(row.label, str) and row.label != row.label.strip()
        if name:
            self._state(posixpath.normpath(name) if not URL.match(name) else name, _Said(row.line, label, split, _group(row.group)))

    def _state(self, name: str, said: _Said) -> None:
        first = self.said.setdefault(name, said)
        if first is said:
            return
        if first.label != said.label:
            if name not in self.conflicts:
                self.conflicts.add(name)
                self._set_aside(name, "conflicting_label")
            self._set_aside(name, "conflicting_label")
        elif first.split != said.split:
            value = f"{first.split or 'none'} in line {first.line}, {said.split or 'none'} in line {said.line}"
            raise BadInput("leak_exact", f"{self._name} states {printable(name)} in two splits", value=value, constraint="one split for each image")
        elif name not in self.conflicts:
            self._repeats += 1
        else:
            self._set_aside(name, "conflicting_label")

    def _set_aside(self, name: str, code: str) -> None:
        shown = name[:1024].partition("?")[0] if URL.match(name) else name[:1024]  # a query may hold a signature
        self.aside.append(SetAside(name=printable(_USER.sub("//***@", shown)), code=code))

    def finish(self) -> None:
        """Refuse what can be refused only at the end; raises BadInput ``empty_manifest`` or ``class_name_collision``."""
        if not self._rows:
            raise BadInput("empty_manifest", f"{self._name} has no rows", value=0, constraint="at least 1 below the header", knob="ingest.location")
        refuse_collisions({*self._labels, *self._classes})
        for name in self.conflicts:
            del self.said[name]
        if self._repeats:
            self.notices.append(Notice("duplicate_rows", f"{self._repeats} rows repeat others"))
        if self._trimmed:
            self.notices.append(Notice("label_trimmed", f"{self._trimmed} labels had spaces around them"))


def _name(cell: Any) -> str | None:
    """The path or URL of an image cell (Hugging Face's struct may hold a path instead of bytes), None where it is none."""
    if isinstance(cell, dict) and cell.get("bytes") is None:
        cell = cell.get("path")
    return cell if isinstance(cell, str) and 0 < len(cell) <= CELL_MAX and "\0" not in cell else None


def _bytes_of(cell: Any) -> bytes | None:
    """The bytes of an image cell, where it holds them: as they are, or in Hugging Face's struct."""
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    return data if isinstance(data, bytes) else None


def _group(cell: Any) -> str | None:
    return None if cell is None or cell == "" else str(cell)


def items_of(check: Check, read: Callable[[str], bytes | str], limits: Limits) -> Iterator[Item | SetAside]:
    """The images that ``check`` found, in its order: URLs fetched a few ahead, paths by ``read``, which gives bytes or a code.

    Raises the last TrainyardError where there are URLs and none could be fetched.
    """
    yield from check.aside
    fetched = 0
    failure: TrainyardError | None = None
    entries = iter(check.said.items())
    waiting: deque[tuple[str, _Said, Future[bytes | str] | None]] = deque()
    with ThreadPoolExecutor(AHEAD, "fetch") as pool:
        try:
            while True:
                for name, said in itertools.islice(entries, AHEAD + 1 - len(waiting)):
                    url = URL.match(name) is not None  # one that is refused is not among the entries
                    waiting.append((name, said, pool.submit(check.abroad.read, name, limits.max_file_bytes) if url else None))
                if not waiting:
                    break
                name, said, future = waiting.popleft()
                try:
                    found = read(name) if future is None else future.result()
                    fetched += future is not None
                except TrainyardError as error:
                    found, failure = error.code, error
                shown = printable(name) if future is None else url_name(name)
                yield SetAside(name=shown, code=found) if isinstance(found, str) else Item(shown, said.label, found, said.split, said.group)
        finally:
            for _, _, future in waiting:
                if future is not None:
                    future.cancel()
    if failure is not None and not fetched:
        raise failure


def url_name(url: str) -> str:
    """The name under which the image at ``url`` is stored: without user and query, which are told by a digest of the whole where there are any."""
    plain = masked(url)
    return plain if plain == url else f"{plain.removesuffix('?***')}#{digest_of(url)[:12]}"


def _below(folder: Path, check: Check, limits: Limits) -> Callable[[str], bytes | str]:
    """Reads a path below the manifest's folder; tells near names of those that are not there."""
    folders = Folders(folder)

    def read(name: str) -> bytes | str:
        found = folders.refused(name) or read_file(folder / name, limits.max_file_bytes)
        if found == "missing_file" and sum(notice.code == found for notice in check.notices) < HINTS:
            near = folders.nearest(name)
            line = check.said[name].line
            check.notices.append(Notice(found, f"line {line}: {printable(name)} is not there" + (f", {printable(near)} is" if near else "")))
        return found

    return read


def _beside(location: str, limits: Limits) -> Callable[[str], bytes | str]:
    """Reads a path below the folder of a manifest in a store."""
    beside = remote.reader(location.rpartition("/")[0])
    return lambda name: beside(name, limits.max_file_bytes)


def _items_of_bytes(path: Path, form: str, options: TableOptions, limits: Limits) -> Iterator[Item | SetAside]:
    """The rows that hold the bytes themselves, which are all there in memory is of them."""
    for row in _rows(path, form, options):
        data, label = _bytes_of(row.image), label_text(row.label)
        if data is None or not label or (options.classes and label not in options.classes):
            continue
        name = f"{path.name}/{row.line:08d}"
        if len(data) > limits.max_file_bytes:
            yield SetAside(name=name, code="image_too_large")
        else:
            yield Item(name, label, data, split_of(row.split, f"{path.name} row {row.line}"), _group(row.group))


def _rows(path: Path, form: str, options: TableOptions) -> Iterator[Row]:
    """Every row that is not blank."""
    if form == "parquet":
        shard = open_shard(path, options, [])
        image, label, split, group = shard.columns.used()
        for number, row in rows_of(shard):
            named = label_text(row[label], shard.class_names)
            yield Row(number, row[image], named, row.get(split), row.get(group))
        return
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            if form == "jsonl":
                yield from _json_rows(handle, path, options)
            else:
                yield from _csv_rows(handle, path, options, options.delimiter or ("\t" if form == "tsv" else ","))
    except OSError as error:
        raise BadInput("source_unavailable", "the manifest cannot be read", value=error.strerror, knob="ingest.location") from error


class _Lines:
    """Lines of a text file, the longest LINE_MAX characters: a longer one is passed over and told by csv.Error, and reading may go on."""

    def __init__(self, handle: IO[str]) -> None:
        self._handle = handle
        self.number = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._handle.readline(LINE_MAX)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) == LINE_MAX and not line.endswith(("\n", "\r")):
            while (rest := self._handle.readline(LINE_MAX)) and not rest.endswith(("\n", "\r")):
                pass
            raise csv.Error("a line is too long")
        return line


def _csv_rows(handle: IO[str], path: Path, options: TableOptions, delimiter: str) -> Iterator[Row]:
    lines = _Lines(handle)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next((row for row in reader if row), None)
    except csv.Error as error:
        raise BadInput("manifest_corrupt", f"the header of {path.name} cannot be read", value=str(error), constraint="names of columns") from None
    if header is None:
        raise BadInput("empty_manifest", f"{path.name} is empty", value="no header", constraint="a header and rows", knob="ingest.location")
    names = [name.strip() for name in header]
    places = [names.index(name) if name else None for name in choose(names, options, path.name).used()]
    while True:
        line = lines.number + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                what = f"{path.name}: a quoted cell that begins in or after line {line} has no end"
                raise BadInput("manifest_corrupt", what, value='"', constraint="a quote at its end") from None
            yield Row(line, None)
            continue
        if not row:
            continue
        if len(row) != len(names):
            yield Row(line, None)
        else:
            yield Row(line, *(row[place] if place is not None else None for place in places))


def _json_rows(handle: IO[str], path: Path, options: TableOptions) -> Iterator[Row]:
    lines = _Lines(handle)
    used: tuple[str, ...] = ()
    while True:
        try:
            text = next(lines)
        except StopIteration:
            return
        except csv.Error:
            yield Row(lines.number, None)
            continue
        if not text.strip():
            continue
        row = _json_object(text)
        if row and not used:
            used = choose(list(row), options, path.name).used()
        yield Row(lines.number, *(row.get(name) for name in used)) if row else Row(lines.number, None)


def _json_object(text: str) -> dict[str, Any]:
    """The object on a line, {} where there is none, or where a key stands twice."""

    def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        listed = list(pairs)
        found = dict(listed)
        if len(found) != len(listed):
            raise ValueError("a key stands twice")
        return found

    try:
        found = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _encoding(path: Path) -> BadInput:
    """BadInput ``manifest_encoding`` naming the encoding, where a mark tells it, or the first line that is not UTF-8."""
    with path.open("rb") as handle:
        if handle.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            value = "UTF-16"
        else:
            handle.seek(0)
            value = "bytes that are no UTF-8"
            for number, line in enumerate(iter(lambda: handle.readline(LINE_MAX), b""), 1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    value = f"byte 0x{line[error.start]:02x} in line {number}"
                    break
    return BadInput("manifest_encoding", f"{path.name} is not UTF-8", value=value, constraint="UTF-8", knob="the program that wrote it to UTF-8")
