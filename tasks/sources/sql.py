"""Rows of a database, by any SQLAlchemy URL: images as bytes, paths or URLs, read in the order of a key, a few rows in memory.

    sqlite:///photos.db                            relative to the project
    postgresql+psycopg2://reader@host/photos       the password from the environment: password: env:PHOTOS_PASSWORD
    env:PHOTOS_URL                                 the whole URL from the environment

A table is read by one streamed SELECT in a transaction that cannot write, on PostgreSQL of one snapshot. Where the connection
drops, reading goes on in a new one (and a new snapshot) after the last key.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput, TrainyardError, Transient
from tasks.sources import Item, Limits, Source, fingerprint, source
from tasks.sources.columns import Columns, choose, label_text, split_of
from tasks.sources.layout import is_storable, located, printable
from tasks.sources.paths import Abroad, Folders, Stores
from tasks.sources.web import WebPolicy

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine, FromClause, Select

KIND = "a database's URL, such as sqlite:///photos.db"
FROM_ENVIRONMENT = "env:"
SECRET_KEYS = {"password", "passwd", "sslpassword"}
TRIES = 5
"""Attempts without a row between them, after which a lost connection is not mended."""
FIRST_PAUSE_S = 0.2
"""Before the second attempt; doubled before each further one."""
FINAL_WORDS = ("authentication failed", "does not exist", "no password supplied", "no such table", "no such column", "syntax error", "unable to open")
"""In messages of drivers that class what no retry mends with lost connections."""


class SqlOptions(Columns):
    """Which rows of the database are images, and which of their columns says what."""

    table: str = Field("", description="table or view; or else a query")
    query: str = Field("", description="one SELECT, in place of a table")
    namespace: str = Field("", description="schema of the table; empty: the database's default")
    key: str = Field("", description="unique column by which rows are ordered; empty: the table's primary key")
    updated: str = Field("", description="column of the time of a row's last change, which the watch asks for; empty: none")
    image_kind: Literal["auto", "bytes", "path"] = Field(
        "auto", description="auto: bytes in a binary column, else by the cell: bytes, or text as a path"
    )
    folder: str = Field("", description="folder that paths are relative to; empty: the project")
    password: str = Field("", pattern=r"^(env:[A-Za-z_][A-Za-z0-9_]*)?$", description="env:NAME, the environment variable with the password")
    web: WebPolicy | None = Field(None, description="what may be fetched where cells are URLs; without it they are set aside")
    stores: Stores = ()
    batch: int = Field(16, ge=1, le=10_000, description="rows that are in memory at once")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.table) == bool(self.query):
            raise ValueError("table or query must be set, and not both")
        words = self.query.split(None, 1)
        if words and (words[0].casefold() not in ("select", "with") or ";" in self.query):
            raise ValueError("query must be one SELECT without a semicolon")
        return self


class _Rows(NamedTuple):
    """What is read: a table or a subquery, its columns, its key, and whether its image column is declared as binary (None: unknown)."""

    name: str
    clause: FromClause
    columns: Columns
    key: str
    binary: bool | None


@source("sql", options=SqlOptions)
def sql(location: str, root: Path, limits: Limits, options: SqlOptions) -> Source:
    """Connect, and find the columns; rows are read by ``items``, at most ``options.batch`` in memory.

    Raises BadInput ``source_unavailable``, ``missing_column``, ``duplicate_column``, ``empty_manifest`` or ``params_invalid``; while it
    is read, ``unknown_split``, ``manifest_corrupt`` for a key that is NULL, a fraction or not unique; Transient
    ``source_unavailable`` where the database stays away.
    """
    import sqlalchemy as sa

    base = located(options.folder, root, "the folder of the images") if options.folder else root
    database = _Database(location, root, options)
    rows = database.rows()
    with database.connected() as connection:
        if connection.execute(sa.select(sa.literal(1)).select_from(rows.clause).limit(1)).first() is None:
            raise BadInput("empty_manifest", f"{rows.name} has no rows", value=0, constraint="at least 1 row", knob="ingest.options")
    return Source(_items(database, rows, Folders(base, Abroad(options.web, options.stores)), limits))


@fingerprint("sql")
def sql_fingerprint(location: str, root: Path, options: SqlOptions) -> str:
    """A digest of the count of rows, the highest key and the last change, where a column states it. Raises as ``sql`` does."""
    import sqlalchemy as sa

    database = _Database(location, root, options)
    rows = database.rows()
    with database.connected() as connection:
        facts = [repr(connection.execute(sa.select(sa.func.count()).select_from(rows.clause)).scalar_one())]
        for name in filter(None, (rows.key, options.updated)):
            column = _column(name)
            highest = sa.select(column).select_from(rows.clause).where(column.is_not(None)).order_by(column.desc()).limit(1)
            facts.append(str(connection.execute(highest).scalar()))
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()


def _column(name: str) -> Any:
    """A column without a type, so that cells come as the driver gives them; its name always quoted."""
    import sqlalchemy as sa

    return sa.column(sa.quoted_name(name, quote=True))


class _Database:
    """A database behind a URL whose password no message shows."""

    def __init__(self, location: str, root: Path, options: SqlOptions) -> None:
        self._options = options
        url = _url(location, options)
        self._secret = url.password or ""
        self.shown = url.render_as_string(hide_password=True)
        self._engine = _engine(url, root)

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """A connection in a transaction that cannot write. What the database refuses becomes BadInput or Transient ``source_unavailable``."""
        import sqlalchemy.exc as failures

        try:
            with self._engine.connect() as connection:
                if connection.dialect.name == "postgresql":
                    connection = connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
                yield connection
        except failures.DBAPIError as error:
            raise self._told(error) from None
        except ImportError as error:
            raise _no_driver(self.shown, str(error)) from None

    def _told(self, error: Any) -> TrainyardError:
        import sqlalchemy.exc as failures

        said = str(error.orig).strip().splitlines()
        why = (said[0] if said else type(error.orig).__name__)[:300]
        if self._secret:
            why = why.replace(self._secret, "***")
        lost = error.connection_invalidated or isinstance(error, failures.OperationalError | failures.InterfaceError)
        if lost and not any(words in str(error.orig) for words in FINAL_WORDS):
            return Transient("source_unavailable", "the database is away", value=f"{self.shown}: {why}", knob="ingest.location")
        return BadInput("source_unavailable", "the database refuses", value=f"{self.shown}: {why}", knob="ingest.location or ingest.options")

    def rows(self) -> _Rows:
        """Find the table or query and its columns. Raises BadInput ``source_unavailable``, ``missing_column`` or ``duplicate_column``."""
        import sqlalchemy as sa

        options = self._options
        with self.connected() as connection:
            if options.query:
                text = sa.text(options.query.strip().replace(":", "\\:"))
                whole = sa.select(sa.text("*")).select_from(text.columns().subquery("asked")).limit(0)
                header = list(connection.execute(whole).keys())
                clause: FromClause = text.columns(*map(_column, header)).subquery("asked")
                return self._chosen("the query", clause, header, [], {})
            inspector = sa.inspect(connection)
            try:
                facts = inspector.get_columns(options.table, schema=options.namespace or None)
            except sa.exc.NoSuchTableError:
                there = [*inspector.get_table_names(options.namespace or None), *inspector.get_view_names(options.namespace or None)]
                value, near = repr(options.table), ", ".join(there[:20]) or "a table: there is none"
                raise BadInput("source_unavailable", "no such table", value=value, constraint=near, knob="ingest.options.table") from None
            keys = inspector.get_pk_constraint(options.table, schema=options.namespace or None)["constrained_columns"]
            header = [fact["name"] for fact in facts]
            space = sa.quoted_name(options.namespace, quote=True) if options.namespace else None
            clause = sa.table(sa.quoted_name(options.table, quote=True), *map(_column, header), schema=space)
            binary = {fact["name"]: isinstance(fact["type"], sa.LargeBinary) for fact in facts}
            return self._chosen(f"the table {options.table}", clause, header, keys, binary)

    def _chosen(self, name: str, clause: FromClause, header: list[str], keys: list[str], binary: dict[str, bool]) -> _Rows:
        columns = choose(header, Columns(**{role: getattr(self._options, role) for role in Columns.model_fields}), name)
        for role in ("key", "updated"):
            stated = getattr(self._options, role)
            if stated and stated not in header:
                value = ", ".join(header)[:200]
                raise BadInput(
                    "missing_column", f"{name} has no column {stated!r}", value=value, constraint="one of them", knob=f"ingest.options.{role}"
                )
        key = self._options.key or (keys[0] if len(keys) == 1 else "")
        if not key:
            what, must = f"{name} has no single column as its primary key", "a unique column, by which rows are ordered"
            raise BadInput("missing_column", what, value=", ".join(keys) or "none", constraint=must, knob="ingest.options.key")
        return _Rows(name, clause, columns, key, binary.get(columns.image))

    def read(self, rows: _Rows, max_bytes: int) -> Iterator[Any]:
        """(key, bytes of the image or None, image, label, split, group) of every row by its key. A lost connection is made again.

        Raises Transient ``source_unavailable`` after TRIES attempts without a row between them.
        """
        last, failed = None, 0
        while True:
            try:
                with self.connected() as connection:
                    streamed = connection.execution_options(stream_results=True, yield_per=self._options.batch)
                    for row in streamed.execute(_after(rows, last, max_bytes, connection.dialect.name)):
                        last, failed = _key(rows, row[0], last), 0
                        yield row
                return
            except Transient:
                failed += 1
                if failed == TRIES:
                    raise
                time.sleep(FIRST_PAUSE_S * 2 ** (failed - 1))


def _after(rows: _Rows, last: Any, max_bytes: int, dialect: str) -> Select[Any]:
    """The rows after the key ``last`` (None: all); where the image's size can be asked, a larger one stays in the database."""
    import sqlalchemy as sa

    key, image = _column(rows.key), _column(rows.columns.image)
    size: Any = sa.func.length(image) if rows.binary or dialect == "sqlite" else sa.null()
    if rows.binary or dialect == "sqlite":
        image = sa.case((size > max_bytes, sa.null()), else_=image)
    others = [_column(name) if name else sa.null() for name in rows.columns.used()[1:]]
    asked = [column.label(f"c{number}") for number, column in enumerate((key, size, image, *others))]
    statement = sa.select(*asked).select_from(rows.clause).order_by(key)
    return statement if last is None else statement.where(key > last)


