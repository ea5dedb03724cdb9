"""WebDataset's tar shards: the files of one sample follow each other and share their name up to its first dot.

0001.jpg 0001.cls    0002.jpg 0002.txt    0003.png 0003.json
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tasks.core.artifacts import SetAside
from tasks.core.config import Section
from tasks.core.errors import BadInput
from tasks.sources import Item, Limits, Source, fingerprint, source
from tasks.sources.archive import members_of, open_tar, tar_index, told_as_corrupt
from tasks.sources.columns import label_text
from tasks.sources.layout import IMAGE_ENDINGS, globbed, is_junk, is_storable, located, printable

KIND = "a tar shard, a folder, a glob or a range of them"
LABELS = ("cls", "txt", "json")
LABEL_MAX = 1 << 20
"""Bytes of a label's file, above which it is no label."""
SHARDS_MAX = 100_000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NUMBER = re.compile(r"-?\d{1,9}")


class WebdatasetOptions(Section):
    """Where a sample's label stands."""

    ending: Literal["", "cls", "txt", "json"] = Field(
        "", description="ending of the label's file; empty: the first of cls, txt and json that is there"
    )
    label: str = Field("label", description="field of a json file that holds the label")
    class_names: list[str] = Field([], description="names of the classes 0, 1, 2 ...; empty: numbers are names")


class _Sample:
    """The files of one sample as they come: its image, or the code of why there is none, and the text of its label's files."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.name = key
        self.data: bytes | None = None
        self.code = "missing_file"
        self.texts: dict[str, bytes] = {}


@source("webdataset", options=WebdatasetOptions)
def webdataset(location: str, root: Path, limits: Limits, options: WebdatasetOptions) -> Source:
    """Check every shard to its end; samples come in the order of the shards, then as they lie there.

    Raises BadInput ``source_unavailable``, ``archive_*`` or ``too_large``.
    """
    shards = _files(location, root)
    aside: list[SetAside] = []
    ignored = 0
    for shard in shards:
        with told_as_corrupt(shard):
            index = tar_index(shard, limits)
        aside += [SetAside(name=f"{shard.name}/{item.name}", code=item.code) for item in index.set_aside]
        ignored += index.ignored
    return Source(_items(shards, aside, limits, options), tuple(sorted(options.class_names)), ignored)


@fingerprint("webdataset")
def webdataset_fingerprint(location: str, root: Path, options: WebdatasetOptions) -> str:
    """Names, sizes and times of modification (ns) of the shards: none is opened. Raises BadInput ``source_unavailable``."""
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _files(location, root)]
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()


def expanded(location: str) -> list[str]:
    """The locations that one with a range, as {0000..0063}, names; itself where it has none. Raises BadInput ``source_unavailable``."""
    bounds = _RANGE.search(location)
    if not bounds:
        return [location]
    first, last = int(bounds[1]), int(bounds[2])
    if not first <= last < first + SHARDS_MAX:
        raise BadInput("source_unavailable", "a range of shards", value=bounds[0], constraint=f"rising, at most {SHARDS_MAX}", knob="ingest.location")
    return [f"{location[: bounds.start()]}{number:0{len(bounds[1])}d}{location[bounds.end() :]}" for number in range(first, last + 1)]


def _files(location: str, root: Path) -> list[Path]:
    names = expanded(location)
    if names != [location]:
        return [located(name, root, KIND) for name in names]
    if any(letter in location for letter in "*?["):
        found = globbed(location, root, KIND)
    else:
        path = located(location, root, KIND)
        found = [inner for inner in path.iterdir() if ".tar" in inner.suffixes or inner.suffix == ".tgz"] if path.is_dir() else [path]
    files = sorted(path for path in found if path.is_file() and not path.name.startswith("."))
    if not files:
        raise BadInput("source_unavailable", "no shard is there", value=location, constraint=KIND, knob="ingest.location")
    return files


def _items(shards: list[Path], aside: list[SetAside], limits: Limits, options: WebdatasetOptions) -> Iterator[Item | SetAside]:
    yield from aside
    for shard in shards:
        sample: _Sample | None = None
        with told_as_corrupt(shard), open_tar(shard, limits) as (archive, _):
            for member in members_of(archive):
                name = "/".join(part for part in member.name.split("/") if part not in ("", "."))
                if not member.isreg() or not is_storable(name) or any(is_junk(part) for part in name.split("/")):
                    continue
                folder, slash, last = name.rpartition("/")
                key = folder + slash + last.partition(".")[0]
                if sample is not None and sample.key != key:
                    yield _item(shard, sample, options)
                    sample = None
                sample = sample or _Sample(key)
                _take(sample, name, archive, member, limits)
        if sample is not None:
            yield _item(shard, sample, options)


def _take(sample: _Sample, name: str, archive: tarfile.TarFile, member: tarfile.TarInfo, limits: Limits) -> None:
    """Read one file of a sample; a second image makes it unclear which is meant."""
    ending = name.rpartition(".")[2].casefold()
    content = archive.extractfile(member)
    assert content is not None, "a regular member has content"
    if name.casefold().endswith(IMAGE_ENDINGS):
        if sample.name != sample.key:
            sample.data, sample.code = None, "bad_row"
            return
        sample.name = name
        if member.size > limits.max_file_bytes:
            sample.code = "image_too_large"
        else:
            sample.data = content.read()
    elif ending in LABELS:
        sample.texts[ending] = content.read() if member.size <= LABEL_MAX else b"\xff"


def _item(shard: Path, sample: _Sample, options: WebdatasetOptions) -> Item | SetAside:
    name = f"{shard.name}/{sample.name}"
    if sample.data is None:
        return SetAside(name=printable(name), code=sample.code)
    label = _label(sample.texts, options)
    if not label:
        return SetAside(name=printable(name), code="missing_label" if label is not None else "bad_row")
    return Item(name, label, sample.data)


def _label(texts: dict[str, bytes], options: WebdatasetOptions) -> str | None:
    """A sample's label; "" where it has none, None where what it has is no label."""
    ending: str = options.ending or next((ending for ending in LABELS if ending in texts), "")
    if ending not in texts:
        return ""
    try:
        cell: Any = texts[ending].decode("utf-8-sig").strip()
        if ending == "json":
            cell = json.loads(cell)
            cell = cell.get(options.label) if isinstance(cell, dict) else cell
    except (ValueError, RecursionError):
        return None
    if options.class_names and isinstance(cell, str) and _NUMBER.fullmatch(cell):
        cell = int(cell)
    return label_text(cell, tuple(options.class_names))
