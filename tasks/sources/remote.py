"""A source that lies elsewhere: what a URL names is brought here, file by file, and read from a folder like any other.

    s3://bucket/photos   gs://bucket/photos.zip   az://container/shards/*.tar   sftp://host/photos.csv   file:///photos

fsspec and its drivers do the talking. Credentials, endpoints and regions are those that a driver finds for itself (environment,
profile, role): none stands in a location. Files that did not change since the last time are not asked for again.

    .trainyard/downloads/URL/files/FILE            complete files, one for each (name, version) of the store
    .trainyard/downloads/URL/parts/FILE            what came so far of a file: the next call goes on from its end
    .trainyard/downloads/URL/views/LISTING/...     a folder as the store listed it, hard links to files; whoever reads one keeps it
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from tasks.core.config import PARAMS
from tasks.core.errors import BadInput, Transient
from tasks.core.files import STATE, digest_of, file_lock, link_or_copy, publish_dir

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
EXTRAS = {**dict.fromkeys(("s3", "s3a"), "s3"), **dict.fromkeys(("gs", "gcs"), "gcs"), **dict.fromkeys(("az", "abfs", "abfss", "adl"), "azure")}
"""Protocol -> our extra that brings its driver."""
WRAPPERS = frozenset(
    ("blockcache", "cached", "dask", "dir", "dirfs", "filecache", "generic", "jlab", "jupyter", "reference", "simplecache", "zip", "tar")
)
"""fsspec's protocols that only lead to another one."""
THREADS = 8
BLOCK_BYTES = 16 * 1024 * 1024
TRIES = 5
KEEP_S = 7 * 86_400.0
"""A view that nobody opened for so long is removed."""
LOCK_TIMEOUT_S = 6 * 3600.0
T = TypeVar("T")


class Remote(NamedTuple):
    """A file in a store: its name below the location, the store's own path, its bytes, what changes with its content, its MD5 in hex where told."""

    name: str
    path: str
    size: int
    version: str
    md5: str


def is_url(location: str) -> bool:
    """Whether a location names a place by scheme://."""
    return bool(SCHEME.match(location))


def mirror(url: str, root: Path) -> Path:
    """The file or folder that ``url`` names, as it is now, in a local copy; a * in its last part chooses files of a folder.

    Raises BadInput ``source_unavailable`` where it is not there, not allowed or cannot be stored; Transient
    ``source_unavailable`` where the store does not answer, or what came is not what it listed.
    """
    if (scheme := _scheme(url)) in ("file", "local"):
        return Path(url.partition("://")[2])
    store, path = _store(url, scheme)
    folder = folder_of(url, root)
    with file_lock(folder / "lock", LOCK_TIMEOUT_S, f"the copy of {url}"):
        files, single = _listing(store, path, url)
        view = folder / "views" / digest_of([file[:4] for file in files])[:20]
        if not view.is_dir():
            _download(store, files, folder, url)
            with publish_dir(view) as made:
                for file in files:
                    (made / file.name).parent.mkdir(parents=True, exist_ok=True)
                    link_or_copy(folder / "files" / _key(file), made / file.name)
                os.sync()
        for used in (view, folder):
            os.utime(used)
        _forget(folder)
    return view / files[0].name if single else view


def folder_of(url: str, root: Path) -> Path:
    """Where copies of what ``url`` names lie: below the project ``root``, or where that is none below the user's cache."""
    return (root / STATE if (root / PARAMS).is_file() else _cache_home()) / "downloads" / digest_of(url.rstrip("/"))[:20]


def reader(url: str) -> Callable[[str, int], bytes | str]:
    """A function of (name, most bytes) that gives the bytes of a file below the folder ``url``, or the code of why not.

    It raises as ``mirror`` does; names are taken as they stand, ``..`` in them is the caller's to refuse.
    """
    store, path = _store(url, _scheme(url))

    def read(name: str, most: int) -> bytes | str:
        def ask() -> bytes | str:
            try:
                data: bytes = store.cat_file(f"{path.rstrip('/')}/{name}", start=0, end=most + 1)
            except FileNotFoundError:
                return "missing_file"
            return data if len(data) <= most else "image_too_large"

        return _asked(ask, url)

    return read


