"""What the local stack consists of: its settings, its credentials, and each server's command, environment and sign of readiness.

Settings stand in .trainyard/stack.env as lines of TRAINYARD_STACK_NAME=value, or in the environment, which wins (docs/servers.md).
Credentials are made once, in .trainyard/stack/credentials.env, readable by their owner alone, and reach the servers by their
environment: never by an argument, which the process list shows.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows import postgres
from flows.postgres import Cluster
from tasks.core.errors import BadInput
from tasks.core.files import STATE, write_atomic

PREFIX = "TRAINYARD_STACK_"
ROOT_VARIABLE, PART_VARIABLE, DIGEST_VARIABLE = f"{PREFIX}ROOT", f"{PREFIX}PART", f"{PREFIX}DIGEST"
FOLDER = STATE / "stack"
SETTINGS_FILE = STATE / "stack.env"
ENV_FILE = FOLDER / "env"
POOL = "trainyard"
USER = "trainyard"
"""Login name at Prefect and MLflow, and the owner of the databases."""
PREFECT_DATABASE, MLFLOW_DATABASE = "prefect", "mlflow"
AMBIENT = {"PATH", "no_proxy", "NO_PROXY", "PREFECT_HOME", "PREFECT_WORKER_QUERY_SECONDS"}
"""Variables that come from the shell of whoever calls: `up` from cron must not restart the worker, which would cut off its runs."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_PROXY = build_opener(ProxyHandler({}))


class Settings(BaseModel):
    """What a user may choose."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address that Prefect and MLflow listen on; other than loopback needs auth")
    prefect_port: int = Field(4200, ge=1, le=65535, description="Prefect's API and UI")
    mlflow_port: int = Field(5000, ge=1, le=65535, description="MLflow's API and UI")
    postgres_port: int = Field(54329, ge=1, le=65535, description="PostgreSQL, on loopback always")
    auth: bool = Field(False, description="whether Prefect and MLflow ask for a password")
    permission: Literal["READ", "EDIT", "MANAGE", "NO_PERMISSIONS"] = Field(
        "READ", description="with auth, what an MLflow user may do to what others made and did not share"
    )
    database: Literal["auto", "postgresql", "sqlite"] = Field("auto", description="auto: PostgreSQL where it can run, else SQLite")
    worker_limit: int = Field(4, ge=1, description="runs that the worker starts at once")

    @property
    def reachable(self) -> str:
        """An address that a client on this machine can connect to."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    def url(self, port: int) -> str:
        """http://address:port for clients on this machine."""
        return f"http://[{self.reachable}]:{port}" if ":" in self.reachable else f"http://{self.reachable}:{port}"


@dataclass(frozen=True)
class Credentials:
    """Generated once. ``mlflow_secret`` signs MLflow's forms."""

    postgres_password: str = field(repr=False)
    prefect_password: str = field(repr=False)
    mlflow_password: str = field(repr=False)
    mlflow_secret: str = field(repr=False)


