"""Sources in object stores: a real S3 server on loopback, listings of more than a page, cut lines, and what a copy keeps."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from source_trees import png

from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput, Transient
from tasks.core.process import spare_port
from tasks.sources import Item, fingerprint_of, open_source, remote

BUCKET = "yard"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server."""
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket, and the environment that leads any driver there."""
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-store",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "TRIES", 2)
    files = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    files.mkdir(BUCKET)
    yield files
    files.rm(BUCKET, recursive=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project's root."""
    (tmp_path / "params.yaml").touch()
    return tmp_path


def read(kind: str, url: str, root: Path, **options: Any) -> list[Item]:
    found = list(open_source(kind, url, root, options=options).items)
    assert not [item for item in found if isinstance(item, SetAside)]
    return [item for item in found if isinstance(item, Item)]


def test_a_folder_of_more_keys_than_a_page_of_the_listing(store: Any, root: Path) -> None:
    wanted = {f"{label}/{index:04d}.png": png(index * 2 + (label == "dog")) for label in ("cat", "dog") for index in range(501)}
    store.pipe({f"{BUCKET}/photos/{name}": data for name, data in wanted.items()})
    store.touch(f"{BUCKET}/photos/empty/")  # the marker that consoles leave for a folder
    items = read("folder", f"s3://{BUCKET}/photos", root)
    assert {item.name: item.data for item in items} == wanted
    assert items == read("folder", f"s3://{BUCKET}/photos/", root)


def test_only_what_changed_is_downloaded_again(store: Any, root: Path) -> None:
    url = f"s3://{BUCKET}/photos"
    store.pipe({f"{BUCKET}/photos/{label}/{index}.png": png(index) for label in ("cat", "dog") for index in range(3)})
    before = fingerprint_of("folder", url, root)
    first = read("folder", url, root)
    assert before == fingerprint_of("folder", url, root)
    pool = next((root / ".trainyard" / "downloads").glob("*/files"))
    kept = {path.name: path.stat().st_ino for path in pool.iterdir()}
    store.pipe(f"{BUCKET}/photos/cat/0.png", png(77))
    store.rm(f"{BUCKET}/photos/dog/2.png")
    assert fingerprint_of("folder", url, root) != before
    second = read("folder", url, root)
    assert {item.name for item in first} - {item.name for item in second} == {"dog/2.png"}
    assert next(item.data for item in second if item.name == "cat/0.png") == png(77)
    now = {path.name: path.stat().st_ino for path in pool.iterdir()}
    assert {name: now[name] for name in kept} == kept
    assert len(now) == len(kept) + 1


def test_a_run_that_reads_keeps_what_it_began_to_read(store: Any, root: Path) -> None:
    store.pipe({f"{BUCKET}/photos/{label}/{index}.png": png(index) for label in ("cat", "dog") for index in range(3)})
    reading = iter(open_source("folder", f"s3://{BUCKET}/photos", root).items)
    first = next(reading)
    store.rm(f"{BUCKET}/photos", recursive=True)
    store.pipe({f"{BUCKET}/photos/{label}/new.png": png(9) for label in ("cat", "dog")})
    assert len(read("folder", f"s3://{BUCKET}/photos", root)) == 2
    rest = list(reading)
    assert isinstance(first, Item)
    assert [item.name for item in rest if isinstance(item, Item)] == ["cat/1.png", "cat/2.png", "dog/0.png", "dog/1.png", "dog/2.png"]


