"""The processes of the served classifier: start, find, ask and end them. No state but what the machine itself can tell.

Every process of a server carries two environment variables, the project's serve folder and the server's id, by which it is found
whole (arbiter and workers; see tasks.core.daemons). ``state.json`` says which server is in service.

    .trainyard/serve/state.json    the server in service
    .trainyard/serve/<id>/         a server's own BENTOML_HOME (metrics) and TMPDIR, gone when it ends
    .trainyard/serve/<tag>.log     what it wrote
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tasks.core import daemons
from tasks.core.errors import BadInput, Transient
from tasks.core.files import STATE, canonical_json, write_atomic
from tasks.core.process import QUIET

ROOT_VARIABLE = "TRAINYARD_SERVICE_ROOT"
ID_VARIABLE = "TRAINYARD_SERVICE_ID"
FOREIGN = ("PYTHON", "BENTOML_", "PROMETHEUS_", "PREFECT_", "MLFLOW_", "TRAINYARD_STACK_")
"""Beginnings of variables that a server does not inherit: it needs no login of ours, and is no part of the worker that started it."""
LAUNCHER = Path(__file__).resolve().parents[2] / "service" / "launch.py"
LOG_BYTES = 5_000_000
"""A log that is longer is started anew with the next server of its tag."""
GRACE_S = 10.0
"""Requests in flight have this long to end when a server is retired."""


@dataclass(frozen=True)
class Server:
    """A server that was started: which Bento, where it listens, who it is."""

    id: str
    tag: str
    host: str
    port: int
    pid: int
    log: str

    @property
    def url(self) -> str:
        """Where to reach it from this machine."""
        return url_of(self.host, self.port)


def url_of(host: str, port: int) -> str:
    """http://host:port, with an address that can be connected to where ``host`` means all addresses."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _folder(root: Path) -> Path:
    """The project's own: a run's worktree links to it, so every worktree of one project sees the same service."""
    return (root / STATE / "serve").resolve()