@dataclass(frozen=True)
class Part:
    """One program of the stack. ``sheds`` are beginnings of variables that it does not inherit."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    address: str
    ready: Callable[[float], bool]
    """whether it answers, given the time of its start in Unix seconds"""
    port: int | None = None
    user: str | None = None
    cwd: Path = Path("/")
    sheds: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict, repr=False)
    """path -> text, written before it starts and readable by its owner alone"""

    @property
    def port_knob(self) -> str:
        """The setting that moves it."""
        return f"{PREFIX}{self.name.upper()}_PORT in {SETTINGS_FILE}"


def load_settings(root: Path) -> Settings:
    """From the settings file and the environment. Raises BadInput ``stack_invalid``."""
    path, names = root / SETTINGS_FILE, {f"{PREFIX}{name.upper()}": name for name in Settings.model_fields}
    found = _pairs(path) if path.is_file() else {}
    found |= {key: value for key, value in os.environ.items() if key.startswith(PREFIX)}
    for key in (ROOT_VARIABLE, PART_VARIABLE, DIGEST_VARIABLE):
        found.pop(key, None)
    for key in found:
        if key not in names:
            raise BadInput("stack_invalid", "unknown setting of the stack", value=key, constraint=", ".join(names))
    try:
        settings = Settings.model_validate({names[key]: value for key, value in found.items()})
    except ValidationError as error:
        first = error.errors()[0]
        name = f"{PREFIX}{first['loc'][0]}".upper()
        raise BadInput("stack_invalid", first["msg"], value=f"{name}={first['input']}", knob=f"{name} in {SETTINGS_FILE}") from None
    if settings.host not in LOOPBACK and not settings.auth:
        raise BadInput(
            "stack_invalid",
            "servers without a password are for this machine alone",
            value=settings.host,
            constraint="127.0.0.1",
            knob=f"{PREFIX}AUTH=true",
        )
    return settings


def _pairs(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines if line and not line.startswith("#"))}


def load_credentials(root: Path) -> Credentials:
    """Read them, or make them on the first call. Raises BadInput ``stack_invalid`` where they are gone and PostgreSQL has the old ones."""
    path = root / FOLDER / "credentials.env"
    names = tuple(Credentials.__dataclass_fields__)
    found = {key.lower(): value for key, value in _pairs(path).items()} if path.is_file() else {}
    if not found and not (root / STATE / "postgres").exists():
        found = {name: secrets.token_urlsafe(24) for name in names}
        write_atomic(path, "".join(f"{name.upper()}={value}\n" for name, value in found.items()).encode(), mode=0o600)
    if set(found) != set(names) or not all(found.values()):
        raise BadInput(
            "stack_invalid",
            "the credentials of the stack are not whole",
            value=path,
            constraint=", ".join(names).upper(),
            knob=f"them from a backup, or remove {STATE / 'postgres'} and {FOLDER} to start afresh",
        )
    return Credentials(**found)


def database(root: Path, settings: Settings) -> Cluster | str:
    """The PostgreSQL cluster to use, or why it is SQLite, in words. What the stack began with stays, so that no history is lost.

    Raises BadInput ``stack_invalid`` where PostgreSQL was asked for, or holds the history, and cannot run.
    """
    began_with_sqlite = (root / FOLDER / "prefect" / "prefect.db").exists() and not (root / STATE / "postgres").exists()
    if settings.database == "sqlite":
        return "as asked for"
    if settings.database == "auto" and began_with_sqlite:
        return f"begun with SQLite; remove {FOLDER} for PostgreSQL"
    found = postgres.find(root)
    if isinstance(found, str) and (settings.database == "postgresql" or (root / STATE / "postgres").exists()):
        raise BadInput("stack_invalid", found, constraint="able to run here", knob=f"{PREFIX}DATABASE=sqlite, to begin with an empty SQLite")
    return found


def client_environment(settings: Settings, credentials: Credentials) -> dict[str, str]:
    """What a client on this machine needs to use the servers."""
    proxies = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")]
    no_proxy = ",".join(dict.fromkeys(name for name in [*proxies[0].split(","), settings.reachable] if name))
    environment = {
        "PREFECT_API_URL": f"{settings.url(settings.prefect_port)}/api",
        "MLFLOW_TRACKING_URI": settings.url(settings.mlflow_port),
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
    }
    if settings.auth:
        environment |= {
            "PREFECT_API_AUTH_STRING": f"{USER}:{credentials.prefect_password}",
            "MLFLOW_TRACKING_USERNAME": USER,
            "MLFLOW_TRACKING_PASSWORD": credentials.mlflow_password,
        }
    return environment


def parts(root: Path, settings: Settings, credentials: Credentials, cluster: Cluster | None) -> dict[str, Part]:
    """The programs of the stack by name, in the order of their start."""
    made = [_prefect(root, settings, credentials, cluster), _mlflow(root, settings, credentials, cluster), _worker(root, settings, credentials)]
    if cluster is not None:
        port, password = settings.postgres_port, credentials.postgres_password
        start = Part(
            "postgres",
            cluster.command(port),
            dict(postgres.ENVIRONMENT),
            f"127.0.0.1:{port}",
            lambda since: postgres.answers(port, password),
            port=port,
            user=cluster.user,
            sheds=("",),
        )
        made.insert(0, start)
    return {part.name: part for part in made}


def _prefect(root: Path, settings: Settings, credentials: Credentials, cluster: Cluster | None) -> Part:
    url, port = settings.url(settings.prefect_port), settings.prefect_port
    environment = {
        "PREFECT_HOME": str((root / FOLDER / "prefect").resolve()),
        # In memory, as by default, a slot that is held while the server is restarted would never come free.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }
    if cluster is not None:
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = _database_url("postgresql+asyncpg", settings, credentials, PREFECT_DATABASE)
    if settings.auth:
        environment["PREFECT_SERVER_API_AUTH_STRING"] = f"{USER}:{credentials.prefect_password}"
    command = (sys.executable, "-m", "prefect", "server", "start", "--host", settings.host, "--port", str(port))
    ready: Callable[[float], bool] = lambda since: request(f"{url}/api/health")[0] == 200  # noqa: E731
    return Part("prefect", command, environment, url, ready, port=port, cwd=root, sheds=("PREFECT_API_", "PREFECT_PROFILE", "MLFLOW_"))


def _mlflow(root: Path, settings: Settings, credentials: Credentials, cluster: Cluster | None) -> Part:
    url, port, folder = settings.url(settings.mlflow_port), settings.mlflow_port, (root / FOLDER / "mlflow").resolve()
    store = f"sqlite:///{folder}/mlflow.db" if cluster is None else _database_url("postgresql+psycopg2", settings, credentials, MLFLOW_DATABASE)
    # Clients send files to the server and never to a folder, so they may be anywhere.
    environment = {"MLFLOW_BACKEND_STORE_URI": store, "MLFLOW_SERVE_ARTIFACTS": "true", "MLFLOW_ARTIFACTS_DESTINATION": f"{folder}/artifacts"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", settings.host, "--port", str(port), "--workers", "1"]
    files = {}
    if settings.auth:
        logins = f"sqlite:///{folder}/auth.db" if cluster is None else store
        # A minute's memory of who logged in spares a slow hash at each request; our one process forgets at once when users change.
        lines = ("[mlflow]", f"default_permission = {settings.permission}", f"database_uri = {logins}", "auth_cache_ttl_seconds = 60", "")
        files = {str(folder / "auth.ini"): "\n".join(lines)}
        command += ["--app-name", "basic-auth"]
        environment |= {
            "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
            "MLFLOW_AUTH_ADMIN_USERNAME": USER,
            "MLFLOW_AUTH_ADMIN_PASSWORD": credentials.mlflow_password,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": credentials.mlflow_secret,
        }
    ready: Callable[[float], bool] = lambda since: request(f"{url}/health")[0] == 200  # noqa: E731
    return Part("mlflow", tuple(command), environment, url, ready, port=port, cwd=folder, sheds=("MLFLOW_TRACKING_", "PREFECT_"), files=files)


def _worker(root: Path, settings: Settings, credentials: Credentials) -> Part:
    api, name = f"{settings.url(settings.prefect_port)}/api", f"trainyard-{socket.gethostname()}"
    environment = client_environment(settings, credentials) | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        # Without heartbeats nobody can tell a run whose process died from one that works; 30 s is the least Prefect takes.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_WORKER_QUERY_SECONDS": os.environ.get("PREFECT_WORKER_QUERY_SECONDS", "5"),
        "PREFECT_HOME": os.environ.get("PREFECT_HOME", str((root / STATE / "prefect").resolve())),
        "PYTHONUNBUFFERED": "1",
    }
    login = environment.get("PREFECT_API_AUTH_STRING", "")

    def ready(since: float) -> bool:
        status, found = request(f"{api}/work_pools/{POOL}/workers/filter", {}, login)
        return status == 200 and any(one["name"] == name and _seconds(one["last_heartbeat_time"]) > since for one in found)

    command = (sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", name)
    limit = ("--limit", str(settings.worker_limit))
    return Part("worker", command + limit, environment, f"pool {POOL}", ready, cwd=root.resolve(), sheds=("MLFLOW_TRACKING_",))


def _seconds(time: str | None) -> float:
    from datetime import datetime

    return datetime.fromisoformat(time).timestamp() if time else 0.0


def _database_url(driver: str, settings: Settings, credentials: Credentials, name: str) -> str:
    return f"{driver}://{postgres.OWNER}:{credentials.postgres_password}@127.0.0.1:{settings.postgres_port}/{name}"


def request(url: str, body: Any = None, login: str = "", timeout_s: float = 5.0) -> tuple[int, Any]:
    """GET, or POST where there is a ``body``, past any proxy: (status, JSON answer or None); status 0 where nothing answers."""
    headers = {"Content-Type": "application/json"}
    if login:
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    asked = Request(url, data=None if body is None else json.dumps(body).encode(), headers=headers)
    try:
        with NO_PROXY.open(asked, timeout=timeout_s) as answer:
            status, data = answer.status, answer.read()
    except HTTPError as error:
        return error.code, None
    except OSError:
        return 0, None
    try:
        return status, json.loads(data)
    except ValueError:
        return status, None
