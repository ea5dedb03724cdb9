"""A project with cheap training on a real Prefect server and a real worker, to be run for days and broken on purpose."""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from ruamel.yaml import YAML

from bench.projects import fresh_project, run
from flows import postgres
from flows.automations import MAX_STARTS
from tasks.backends import model_registry
from tasks.core.config import PARAMS, apply_overrides, load_params
from tasks.core.process import QUIET, end_group, spare_port
from tasks.core.runs import run_of

CLASSES = {"blue": (40, 60, 200), "green": (40, 170, 60), "red": (200, 50, 40)}
SIDE_PX = 12
CHEAP: dict[str, dict[str, Any]] = {
    "validate": {"min_images_per_class": 5, "min_decodable_share": 0.9},
    "prepare": {"image_size": SIDE_PX},
    "train": {"width": 4, "epochs": 12, "batch_size": 16, "lr": 0.1, "threads": 1},
    "augment": {"translate_px": 0, "rotate_degrees": 0.0},
    "gate": {"min_accuracy": 0.6, "min_class_recall": 0.1, "min_macro_f1": 0.4, "max_calibration_error": 1.0, "min_test_images": 10, "margin": 0.05},
    "deploy": {"smoke_images": 3, "ready_timeout_s": 120.0},
    "run": {"keep_runs": 3, "keep_days": 1},
}
BUSY_S = 300.0
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
STAGES = ("ingest", "validate", "prepare", "augment", "train", "evaluate", "gate", "register", "package", "deploy")


