"""Images behind URLs: in tables, in JSON APIs with pages, in lists; on real servers on loopback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from source_trees import png, write_tree
from test_remote import BUCKET, server, store  # noqa: F401  the fixtures
from test_web import Answer, Server, Step, serving

from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput, TrainyardError, Transient
from tasks.sources import Item, fingerprint_of, open_source

WEB = {"schemes": ["http"], "allow_private": True, "backoff_s": 0.01, "retries": 1, "timeout_s": 10}


def files(found: Mapping[str, bytes | Step]) -> Answer:
    """A server of these files; another path is 404."""

    def answer(path: str, headers: dict[str, str], number: int) -> Step:
        content = found.get(path, Step(status=404))
        return content if isinstance(content, Step) else Step(body=content)

    return answer


def read(kind: str, location: str, root: Path, **options: Any) -> tuple[list[Item], dict[str, str]]:
    everything = list(open_source(kind, location, root, options=options).items)
    return [one for one in everything if isinstance(one, Item)], {one.name: one.code for one in everything if isinstance(one, SetAside)}


def test_a_table_of_urls_paths_and_failures(tmp_path: Path) -> None:
    pictures = {f"/{number}.png": png(number) for number in range(20)}
    pictures["/signed.png?key=secret"] = png(90)
    broken = {"/cut.png": Step(body=png(50), cut=20), "/away.png": Step(status=503)}
    with serving(files({**pictures, **broken})) as site:
        names = [*(f"{site.url}/{number}.png" for number in range(20)), "local.png", f"{site.url}/signed.png?key=secret"]
        bad = [f"{site.url}/cut.png", f"{site.url}/away.png", f"{site.url}/none.png", "ftp://x.test/1.png", "http://user:pw@x.test/1.png?a=b"]
        rows = "".join(f"{name},{('cat', 'dog')[index % 2]}\n" for index, name in enumerate([*names, *bad])) + f"{names[0]},cat\n"
        write_tree(tmp_path, {"m.csv": f"url,label\n{rows}".encode(), "local.png": png(99)})
        items, aside = read("table", "m.csv", tmp_path, web=WEB)
        assert sum(path == "/0.png" for path, _ in site.asked) == 1, "a URL that stands twice is fetched once"
        without, all_aside = read("table", "m.csv", tmp_path)
    assert [item.data for item in items] == [*(png(number) for number in range(20)), png(99), png(90)]
    assert [item.name for item in items[:21]] == names[:21]
    assert items[21].name.startswith(f"{site.url}/signed.png#")
    assert "secret" not in items[21].name
    assert aside == {
        f"{site.url}/cut.png": "download_truncated",
        f"{site.url}/away.png": "source_unavailable",
        f"{site.url}/none.png": "download_failed",
        "ftp://x.test/1.png": "url_not_allowed",
        "http://***@x.test/1.png": "url_not_allowed",
    }
    assert [item.name for item in without] == ["local.png"]
    assert set(all_aside.values()) == {"url_not_allowed"}


def test_where_no_url_can_be_fetched_the_source_is_away(tmp_path: Path) -> None:
    with serving([Step(status=503)]) as site:
        write_tree(tmp_path, {"m.csv": f"url,label\n{site.url}/1.png,cat\n{site.url}/2.png,dog\n".encode()})
        with pytest.raises(Transient, match="503"):
            read("table", "m.csv", tmp_path, web=WEB)


def test_a_manifest_in_a_store_names_files_beside_it(store: Any, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "params.yaml").touch()
    store.pipe({f"{BUCKET}/set/images/{name}.png": png(number) for number, name in enumerate("abc")})
    rows = "path,label\nimages/a.png,cat\nimages/b.png,dog\nimages/none.png,dog\n../images/c.png,cat\n"
    store.pipe(f"{BUCKET}/set/m.csv", rows.encode())
    items, aside = read("table", f"s3://{BUCKET}/set/m.csv", tmp_path)
    assert [(item.name, item.label, item.data) for item in items] == [("images/a.png", "cat", png(0)), ("images/b.png", "dog", png(1))]
    assert aside == {"images/none.png": "missing_file", "../images/c.png": "path_outside_root"}


def api(pages: list[Any], images: dict[str, bytes], way: str) -> Answer:
    """A JSON API of ``pages``: linked by URL, by a cursor, or by number."""

    def answer(path: str, headers: dict[str, str], number: int) -> Step:
        if path in images:
            return Step(body=images[path])
        query = dict(parse_qsl(urlsplit(path).query))
        at = int(query.get("page" if way == "page" else "after", 1 if way == "page" else 0)) - (way == "page")
        body: dict[str, Any] = {"data": {"items": pages[at] if at < len(pages) else []}}
        if way != "page" and at + 1 < len(pages):
            body["meta"] = {"next": f"/list?after={at + 1}" if way == "next" else at + 1}
        return Step(body=json.dumps(body).encode())

    return answer


WAYS: dict[str, dict[str, Any]] = {"next": {"next": "meta.next"}, "cursor": {"next": "meta.next", "cursor": "after"}, "page": {"page": "page"}}


@pytest.mark.parametrize("way", WAYS)
def test_an_api_page_by_page(way: str, tmp_path: Path) -> None:
    images = {f"/img/{number}.png": png(number) for number in range(7)}
    listed = [{"file": {"url": path}, "what": ("cat", "dog")[number % 2], "set": "train"} for number, path in enumerate(images)]
    pages = [listed[:3], listed[3:6], listed[6:]]
    options = {"items": "data.items", "image": "file.url", "label": "what", "split": "set", "web": WEB, **WAYS[way]}
    with serving(api(pages, images, way)) as site:
        items, aside = read("http", f"{site.url}/list", tmp_path, **options)
        before = fingerprint_of("http", f"{site.url}/list", tmp_path, options)
        assert before == fingerprint_of("http", f"{site.url}/list", tmp_path, options)
        pages[2].append({"file": {"url": "/img/0.png"}, "what": "dog", "set": "train"})
        assert fingerprint_of("http", f"{site.url}/list", tmp_path, options) != before
    assert not aside
    assert [(item.name, item.label, item.split) for item in items] == [
        (f"{site.url}{path}", ("cat", "dog")[number % 2], "train") for number, path in enumerate(images)
    ]
    assert [item.data for item in items] == list(images.values())


def refusal(site: Server, tmp_path: Path, **options: Any) -> TrainyardError:
    with pytest.raises(TrainyardError) as caught:
        read("http", f"{site.url}/list?token=secret", tmp_path, **{"web": WEB, **options})
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    return caught.value


def test_listings_that_go_round_lie_or_have_no_end(tmp_path: Path) -> None:
    item = {"image": "/1.png", "label": "cat"}

    def turning(path: str, headers: dict[str, str], number: int) -> Step:
        return Step(body=json.dumps({"items": [item], "next": "/list?at=1"}).encode())

    def endless(path: str, headers: dict[str, str], number: int) -> Step:
        return Step(body=json.dumps({"items": [item], "next": f"/list?at={number}"}).encode())

    with serving(turning) as site:
        assert "came before" in str(refusal(site, tmp_path, items="items", next="next"))
        assert "came before" in str(refusal(site, tmp_path, items="items", page="page")), "an API that gives its last page for ever"
    with serving(endless) as site:
        assert "no end after 5 pages" in str(refusal(site, tmp_path, items="items", next="next", max_pages=5))
    for body, said in ((b"<html>", "no JSON"), (b"{}", "absent"), (b'{"items": {"a": 1}}', "dict"), (b'{"items": [], "next": null}', "no rows")):
        with serving([Step(body=body)]) as site:
            assert said in str(refusal(site, tmp_path, items="items", next="next"))
    with serving([Step(body=json.dumps({"items": [item], "next": {"a": 1}}).encode())]) as site:
        assert "next is a dict" in str(refusal(site, tmp_path, items="items", next="next"))
    with serving([Step(status=401)]) as site:
        assert isinstance(refusal(site, tmp_path), BadInput)
        assert refusal(site, tmp_path, page="p", next="n").code == "params_invalid"


def test_bad_items_of_an_api_are_set_aside_by_name(tmp_path: Path) -> None:
    items = [
        {"image": "/1.png", "label": "cat"},
        {"image": "/2.png", "label": 7},
        {"image": None, "label": "cat"},
        {"image": "/3.png", "label": ["cat"]},
        {"image": "/4.png"},
        "no object",
        {"image": "http://169.254.169.254/latest", "label": "cat"},
    ]
    with serving(files({"/list": json.dumps(items).encode(), "/1.png": png(1), "/2.png": png(2)})) as site:
        found, aside = read("http", f"{site.url}/list", tmp_path, web=WEB)
    assert [(item.name, item.label) for item in found] == [(f"{site.url}/1.png", "cat"), (f"{site.url}/2.png", "7")]
    line = f"{site.url}/list line"
    assert aside == {
        f"{line} 3": "bad_row",
        f"{site.url}/3.png": "bad_row",
        f"{site.url}/4.png": "missing_label",
        f"{line} 6": "bad_row",
        "http://169.254.169.254/latest": "url_not_allowed",
    }


@pytest.mark.parametrize("on_the_web", [True, False])
def test_a_list_of_urls(on_the_web: bool, tmp_path: Path) -> None:
    images = {"/cats/1.png": png(1), "/dog%20s/2.png": png(2), "/x/3.png": png(3)}
    known: dict[str, bytes | Step] = dict(images)
    with serving(files(known)) as site:
        text = f"# pictures\n{site.url}/cats/1.png\n\n{site.url}/dog%20s/2.png\n{site.url}/x/3.png\tcats\n".encode()
        known["/list.txt"] = text
        write_tree(tmp_path, {"list.txt": text})
        location = f"{site.url}/list.txt" if on_the_web else "list.txt"
        items, aside = read("http", location, tmp_path, lines=True, web=WEB)
    assert not aside
    assert [(item.label, item.data) for item in items] == [("cats", png(1)), ("dog s", png(2)), ("cats", png(3))]


def test_by_default_this_machine_is_not_asked(tmp_path: Path) -> None:
    with serving(files({"/list": b"[]"})) as site:
        with pytest.raises(BadInput) as caught:
            read("http", f"{site.url}/list", tmp_path)
        assert caught.value.code == "url_not_allowed"
        assert not site.asked
    shutil.rmtree(tmp_path)
