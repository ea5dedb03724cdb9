"""A zip or tar archive (also .tar.gz, .tar.bz2, .tar.xz, .tar.zst) of class folders, read in place: nothing is unpacked to disk.

Its index is checked before the first image is read: unsafe paths, links, special files, encryption, repeated entries and
sizes out of proportion refuse the whole archive. Archives inside it are not opened.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput
from tasks.core.files import sha256_file
from tasks.sources import Item, Limits, Source, fingerprint, source
from tasks.sources.layout import Layout, arrange, is_junk, is_storable, located, printable

RATIO_FLOOR = 10 * 1024 * 1024
"""Bytes unpacked below which no ratio is suspicious."""
SMALL = 64 << 20
"""Bytes up to which an archive is read whole for its fingerprint (a quarter of a second)."""
STEP = 1 << 20
TAIL = 4 * tarfile.RECORDSIZE
EXTRA = 256
"""Bytes of extra fields in an entry's own header that are read along with it."""
_ORDINARY = 0x80E
"""Flags of a zip's entry that change nothing for its reader: how hard it was packed, sizes after the data, a name in UTF-8."""
HEADER_MAX = 1 << 20
"""Bytes of a tar's long-name or pax header, which tarfile reads into memory whole."""
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, NotImplementedError, RuntimeError, ValueError)
_PACKED: tuple[tuple[bytes, Callable[[IO[bytes]], Any]], ...] = (
    (b"\x1f\x8b", lambda packed: gzip.GzipFile(fileobj=packed)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
    (b"\x28\xb5\x2f\xfd", lambda packed: _zstd(packed)),
)
_DRIVE = re.compile(r"[A-Za-z]:")


def _zstd(packed: IO[bytes]) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(packed, "zstd")


class Entry(NamedTuple):
    """A regular file of an archive: its clean name, and its size in bytes unpacked."""

    name: str
    size: int


class Index(NamedTuple):
    """Regular files and folders of an archive that are no junk, names set aside, and the number of junk entries."""

    files: list[Entry]
    folders: list[str]
    set_aside: list[SetAside]
    ignored: int


@source("archive")
def archive(location: str, root: Path, limits: Limits) -> Source:
    """Open the archive at ``location``; what it is, its first bytes say.

    A zip's images come sorted by name, a tar's in the order in which they lie there. Raises BadInput ``source_unavailable``,
    ``archive_*``, ``too_large``, ``class_name_collision`` or ``unknown_split``.
    """
    path = located(location, root, "a zip or tar archive")
    if not path.is_file():
        raise BadInput("source_unavailable", "the source is no file", value=location, constraint="an archive", knob="ingest.source: folder")
    try:
        with path.open("rb") as handle:
            head = handle.read(8)
    except OSError as error:
        raise BadInput("source_unavailable", "the archive cannot be read", value=error.strerror, knob="ingest.location") from error
    zipped = head.startswith(b"PK")
    with told_as_corrupt(path):
        index, found = _zip_index(path, limits) if zipped else (tar_index(path, limits), {})
    layout = arrange((entry.name for entry in index.files), index.folders, unwrap=True)
    items = _zip_items(path, index, found, layout, limits) if zipped else _tar_items(path, index, layout, limits)
    return Source(items, layout.labels, index.ignored + layout.loose)


@fingerprint("archive")
def archive_fingerprint(location: str, root: Path) -> str:
    """The sha256 of a small archive, else its size and time of modification (ns). Raises BadInput ``source_unavailable``."""
    path = located(location, root, "a zip or tar archive")
    try:
        facts = path.stat()
        return sha256_file(path) if facts.st_size <= SMALL else f"{facts.st_size} bytes, modified {facts.st_mtime_ns}"
    except OSError as error:
        raise BadInput("source_unavailable", "the archive cannot be read", value=error.strerror, knob="ingest.location") from error


@contextmanager
def told_as_corrupt(path: Path) -> Iterator[None]:
    """Turn what the readers raise on damage into BadInput ``archive_corrupt``."""
    try:
        yield
    except BadInput:
        raise
    except DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise BadInput("archive_corrupt", f"{path.name} cannot be read to its end", value=reason, constraint="a whole zip or tar archive") from error


class _Collector:
    """Checks entries one by one and sorts them into an Index."""

    def __init__(self, archive: Path, limits: Limits) -> None:
        self._archive = archive.name
        self._limits = limits
        self._seen: set[str] = set()
        self._unpacked = 0
        self._junk: dict[str, bool] = {}
        self.index = Index([], [], [], 0)

    def add(self, raw: str, kind: str, size: int) -> str | None:
        """Take an entry of ``kind`` file, folder, link or special; returns the clean name of a regular file that may be used."""
        name = self._clean(raw)
        if kind in ("link", "special"):
            what = "a link" if kind == "link" else "a special file"
            raise BadInput(f"archive_{kind}", f"{self._archive} holds {what}", value=repr(raw), constraint="files and folders only")
        self._unpacked += size
        if self._unpacked > self._limits.max_unpacked_bytes:
            raise BadInput(
                "too_large",
                f"{self._archive} is too large",
                value=f"over {self._unpacked} bytes unpacked",
                constraint=f"at most {self._limits.max_unpacked_bytes}",
                knob="ingest.max_unpacked_bytes",
            )
        if not name:
            return None
        if kind == "file":
            if name in self._seen:
                raise BadInput(
                    "archive_duplicate_entry",
                    f"{self._archive} holds two entries of one name",
                    value=repr(name),
                    constraint="one entry for each name",
                )
            self._seen.add(name)
        folder, _, last = name.rpartition("/")
        if folder not in self._junk:
            self._junk[folder] = any(is_junk(part) for part in folder.split("/") if part)
        if self._junk[folder] or is_junk(last):
            self.index = self.index._replace(ignored=self.index.ignored + (kind == "file"))
        elif not is_storable(name):
            if kind == "file":
                self.index.set_aside.append(SetAside(name=printable(name), code="bad_file_name"))
        elif kind == "folder":
            self.index.folders.append(name)
        else:
            self.index.files.append(Entry(name, size))
            return name
        return None

    def _clean(self, raw: str) -> str:
        """``raw`` without empty and "." parts; raises BadInput ``archive_unsafe_path`` where it could lead outside."""
        parts = raw.replace("\\", "/").split("/")
        if raw.startswith(("/", "\\")) or ".." in parts or _DRIVE.match(raw) or "\0" in raw:
            raise BadInput("archive_unsafe_path", f"{self._archive} names a path outside itself", value=repr(raw), constraint="relative, without ..")
        return "/".join(part for part in raw.split("/") if part not in ("", "."))


def _refuse_ratio(archive: str, what: str, unpacked: int, packed: int, limits: Limits) -> None:
    if unpacked > RATIO_FLOOR and unpacked > limits.max_unpacked_ratio * max(packed, 1):
        raise BadInput(
            "archive_ratio",
            f"{archive} unpacks to far more than its size ({what})",
            value=f"{unpacked} bytes from {packed}",
            constraint=f"at most {limits.max_unpacked_ratio:g} times",
            knob="ingest.max_unpacked_ratio",
        )


def _zip_index(path: Path, limits: Limits) -> tuple[Index, dict[str, zipfile.ZipInfo]]:
    """The index, and the archive's own entry of each file in it."""
    entries: dict[str, zipfile.ZipInfo] = {}
    with zipfile.ZipFile(path) as archive:
        collector, unpacked = _Collector(path, limits), 0
        for info in archive.infolist():
            if info.flag_bits & 0x41:
                raise BadInput("archive_encrypted", f"{path.name} is encrypted", value=repr(info.filename), constraint="without a password")
            mode = stat.S_IFMT(info.external_attr >> 16)
            kinds = {0: "file", stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
            name = collector.add(_zip_name(info), "folder" if info.is_dir() else kinds.get(mode, "special"), info.file_size)
            if name:
                entries[name] = info
            _refuse_ratio(path.name, repr(info.filename), info.file_size, info.compress_size, limits)
            unpacked += info.file_size
        _refuse_ratio(path.name, "all entries", unpacked, path.stat().st_size, limits)
    return collector.index, entries


def _zip_name(info: zipfile.ZipInfo) -> str:
    """The entry's name; some Windows programs write backslashes between folders."""
    return info.filename.replace("\\", "/")


def _zip_items(path: Path, index: Index, entries: dict[str, zipfile.ZipInfo], layout: Layout, limits: Limits) -> Iterator[Item | SetAside]:
    yield from sorted(index.set_aside, key=lambda item: item.name)
    with told_as_corrupt(path), path.open("rb") as handle, ExitStack() as stack:
        archive: zipfile.ZipFile | None = None
        for entry in sorted(index.files):
            place = layout.places.get(entry.name)
            if place is None:
                continue
            if entry.size > limits.max_file_bytes:
                yield SetAside(name=place.name, code="image_too_large")
                continue
            data = _zip_read(handle.fileno(), entries[entry.name])
            if data is None:
                archive = archive or stack.enter_context(zipfile.ZipFile(path))
                data = archive.read(entries[entry.name])
            yield Item(place.name, place.label, data, place.split)


def _zip_read(file: int, info: zipfile.ZipInfo) -> bytes | None:
    """The content of an ordinary entry, read at once (zipfile takes several times as long over a small one).

    None where zipfile must look: at the unusual, and to say what is wrong with a header, a length or a checksum that does not fit.
    """
    if info.flag_bits & ~_ORDINARY or info.file_size == 0 or info.compress_size > info.file_size + STEP:
        return None
    name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    block = os.pread(file, 30 + len(name) + EXTRA + info.compress_size, info.header_offset)
    if len(block) < 30 or block[:4] != b"PK\x03\x04" or block[30 : 30 + len(name)] != name:
        return None
    flags, name_size, extra_size = (int.from_bytes(block[at : at + 2], "little") for at in (6, 26, 28))
    data = block[30 + name_size + extra_size :][: info.compress_size]
    if info.compress_type == zipfile.ZIP_DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, info.file_size)
        except zlib.error:
            return None
    elif info.compress_type != zipfile.ZIP_STORED:
        return None
    sound = flags == info.flag_bits and name_size == len(name) and len(data) == info.file_size and zlib.crc32(data) == info.CRC
    return data if sound else None


class _Guarded:
    """A stream of unpacked bytes that counts them against the packed bytes read so far, so that a bomb stops early."""

    def __init__(self, path: Path, packed: IO[bytes], stream: IO[bytes], limits: Limits) -> None:
        self._path, self._packed, self._stream, self._limits = path, packed, stream, limits
        self._tail = b""
        self.total = 0

    def block_at(self, offset: int) -> bytes:
        """The tar block at ``offset``, which must be among the last bytes read."""
        at = offset - (self.total - len(self._tail))
        return self._tail[at : at + tarfile.BLOCKSIZE] if at >= 0 else b""

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes; raises BadInput ``too_large`` or ``archive_ratio``."""
        data = self._stream.read(size)
        self.total += len(data)
        self._tail = (self._tail + data)[-TAIL:]
        if self.total > self._limits.max_unpacked_bytes + RATIO_FLOOR:  # headers and padding count here
            raise BadInput(
                "too_large",
                f"{self._path.name} is too large",
                value=f"over {self.total} bytes unpacked",
                constraint=f"at most {self._limits.max_unpacked_bytes}",
                knob="ingest.max_unpacked_bytes",
            )
        if self._stream is not self._packed:
            _refuse_ratio(self._path.name, "as a stream", self.total, self._packed.tell(), self._limits)
        return data


@contextmanager
def open_tar(path: Path, limits: Limits) -> Iterator[tuple[tarfile.TarFile, _Guarded]]:
    """Yield a tar, packed or not, to be read once from its start, and the guarded stream under it."""
    with path.open("rb") as packed:
        head = packed.read(8)
        packed.seek(0)
        unpack = next((reader for magic, reader in _PACKED if head.startswith(magic)), None)
        stream = unpack(packed) if unpack else packed
        guarded = _Guarded(path, packed, stream, limits)
        with tarfile.open(fileobj=cast(IO[bytes], guarded), mode="r|", encoding="utf-8", errors="surrogateescape", tarinfo=_Header) as archive:
            yield archive, guarded


class _Header(tarfile.TarInfo):
    """A header that refuses to be followed by an extended header of any size."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.size > HEADER_MAX and not self.isreg():
            raise tarfile.ReadError("an extended header is too long")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]


