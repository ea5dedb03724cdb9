"""A project whose local stack (flows/stack.py) runs on ports of its own, where PostgreSQL's user can reach it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Project, make_project

from flows import postgres, servers
from tasks.core import daemons
from tasks.core.process import spare_port

FLOW = """
import os, sys, time
from pathlib import Path
from prefect import flow
from tasks.core.process import run_child

@flow
def probe(name: str, seconds: float = 0.0) -> None:
    run_child([sys.executable, "-c", f"import time; time.sleep({seconds})"], cwd=Path.cwd(), on_line=print) if seconds else None
    Path(f"{name}.seen").write_text(os.environ.get("TEAM", ""))

if __name__ == "__main__":
    probe()
"""
"""A flow that holds a child process for ``seconds``, as a stage does, and says which team's worker ran it."""


@dataclass(frozen=True)
class Stack:
    """A project and what its stack is set to."""

    project: Project

    @property
    def root(self) -> Path:
        """The project's folder."""
        return self.project.root

    @property
    def clients(self) -> dict[str, str]:
        """What a client needs to use the servers."""
        return servers.client_environment(servers.load_settings(self.root), servers.load_credentials(self.root))

    def make(self, verb: str, check: bool = True) -> dict[str, list[str]]:
        """``python -m flows.stack VERB``: the words of each row of its table, by name."""
        done = self.project.python("-m", "flows.stack", verb, check=check, timeout_s=300)
        return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}

    def processes(self) -> list[psutil.Process]:
        """Everything that the stack runs."""
        found = daemons.tagged(servers.ROOT_VARIABLE, self.root, servers.PART_VARIABLE)
        lines = ((process, daemons.command_line(process)) for process in psutil.process_iter())
        postgres_too = [process for process, line in lines if "postgres" in line and str(self.root) in line]
        return [process for processes in found.values() for process in processes] + postgres_too

    def leader(self, part: str, command: str) -> psutil.Process:
        """The process of ``part`` whose command line holds ``command``."""
        found = daemons.tagged(servers.ROOT_VARIABLE, self.root, servers.PART_VARIABLE)[part]
        return next(process for process in found if command in daemons.command_line(process))

    def api(self, path: str, body: Any = None) -> Any:
        """The answer of Prefect's API, logged in."""
        clients = self.clients
        status, answer = servers.request(f"{clients['PREFECT_API_URL']}{path}", body, clients.get("PREFECT_API_AUTH_STRING", ""))
        assert status in (200, 201), f"{path}: {status} {answer}"
        return answer

    def add_probe(self, pool: str) -> str:
        """Deploy FLOW to ``pool``; returns the deployment's id."""
        (self.root / "probe.py").write_text(FLOW)
        name = f"probe-{pool}"
        command = ("prefect", "--no-prompt", "deploy", "probe.py:probe", "--name", name, "--pool", pool)
        self.project.run(*command, env=self.clients)
        return str(self.api(f"/deployments/name/probe/{name}")["id"])

    def start(self, deployment: str, **parameters: object) -> str:
        """Ask for a run; returns its id."""
        return str(self.api(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters, "state": {"type": "SCHEDULED"}})["id"])

    def wait_for_run(self, run: str, *states: str, seconds: float = 90) -> str:
        """Wait until the run is in one of ``states``."""
        deadline = time.monotonic() + seconds
        while (state := self.api(f"/flow_runs/{run}")["state_type"]) not in states:
            assert time.monotonic() < deadline, f"{run} is {state}\n{(self.root / '.trainyard/stack/worker.log').read_text()}"
            time.sleep(0.3)
        return str(state)


def free_ports() -> dict[str, str]:
    """Settings with ports that were free a moment ago."""
    return {f"TRAINYARD_STACK_{name}_PORT": str(spare_port()) for name in ("PREFECT", "MLFLOW", "POSTGRES")}


@contextmanager
def stack_project(settings: Mapping[str, str]) -> Iterator[Stack]:
    """A project with ``settings`` in its stack.env; whatever runs of its stack ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="trainyard-stack-"))
    folder.chmod(0o755)  # pytest's own folders are closed to other users, such as PostgreSQL's
    try:
        stack = Stack(make_project(folder / "project"))
        (stack.root / servers.SETTINGS_FILE).write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        try:
            yield stack
        finally:
            stack.make("down", check=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres_stack() -> Iterator[Stack]:
    """A running stack on PostgreSQL with passwords on; skips where PostgreSQL cannot run."""
    with stack_project({**free_ports(), "TRAINYARD_STACK_AUTH": "true", "TRAINYARD_STACK_DATABASE": "postgresql"}) as stack:
        found = postgres.find(stack.root)
        if isinstance(found, str):
            pytest.skip(f"{found}: apt-get install postgresql")
        stack.make("up")
        yield stack