def test_archives_and_globs_of_shards(store: Any, root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = tmp_path_factory.mktemp("made")
    for label in ("cat", "dog"):
        (made / "in" / label).mkdir(parents=True)
        (made / "in" / label / "1.png").write_bytes(png(len(label)))
        (made / "in" / label / "2.png").write_bytes(png(len(label) + 10))
    packed = Path(shutil.make_archive(str(made / "photos"), "zip", made / "in"))
    store.put(str(packed), f"{BUCKET}/photos.zip")
    assert {item.name for item in read("archive", f"s3://{BUCKET}/photos.zip", root)} == {"cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"}
    from test_webdataset import shard

    for index in range(3):
        path = shard(made / f"t-{index:03d}.tar", [("1.png", png(index)), ("1.txt", b"cat")])
        store.put(str(path), f"{BUCKET}/shards/{path.name}")
    store.pipe(f"{BUCKET}/shards/README.md", b"no shard")
    names = [f"t-{index:03d}.tar/1.png" for index in range(3)]
    for location in ("shards/t-*.tar", "shards", "shards/t-{000..002}.tar"):
        assert [item.name for item in read("webdataset", f"s3://{BUCKET}/{location}", root)] == names


class Cutting:
    """A line to ``target`` (host, port) that is cut after ``budget`` bytes of answers, as long as it is not mended."""

    def __init__(self, target: tuple[str, int], budget: int) -> None:
        self.target, self.left, self.cuts = target, budget, 0
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near = self._door.accept()[0]
            except OSError:
                return
            far = socket.create_connection(self.target)
            threading.Thread(target=self._copy, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, True), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(65536):
                if answers and self.left < len(data):
                    self.cuts += 1
                    break
                self.left -= len(data) if answers else 0
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._door.close()


def test_a_cut_line_publishes_nothing_and_the_next_call_goes_on(store: Any, server: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 100_000)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    data = os.urandom(1_000_000)
    store.pipe(f"{BUCKET}/big.tar", data)
    host, port = server.removeprefix("http://").split(":")
    line = Cutting((host, int(port)), 450_000)
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.url)
    url = f"s3://{BUCKET}/big.tar"
    with pytest.raises(Transient) as caught:
        remote.mirror(url, root)
    assert caught.value.code == "source_unavailable"
    assert "a-secret-of-the-store" not in str(caught.value)
    assert line.cuts
    folder = next((root / ".trainyard" / "downloads").iterdir())
    assert not list((folder / "files").iterdir())
    assert not (folder / "views").exists()
    so_far = next((folder / "parts").iterdir()).stat().st_size
    assert so_far in range(100_000, 500_000, 100_000)
    line.left = 1_000_000 - so_far + 50_000  # too little for all of it: what is there is not asked for again
    path = remote.mirror(url, root)
    line.close()
    assert path.read_bytes() == data
    assert not list((folder / "parts").iterdir())


def test_a_file_that_changes_between_two_calls_begins_anew(store: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 100_000)
    url = f"s3://{BUCKET}/big.tar"
    store.pipe(f"{BUCKET}/big.tar", b"a" * 300_000)
    files, _ = remote._listing(*remote._store(url, "s3"), url)
    downloads = root / ".trainyard" / "downloads" / "x"
    for name in ("files", "parts"):
        (downloads / name).mkdir(parents=True)
    (downloads / "parts" / remote._key(files[0])).write_bytes(b"a" * 100_000)
    store.pipe(f"{BUCKET}/big.tar", b"b" * 300_000)
    with pytest.raises(Transient, match="changed as it was read"):
        remote._fetch(remote._store(url, "s3")[0], files[0], downloads, url)
    assert not list((downloads / "files").iterdir())
    assert remote.mirror(url, root).read_bytes() == b"b" * 300_000