def fingerprint(url: str) -> str:
    """A text that differs once the store lists something else: names, sizes and versions; nothing is downloaded. Raises as ``mirror`` does."""
    scheme = _scheme(url)
    store, path = _store(url, scheme)
    return digest_of([file[:4] for file in _listing(store, path, url)[0]])


def _scheme(url: str) -> str:
    found = SCHEME.match(url)
    assert found, f"{url!r} is no URL"
    scheme, at = found[1].lower(), urlsplit(url).netloc
    if "@" in at:
        raise _refused("a location holds no login", f"{scheme}://***@{at.rpartition('@')[2]}", "credentials in the environment")
    if "::" in url or scheme in WRAPPERS:
        raise _refused("the location leads over another one", scheme, "one store, such as s3://bucket/folder")
    if scheme in ("http", "https"):
        raise _refused("a folder over HTTP", url.partition("?")[0], "one file of the kinds archive, table, parquet ..., or ingest.source: http")
    return scheme


def _store(url: str, scheme: str) -> tuple[Any, str]:
    """The file system of ``url`` and the path there."""
    import fsspec

    try:
        store, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=scheme != "memory")
    except ImportError as error:
        extra = f"pip install 'trainyard[{EXTRAS[scheme]}]'" if scheme in EXTRAS else str(error)
        raise _refused(f"the driver of {scheme}:// is not installed", scheme, extra) from None
    except ValueError as error:
        raise _refused("the location cannot be opened", scheme, str(error).partition("\n")[0][:200]) from None
    return store, path


def _listing(store: Any, path: str, url: str) -> tuple[list[Remote], bool]:
    """All files at ``path`` by name, and whether it is a single one."""
    parent, _, last = path.rstrip("/").rpartition("/")
    if any(letter in last for letter in "*?["):
        found, base, single = _asked(lambda: store.glob(path, detail=True), url), parent, False
    else:
        facts = _asked(lambda: store.info(path), url)
        single = facts["type"] == "file"
        found, base = ({path: facts}, parent) if single else (_asked(lambda: store.find(path, detail=True), url), path.rstrip("/"))
    files = []
    for full, facts in found.items():
        name = full[len(base) :].lstrip("/") if base else full.lstrip("/")
        if facts["type"] != "file" or not name or (full.endswith("/") and not facts["size"]):  # a folder's own marker
            continue
        if facts["size"] is None:
            raise Transient("source_unavailable", f"{url}: the store does not say how long {name!r} is")
        files.append(Remote(_safe(name, url), full, int(facts["size"]), _version(facts), _md5(facts)))
    if not files:
        raise _refused("nothing is there", url, "a file or a folder with files")
    files.sort()
    names = {file.name for file in files}
    for name in names:
        at = name
        while at := at.rpartition("/")[0]:
            if at in names:
                raise _refused(f"{url} holds both a file {at!r} and a folder of that name", at, "one of them")
    return files, single