def _key(rows: _Rows, key: Any, last: Any) -> Any:
    """The key of a row; raises BadInput ``manifest_corrupt`` where rows cannot be told apart by it."""
    value = bytes(key) if isinstance(key, memoryview) else key
    if value is None or isinstance(value, float) or value == last:
        shown = f"{str(value)[:80]!r} twice" if value is not None and value == last else repr(value)
        raise BadInput(
            "manifest_corrupt",
            f"the column {rows.key} of {rows.name} is no key",
            value=shown,
            constraint="unique, not NULL and no fraction",
            knob="ingest.options.key",
        )
    return value


def _items(database: _Database, rows: _Rows, folders: Folders, limits: Limits) -> Iterator[Item | SetAside]:
    options = database._options
    prefix = options.table.replace("/", "_")[:100] or "query"
    for key, size, cell, label, split, group in database.read(rows, limits.max_file_bytes):
        text = key.hex() if isinstance(key, bytes | memoryview) else str(key)
        name = f"{prefix}/{text.replace('/', '_')}"
        name = printable(name) if is_storable(name) else f"{prefix}/{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}"
        if size is not None and size > limits.max_file_bytes:
            yield SetAside(name=name, code="image_too_large")
            continue
        data = _data(cell, options.image_kind, rows.binary, folders, limits)
        said = label_text(label)
        if isinstance(data, str):
            yield SetAside(name=name, code=data)
        elif not said or not is_storable(said):
            yield SetAside(name=name, code="missing_label" if said == "" else "bad_row")
        else:
            stated = split_of(split, f"row {text[:80]} of {rows.name}")
            yield Item(name, said, data, stated, None if group is None or group == "" else str(group))