def current(root: Path) -> Server | None:
    """The server that state.json names, if any of its processes lives."""
    try:
        server = Server(**json.loads((_folder(root) / "state.json").read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return server if server.id in running(root) else None


def commit(root: Path, server: Server | None) -> None:
    """Record the server in service (None: nothing is)."""
    if server is None:
        (_folder(root) / "state.json").unlink(missing_ok=True)
    else:
        write_atomic(_folder(root) / "state.json", canonical_json(asdict(server)))


def running(root: Path) -> dict[str, list[psutil.Process]]:
    """Our living processes of this project, by server id."""
    return daemons.tagged(ROOT_VARIABLE, _folder(root), ID_VARIABLE)


def launch(root: Path, bento: Path, tag: str, host: str, port: int) -> Server:
    """Start ``bentoml serve`` on the Bento in the folder ``bento``, detached from this process; do not wait for it.

    It sees no PYTHONPATH and runs in a folder without code, so it imports the Bento's modules and not the project's.
    """
    identity = secrets.token_hex(8)
    home = _folder(root) / identity
    for name in ("home", "tmp", "cwd"):
        (home / name).mkdir(parents=True)
    log = _folder(root) / f"{tag.replace(':', '-')}.log"
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.unlink()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    environment |= QUIET | {
        ROOT_VARIABLE: str(_folder(root)),
        ID_VARIABLE: identity,
        "BENTOML_HOME": str((home / "home").resolve()),
        "TMPDIR": str((home / "tmp").resolve()),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, str(LAUNCHER), "serve", str(bento.resolve()), "--host", host, "--port", str(port)]
    command += ["--timeout-graceful-shutdown", str(int(GRACE_S))]
    with log.open("ab") as sink:
        child = subprocess.Popen(
            command, cwd=home / "cwd", env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    # For a moment after exec the kernel shows no environment yet: a server that is not seen would be taken for dead.
    while child.poll() is None and identity not in running(root):
        time.sleep(0.01)
    return Server(identity, tag, host, port, child.pid, str(log))


def retire(root: Path, *identities: str) -> None:
    """End servers: no new connection at once, requests in flight may end within GRACE_S, then nothing is left of them."""
    everyone = running(root)
    processes = [process for identity in identities for process in everyone.get(identity, [])]
    ids = {process.pid for process in processes}
    # The arbiter first and hard: asked to end, it would hold the listening socket while no worker takes from it.
    arbiters = [process for process in processes if _parent(process) not in ids]
    daemons.send(arbiters, signal.SIGKILL)
    workers = [process for process in processes if process not in arbiters]
    daemons.send(workers, signal.SIGTERM)
    daemons.wait_gone(processes, GRACE_S + 2.0)
    while left := [process for identity in identities for process in running(root).get(identity, [])]:
        daemons.send(left, signal.SIGKILL)
        daemons.wait_gone(left, 2.0)
    for identity in identities:
        shutil.rmtree(_folder(root) / identity, ignore_errors=True)


def sweep(root: Path, keep: Server | None) -> list[str]:
    """Retire every server of this project but ``keep``, and what dead ones left behind; returns the ids that ran."""
    kept = keep.id if keep else ""
    stray = [identity for identity in running(root) if identity != kept]
    retire(root, *stray)
    for folder in _folder(root).glob("*/"):
        if folder.name != kept:
            shutil.rmtree(folder, ignore_errors=True)
    return stray


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.Error:
        return 0


def require_port(host: str, port: int) -> None:
    """Raise BadInput ``port_taken`` where ``port`` cannot be bound, with the id of the program that has it, if it shows."""
    daemons.require_port(host, port, "deploy.port in params.yaml")


def wait_ready(root: Path, server: Server, timeout_s: float, ready: Callable[[], bool]) -> float:
    """Wait until ``ready()``; returns the seconds it took. Raises ``service_not_ready`` with the log's last line:
    BadInput where the server died, Transient where the time is over."""
    start = time.monotonic()
    while not ready():
        seconds = time.monotonic() - start
        dead = server.id not in running(root)
        if dead or seconds > timeout_s:
            kind = BadInput if dead else Transient
            raise kind(
                "service_not_ready",
                f"{server.tag} {'ended' if dead else 'did not answer'} on port {server.port} after {seconds:.0f} s",
                value=daemons.last_line(Path(server.log)),
                constraint=f"ready within {timeout_s:g} s",
                knob=f"deploy.ready_timeout_s; the log is {server.log}",
            )
        time.sleep(0.05)
    return time.monotonic() - start


def ask(url: str, method: str, path: str, *, body: bytes | None = None, content_type: str = "", timeout_s: float = 5.0) -> tuple[int, Any]:
    """One HTTP request on a connection of its own, past any proxy: (status, JSON answer or None). Raises OSError."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    try:
        connection.request(method, path, body, {"content-type": content_type, "connection": "close"} if body else {"connection": "close"})
        response = connection.getresponse()
        data = response.read()
        try:
            return response.status, json.loads(data)
        except ValueError:
            return response.status, None
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from None
    finally:
        connection.close()


def served_tag(url: str) -> str | None:
    """The tag of the Bento that answers at ``url``, or None where nothing of ours does."""
    try:
        status, answer = ask(url, "GET", "/provenance", timeout_s=2.0)
    except OSError:
        return None
    return str(answer.get("tag")) if status == 200 and isinstance(answer, dict) else None


def classify(url: str, image: bytes, timeout_s: float) -> tuple[int, Any]:
    """POST /classify with the raw bytes of one image file: (status, JSON answer). Raises OSError."""
    boundary = secrets.token_hex(16)
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="image"\r\nContent-Type: application/octet-stream\r\n\r\n'
    body = head.encode() + image + f"\r\n--{boundary}--\r\n".encode()
    return ask(url, "POST", "/classify", body=body, content_type=f"multipart/form-data; boundary={boundary}", timeout_s=timeout_s)