class Source:
    """A folder of images that grows, spoils and is mended; every image is drawn from ``seed``."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self._random, self._made = folder, np.random.default_rng(seed), 0

    def grow(self, each: int) -> None:
        """Add ``each`` images to every class."""
        for name, colour in CLASSES.items():
            for _ in range(each):
                pixels = np.clip(np.array(colour) + self._random.normal(0, 30, (SIDE_PX, SIDE_PX, 3)), 0, 255).astype(np.uint8)
                buffer = io.BytesIO()
                Image.fromarray(pixels).save(buffer, "PNG")
                self._write(name, buffer.getvalue())

    def spoil(self) -> None:
        """Add as many broken files as there are images."""
        count = sum(1 for _ in self.folder.rglob("image-*.png"))
        for index in range(count):
            self._write(tuple(CLASSES)[index % len(CLASSES)], b"\x89PNG\r\n\x1a\n" + self._random.bytes(80), "broken")

    def mend(self) -> None:
        """Take the broken files away."""
        for path in self.folder.rglob("broken-*.png"):
            path.unlink()

    def _write(self, label: str, data: bytes, kind: str = "image") -> None:
        self._made += 1
        path = self.folder / label / f"{kind}-{self._made:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@dataclass
class Yard:
    """The running project: its folder, its source, its server's API, and the worker."""

    root: Path
    source: Source
    api: str
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    server: list[subprocess.Popen[bytes]] = field(default_factory=list)
    database: dict[str, str] = field(default_factory=dict)
    """What tells the server of another database than SQLite."""

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of this yard: the server's address, no other tool's settings."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "BENTOML_", "TRAINYARD_"))}
        author = {f"GIT_{who}_{what}": "yard@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        own = {"PREFECT_API_URL": self.api, "PREFECT_HOME": str(self.root / ".trainyard" / "prefect"), "PREFECT_WORKER_QUERY_SECONDS": "1"}
        return {**clean, **QUIET, **author, **own, **self.database, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One request to the server's API: the JSON answer. A server that is busy (503) is asked again for BUSY_S.

        Raises urllib.error.URLError.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.api}{path}", data=data, headers={"Content-Type": "application/json"}, method=method)
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def start_server(self) -> None:
        """Start the Prefect server and wait until it answers."""
        port = self.api.split(":")[2].split("/")[0]
        self.server.append(self._start("server", "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port))
        deadline = time.monotonic() + 120
        while True:
            try:
                self.call("GET", "/health")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def start_worker(self, limit: int = 4) -> subprocess.Popen[bytes]:
        """Start one more worker."""
        worker = self._start("worker", "-m", "prefect", "worker", "start", "--pool", "trainyard", "--limit", str(limit))
        self.workers.append(worker)
        return worker

    def _start(self, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.root.parent / f"{log}.log").open("ab") as sink:
            return subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def python(self, *arguments: str) -> str:
        """``python ARGUMENTS`` in the project: its output. Raises RuntimeError where it fails."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.root, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{arguments} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def git(self, *arguments: str) -> str:
        """The output of a git command in the project."""
        return subprocess.run(["git", *arguments], cwd=self.root, check=True, capture_output=True, text=True).stdout.strip()

    def trigger(self, deployment: str, key: str = "", **parameters: Any) -> str:
        """Ask for a run of ``deployment`` (FLOW/NAME), by an idempotency key where one is given; its id."""
        identity = self.call("GET", f"/deployments/name/{deployment}")["id"]
        body = {"parameters": parameters, **({"idempotency_key": key} if key else {})}
        return str(self.call("POST", f"/deployments/{identity}/create_flow_run", body)["id"])

    def state(self, run_id: str) -> dict[str, Any]:
        """The state of a flow run."""
        found: dict[str, Any] = self.call("GET", f"/flow_runs/{run_id}")["state"]
        return found

    def wait(self, run_id: str, timeout_s: float = 600.0, settle_s: float = 45.0) -> dict[str, Any]:
        """The final state of a flow run; one that crashed after it began is given ``settle_s`` seconds to be tried again.

        Raises TimeoutError with the run's log.
        """
        deadline, crashed_since = time.monotonic() + timeout_s, 0.0
        while time.monotonic() < deadline:
            try:
                run = self.call("GET", f"/flow_runs/{run_id}")
            except OSError:  # the server may be down on purpose
                time.sleep(0.5)
                continue
            state: dict[str, Any] = run["state"]
            if state["type"] == "CRASHED":
                crashed_since = crashed_since or time.monotonic()
                if not 0 < run["run_count"] < MAX_STARTS or time.monotonic() - crashed_since > settle_s:
                    return state
            elif state["type"] in FINAL:
                return state
            else:
                crashed_since = 0.0
            time.sleep(0.5)
        raise TimeoutError(f"run {run_id} is {state['name']} after {timeout_s:g} s\n{self.log(run_id)}")

    def log(self, run_id: str) -> str:
        """What a flow run logged."""
        body = {"logs": {"flow_run_id": {"any_": [run_id]}}, "limit": 200, "sort": "TIMESTAMP_ASC"}
        return "\n".join(entry["message"] for entry in self.call("POST", "/logs/filter", body))

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        """All runs of a deployment, newest first."""
        flow, name = deployment.split("/")
        asked = {"flows": {"name": {"any_": [flow]}}, "deployments": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 200}
        found: list[dict[str, Any]] = []
        while page := self.call("POST", "/flow_runs/filter", {**asked, "offset": len(found)}):
            found += page
        return found

    def processes(self, *words: str) -> list[psutil.Process]:
        """The processes of this project's flows and stages whose command line holds all ``words``."""
        found = []
        for process in psutil.process_iter():
            try:
                command = " ".join(process.cmdline())
                here = process.cwd().startswith(str(self.root))
                if here and all(word in command for word in words) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def flow_processes(self, run_id: str) -> list[psutil.Process]:
        """The processes of a run's flow, without its stages."""
        return [process for process in self.processes("prefect") if run_of(process.pid) == run_id]

    def champion(self) -> tuple[str, str] | None:
        """(version, model digest) of the registry's champion."""
        found = model_registry.champion(self.root, load_params(self.root / PARAMS).register_.model_name)
        return (found.version, found.model_digest) if found else None

    def newest_version(self) -> str | None:
        """The registry's newest version, which bears the alias `challenger`."""
        return model_registry.alias_version(self.root, load_params(self.root / PARAMS).register_.model_name, "challenger")


@contextmanager
def yard(seed: int = 0, workers: int = 1, images: int = 30, runs: int = 4, on_postgres: bool = False) -> Iterator[Yard]:
    """A set-up yard: server, deployments (their schedules off: the clock is the caller's), ``workers`` with ``runs`` each, a first source.

    Its server keeps its book in SQLite, or with ``on_postgres`` as `make up` does where PostgreSQL is installed.
    """
    with ExitStack() as stack:
        root = stack.enter_context(fresh_project("digits"))
        database = stack.enter_context(_postgres(root)) if on_postgres else {}
        source = Source(root.parent / "source", seed)
        source.grow(images)
        _configure(root, source.folder)
        made = Yard(root, source, f"http://127.0.0.1:{spare_port()}/api", database=database)
        try:
            made.start_server()
            made.python("-m", "flows.setup")
            for _ in range(workers):
                made.start_worker(runs)
            yield made
        finally:
            for child in (*made.workers, *made.server):
                end_group(child.pid, grace_s=5.0)
                child.wait()
            for left in made.processes():
                end_hard(left)
            run(root, "-m", "tasks.deploy", "--stop")


@contextmanager
def _postgres(root: Path) -> Iterator[dict[str, str]]:
    """A PostgreSQL of the project's own; the variable that tells a Prefect server of it. Raises RuntimeError where none can run."""
    root.parent.chmod(0o711)  # PostgreSQL's user must pass
    cluster = postgres.find(root)
    if isinstance(cluster, str):
        raise RuntimeError(cluster)
    password, port = secrets.token_hex(16), spare_port()
    cluster.make(password)
    server = subprocess.Popen(
        cluster.command(port),
        env=postgres.ENVIRONMENT,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        **postgres.identity(cluster.user),
    )
    try:
        deadline = time.monotonic() + 60
        while not postgres.answers(port, password):
            if time.monotonic() > deadline or server.poll() is not None:
                raise RuntimeError("PostgreSQL did not become ready")
            time.sleep(0.2)
        postgres.make_databases(port, password, ["prefect"])
        url = f"postgresql+asyncpg://{postgres.OWNER}:{password}@127.0.0.1:{port}/prefect"
        yield {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url}
    finally:
        server.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
        server.wait()


def _configure(root: Path, source: Path) -> None:
    """Point the project at the source with cheap numbers, switch the schedules off, and commit."""
    # The demonstration's data would keep any other source's classes apart.
    for path in (root / "data.dvc", root / "dvc.lock"):
        path.unlink(missing_ok=True)
    shutil.rmtree(root / ".dvc" / "embedded", ignore_errors=True)
    apply_overrides({"ingest": {"source": "folder", "location": str(source)}, **CHEAP}, root / PARAMS)
    yaml = YAML()
    prefect = yaml.load(root / "prefect.yaml")
    for deployment in prefect["deployments"]:
        for schedule in deployment.get("schedules", []):
            schedule["active"] = False
    yaml.dump(prefect, root / "prefect.yaml")
    author = ["-c", "user.name=yard", "-c", "user.email=yard@localhost"]
    subprocess.run(["git", *author, "commit", "-qam", "A cheap pipeline"], cwd=root, check=True)


def end_hard(process: psutil.Process) -> None:
    """SIGKILL, whether or not it still lives."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.Error:
        return
