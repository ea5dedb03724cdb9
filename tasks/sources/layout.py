"""What a tree of files says about classes and splits, the same for folders and archives. Works on names alone.

    cat/1.png, dog/deep/down/2.png                    a folder for each class; the class is the first folder
    train/cat/1.png, test/dog/2.png                   folders for splits above those for classes
    flowers/cat/1.png                                 in archives, one folder around everything is no class

Class names are taken as written, in Unicode NFC; two that are equal after NFC, strip and case folding are refused.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tasks.core.artifacts import Split
from tasks.core.errors import BadInput
from tasks.sources.remote import is_url, mirror

SPLIT_NAMES: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
JUNK = {
    "__macosx",
    "__pycache__",
    "thumbs.db",
    "thumbs.db:encryptable",
    "ehthumbs.db",
    "desktop.ini",
    "icon\r",
    "@eadir",
    "$recycle.bin",
    "system volume information",
    "lost+found",
}
IMAGE_ENDINGS = (
    *(".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".jxl"),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".svg", ".tga", ".tif", ".tiff", ".webp"),
)
IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
NAME_MAX = 255
"""Bytes of one file name that Linux and macOS take."""


class Place(NamedTuple):
    """Where a file stands: its name below the class or split folders, its class, its split."""

    name: str
    label: str
    split: Split | None


@dataclass(frozen=True)
class Layout:
    """Original name -> place of every file in a class folder, all classes named (empty ones too), and loose files passed over."""

    places: dict[str, Place]
    labels: tuple[str, ...]
    loose: int


def is_junk(name: str) -> bool:
    """Whether a file or folder name is hidden, or is what an operating system or editor leaves behind."""
    return name.startswith(".") or name.casefold() in JUNK


def claims_image(name: str, data: bytes) -> bool:
    """Whether a file says that it is a picture, by its name's ending or by its first bytes. Whether it is one, decoding tells."""
    if name.casefold().endswith(IMAGE_ENDINGS):
        return True
    return data.startswith(IMAGE_STARTS) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP") or data[4:8] == b"ftyp"


def is_storable(name: str) -> bool:
    """Whether a name is UTF-8 and no part of it is longer than file systems take."""
    if name.isascii() and len(name) <= NAME_MAX:
        return True
    try:
        return all(len(part.encode()) <= NAME_MAX for part in name.split("/"))
    except UnicodeEncodeError:
        return False


