"""Label Studio's JSON export of a classification: tasks with an image and the choices of one or several people.

    [{"id": 7, "data": {"image": "/data/local-files/?d=photos/1.jpg"},
      "annotations": [{"was_cancelled": false, "result": [{"type": "choices", "from_name": "kind", "value": {"choices": ["cat"]}}]}]}]

An image may be a data URI too, as `python -m tasks.sources.review` writes them: its bytes are those of data/, so an answer that differs
from the stored label becomes a label layer at the next ingest, and nothing is stored twice.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import Field

from tasks.core.artifacts import SetAside
from tasks.core.config import Section
from tasks.core.errors import BadInput
from tasks.core.files import sha256_file
from tasks.sources import Item, Limits, Source, fingerprint, source
from tasks.sources.columns import label_text
from tasks.sources.layout import located, printable
from tasks.sources.paths import URL, Abroad, Folders, Stores
from tasks.sources.table import url_name
from tasks.sources.web import WebPolicy

KIND = "a JSON export of Label Studio"
LARGEST = 1 << 30
"""Bytes of an export, which is read whole."""
LOCAL, UPLOAD = "/data/local-files/", "/data/upload/"
NAME = "name"
"""Field of a task's data that names the image, where it is a data URI."""


class LabelstudioOptions(Section):
    """Which fields of a task are used, and where its images lie."""

    image: str = Field("image", description="field of a task's data that holds the image")
    choices: str = Field("", description="name of the choices (from_name) that state the class; empty: the only ones there are")
    images: str = Field("", description="folder that Label Studio's local files and uploads are relative to; empty: the export's folder")
    web: WebPolicy | None = Field(None, description="what may be fetched where images are URLs; without it they are set aside")
    stores: Stores = ()


@source("labelstudio", options=LabelstudioOptions)
def labelstudio(location: str, root: Path, limits: Limits, options: LabelstudioOptions) -> Source:
    """Read the export at ``location``. What most people chose is an image's class.

    A task that nobody answered is set aside as ``missing_label``, one in which no choice leads, or a person chose several, as
    ``conflicting_label``. Raises BadInput ``source_unavailable``, ``too_large``, ``manifest_corrupt`` or ``empty_manifest``.
    """
    path = _file(location, root)
    base = located(options.images, root, "the folder of the images") if options.images else path.parent
    tasks = _tasks(path)
    _one_control(path, tasks, options)
    return Source(_items(tasks, Folders(base, Abroad(options.web, options.stores)), limits, options))


@fingerprint("labelstudio")
def labelstudio_fingerprint(location: str, root: Path, options: LabelstudioOptions) -> str:
    """The sha256 of the export. Raises BadInput ``source_unavailable``."""
    return sha256_file(_file(location, root))


def _file(location: str, root: Path) -> Path:
    path = located(location, root, KIND)
    if not path.is_file():
        raise BadInput("source_unavailable", "the source is no file", value=location, constraint=KIND, knob="ingest.location")
    return path


def _tasks(path: Path) -> list[dict[str, Any]]:
    size = path.stat().st_size
    if size > LARGEST:
        raise BadInput("too_large", f"{path.name} is too large to be read whole", value=f"{size} bytes", constraint=f"at most {LARGEST}")
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInput("source_unavailable", f"{path.name} cannot be read", value=error.strerror, knob="ingest.location") from None
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, str(error)) from None
    if not isinstance(found, list) or not all(isinstance(task, dict) and isinstance(task.get("data"), dict) for task in found):
        raise _corrupt(path, "no list of tasks with their data (JSON-MIN and CSV exports are a table's)")
    if not found:
        raise BadInput("empty_manifest", f"{path.name} has no tasks", value=0, constraint="at least 1", knob="ingest.location")
    return found


def _corrupt(path: Path, why: str) -> BadInput:
    return BadInput("manifest_corrupt", f"{path.name} is no JSON export of Label Studio", value=why[:200], constraint=KIND, knob="ingest.location")


def _one_control(path: Path, tasks: list[dict[str, Any]], options: LabelstudioOptions) -> None:
    """Refuse an export in which two choices could be meant, or the named one never stands."""
    names = Counter(
        result["from_name"] for task in tasks for answer in _answers(task) for result in answer if isinstance(result.get("from_name"), str)
    )
    if (options.choices and options.choices not in names and names) or (not options.choices and len(names) > 1):
        value, knob = ", ".join(sorted(names))[:200], "ingest.options.choices"
        raise BadInput("missing_column", f"{path.name} does not say by itself which choices are the class", value=value, constraint="one", knob=knob)


def _answers(task: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The choices in each person's answer; a cancelled one is none."""
    answers = task.get("annotations")
    for answer in answers if isinstance(answers, list) else ():
        results = answer.get("result") if isinstance(answer, dict) and not answer.get("was_cancelled") else None
        if isinstance(results, list):
            yield [result for result in results if isinstance(result, dict) and result.get("type") == "choices"]


def _label(task: dict[str, Any], options: LabelstudioOptions) -> tuple[str, str]:
    """(class, "") or ("", the code of why there is none)."""
    votes: Counter[str] = Counter()
    for answer in _answers(task):
        chosen: list[Any] = []
        for result in answer:
            value = result.get("value")
            if (not options.choices or result.get("from_name") == options.choices) and isinstance(value, dict):
                chosen += value.get("choices") or []
        if len(chosen) > 1:
            return "", "conflicting_label"
        label = label_text(chosen[0]) if chosen else ""
        if label is None:
            return "", "bad_row"
        votes.update([label] if label else [])
    if not votes:
        return "", "missing_label"
    first, *others = votes.most_common(2)
    return ("", "conflicting_label") if others and others[0][1] == first[1] else (first[0], "")


def _items(tasks: list[dict[str, Any]], folders: Folders, limits: Limits, options: LabelstudioOptions) -> Iterator[Item | SetAside]:
    for number, task in enumerate(tasks, 1):
        image, named = task["data"].get(options.image), task["data"].get(NAME)
        embedded = isinstance(image, str) and image.startswith("data:")
        stated = named if embedded and isinstance(named, str) and named else image
        where = f"task {task.get('id', number)}"
        if not isinstance(image, str) or not image or "\0" in image or not isinstance(stated, str):
            yield SetAside(name=where, code="bad_row")
            continue
        path = where if embedded and stated is image else _local(stated)
        name = url_name(path) if URL.match(path) else printable(path[:1024])
        label, code = _label(task, options)
        data = code or (_embedded(image) if embedded else folders.read(path, limits.max_file_bytes))
        yield SetAside(name=name, code=data) if isinstance(data, str) else Item(name, label, data)


def _local(image: str) -> str:
    """The path of a file that Label Studio serves itself; anything else as it stands."""
    parts = urlsplit(image)
    if image.startswith(LOCAL):
        return parse_qs(parts.query).get("d", [""])[0] or image
    return unquote(parts.path.removeprefix(UPLOAD)) if image.startswith(UPLOAD) else image


def _embedded(image: str) -> bytes | str:
    """The bytes of a base64 data URI, or ``bad_row``."""
    head, comma, data = image.partition(",")
    if not comma or not head.endswith(";base64"):
        return "bad_row"
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return "bad_row"
