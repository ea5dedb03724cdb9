"""Paths and URLs of images that a row states: which may be opened, and the bytes behind them. No path leads out of its folder."""

from __future__ import annotations

import difflib
import os
import posixpath
import re
import stat
from pathlib import Path

from tasks.core.errors import BadInput
from tasks.sources.folder import read_file
from tasks.sources.layout import is_storable
from tasks.sources.web import WebPolicy, fetch
from tasks.sources.web import refused as web_refused

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:|//")
_DRIVE = re.compile(r"[A-Za-z]:")


def refused(name: str, web: WebPolicy | None) -> str:
    """The code of why a path, or a URL by the policy ``web``, is not opened, or ""."""
    if _DRIVE.match(name) and not URL.match(name):
        return "path_outside_root"
    if URL.match(name):
        return "" if web is not None and not web_refused(name, web) else "url_not_allowed"
    if name.startswith(("/", "\\")) or posixpath.normpath(name).split("/")[0] == "..":
        return "path_outside_root"
    return "" if is_storable(name) else "bad_file_name"


class Folders:
    """What lies in the folders below ``base``: each is looked at once."""

    def __init__(self, base: Path, web: WebPolicy | None = None) -> None:
        self._base, self._web = base, web
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
            return refused(name, self._web) or self._fetched(name, max_bytes)
        path = posixpath.normpath(name) if name else name
        return refused(path, self._web) or self.refused(path) or read_file(self._base / path, max_bytes)

    def _fetched(self, url: str, max_bytes: int) -> bytes | str:
        assert self._web is not None, "without a policy every URL is refused"
        try:
            return fetch(url, self._web, max_bytes)
        except BadInput as error:  # a host that is away is no fault of this row: it is raised
            return error.code