def printable(name: str) -> str:
    """A name as text that UTF-8 can hold: bytes that are not UTF-8 stand as \\xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def located(location: str, root: Path, kind: str) -> Path:
    """The path of a source, brought here where it is a URL (tasks/sources/remote.py).

    Raises BadInput ``source_unavailable`` where it is not set, not there, or inside data/.
    """
    if not location:
        raise BadInput("source_unavailable", "no location is set", value="''", constraint=f"the path of {kind}", knob="ingest.location")
    path = mirror(location, root) if is_url(location) else root / Path(location).expanduser()
    if not path.exists():
        raise BadInput("source_unavailable", "the source does not exist", value=location, constraint=f"the path of {kind}", knob="ingest.location")
    if path.resolve().is_relative_to((root / "data").resolve()):
        raise BadInput(
            "source_unavailable", "the source lies in data/, which ingest writes", value=location, constraint="elsewhere", knob="ingest.location"
        )
    return path


def globbed(location: str, root: Path, kind: str) -> list[Path]:
    """The paths that a location with a * in its last part names; raises as ``located`` does."""
    if is_url(location):
        return list(located(location, root, kind).iterdir())
    pattern = root / Path(location).expanduser()
    return [located(str(path), root, kind) for path in pattern.parent.absolute().glob(pattern.name)]


def collision_key(label: str) -> str:
    """Two class names with equal keys are taken for one name written twice."""
    return unicodedata.normalize("NFC", label).strip().casefold()


def refuse_collisions(labels: Iterable[str]) -> None:
    """Raise BadInput ``class_name_collision`` where two different names have one key."""
    first: dict[str, str] = {}
    for label in sorted(labels):
        other = first.setdefault(collision_key(label), label)
        if other != label:
            raise BadInput(
                "class_name_collision",
                "two classes have nearly one name",
                value=f"{other!r} and {label!r}",
                constraint="different after Unicode NFC, strip and case folding",
                knob="the folders' names",
            )


def arrange(files: Iterable[str], folders: Iterable[str], *, unwrap: bool) -> Layout:
    """Find the classes and splits of a tree.

    ``files`` and ``folders`` are names with "/" between the parts, free of junk; with ``unwrap``, a lone folder around
    everything is passed through. Raises BadInput ``class_name_collision`` or ``unknown_split``.
    """
    tree = _Tree(files, folders)
    prefix = ""
    while unwrap:
        tops = tree.folders_in(prefix)
        inner = f"{prefix}{tops[0]}/" if len(tops) == 1 else ""
        if not inner or tops[0].casefold() in SPLIT_NAMES or not tree.folders_in(inner) or tree.holds_images(inner):
            break
        prefix = inner
    splits = _split_folders(tree, prefix)
    bases: dict[str, Split | None] = {f"{prefix}{name}/": split for name, split in splits.items()} if splits else {prefix: None}
    raw = {name for base in bases for name in tree.folders_in(base)}
    refuse_collisions(raw)
    places: dict[str, Place] = {}
    loose = 0
    for name in tree.files:
        base = next((base for base in bases if name.startswith(base)), None)
        label, slash, _ = name[len(base) :].partition("/") if base is not None else ("", "", "")
        if not slash or base is None:
            loose += 1
            continue
        places[name] = Place(name[len(prefix) :], unicodedata.normalize("NFC", label), bases[base])
    return Layout(places, tuple(sorted(unicodedata.normalize("NFC", name) for name in raw)), loose)


class _Tree:
    """Files by folder, from names."""

    def __init__(self, files: Iterable[str], folders: Iterable[str]) -> None:
        self.files = sorted(files)
        inside: dict[str, set[str]] = {"": set()}
        for name in dict.fromkeys((*(name.rpartition("/")[0] for name in self.files), *folders)):
            at = ""
            for part in filter(None, name.split("/")):
                inside.setdefault(at, set()).add(part)
                at = f"{at}{part}/"
                inside.setdefault(at, set())
        self._inside = {folder: sorted(names) for folder, names in inside.items()}
        self._images = Counter(name[: name.rfind("/") + 1] for name in self.files if claims_image(name, b""))

    def folders_in(self, folder: str) -> list[str]:
        """Names of the folders directly in ``folder`` ("" or ending in "/")."""
        return self._inside.get(folder, [])

    def holds_images(self, folder: str) -> bool:
        """Whether a file directly in ``folder`` is named like an image."""
        return self._images[folder] > 0


def _split_folders(tree: _Tree, prefix: str) -> dict[str, Split]:
    """Folder name -> split where the top folders are splits; empty where they are classes."""
    tops = tree.folders_in(prefix)
    named = {name: SPLIT_NAMES[name.casefold()] for name in tops if name.casefold() in SPLIT_NAMES}
    above_classes = [name for name in named if tree.folders_in(f"{prefix}{name}/") and not tree.holds_images(f"{prefix}{name}/")]
    if len(named) == len(tops):
        bare = [name for name in named if tree.holds_images(f"{prefix}{name}/")]
        if bare:
            raise BadInput("unknown_split", "a split's folder holds images outside class folders", value=bare[0], constraint=f"{bare[0]}/CLASS/IMAGE")
        return named
    if len({named[name] for name in above_classes}) >= 2:
        stray = next(name for name in tops if name not in named)
        raise BadInput(
            "unknown_split",
            "a folder beside the splits is none",
            value=repr(stray),
            constraint="train, val or test",
            knob="the folder's name or place",
        )
    return {}
