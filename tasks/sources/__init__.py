"""Where images come from. A source is opened by name: one of ours, or a plug-in's (entry point group ``trainyard.sources``).

A source is a function of (location, root, limits) that returns an opened Source:

    @source("numbers")
    def numbers(location: str, root: Path, limits: Limits) -> Source:
        return Source(items=(Item(name, label, data) for name, label, data in ...))

Beside it may stand its fingerprint, a text that differs once the source holds something else and that costs next to nothing
to find (a listing, an ETag, a row count, the highest id):

    @fingerprint("numbers")
    def numbers_fingerprint(location: str, root: Path) -> str: ...

A source that can be told more than a location declares a frozen model of its options. Its opener and its fingerprint are then
called with it as the last argument, checked; paths in options are relative to the project's root, as locations are:

    class NumbersOptions(Section):
        base: int = Field(10, ge=2, description="base in which a number is written")

    @source("numbers", options=NumbersOptions)
    def numbers(location: str, root: Path, limits: Limits, options: NumbersOptions) -> Source: ...

A package offers it to Trainyard with

    [project.entry-points."trainyard.sources"]
    numbers = "its_package.module:numbers"
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tasks.core.artifacts import SetAside, Split
from tasks.core.config import Section, check_options
from tasks.core.errors import BadInput
from tasks.core.files import digest_of
from tasks.sources.remote import fingerprint as listed
from tasks.sources.remote import is_url

if TYPE_CHECKING:
    from tasks.sources.web import WebPolicy

GROUP = "trainyard.sources"
_KINDS = ("archive", "arrays", "coco", "digits", "folder", "http", "labelstudio", "parquet", "sql", "table", "torchvision", "webdataset")
BUILT_IN = {name: f"tasks.sources.{name}" for name in _KINDS}

OWN_URLS = frozenset({"http", "sql"})
"""Sources of ours that open URLs by themselves; the others read what is brought here (tasks/sources/remote.py)."""
ONE_FILE = frozenset({"archive", "arrays", "coco", "labelstudio", "parquet", "webdataset"})
"""Sources of ours that read one file (webdataset also a range of them), which may lie on a web server; the option ``web`` of each is how
it may be fetched (tasks/sources/web.py). A table fetches its manifest itself."""


class Item(NamedTuple):
    """One file of a source: its name there ("/" between folders), class name, bytes, and split and group where it has them."""

    name: str
    label: str
    data: bytes
    split: Split | None = None
    group: str | None = None


class Unread(NamedTuple):
    """A file of a source before it is read. ``version`` differs once its bytes do; "" where nothing vouches for that."""

    name: str
    label: str
    split: Split | None
    version: str
    read: Callable[[], Item | SetAside]


class Notice(NamedTuple):
    """Something worth a word that sets nothing aside: a stable code, and what was seen, in one line."""

    code: str
    what: str


@dataclass(frozen=True)
class Limits:
    """What a source may bring: bytes of one file, bytes of an unpacked archive, and its unpacked over its packed size."""

    max_file_bytes: int = 67_108_864
    max_unpacked_bytes: int = 10_737_418_240
    max_unpacked_ratio: float = 200.0


@dataclass(frozen=True)
class Source:
    """An opened source.

    ``items`` is read once, in an order that depends on the content alone, and holds one file's bytes at a time; a SetAside
    among them is something that cannot be used, by name and code. ``labels`` are the classes that the source names, those
    without a file too; a source that learns its classes from its items leaves it empty. ``ignored`` counts junk files.
    ``notices`` may grow while ``items`` is read. A source that can tell without reading whether a file changed gives ``files``
    too: the same, to be read in place of ``items``.
    """

    items: Iterable[Item | SetAside]
    labels: tuple[str, ...] = ()
    ignored: int = 0
    notices: list[Notice] = field(default_factory=list)
    files: Iterable[Unread | SetAside] | None = None


Opener = Callable[..., Source]
"""(location, root, limits), and options where the source declares them."""
Fingerprint = Callable[..., str]
"""(location, root), and options where the source declares them."""
O = TypeVar("O", bound=Opener)  # noqa: E741
F = TypeVar("F", bound=Fingerprint)
_OPENERS: dict[str, Opener] = {}
_FINGERPRINTS: dict[str, Fingerprint] = {}
_OPTIONS: dict[Opener, type[Section]] = {}


def source(name: str, options: type[Section] | None = None) -> Callable[[O], O]:
    """Register the decorated function as the source ``name``; it is called with ``options`` where it declares them."""

    def register(opener: O) -> O:
        _OPENERS[name] = opener
        if options is not None:
            _OPTIONS[opener] = options
        return opener

    return register


def fingerprint(name: str) -> Callable[[F], F]:
    """Register the decorated function as the fingerprint of the source ``name``."""

    def register(function: F) -> F:
        _FINGERPRINTS[name] = function
        return function

    return register


def fingerprint_of(name: str, location: str, root: Path, options: Mapping[str, Any] = {}) -> str:
    """The text that moves when the source does; "" for a source that has none, which must be read to know.

    Raises BadInput ``unknown_source``, ``params_invalid`` for its options, or whatever the source itself refuses with.
    """
    if _is_on_the_web(name, location):
        from tasks.sources.web import version

        policy, options = _policy(name, options)
        _options(name, _opener(name), options)
        told = [version(url, policy) for url in _urls(name, location)]
        return told[0] if len(told) == 1 else digest_of(told) if all(told) else ""
    extra = _options(name, _opener(name), options)
    if name in BUILT_IN and name not in OWN_URLS and is_url(location) and not _is_http(location):
        return "" if any(is_url(str(value)) for value in options.values()) else listed(location)
    return _FINGERPRINTS[name](location, root, *extra) if name in _FINGERPRINTS else ""


def open_source(name: str, location: str, root: Path, limits: Limits = Limits(), options: Mapping[str, Any] = {}) -> Source:
    """Open the source ``name`` at ``location``; a relative path, there or in ``options``, is relative to ``root``, the project.

    Raises BadInput ``unknown_source`` with the nearest name, ``params_invalid`` for an option that it does not take, or
    whatever the source itself refuses with.
    """
    opener = _opener(name)
    if not _is_on_the_web(name, location):
        return opener(location, root, limits, *_options(name, opener, options))
    from tasks.sources.web import copies_of, copy_of

    policy, options = _policy(name, options)
    checked = _options(name, opener, options)
    urls, most = _urls(name, location), limits.max_unpacked_bytes
    copy = copy_of(location, policy, root, most) if urls == [location] else copies_of(location, urls, policy, root, most)
    return opener(str(copy.absolute()), root, limits, *checked)


def _urls(name: str, location: str) -> list[str]:
    """The files that a location on a web server names. Raises BadInput ``source_unavailable``."""
    if name != "webdataset":
        return [location]
    from tasks.sources.webdataset import expanded

    return expanded(location)


def _is_on_the_web(name: str, location: str) -> bool:
    return name in ONE_FILE and _is_http(location)


def _is_http(location: str) -> bool:
    return location.lower().startswith(("http://", "https://"))


def _policy(name: str, given: Mapping[str, Any]) -> tuple[WebPolicy, Mapping[str, Any]]:
    """The policy by which a source's file is fetched, and the options that are left for the source itself."""
    from tasks.sources.web import WebPolicy

    web = given.get("web", {})
    policy = check_options(WebPolicy, dict(web) if isinstance(web, Mapping) else {"web": web}, "ingest.options.web")
    model = _OPTIONS.get(_opener(name))
    own = model is not None and "web" in model.model_fields
    return policy, given if own else {key: value for key, value in given.items() if key != "web"}


def _options(name: str, opener: Opener, given: Mapping[str, Any]) -> tuple[Section, ...]:
    """The checked options as a last argument; none for a source that declares none."""
    model = _OPTIONS.get(opener)
    if model is not None:
        return (check_options(model, dict(given), "ingest.options"),)
    if given:
        raise BadInput(
            "params_invalid", f"the source {name} takes no options", value=", ".join(map(str, given)), constraint="{}", knob="ingest.options"
        )
    return ()


def names() -> list[str]:
    """Every name that ``open_source`` takes."""
    return sorted({*BUILT_IN, *_OPENERS, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def _opener(name: str) -> Opener:
    if name not in _OPENERS and name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
    if name in _OPENERS:
        return _OPENERS[name]
    for point in importlib.metadata.entry_points(group=GROUP, name=name):
        try:
            opener: Opener = point.load()
        except (ImportError, AttributeError) as error:
            raise BadInput(
                "source_unavailable", f"the plug-in of source {name!r} does not load", value=f"{point.value}: {error}", knob="ingest.source"
            ) from error
        return opener
    known = names()
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    raise BadInput(
        "unknown_source", "no such source", value=repr(name), constraint=near[0] if near else f"one of {', '.join(known)}", knob="ingest.source"
    )
