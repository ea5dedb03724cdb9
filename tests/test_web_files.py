"""Sources of one file on a web server: fetched once for each version, by the policy, whole or not at all."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from source_trees import pictures, png
from test_web import Step, serving

from tasks.core.artifacts import DatasetRef, SetAside
from tasks.core.config import IngestConfig
from tasks.core.errors import BadInput, TrainyardError
from tasks.ingest import ingest
from tasks.sources import Item, fingerprint_of, open_source

WEB = {"web": {"schemes": ["http"], "allow_private": True, "backoff_s": 0.01, "retries": 1}}

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies lie outside a project."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trainyard" / "downloads"


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def labels(kind: str, url: str, root: Path, options: dict[str, Any] = WEB) -> dict[str, str]:
    return {item.name: item.label for item in open_source(kind, url, root, options=options).items if isinstance(item, Item)}


def test_an_archive_is_fetched_once_for_each_version(tmp_path: Path) -> None:
    held: dict[str, Any] = {"etag": '"1"', "body": zipped(pictures(cat=2, dog=1))}
    with serving(lambda path, headers, number: Step(headers={"ETag": held["etag"]}, body=held["body"])) as server:
        url = f"{server.url}/sets/animals.zip?token=secret"
        assert sorted(labels("archive", url, tmp_path).values()) == ["cat", "cat", "dog"]
        assert len(server.asked) == 2, "its version, then itself"
        first = fingerprint_of("archive", url, tmp_path, WEB)
        labels("archive", url, tmp_path)
        assert len(server.asked) == 4, "its version alone, twice"
        held.update(etag='"2"', body=zipped(pictures(cat=1, dog=4)))
        assert fingerprint_of("archive", url, tmp_path, WEB) != first
        assert sorted(labels("archive", url, tmp_path).values()) == ["cat", "dog", "dog", "dog", "dog"]


def test_a_server_that_states_no_version_is_asked_each_time(tmp_path: Path) -> None:
    with serving([Step(body=zipped(pictures(cat=1, dog=1)))]) as server:
        for _ in range(2):
            labels("archive", f"{server.url}/a.zip", tmp_path)
        assert fingerprint_of("archive", f"{server.url}/a.zip", tmp_path, WEB) == ""
    assert len(server.asked) == 5


def test_ingest_takes_a_table_whose_cells_are_urls(tmp_path: Path) -> None:
    images = {f"/{number}.png": png(number) for number in range(4)}

    def answer(path: str, headers: dict[str, str], number: int) -> Step:
        if path == "/photos.csv":
            rows = "".join(f"{server.url}{name},{'cat' if index % 2 else 'dog'}\n" for index, name in enumerate(images))
            return Step(headers={"Last-Modified": "Thu, 03 Dec 2026 10:00:00 GMT"}, body=f"path,label\n{rows}".encode())
        return Step(body=images[path])

    with serving(answer) as server:
        config = IngestConfig(source="table", location=f"{server.url}/photos.csv", options=WEB)
        assert ingest(config, tmp_path).counts == {"cat": 2, "dog": 2}
    assert DatasetRef.load(tmp_path).verify()


@pytest.mark.parametrize(
    ("kind", "name", "options", "steps", "code"),
    [
        ("archive", "a.zip", {}, [Step(body=b"PK")], "url_not_allowed"),
        ("archive", "a.zip", {"web": 3}, [Step()], "params_invalid"),
        ("archive", "a.zip", {**WEB, "colour": 1}, [Step()], "params_invalid"),
        ("archive", "", WEB, [Step()], "source_unavailable"),
        ("archive", "%2e%2e%2f.hidden", WEB, [Step()], "source_unavailable"),
        ("folder", "photos", {}, [Step()], "source_unavailable"),
        ("archive", "a.zip", WEB, [Step(404)], "download_failed"),
        ("archive", "a.zip", WEB, [Step(503)], "source_unavailable"),
        ("archive", "a.zip", WEB, [Step(body=zipped(pictures(cat=9, dog=9)), cut=40)], "download_truncated"),
        ("archive", "a.zip", WEB, [Step(body=b"<html>not found, but 200</html>")], "archive_corrupt"),
        ("parquet", "a.parquet", WEB, [Step(302, {"Location": "http://169.254.169.254/latest"})], "url_not_allowed"),
    ],
)
def test_what_is_refused(kind: str, name: str, options: dict[str, Any], steps: list[Step], code: str, tmp_path: Path, cache_home: Path) -> None:
    with serving(steps) as server, pytest.raises(TrainyardError) as caught:
        labels(kind, f"{server.url}/{name}", tmp_path, options)
    assert caught.value.code == code
    if code != "archive_corrupt":
        assert [path for path in cache_home.rglob("*") if path.is_file() and path.name != "lock"] == []


def test_a_damaged_copy_is_not_kept_by_its_name_alone(tmp_path: Path, cache_home: Path) -> None:
    """A run that died between two versions leaves no version behind, so the next one fetches."""
    body = zipped(pictures(cat=1, dog=1))
    with serving([Step(headers={"ETag": '"1"'}, body=body)]) as server:
        labels("archive", f"{server.url}/a.zip", tmp_path)
        (copy,) = cache_home.rglob("a.zip")
        copy.write_bytes(b"PK half")
        copy.with_name(".version").unlink()
        assert sorted(labels("archive", f"{server.url}/a.zip", tmp_path).values()) == ["cat", "dog"]


def test_larger_than_an_archive_may_unpack_to_is_not_fetched(tmp_path: Path) -> None:
    with serving([Step(body=zipped(pictures(cat=3, dog=3)))]) as server:
        config = IngestConfig(source="archive", location=f"{server.url}/a.zip", options=WEB, max_unpacked_bytes=100)
        with pytest.raises(BadInput) as caught:
            ingest(config, tmp_path)
    assert caught.value.code == "download_too_large"


def test_a_tables_relative_names_lie_beside_it_on_the_server(tmp_path: Path) -> None:
    """By the same policy; what leads out of the manifest's folder is refused as it is on a disk, and no other host is asked."""
    names = ["a.png", "deep/b ü#1?.png", "./deep/../a.png", "../up.png", "/root.png", "gone.png", "C:\\c.png"]
    images = {"/sets/v1/a.png": png(1), "/sets/v1/deep/b%20%C3%BC%231%3F.png": png(2), "/sets/up.png": png(3), "/root.png": png(4)}

    def answer(path: str, headers: dict[str, str], number: int) -> Step:
        if path.startswith("/sets/v1/photos.csv"):
            return Step(headers={"ETag": '"1"'}, body=b"path,label\n" + "".join(f"{name},cat\n" for name in names).encode())
        return Step(body=images[path]) if path in images else Step(404)

    with serving(answer) as server:
        found = list(open_source("table", f"{server.url}/sets/v1/photos.csv?sig=secret", tmp_path, options=WEB).items)
        assert fingerprint_of("table", f"{server.url}/sets/v1/photos.csv", tmp_path, WEB) == '"1"'
        assert {path for path, _ in server.asked} == {"/sets/v1/photos.csv?sig=secret", "/sets/v1/photos.csv", "/sets/v1/gone.png", *list(images)[:2]}
    items = {item.name.removeprefix(server.url): item.data for item in found if isinstance(item, Item)}
    assert items == {path: images[path] for path in list(images)[:2]}
    aside = {item.name.removeprefix(server.url): item.code for item in found if isinstance(item, SetAside)}
    assert aside == {
        "../up.png": "path_outside_root",
        "/root.png": "path_outside_root",
        "C:\\c.png": "path_outside_root",
        "/sets/v1/gone.png": "download_failed",
    }