def members_of(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members in order; tarfile itself would keep every header in memory."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]
        yield member


def tar_index(path: Path, limits: Limits) -> Index:
    """Walk a tar once to its very end: a stream has no index, and a cut one must be refused before anything is stored."""
    collector = _Collector(path, limits)
    with open_tar(path, limits) as (archive, guarded):
        for member in members_of(archive):
            collector.add(member.name, tar_kind(member), member.size if member.isreg() else 0)
        if guarded.block_at(archive.offset) != bytes(tarfile.BLOCKSIZE):  # tarfile takes a damaged header for the end
            raise tarfile.ReadError("a header is damaged, or the end mark is missing")
        while guarded.read(STEP):  # a packed stream has its checksum at its end
            pass
    return collector.index


def tar_kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return "link"
    if member.isdir():
        return "folder"
    return "file" if member.isreg() else "special"


def _tar_items(path: Path, index: Index, layout: Layout, limits: Limits) -> Iterator[Item | SetAside]:
    yield from sorted(index.set_aside, key=lambda item: item.name)
    wanted = {entry.name for entry in index.files}
    with told_as_corrupt(path), open_tar(path, limits) as (archive, _):
        for member in members_of(archive):
            name = "/".join(part for part in member.name.split("/") if part not in ("", "."))
            place = layout.places.get(name) if member.isreg() and name in wanted else None
            if place is None:
                continue
            if member.size > limits.max_file_bytes:
                yield SetAside(name=place.name, code="image_too_large")
                continue
            content = archive.extractfile(member)
            assert content is not None, "a regular member has content"
            yield Item(place.name, place.label, content.read(), place.split)
