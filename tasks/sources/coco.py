"""COCO's annotation file as a classification: each image has the one category of its annotations.

    {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"image_id": 1, "category_id": 3}], "categories": [{"id": 3, "name": "cat"}]}

The file is read whole: it takes about ten times its size in memory, and more than 512 MiB of it is refused. Images are read one by one.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from tasks.core.artifacts import SetAside, Split
from tasks.core.config import Section
from tasks.core.errors import BadInput
from tasks.core.files import sha256_file
from tasks.sources import Item, Limits, Notice, Source, fingerprint, source
from tasks.sources.columns import split_of
from tasks.sources.layout import located, printable, refuse_collisions
from tasks.sources.paths import URL, Abroad, Folders, Stores
from tasks.sources.remote import is_url
from tasks.sources.table import url_name
from tasks.sources.web import WebPolicy

KIND = "a COCO annotation file"
LARGEST = 512 << 20
"""Bytes of an annotation file; COCO's own of 2017 has 469,785,474."""


class CocoOptions(Section):
    """Where the images lie, and what they are for."""

    images: str = Field("", description="folder or URL that file names are relative to; empty: the annotation file's folder")
    split: str = Field("", description="split of all images: train, val or test; empty: none")
    web: WebPolicy | None = Field(None, description="what may be fetched where file names are URLs; without it they are set aside")
    stores: Stores = ()


class _Read(NamedTuple):
    """File name of every image by its id, category names by theirs, the categories of an image's annotations, and how many are of no image."""

    images: dict[Any, str]
    categories: dict[Any, str]
    stated: dict[Any, set[Any]]
    orphans: int


@source("coco", options=CocoOptions)
def coco(location: str, root: Path, limits: Limits, options: CocoOptions) -> Source:
    """Read the annotation file at ``location``; images come in the order of their names.

    An image without annotation is set aside as ``missing_label``, with two categories as ``conflicting_label``, with one that is
    not in the file as ``unknown_class``. Raises BadInput ``source_unavailable``, ``too_large``, ``manifest_encoding``,
    ``manifest_corrupt``, ``empty_manifest``, ``class_name_collision`` or ``unknown_split``.
    """
    path = _file(location, root)
    if is_url(location) and not options.images:
        must = "the folder that file names are relative to"
        raise BadInput("source_unavailable", "the images of an annotation file in a store", constraint=must, knob="ingest.options.images")
    base = located(options.images, root, "the folder of the images") if options.images else path.parent
    split = split_of(options.split, "ingest.options.split")
    found = _checked(path, _parsed(path))
    told = [Notice("orphan_annotations", f"{found.orphans} annotations are of images that are not listed")] if found.orphans else []
    return Source(_items(found, Folders(base, Abroad(options.web, options.stores)), split, limits), notices=told)


@fingerprint("coco")
def coco_fingerprint(location: str, root: Path, options: CocoOptions) -> str:
    """The sha256 of the annotation file: images that change say nothing of it. Raises BadInput ``source_unavailable``."""
    return sha256_file(_file(location, root))


def _file(location: str, root: Path) -> Path:
    path = located(location, root, KIND)
    if not path.is_file():
        raise BadInput("source_unavailable", "the source is no file", value=location, constraint=KIND, knob="ingest.location")
    return path


def _parsed(path: Path) -> Any:
    size = path.stat().st_size
    if size > LARGEST:
        what = f"{path.name} is too large to be read whole"
        raise BadInput("too_large", what, value=f"{size} bytes", constraint=f"at most {LARGEST}", knob="ingest.location")
    try:
        with path.open(encoding="utf-8-sig") as handle:
            return json.load(handle)
    except UnicodeDecodeError:
        raise BadInput("manifest_encoding", f"{path.name} is not UTF-8", constraint="UTF-8", knob="the program that wrote it to UTF-8") from None
    except OSError as error:
        raise BadInput("source_unavailable", f"{path.name} cannot be read", value=error.strerror, knob="ingest.location") from None
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, str(error)) from None


def _corrupt(path: Path, why: str) -> BadInput:
    return BadInput("manifest_corrupt", f"{path.name} is no COCO annotation file", value=why[:200], constraint=KIND, knob="ingest.location")


def _checked(path: Path, document: Any) -> _Read:
    """The parts of the document that are used. Raises BadInput as ``coco`` does."""
    parts: list[list[dict[str, Any]]] = []
    for part in ("images", "annotations", "categories"):
        rows = document.get(part) if isinstance(document, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise _corrupt(path, f"no list of objects {part!r}")
        parts.append(rows)
    rows, annotations, kinds = parts
    if not rows:
        raise BadInput("empty_manifest", f"{path.name} has no images", value=0, constraint="at least 1", knob="ingest.location")
    images = _named(path, rows, "images", "file_name")
    categories = {key: unicodedata.normalize("NFC", name).strip() for key, name in _named(path, kinds, "categories", "name").items()}
    refuse_collisions(set(categories.values()))
    stated: dict[Any, set[Any]] = {}
    orphans = 0
    for number, row in enumerate(annotations):
        image, category = row.get("image_id"), row.get("category_id")
        if not _is_id(image) or not _is_id(category):
            raise _corrupt(path, f"annotations[{number}] has no image_id or no category_id")
        if image in images:
            stated.setdefault(image, set()).add(category)
        else:
            orphans += 1
    return _Read(images, categories, stated, orphans)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _named(path: Path, rows: list[dict[str, Any]], part: str, field: str) -> dict[Any, str]:
    """Id -> name; raises BadInput ``manifest_corrupt`` for one without, and for an id that two have."""
    found: dict[Any, str] = {}
    for number, row in enumerate(rows):
        key, name = row.get("id"), row.get(field)
        if not _is_id(key) or not isinstance(name, str) or not name.strip():
            raise _corrupt(path, f"{part}[{number}] has no id or no {field}")
        if key in found:
            raise _corrupt(path, f"two {part} have the id {key!r}")
        found[key] = name
    return found


def _items(found: _Read, folders: Folders, split: Split | None, limits: Limits) -> Iterator[Item | SetAside]:
    labels: dict[str, set[str | None]] = {}
    for key, name in found.images.items():  # two images may have one file
        labels.setdefault(name, set()).update(found.categories.get(category) for category in found.stated.get(key, ()))
    for name in sorted(labels):
        stated = labels[name]
        label = next(iter(stated)) if len(stated) == 1 else None
        if label is not None:
            data = folders.read(name, limits.max_file_bytes) if "\0" not in name else "bad_row"
        else:
            data = "missing_label" if not stated else "conflicting_label" if len(stated) > 1 else "unknown_class"
        if label is None or isinstance(data, str):
            yield SetAside(name=printable(name[:1024].partition("?")[0] if URL.match(name) else name[:1024]), code=str(data))
        else:
            yield Item(url_name(name) if URL.match(name) else name, label, data, split)