@pytest.mark.parametrize(
    ("location", "said"),
    [
        (f"s3://{BUCKET}/nothing", "does not exist"),
        (f"s3://{BUCKET}/nothing/*.tar", "nothing is there"),
        ("s3://someone:a-secret@yard/photos", r"holds no login.*\*\*\*@yard"),
        ("nosuch://yard/photos", "cannot be opened"),
        ("zip://x::s3://yard/photos.zip", "leads over another"),
        ("gs://yard/photos", r"driver of gs:// is not installed.*trainyard\[gcs\]"),
        ("http://169.254.169.254/latest", "over HTTP"),
    ],
)
def test_what_cannot_be_opened_is_refused_in_a_line(store: Any, root: Path, location: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        open_source("webdataset" if "*" in location else "folder", location, root)
    assert caught.value.code == "source_unavailable"
    assert "a-secret" not in str(caught.value)


def test_names_that_no_folder_can_hold_are_refused(store: Any, root: Path) -> None:
    for names in (["cat/../../x.png"], ["cat", "cat/1.png"], [f"cat/{'x' * 300}.png"]):
        store.pipe({f"{BUCKET}/odd/{name}": png(1) for name in names})
        with pytest.raises(BadInput):
            remote.mirror(f"s3://{BUCKET}/odd", root)
        store.rm(f"{BUCKET}/odd", recursive=True)
    assert not list(root.rglob("x.png"))


def test_a_local_file_by_url_and_a_copy_outside_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        (tmp_path / "photos" / label / "1.png").write_bytes(png(len(label)))
    assert [item.name for item in read("folder", f"file://{tmp_path}/photos", tmp_path)] == ["cat/1.png", "dog/1.png"]
    assert not (tmp_path / ".trainyard").exists()
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/remote-test/{label}/1.png": png(len(label)) for label in ("cat", "dog")})
    assert [item.name for item in read("folder", "memory://remote-test", tmp_path)] == ["cat/1.png", "dog/1.png"]
    memory.rm("/remote-test", recursive=True)
    assert not (tmp_path / ".trainyard").exists()
    assert (home / "trainyard" / "downloads").is_dir()


def test_old_views_go_and_young_ones_stay(store: Any, root: Path) -> None:
    url = f"s3://{BUCKET}/photos"
    store.pipe(f"{BUCKET}/photos/cat/1.png", png(1))
    old = remote.mirror(url, root)
    store.pipe(f"{BUCKET}/photos/cat/1.png", png(2))
    young = remote.mirror(url, root)
    files = young.parents[1] / "files"
    long_ago = young.stat().st_mtime - remote.KEEP_S - 60
    for path in (old, *files.iterdir()):
        os.utime(path, (long_ago, long_ago))
    assert remote.mirror(url, root) == young
    assert not old.exists()
    assert len(list(files.iterdir())) == 1
    assert (young / "cat" / "1.png").read_bytes() == png(2)


STORES = [f"s3://{BUCKET}/photos/"]


def named(root: Path, names: list[str], kind: str = "table", **options: Any) -> tuple[dict[str, bytes], dict[str, str]]:
    """What rows that name ``names`` give: bytes by name, and codes."""
    if kind == "sql":
        with contextlib.closing(sqlite3.connect(root / "rows.db")) as database:
            database.execute("create table rows (id integer primary key, path text, label text)")
            database.executemany("insert into rows (path, label) values (?, 'cat')", [(name,) for name in names])
            database.commit()
        location, options = "sqlite:///rows.db", {"table": "rows", **options}
    elif kind == "labelstudio":
        choice = {"type": "choices", "from_name": "class", "value": {"choices": ["cat"]}}
        tasks = [{"data": {"image": name}, "annotations": [{"result": [choice]}]} for name in names]
        (root / (location := "export.json")).write_text(json.dumps(tasks))
    elif kind == "coco":
        images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
        labels = [{"id": number, "image_id": number, "category_id": 1} for number in range(len(names))]
        (root / (location := "coco.json")).write_text(json.dumps({"images": images, "annotations": labels, "categories": [{"id": 1, "name": "cat"}]}))
    else:
        (root / (location := "rows.csv")).write_text("path,label\n" + "".join(f"{name},cat\n" for name in names))
    found = list(open_source(kind, location, root, options=options).items)
    return {item.name: item.data for item in found if isinstance(item, Item)}, {item.name: item.code for item in found if isinstance(item, SetAside)}


@pytest.mark.parametrize("kind", ["table", "sql", "coco", "labelstudio"])
def test_rows_may_name_images_below_the_folders_of_stores_that_options_name(kind: str, store: Any, root: Path) -> None:
    """Attack: another folder of the same beginning, a way out by dots, a bucket that nobody named; with a worker's credentials all would open."""
    store.pipe({f"{BUCKET}/photos/a.png": png(1), f"{BUCKET}/photos/deep/b ü.png": png(2), f"{BUCKET}/photos-secret/c.png": png(3)})
    at = f"s3://{BUCKET}/"
    names = [
        f"{at}photos/a.png",
        f"{at}photos/deep/b ü.png",
        f"{at}photos/gone.png",
        f"{at}photos-secret/c.png",
        f"{at}photos/../photos-secret/c.png",
        f"{at}photos//a.png",
        "s3://other/photos/a.png",
        "simplecache::s3://yard/photos/a.png",
    ]
    items, aside = named(root, names, kind, stores=STORES)
    shown = [f"rows/{number + 1}" if kind == "sql" else name for number, name in enumerate(names)]
    codes = ["missing_file", "url_not_allowed", "path_outside_root", "path_outside_root", "url_not_allowed", "url_not_allowed"]
    assert items == dict(zip(shown[:2], (png(1), png(2)), strict=True))
    assert aside == dict(zip(shown[2:], codes, strict=True))


def test_without_a_word_in_options_no_row_reaches_a_store(store: Any, root: Path) -> None:
    store.pipe({f"{BUCKET}/photos/a.png": png(1)})
    assert named(root, [f"s3://{BUCKET}/photos/a.png"]) == ({}, {f"s3://{BUCKET}/photos/a.png": "url_not_allowed"})


@pytest.mark.parametrize("kind", ["table", "sql"])
def test_a_store_that_is_away_is_the_runs_affair_not_a_rows(kind: str, store: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{spare_port()}")
    monkeypatch.setattr(remote, "TRIES", 1)
    with pytest.raises(Transient, match="does not answer"):
        named(root, [f"s3://{BUCKET}/photos/a.png"], kind, stores=STORES)


@pytest.mark.parametrize(
    "folder", ["s3://", "s3:///", "https://x.test/a", "file:///etc", "/etc", "s3://me:secret@yard/photos", "simplecache::s3://yard/a", "zip://a"]
)
def test_what_is_no_folder_of_a_store_is_refused_as_an_option(folder: str, root: Path) -> None:
    with pytest.raises(BadInput, match="stores") as caught:
        named(root, ["a.png"], stores=[folder])
    assert "secret" not in str(caught.value)
