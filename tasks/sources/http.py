"""A JSON API that lists images and labels page by page, or a plain list of URLs; both are read whole first, then the images one by one.

{"data": {"items": [{"image": "/pictures/1.jpg", "label": "cat"}, ...]}, "next": "/list?cursor=abc"}

https://img.example.org/cats/1.jpg            a list: a URL a line, its class the folder above the file
https://img.example.org/2.jpg  dog            or what stands behind it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urljoin, urlsplit, urlunsplit

from pydantic import Field

from tasks.core.config import Section
from tasks.core.errors import BadInput
from tasks.core.files import digest_of
from tasks.sources import Limits, Source, fingerprint, source
from tasks.sources.layout import located
from tasks.sources.paths import Abroad
from tasks.sources.table import CELL_MAX, Check, Row, items_of
from tasks.sources.web import WebPolicy, fetch, masked

KIND = "the URL of a JSON API, or of a text file with a URL a line"
PAGE_BYTES = 64 << 20
"""Bytes of one page of a listing."""


class HttpOptions(Section):
    """Where in the answer what stands; a name with dots leads into objects, an empty one is the answer itself."""

    items: str = Field("", description="the list of a page's images; empty: the answer is the list")
    image: str = Field("image", description="an item's URL, relative to the page's own")
    label: str = Field("label", description="an item's label")
    split: str = Field("", description="an item's split; empty: it has none")
    group: str = Field("", description="an item's group; empty: it has none")
    next: str = Field("", description="the next page: its URL, or the value of the query parameter that `cursor` names; empty: one page")
    cursor: str = Field("", description="query parameter that takes what stands at `next`")
    page: str = Field("", description="query parameter that counts pages up, until one is empty; not with `next`")
    first_page: int = Field(1, ge=0, description="number of the first page")
    max_pages: int = Field(10_000, ge=1, description="most pages that are asked for")
    lines: bool = Field(False, description="the location is a text file, here or on the web, with a URL a line and maybe a label behind it")
    classes: list[str] = Field([], description="the classes there are; another label is set aside. Empty: whatever labels stand there")
    web: WebPolicy = WebPolicy()


@source("http", options=HttpOptions)
def http(location: str, root: Path, limits: Limits, options: HttpOptions) -> Source:
    """Read the whole listing at ``location`` and check it as a table is checked.

    Raises BadInput ``manifest_corrupt`` where an answer is not as the options say, comes again, or has no end, the codes of
    ``table``, and what ``fetch`` raises.
    """
    check = Check(masked(location), options.classes, Abroad(options.web))
    for row in _rows(location, root, options):
        check.add(row)
    check.finish()
    return Source(items_of(check, lambda name: "url_not_allowed", limits), tuple(options.classes), notices=check.notices)


@fingerprint("http")
def http_fingerprint(location: str, root: Path, options: HttpOptions) -> str:
    """The digest of the whole listing: no image is asked for. Raises as ``http`` does."""
    return digest_of([[row.image, row.label, row.split, row.group] for row in _rows(location, root, options)])


def _rows(location: str, root: Path, options: HttpOptions) -> Iterator[Row]:
    if options.lines:
        yield from _listed(location, root, options)
        return
    if options.page and options.next:
        raise BadInput("params_invalid", "two ways to the next page", value="page and next", constraint="one of them", knob="ingest.options.page")
    number = 0
    for url, answer in _pages(location, options):
        for item in _items(url, answer, options):
            number += 1
            image = _at(item, options.image)
            address = urljoin(url, image) if isinstance(image, str) and 0 < len(image) <= CELL_MAX else None
            yield Row(number, address, _text(_at(item, options.label)), _cell(item, options.split), _cell(item, options.group))


def _pages(location: str, options: HttpOptions) -> Iterator[tuple[str, Any]]:
    """(URL, parsed answer) of each page. Raises BadInput ``manifest_corrupt`` where one comes twice or max_pages are used up."""
    seen: set[str] = set()
    url = _with(location, options.page, options.first_page) if options.page else location
    for number in range(options.max_pages):
        data = fetch(url, options.web, PAGE_BYTES)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            raise _corrupt(url, "an answer that is no JSON", "JSON") from None
        digest = digest_of([url, answer]) if options.next else digest_of(answer)
        if options.page and not _items(url, answer, options):
            return
        if digest in seen or (options.next and url in seen):
            raise _corrupt(url, "a page that came before", "each page once")
        seen |= {digest, url}
        yield url, answer
        if options.page:
            url = _with(location, options.page, options.first_page + number + 1)
            continue
        following = _at(answer, options.next) if options.next else None
        if following is None or following == "" or following is False:
            return
        if not isinstance(following, str | int):
            raise _corrupt(url, f"{options.next} is a {type(following).__name__}", "a URL or a cursor")
        url = _with(location, options.cursor, following) if options.cursor else urljoin(url, str(following))
    raise _corrupt(url, f"no end after {options.max_pages} pages", "ingest.options.max_pages")


def _items(url: str, answer: Any, options: HttpOptions) -> list[Any]:
    found = _at(answer, options.items) if options.items else answer
    if not isinstance(found, list):
        raise _corrupt(url, f"{options.items or 'the answer'} is {'absent' if found is None else type(found).__name__}", "a list of images")
    return found


def _listed(location: str, root: Path, options: HttpOptions) -> Iterator[Row]:
    """The rows of a text file of URLs; # begins a comment."""
    web = location.startswith(("http://", "https://"))
    data = fetch(location, options.web, PAGE_BYTES) if web else located(location, root, KIND).read_bytes()
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise BadInput(
            "manifest_encoding", f"{masked(location)} is not UTF-8", constraint="UTF-8", knob="the program that wrote it to UTF-8"
        ) from None
    for number, line in enumerate(lines, 1):
        url, _, label = line.strip().replace("\t", " ").partition(" ")
        if not url or url.startswith("#"):
            continue
        address = urljoin(location, url) if web else url
        yield Row(number, address, label.strip() or _folder_of(address), None, None)


def _folder_of(url: str) -> str:
    """The name of the folder above the file, "" where there is none."""
    return unquote(urlsplit(url).path.rpartition("/")[0].rpartition("/")[2])


def _at(value: Any, path: str) -> Any:
    """What stands at a dotted name in nested objects; None where it does not."""
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _cell(item: Any, path: str) -> Any:
    return _text(_at(item, path)) if path else None


def _text(value: Any) -> Any:
    """Numbers as they are, text as it is; anything else as the bad cell that it is."""
    return value if value is None or isinstance(value, str | int) else [value]


def _with(url: str, name: str, value: Any) -> str:
    """``url`` with its query parameter ``name`` set."""
    parts = urlsplit(url)
    query: Iterable[tuple[str, str]] = [pair for pair in parse_qsl(parts.query, keep_blank_values=True) if pair[0] != name]
    return urlunsplit(parts._replace(query=urlencode([*query, (name, str(value))])))


def _corrupt(url: str, value: str, constraint: str) -> BadInput:
    return BadInput("manifest_corrupt", f"the listing {masked(url)}", value=value, constraint=constraint, knob="ingest.options")
