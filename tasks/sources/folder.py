"""A folder of class folders, or of split folders above them. Links are never followed, and only regular files are opened."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput
from tasks.sources import Item, Limits, Source, Unread, fingerprint, source
from tasks.sources.layout import Place, arrange, is_junk, is_storable, located, printable

SETTLED_NS = 3_000_000_000


@source("folder")
def folder(location: str, root: Path, limits: Limits) -> Source:
    """Open the folder at ``location``. Names are collected first, files are read one by one, both sorted by name.

    Raises BadInput ``source_unavailable``, ``class_name_collision`` or ``unknown_split``.
    """
    path = located(location, root, "a folder of class folders")
    if not path.is_dir():
        raise BadInput("source_unavailable", "the source is no folder", value=location, constraint="a folder", knob="ingest.source: archive")
    found = _walk(path)
    layout = arrange(found.files, found.folders, unwrap=False)
    files = lambda: _files(path, layout.places, found.set_aside, limits)  # noqa: E731
    items = (entry.read() if isinstance(entry, Unread) else entry for entry in files())
    return Source(items, layout.labels, found.ignored + layout.loose, files=files())


@fingerprint("folder")
def folder_fingerprint(location: str, root: Path) -> str:
    """Names, sizes and times of modification (ns) of all that lies there: no file is opened. Raises BadInput ``source_unavailable``."""
    path = located(location, root, "a folder of class folders")
    found = _walk(path)
    seen = hashlib.sha256()
    for name in sorted([*found.files, *found.folders]):
        try:
            facts = os.lstat(path / name)
        except OSError:  # gone since it was listed
            continue
        size_and_time = (facts.st_size, facts.st_mtime_ns) if stat.S_ISREG(facts.st_mode) else ()
        seen.update(repr((name, size_and_time)).encode("utf-8", "surrogateescape"))
    for item in sorted(found.set_aside, key=lambda item: item.name):
        seen.update(repr((item.name, item.code)).encode("utf-8", "surrogateescape"))
    return seen.hexdigest()


@dataclass
class _Found:
    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    ignored: int = 0


def _walk(root: Path) -> _Found:
    """Every name below ``root``, by kind. Iterative: a path may be two thousand folders deep."""
    found = _Found()
    waiting = [""]
    while waiting:
        base = waiting.pop()
        try:
            with os.scandir(root / base) as entries:
                listed = list(entries)
        except OSError as error:
            if not base:
                raise BadInput("source_unavailable", "the folder cannot be read", value=error.strerror, knob="ingest.location") from error
            found.set_aside.append(SetAside(name=printable(base), code="unreadable"))
            continue
        for entry in listed:
            name = f"{base}/{entry.name}" if base else entry.name
            if is_junk(entry.name):
                found.ignored += 1
            elif entry.is_symlink():
                found.set_aside.append(SetAside(name=printable(name), code="symlink"))
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(name)
                if is_storable(name):
                    found.folders.append(name)
            elif not entry.is_file(follow_symlinks=False):
                found.set_aside.append(SetAside(name=printable(name), code="not_a_regular_file"))
            elif not is_storable(name):
                found.set_aside.append(SetAside(name=printable(name), code="bad_file_name"))
            else:
                found.files.append(name)
    return found


def _files(root: Path, places: dict[str, Place], set_aside: list[SetAside], limits: Limits) -> Iterator[Unread | SetAside]:
    yield from sorted(set_aside, key=lambda item: item.name)
    for name, place in places.items():
        yield Unread(place.name, place.label, place.split, _version(root / name), partial(_read, root / name, place, limits))


def _read(path: Path, place: Place, limits: Limits) -> Item | SetAside:
    content = read_file(path, limits.max_file_bytes)
    return SetAside(name=place.name, code=content) if isinstance(content, str) else Item(place.name, place.label, content, place.split)


def _version(path: Path) -> str:
    """Size, times of modification and of change (ns), inode and device of a file; "" where it changed within SETTLED_NS.

    Its bytes cannot change and leave the time of change as it was, but within the grain of a file system's clock they could.
    """
    try:
        facts = path.lstat()
    except OSError:
        return ""
    if time.time_ns() - max(facts.st_ctime_ns, facts.st_mtime_ns) < SETTLED_NS:
        return ""
    return f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_ino} {facts.st_dev}"


def read_file(path: Path, limit: int) -> bytes | str:
    """The file's bytes, or the code of why not. What was a file a moment ago may be a link or a FIFO by now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return "unreadable"
    with os.fdopen(descriptor, "rb") as handle:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return "not_a_regular_file"
        if facts.st_size > limit:
            return "image_too_large"
        try:
            data = handle.read(limit + 1)
        except OSError:
            return "unreadable"
    return data if len(data) <= limit else "image_too_large"