def _data(cell: Any, kind: str, binary: bool | None, folders: Folders, limits: Limits) -> bytes | str:
    """The bytes of an image, or the code of why there are none."""
    if isinstance(cell, memoryview | bytearray):
        cell = bytes(cell)
    if cell is None or cell in (b"", ""):
        return "empty_file"
    if kind == "bytes" or (kind == "auto" and (binary or isinstance(cell, bytes))):
        if not isinstance(cell, bytes):
            return "not_an_image"
        return cell if len(cell) <= limits.max_file_bytes else "image_too_large"
    return folders.read(cell, limits.max_file_bytes) if isinstance(cell, str) and "\0" not in cell else "bad_row"


def _url(location: str, options: SqlOptions) -> URL:
    """The URL of the database, its password from the environment. Raises BadInput ``source_unavailable`` or ``params_invalid``."""
    import sqlalchemy as sa

    whole = location.startswith(FROM_ENVIRONMENT)
    text = _environment(location, "ingest.location") if whole else location
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        value = location if whole else "what is no URL"
        raise BadInput("source_unavailable", "the location is no URL of a database", value=value, constraint=KIND, knob="ingest.location") from None
    if not whole and (url.password is not None or SECRET_KEYS & {key.casefold() for key in url.query}):
        value = f"{url.drivername} with a password"
        must = "a URL without it; password: env:NAME in ingest.options"
        raise BadInput("params_invalid", "a password stands in the location", value=value, constraint=must, knob="ingest.location")
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg2")
    return url.set(password=_environment(options.password, "ingest.options.password")) if options.password else url


