"""A real Prefect server, made ready by flows.setup, with a real worker, over a project whose ingest does as a test tells it.

The deployments are those of prefect.yaml. What a retrain would do after its first stage is for other tests: here ``ingest``
fails, or sleeps beside a grandchild, so that a run takes seconds and its processes can be counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from conftest import Project, make_project

from tasks.core.process import spare_port

T = TypeVar("T")
ACTOR = '''"""Stands in for ingest in tests of what happens around a stage: sleeps with a grandchild, or fails."""
import os, subprocess, sys, time
from pathlib import Path

from tasks.core.process import die_with_parent

HOME = Path({home!r})
die_with_parent()
if os.environ.get("ACT", (HOME / ".trainyard" / "act").read_text()) == "sleep":
    print("ingest: sleeping", flush=True)
    child = subprocess.Popen(["sleep", "600"], preexec_fn=die_with_parent)
    (HOME / ".trainyard" / ("sleeper." + os.environ["PREFECT__FLOW_RUN_ID"])).write_text(str(child.pid))
    time.sleep(600)
print("error[source_empty]: the test says so; got nothing; must be something; set tests", file=sys.stderr)
sys.exit(2)
'''


@dataclass
class Deployed:
    """The project, its server's address, what the webhook was told, and the processes to end."""

    project: Project
    api: str
    told: list[dict[str, Any]] = field(default_factory=list)
    hook: str = ""
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """The environment of a client of this server."""
        return {"PREFECT_API_URL": self.api}

    def start(self, log: str, *command: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a server or worker in its own process group."""
        with (self.project.root / ".trainyard" / log).open("ab") as output:
            child = subprocess.Popen(
                command,
                cwd=self.project.root,
                env={**self.project.environment, **self.env, **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.children.append(child)
        return child

    def worker(self) -> subprocess.Popen[bytes]:
        """Start a worker."""
        return self.start("worker.log", "prefect", "worker", "start", "--pool", "trainyard", PREFECT_WORKER_QUERY_SECONDS="1")

    def end(self, child: subprocess.Popen[bytes]) -> None:
        """End a process group; a worker takes its runs along."""
        for sig in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(child.pid, sig)
                child.wait(timeout=10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def act(self, how: str) -> None:
        """What ingest does from now on, fail or sleep, in runs that were not triggered with ``how`` of their own."""
        (self.project.root / ".trainyard" / "act").write_text(how)

    def post(self, path: str, **body: Any) -> Any:
        """POST to the API; raises on an error status. A busy SQLite answers 503 now and then, and is asked again as Prefect's client does."""
        for _ in range(5):
            answer = httpx.post(f"{self.api}/{path}", json=body, timeout=30)
            if answer.status_code != 503:
                break
            time.sleep(1)
        answer.raise_for_status()
        return answer.json()

    def deployment(self, name: str) -> dict[str, Any]:
        """The deployment FLOW/NAME."""
        answer = httpx.get(f"{self.api}/deployments/name/{name}", timeout=30)
        answer.raise_for_status()
        return dict(answer.json())

    def runs(self, name: str) -> list[dict[str, Any]]:
        """The flow runs of a deployment but for those that wait for their schedule, oldest first."""
        wanted = {"deployments": {"id": {"any_": [self.deployment(name)["id"]]}}, "sort": "START_TIME_ASC", "limit": 200}
        found = [run for run in self.post("flow_runs/filter", **wanted) if run["state_name"] != "Scheduled"]
        return sorted(found, key=lambda run: str(run["created"]))

    def trigger(self, name: str, **body: Any) -> str:
        """Ask for a run as `prefect deployment run` does; returns its id."""
        return str(self.post(f"deployments/{self.deployment(name)['id']}/create_flow_run", **body)["id"])

    def run(self, run_id: str) -> dict[str, Any]:
        """One flow run."""
        return dict(httpx.get(f"{self.api}/flow_runs/{run_id}", timeout=30).json())

    def states(self, run_id: str) -> list[dict[str, Any]]:
        """Every state that a run had, oldest first."""
        return list(httpx.get(f"{self.api}/flow_run_states/", params={"flow_run_id": run_id}, timeout=30).json())

    def until(self, run_id: str, *names: str, seconds: float = 90) -> dict[str, Any]:
        """The run, once it is in a state of one of ``names``."""
        return until(lambda: run if (run := self.run(run_id))["state_name"] in names else None, f"{run_id} {names}", seconds, self)

    def sleeper(self, run_id: str, seconds: float = 90) -> int:
        """The pid of the grandchild of the stage that sleeps in a run."""
        path = self.project.root / ".trainyard" / f"sleeper.{run_id}"

        def found() -> int | None:
            return int(path.read_text()) if path.is_file() and path.read_text() else None

        pid = until(found, "a sleeping stage", seconds, self)
        path.unlink()
        return pid

    def logs(self) -> str:
        """The ends of the logs of server and worker."""
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in (self.project.root / ".trainyard").glob("*.log"))


def until(look: Callable[[], T | None], what: str, seconds: float, deployed: Deployed) -> T:
    """What ``look`` returns once it is not None."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None:
            return found
        assert time.monotonic() < deadline, f"no {what} within {seconds} s\n{deployed.logs()}"
        time.sleep(0.25)


def gone(pid: int, seconds: float) -> bool:
    """Whether the process ends within ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def listen(deployed: Deployed) -> HTTPServer:
    """A web server that keeps what it is told."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            deployed.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    deployed.hook = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def add_hook(deployed: Deployed) -> None:
    """Save a custom webhook block `custom-webhook/team` on the server."""
    code = (
        "from prefect.blocks.notifications import CustomWebhookNotificationBlock as Block\n"
        f"Block(name='team', url={deployed.hook!r}, json_data={{'subject': '{{{{subject}}}}', 'body': '{{{{body}}}}'}}).save('team')"
    )
    deployed.project.python("-c", code, env=deployed.env)


@contextmanager
def deployed_project(root: Path) -> Iterator[Deployed]:
    """Server, deployments, automations, a webhook that is told; no worker yet."""
    port = spare_port()
    made = Deployed(make_project(root), f"http://127.0.0.1:{port}/api")
    (root / "tasks" / "ingest.py").write_text(ACTOR.format(home=str(root)))
    made.project.run("git", "commit", "-qam", "an ingest that does as told")
    made.act("fail")
    web = listen(made)
    try:
        made.start("server.log", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
        until(lambda: answers(f"{made.api}/health") or None, "server", 120, made)
        add_hook(made)
        (root / ".trainyard" / "setup.out").write_text(
            made.project.python("-m", "flows.setup", "--notify", "custom-webhook/team", env=made.env).stdout
        )
        yield made
    finally:
        for child in reversed(made.children):
            made.end(child)
        web.shutdown()
        web.server_close()


def answers(url: str) -> bool:
    """Whether anything is served there."""
    try:
        return httpx.get(url, timeout=5).status_code < 500
    except httpx.TransportError:
        return False


def environment_of(pid: int) -> dict[str, str]:
    """The environment of a running process."""
    pairs = (pair.partition("=") for pair in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return {key: value for key, _, value in pairs if key}
