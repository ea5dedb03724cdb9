"""Paths and URLs of images that a row states: which may be opened, and the bytes behind them. No path leads out of its folder, and of
the world beyond it only what the options ``web`` and ``stores`` name is read."""

from __future__ import annotations

import difflib
import os
import posixpath
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from tasks.core.errors import BadInput
from tasks.sources import remote
from tasks.sources.folder import read_file
from tasks.sources.layout import is_storable
from tasks.sources.web import WebPolicy, fetch
from tasks.sources.web import refused as web_refused

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:|//")
_DRIVE = re.compile(r"[A-Za-z]:")


def _store(url: str) -> str:
    """``url``, if it names a folder of a store. Raises ValueError for another."""
    found = remote.SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    if not found or scheme in remote.WRAPPERS | {"http", "https", "file", "local"} or "@" in url or "::" in url or not url[found.end() :].strip("/"):
        raise ValueError("a folder of a store, such as s3://bucket/photos, without a login")
    return url.rstrip("/")


Stores = Annotated[
    tuple[Annotated[str, AfterValidator(_store)], ...],
    Field(description="folders of stores below which images may lie, such as s3://bucket/photos; URLs of others are set aside"),
]


class Abroad:
    """What may be read beyond a source's own folder: URLs by the policy ``web``, and files below the folders ``stores``."""

    def __init__(self, web: WebPolicy | None = None, stores: tuple[str, ...] = ()) -> None:
        self._web, self._stores = web, stores
        self._readers: dict[str, Callable[[str, int], bytes | str]] = {}
        self._answered: set[str] = set()

    def refused(self, url: str) -> str:
        """The code of why it is not fetched, or ""."""
        store = self._store_of(url)
        if store is not None:
            below = url[len(store) + 1 :]
            return "" if posixpath.normpath(below) == below and below.split("/")[0] not in ("", ".", "..") else "path_outside_root"
        return "" if self._web is not None and not web_refused(url, self._web) else "url_not_allowed"

    def _store_of(self, url: str) -> str | None:
        return next((store for store in self._stores if url.startswith(f"{store}/")), None)

    def read(self, url: str, max_bytes: int) -> bytes | str:
        """The bytes behind it, or the code of why there are none. Raises as ``fetch`` and ``remote.reader`` do."""
        store = self._store_of(url)
        if store is None:
            assert self._web is not None, "without a policy every URL is refused"
            return fetch(url, self._web, max_bytes)
        if store not in self._readers:
            self._readers[store] = remote.reader(store)
        data = self._readers[store](url[len(store) + 1 :], max_bytes)
        self._answered.add(store)
        return data

    def read_of_row(self, url: str, max_bytes: int) -> bytes | str:
        """As ``read``, but what is wrong with one URL is its row's code. A host that is away is raised, and so is a store that never answered."""
        try:
            return self.read(url, max_bytes)
        except BadInput as error:
            if (store := self._store_of(url)) is not None and store not in self._answered:
                raise
            return error.code


def refused(name: str, abroad: Abroad) -> str:
    """The code of why a path or a URL is not opened, or ""."""
    if _DRIVE.match(name) and not URL.match(name):
        return "path_outside_root"
    if URL.match(name):
        return abroad.refused(name)
    if name.startswith(("/", "\\")) or posixpath.normpath(name).split("/")[0] == "..":
        return "path_outside_root"
    return "" if is_storable(name) else "bad_file_name"


class Folders:
    """What lies in the folders below ``base``: each is looked at once."""

    def __init__(self, base: Path, abroad: Abroad | None = None) -> None:
        self._base, self._abroad = base, abroad or Abroad()
        self._plain: dict[str, bool] = {"": True}

    def refused(self, name: str) -> str:
        """``symlink`` where the path leads over a link, ``missing_file`` where there is nothing, else ""."""
        if not self._is_plain(posixpath.dirname(name)):
            return "symlink"
        try:
            mode = os.lstat(self._base / name).st_mode
        except OSError:
            return "missing_file"
        return "symlink" if stat.S_ISLNK(mode) else "" if stat.S_ISREG(mode) else "not_a_regular_file"

    def _is_plain(self, folder: str) -> bool:
        if folder not in self._plain:
            self._plain[folder] = self._is_plain(posixpath.dirname(folder)) and not (self._base / folder).is_symlink()
        return self._plain[folder]

    def nearest(self, name: str) -> str:
        """The file beside ``name`` whose name is most like it, "" where none is near."""
        folder, _, last = name.rpartition("/")
        try:
            with os.scandir(self._base / folder) as entries:
                beside = [entry.name for _, entry in zip(range(10_000), entries, strict=False)]
        except OSError:
            return ""
        near = [other for other in beside if other.casefold() == last.casefold()] or difflib.get_close_matches(last, beside, n=1, cutoff=0.8)
        return f"{folder}/{near[0]}".lstrip("/") if near else ""

    def read(self, name: str, max_bytes: int) -> bytes | str:
        """The bytes of the file or URL that ``name`` states, or the code of why there are none."""
        if URL.match(name):
            return refused(name, self._abroad) or self._abroad.read_of_row(name, max_bytes)
        path = posixpath.normpath(name) if name else name
        return refused(path, self._abroad) or self.refused(path) or read_file(self._base / path, max_bytes)