@pytest.mark.parametrize("place", ["/shards/train-{}.tar", "/{}/train.tar"])
def test_a_range_of_shards_is_fetched_as_one_source(place: str, tmp_path: Path) -> None:
    held = {place.format(f"{number:02d}"): shard(number) for number in range(9, 12)}
    tags = dict.fromkeys(held, '"1"')
    with serving(lambda path, headers, number: Step(headers={"ETag": tags[path]}, body=held[path]) if path in held else Step(404)) as server:
        url = f"{server.url}{place.format('{09..11}')}"
        first = labels("webdataset", url, tmp_path)
        assert sorted(name.rpartition("/")[2] for name in first) == ["10.png", "11.png", "9.png"]
        asked, before = len(server.asked), fingerprint_of("webdataset", url, tmp_path, WEB)
        assert labels("webdataset", url, tmp_path) == first
        assert len(server.asked) == asked + 6, "the versions alone"
        tags[last := list(held)[-1]] = '"2"'
        held[last] = shard(50)
        assert fingerprint_of("webdataset", url, tmp_path, WEB) != before
        assert sorted(name.rpartition("/")[2] for name in labels("webdataset", url, tmp_path)) == ["10.png", "50.png", "9.png"]
        with pytest.raises(TrainyardError) as caught:
            labels("webdataset", f"{server.url}{place.format('{09..12}')}", tmp_path)
        assert caught.value.code == "download_failed"


def shard(number: int) -> bytes:
    """A shard of one sample."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in ((f"{number}.png", png(number)), (f"{number}.cls", str(number % 2).encode())):
            facts = tarfile.TarInfo(name)
            facts.size = len(data)
            archive.addfile(facts, io.BytesIO(data))
    return buffer.getvalue()
