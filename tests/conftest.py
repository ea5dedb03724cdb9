"""Real projects for tests: a copy of this tree in a new git repository, and one on which the whole flow has run."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tasks.core.config import apply_overrides
from tasks.core.files import canonical_json, file_lock, write_atomic
from tasks.core.process import QUIET, spare_port

if TYPE_CHECKING:
    from real_server import Deployed
    from stack_project import Stack
    from tiny_repository import Repository

ROOT = Path(__file__).parents[1]
GIT_AUTHOR = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "Test"), ("EMAIL", "test@localhost"))}


Done = subprocess.CompletedProcess[str]
LONGEST = ("test_chaos.py", "test_week.py", "test_deployments.py", "test_stack.py")
"""Minutes each: they begin first, so that no core waits for the last of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the files of LONGEST to the front; the rest stays in order."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@dataclass(frozen=True)
class Project:
    """A project folder, how its flow ended there, and how long it took in seconds."""

    root: Path
    output: str = ""
    seconds: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment without Prefect's and MLflow's settings, with the project's own homes."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "TRAINYARD_", "BENTOML_"))}
        home = {"PREFECT_HOME": str(self.root / ".trainyard" / "prefect"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        return {**clean, **QUIET, **GIT_AUTHOR, **home}

    def run(self, *command: str, check: bool = True, timeout_s: float = 560, env: Mapping[str, str] | None = None) -> Done:
        """Run a command in the project; with ``check``, its output is shown when it fails."""
        done = subprocess.run(
            command, cwd=self.root, env={**self.environment, **(env or {})}, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        assert done.returncode == 0 or not check, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def python(self, *arguments: str, check: bool = True, timeout_s: float = 560, env: Mapping[str, str] | None = None) -> Done:
        """``python ARGUMENTS`` in the project, such as ``-m tasks.train``."""
        return self.run(sys.executable, *arguments, check=check, timeout_s=timeout_s, env=env)

    def retrain(self, *overrides: str, check: bool = True) -> Project:
        """Run the flow; the returned project holds what it printed."""
        start = time.monotonic()
        done = self.python("-m", "flows.local", *overrides, check=check)
        return Project(self.root, done.stdout + done.stderr, time.monotonic() - start)


@cache
def prefect_home() -> Path:
    """A Prefect home with a migrated database, as `make setup` makes it: made once, since the migrations take long."""
    home = Path(tempfile.mkdtemp(prefix="trainyard-prefect-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    subprocess.run(command, env={**environment, **QUIET, "PREFECT_HOME": str(home)}, check=True, capture_output=True)
    return home


def make_project(folder: Path, **overrides: dict[str, object]) -> Project:
    """Copy this tree (what git tracks or would track) into ``folder``, commit it there, and give it a port of its own.

    Its deployments' schedules are switched off: whether a test passes must not hang on the minute at which it runs.
    """
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    deployments = folder / "prefect.yaml"
    deployments.write_text(deployments.read_text(encoding="utf-8").replace("active: true}", "active: false}"), encoding="utf-8")
    apply_overrides({"deploy": {"port": spare_port()}, **overrides}, folder / "params.yaml")
    shutil.copytree(prefect_home(), folder / ".trainyard" / "prefect")
    project = Project(folder)
    for command in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "start"]):
        project.run("git", *command)
    return project


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A fresh project; what it deployed is stopped afterwards."""
    made = make_project(tmp_path / "project")
    yield made
    made.python("-m", "tasks.deploy", "--stop", check=False)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project on which the whole flow has run once on the embedded data. Tests must leave it as it is."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "finished"
    record, users = shared / "run.json", shared / "users"
    users.mkdir(parents=True, exist_ok=True)
    me = users / str(os.getpid())
    with file_lock(shared / "lock", 560, "the finished project"):  # pytest's processes share one
        if not record.exists():
            made = make_project(shared / "project").retrain()
            write_atomic(record, canonical_json({"output": made.output, "seconds": made.seconds}))
        made = Project(shared / "project", **json.loads(record.read_bytes()))
        made.python("-m", "tasks.deploy", "--serve")  # the last of its former users may have ended it
        me.touch()
    yield made
    with file_lock(shared / "lock", 560, "the finished project"):
        me.unlink()
        if not any(users.iterdir()):
            made.python("-m", "tasks.deploy", "--stop", check=False)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """A running local stack on PostgreSQL, with passwords: one for all tests, since it takes half a minute to start."""
    from stack_project import postgres_stack

    with postgres_stack() as made:
        yield made


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A real Prefect server made ready by flows.setup, over a project whose ingest does as a test tells it; no worker yet."""
    from real_server import deployed_project

    with deployed_project(tmp_path_factory.mktemp("deployed") / "project") as made:
        yield made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A tiny git and DVC repository in whose folder this process stands."""
    from tiny_repository import make_repository

    made = make_repository(tmp_path / "home")
    monkeypatch.chdir(made.root)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the tiny repository has no tasks/ of its own
    return made
