"""Databases as sources: odd tables and cells, secrets that no message shows, and connections that a real PostgreSQL drops mid-stream."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2  # type: ignore[import-untyped]
import pytest
from source_trees import png

from flows import postgres
from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput, Transient
from tasks.sources import Item, Limits, fingerprint_of, open_source

PASSWORD = "s3cret-of-the-test"


def database(folder: Path, *statements: tuple[str, list[tuple[Any, ...]]]) -> str:
    connection = sqlite3.connect(folder / "x.db")
    for statement, rows in statements:
        connection.executemany(statement, rows) if rows else connection.execute(statement)
    connection.commit()
    connection.close()
    return "sqlite:///x.db"


def pictures(folder: Path, count: int = 6) -> str:
    rows = [(number, png(number), "cat" if number % 2 else "dog") for number in range(1, count + 1)]
    return database(
        folder, ("CREATE TABLE images (id INTEGER PRIMARY KEY, image BLOB, label TEXT)", []), ("INSERT INTO images VALUES (?, ?, ?)", rows)
    )


def read(location: str, root: Path, **options: Any) -> tuple[list[Item], list[tuple[str, str]]]:
    found = list(open_source("sql", location, root, options=options).items)
    return [item for item in found if isinstance(item, Item)], [(item.name, item.code) for item in found if isinstance(item, SetAside)]


def refusal(location: str, root: Path, **options: Any) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(location, root, **options)
    assert "\n" not in str(caught.value)
    assert PASSWORD not in str(caught.value)
    return caught.value


def test_a_table_is_read_in_the_order_of_its_key_whatever_the_batch(tmp_path: Path) -> None:
    location = pictures(tmp_path)
    items, aside = read(location, tmp_path, table="images", batch=1)
    assert items == [Item(f"images/{number}", "cat" if number % 2 else "dog", png(number)) for number in range(1, 7)]
    assert aside == []
    assert read(location, tmp_path, table="images", batch=4) == (items, [])


def test_a_query_may_join_name_and_filter(tmp_path: Path) -> None:
    pictures(tmp_path)
    location = database(
        tmp_path,
        ("CREATE TABLE facts (image_id INTEGER, part TEXT, patient INTEGER)", []),
        ("INSERT INTO facts VALUES (?, ?, ?)", [(1, "train", 7), (2, "test", None)]),
    )
    query = (
        'SELECT i.id AS "key:no", i.image, i.label || \'%:x\' AS label, part AS split, patient AS "group" '
        "FROM images i JOIN facts f ON f.image_id = i.id"
    )
    items, _ = read(location, tmp_path, query=query, key="key:no")
    assert items == [Item("query/1", "cat%:x", png(1), "train", "7"), Item("query/2", "dog%:x", png(2), "test", None)]


def test_text_is_a_path_below_the_folder_and_none_leads_out(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(png(1))
    (tmp_path / "outside.png").write_bytes(png(2))
    (tmp_path / "photos" / "link.png").symlink_to(tmp_path / "outside.png")
    cells = ["a.png", "./a.png", "../outside.png", "/etc/passwd", "link.png", "gone.png", "https://example.org/a.png", None, 7]
    location = database(
        tmp_path, ("CREATE TABLE t (id INTEGER PRIMARY KEY, path, label TEXT)", []), ("INSERT INTO t VALUES (?, ?, 'cat')", list(enumerate(cells)))
    )
    items, aside = read(location, tmp_path, table="t", folder="photos")
    assert [(item.name, item.data) for item in items] == [("t/0", png(1)), ("t/1", png(1))]
    codes = ["path_outside_root", "path_outside_root", "symlink", "missing_file", "url_not_allowed", "empty_file", "bad_row"]
    assert aside == [(f"t/{number}", code) for number, code in enumerate(codes, 2)]


def test_names_are_quoted_and_nothing_can_be_written(tmp_path: Path) -> None:
    name, column = 'im"ages; DROP TABLE keep; --', 'la"bel %(x)s :y'
    quoted = [part.replace('"', '""') for part in (name, column)]
    location = database(
        tmp_path,
        ("CREATE TABLE keep (id INTEGER PRIMARY KEY)", []),
        (f'CREATE TABLE "{quoted[0]}" ("select" INTEGER PRIMARY KEY, image BLOB, "{quoted[1]}" TEXT)', []),
        (f'INSERT INTO "{quoted[0]}" VALUES (?, ?, ?)', [(1, png(1), "cat")]),
    )
    items, _ = read(location, tmp_path, table=name, label=column)
    assert [(item.label, item.data) for item in items] == [("cat", png(1))]
    assert refusal(location, tmp_path, query="DELETE FROM keep", key="id").code == "params_invalid"
    assert refusal(location, tmp_path, query="SELECT 1; DROP TABLE keep", key="id").code == "params_invalid"
    with sqlite3.connect(tmp_path / "x.db") as connection:
        assert connection.execute("SELECT count(*) FROM keep").fetchone() == (0,)


def test_a_key_that_repeats_is_null_or_missing_is_refused(tmp_path: Path) -> None:
    location = database(
        tmp_path,
        ("CREATE TABLE t (a INTEGER, b INTEGER, c REAL, image BLOB, label TEXT)", []),
        ("INSERT INTO t VALUES (?, ?, ?, ?, 'cat')", [(1, 1, 0.5, png(1)), (1, None, 1.5, png(2))]),
    )
    assert refusal(location, tmp_path, table="t").knob == "ingest.options.key"
    assert [refusal(location, tmp_path, table="t", key=key).code for key in "abc"] == ["manifest_corrupt"] * 3
    assert refusal(location, tmp_path, table="t", key="nokey").code == "missing_column"


def test_what_cannot_be_used_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = pictures(tmp_path)
    (tmp_path / "notes.db").write_text("no database")
    assert "images" in refusal(location, tmp_path, table="imagse").constraint
    assert refusal("sqlite:///gone.db", tmp_path, table="images").code == "source_unavailable"
    assert refusal("sqlite:///notes.db", tmp_path, table="images").code == "source_unavailable"
    assert refusal("mongo://host/x", tmp_path, table="images").code == "source_unavailable"
    assert refusal("postgresql+asyncpg://host/x", tmp_path, table="images").constraint.startswith("a driver that is not asynchronous")
    assert refusal(location, tmp_path).code == "params_invalid"
    assert refusal(location, tmp_path, query="SELECT nothing FROM images", key="id").code == "source_unavailable"
    assert refusal(f"postgresql://me:{PASSWORD}@host/x", tmp_path, table="images").code == "params_invalid"
    assert refusal(f"postgresql://me@host/x?password={PASSWORD}", tmp_path, table="images").code == "params_invalid"
    monkeypatch.delenv("UNSET_URL", raising=False)
    assert refusal("env:UNSET_URL", tmp_path, table="images").value == "UNSET_URL"
    monkeypatch.setenv("X_URL", location)
    assert len(read("env:X_URL", tmp_path, table="images")[0]) == 6
    empty = database(tmp_path, ("CREATE TABLE none (id INTEGER PRIMARY KEY, image BLOB, label TEXT)", []))
    assert refusal(empty, tmp_path, table="none").code == "empty_manifest"


def test_large_images_stay_in_the_database_and_memory_is_flat(tmp_path: Path) -> None:
    location = database(
        tmp_path,
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, image BLOB, label TEXT)", []),
        ("INSERT INTO t VALUES (?, zeroblob(?), 'cat')", [(number, 1_000_000) for number in range(1, 61)] + [(61, 50_000_000)]),
    )
    tracemalloc.start()
    try:
        seen = [type(item) for item in open_source("sql", location, tmp_path, Limits(max_file_bytes=2_000_000), {"table": "t", "batch": 2}).items]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == [Item] * 60 + [SetAside]
    assert peak < 20_000_000


def test_the_fingerprint_moves_with_rows_and_with_the_column_of_changes(tmp_path: Path) -> None:
    location = pictures(tmp_path)
    options = {"table": "images"}
    first = fingerprint_of("sql", location, tmp_path, options)
    assert first == fingerprint_of("sql", location, tmp_path, options)
    dated = {**options, "updated": "changed"}
    database(tmp_path, ("ALTER TABLE images ADD COLUMN changed INTEGER", []), ("UPDATE images SET changed = ?", [(1,)]))
    before = fingerprint_of("sql", location, tmp_path, dated)
    database(tmp_path, ("UPDATE images SET label = 'dog', changed = ? WHERE id = 1", [(2,)]))
    assert fingerprint_of("sql", location, tmp_path, dated) != before
    assert fingerprint_of("sql", location, tmp_path, options) == first
    database(tmp_path, ("INSERT INTO images VALUES (?, ?, 'cat', 3)", [(9, png(9))]))
    assert fingerprint_of("sql", location, tmp_path, options) != first


class Server:
    """A PostgreSQL of our own on loopback."""

    def __init__(self, port: int) -> None:
        self.port, self.location = port, f"postgresql+psycopg2://{postgres.OWNER}@127.0.0.1:{port}/postgres"

    def run(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        connection = psycopg2.connect(host="127.0.0.1", port=self.port, user=postgres.OWNER, password=PASSWORD, dbname="postgres")
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement, values)
                return list(cursor.fetchall()) if cursor.description else []
        finally:
            connection.close()

    def drop_readers(self) -> int:
        return len(self.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = current_user"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    root = Path(tempfile.mkdtemp(prefix="trainyard-sql-"))
    root.chmod(0o755)
    process = None
    try:
        cluster = postgres.find(root)
        if isinstance(cluster, str):
            pytest.skip(cluster)
        cluster.make(PASSWORD)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen(
            cluster.command(port),
            env=postgres.ENVIRONMENT,
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **postgres.identity(cluster.user),
        )
        deadline = time.monotonic() + 30
        while not postgres.answers(port, PASSWORD):
            assert process.poll() is None, "PostgreSQL ended"
            assert time.monotonic() < deadline, "PostgreSQL did not become ready"
            time.sleep(0.1)
        made = Server(port)
        made.run('CREATE TABLE "Images" (id uuid PRIMARY KEY, image bytea, label text, split text)')
        values = ", ".join(["(md5(%s)::uuid, %s, %s, NULL)"] * 200)
        cells = [cell for number in range(200) for cell in (str(number), png(number), "cat" if number % 2 else "dog")]
        made.run(f'INSERT INTO "Images" VALUES {values}', tuple(cells))
        yield made
    finally:
        if process is not None:
            process.terminate()
            process.wait(30)
        shutil.rmtree(root)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("PHOTOS_PASSWORD", PASSWORD)
    return {"table": "Images", "password": "env:PHOTOS_PASSWORD", "batch": 5}


def test_connections_that_drop_mid_stream_lose_and_double_nothing(server: Server, options: dict[str, Any], tmp_path: Path) -> None:
    whole, aside = read(server.location, tmp_path, **options)
    assert len(whole) == 200
    assert aside == []
    seen, dropped = [], 0
    for number, item in enumerate(open_source("sql", server.location, tmp_path, options=options).items):
        seen.append(item)
        if number % 37 == 3:
            dropped += server.drop_readers()
    assert dropped >= 5
    assert seen == whole


def test_a_query_of_postgresql_goes_on_too(server: Server, options: dict[str, Any], tmp_path: Path) -> None:
    asked = {**options, "table": "", "query": "SELECT id::text AS name, image, label FROM \"Images\" WHERE label LIKE 'c%'", "key": "name"}
    seen = []
    for item in open_source("sql", server.location, tmp_path, options=asked).items:
        seen.append(item)
        if len(seen) == 50:
            assert server.drop_readers() == 1
    assert len(seen) == len({item.name for item in seen}) == 100


def test_one_snapshot_is_read_and_the_reader_cannot_write(server: Server, options: dict[str, Any], tmp_path: Path) -> None:
    items = iter(open_source("sql", server.location, tmp_path, options=options).items)
    next(items)
    server.run("INSERT INTO \"Images\" VALUES ('ffffffff-ffff-ffff-ffff-ffffffffffff', %s, 'cat', NULL)", (png(999),))
    try:
        assert len(list(items)) == 199
        assert len(read(server.location, tmp_path, **options)[0]) == 201
    finally:
        server.run("DELETE FROM \"Images\" WHERE id = 'ffffffff-ffff-ffff-ffff-ffffffffffff'")
    server.run("CREATE SEQUENCE IF NOT EXISTS counted")
    writing = {**options, "table": "", "query": "SELECT id, image, label, nextval('counted') FROM \"Images\"", "key": "id"}
    assert "read-only" in str(refusal(server.location, tmp_path, **writing))


def test_a_password_is_in_no_message_and_a_wrong_one_is_not_tried_again(
    server: Server, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHOTOS_PASSWORD", f"{PASSWORD}-wrong")
    error = refusal(server.location, tmp_path, **options)
    assert "authentication failed" in str(error)
    monkeypatch.setenv("PHOTOS_URL", f"postgresql://{postgres.OWNER}:{PASSWORD}@127.0.0.1:1/postgres")
    with pytest.raises(Transient) as caught:
        read("env:PHOTOS_URL", tmp_path, table="Images")
    assert caught.value.code == "source_unavailable"
    assert PASSWORD not in str(caught.value)