def _environment(stated: str, knob: str) -> str:
    name = stated.removeprefix(FROM_ENVIRONMENT)
    value = os.environ.get(name)
    if not value:
        raise BadInput(
            "source_unavailable", "an environment variable is not set", value=name, constraint="set and not empty", knob=f"{name} or {knob}"
        )
    return value


def _engine(url: URL, root: Path) -> Engine:
    """An engine that keeps no connection open. A file of SQLite is opened for reading alone. Raises BadInput ``source_unavailable``."""
    import sqlalchemy as sa

    shown = url.render_as_string(hide_password=True)
    try:
        if url.get_dialect().is_async:
            must = "a driver that is not asynchronous, such as postgresql+psycopg2"
            raise BadInput("source_unavailable", "the driver is asynchronous", value=url.drivername, constraint=must, knob="ingest.location")
        if url.get_backend_name() != "sqlite":
            return sa.create_engine(url, poolclass=sa.NullPool)
    except (sa.exc.NoSuchModuleError, ImportError) as error:
        raise _no_driver(shown, str(error)) from None
    except sa.exc.ArgumentError as error:
        raise BadInput("source_unavailable", "the URL is refused", value=f"{shown}: {error}", constraint=KIND, knob="ingest.location") from None
    path = located(url.database or "", root, "a file of SQLite").absolute()
    if not _is_sqlite(path):
        raise BadInput("source_unavailable", "the file is no SQLite database", value=url.database, constraint=KIND, knob="ingest.location")

    def opened() -> sqlite3.Connection:
        connection = sqlite3.connect(f"file:{urllib.parse.quote(os.fsencode(path))}?mode=ro", uri=True, check_same_thread=False)
        connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        return connection

    return sa.create_engine("sqlite://", creator=opened, poolclass=sa.NullPool)


def _is_sqlite(path: Path) -> bool:
    try:
        with path.open("rb") as handle:
            return handle.read(16) == b"SQLite format 3\0"
    except OSError:
        return False


def _no_driver(shown: str, why: str) -> BadInput:
    must = "one that is installed: trainyard[stack] brings PostgreSQL's"
    return BadInput("source_unavailable", "the database's driver is not installed", value=f"{shown}: {why}", constraint=must, knob="ingest.location")