def _safe(name: str, url: str) -> str:
    """``name``, if a folder here can hold it below itself."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or len(part.encode("utf-8", "surrogateescape")) > 255 or "\0" in part for part in parts):
        raise _refused(f"{url} holds a name that no folder can hold", repr(name)[:200], "parts of 1 to 255 bytes, none . or ..")
    return name


def _version(facts: dict[str, Any]) -> str:
    """What the store says of a file that changes whenever its content does: the strongest that there is."""
    for key in ("ETag", "etag", "generation", "content_md5", "checksum", "LastModified", "last_modified", "updated", "mtime", "created"):
        if facts.get(key):
            return f"{key} {facts[key]}"
    return ""


def _md5(facts: dict[str, Any]) -> str:
    """The MD5 that the store states, in hex, or "". (An S3 ETag is one only for some objects: it is compared as a version, not as a digest.)"""
    stated = facts.get("md5Hash") or (facts.get("content_settings") or {}).get("content_md5") or ""
    try:
        return bytes(stated).hex() if isinstance(stated, bytes | bytearray) else base64.b64decode(stated, validate=True).hex()
    except ValueError:
        return ""


def _download(store: Any, files: list[Remote], folder: Path, url: str) -> None:
    """Bring every file that is not here yet into ``folder``/files; each stands there whole or not at all."""
    for name in ("files", "parts"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    wanted = [file for file in files if not _is_here(folder / "files" / _key(file), file.size)]
    if not wanted:
        return
    size = sum(file.size for file in wanted)
    print(f"{url}: {len(wanted):,} of {len(files):,} files to download, {size / 1e6:,.1f} MB", file=sys.stderr, flush=True)
    told = time.monotonic()
    with ThreadPoolExecutor(THREADS, "download") as pool:
        waiting = [pool.submit(_fetch, store, file, folder, url) for file in wanted]
        try:
            for count, future in enumerate(waiting, 1):
                future.result()
                if time.monotonic() - told > 30:
                    told = time.monotonic()
                    print(f"{url}: {count:,} of {len(wanted):,} files", file=sys.stderr, flush=True)
        finally:
            for future in waiting:
                future.cancel()


def _is_here(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _fetch(store: Any, file: Remote, folder: Path, url: str) -> None:
    """Download one file by blocks, from where the last call ended; publish it once its length, version and MD5 are as listed."""
    part = folder / "parts" / _key(file)
    if not part.exists():
        part.touch()
    while (have := part.stat().st_size) < file.size:
        end = min(have + BLOCK_BYTES, file.size)
        whole = have == 0 and end == file.size
        data = _asked(lambda: store.cat_file(file.path) if whole else store.cat_file(file.path, start=have, end=end), url)  # noqa: B023
        if len(data) != end - have:
            part.unlink()
            raise Transient(
                "source_unavailable", f"{url}: {file.name} changed as it was read", value=f"{len(data)} bytes", constraint=f"{end - have}"
            )
        with part.open("ab") as handle:
            handle.write(data)
    if file.size > BLOCK_BYTES and file.version and _version(_asked(lambda: store.info(file.path), url)) != file.version:
        part.unlink()
        raise Transient("source_unavailable", f"{url}: {file.name} changed as it was read", value="another version", constraint="the listed one")
    if file.md5 and file.md5 != _md5_of(part):
        part.unlink()
        raise Transient("source_unavailable", f"{url}: {file.name} did not come whole", value="another MD5", constraint=file.md5)
    part.replace(folder / "files" / _key(file))


def _md5_of(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _key(file: Remote) -> str:
    return digest_of([file.name, file.version, file.size])


def _forget(folder: Path) -> None:
    """Remove the views that nobody opened for KEEP_S seconds, and the files and parts that are in no view and as old."""
    before = time.time() - KEEP_S
    for view in (folder / "views").iterdir():
        if view.stat().st_mtime < before:
            shutil.rmtree(view, ignore_errors=True)
    for path in (path for name in ("files", "parts") if (folder / name).is_dir() for path in (folder / name).iterdir()):
        facts = path.stat()
        if facts.st_nlink == 1 and facts.st_mtime < before:
            path.unlink()


def _asked(ask: Callable[[], T], url: str) -> T:
    """``ask()``, tried again with jitter while the store does not answer. Raises as ``mirror`` does."""
    for attempt in range(1, TRIES + 1):
        try:
            return ask()
        except FileNotFoundError:
            raise _refused("the source does not exist", url, "a file or folder that is there") from None
        except (PermissionError, NotImplementedError) as error:
            raise _refused("the store refuses", f"{url}: {_said(error)}", "credentials in the environment that may list and read it") from None
        except Exception as error:  # every driver has errors of its own
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"):
                raise _refused("no credentials were found", f"{url}: {_said(error)}", "credentials in the environment") from None
            if attempt == TRIES:
                raise Transient("source_unavailable", f"{url} does not answer", value=_said(error), constraint="a store that does") from error
        time.sleep(random.uniform(0.5, 1.5) * 0.5 * 2**attempt)
    raise AssertionError("unreachable")


def _said(error: Exception) -> str:
    """An error in one line, without the queries of URLs, where signatures stand."""
    return re.sub(r"\?\S+", "?...", f"{type(error).__name__}: {error}".partition("\n")[0])[:200]


def _refused(what: str, value: str, constraint: str) -> BadInput:
    return BadInput("source_unavailable", what, value=value, constraint=constraint, knob="ingest.location")


def _cache_home() -> Path:
    """Where copies lie outside a project."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"
