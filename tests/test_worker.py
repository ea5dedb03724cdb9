"""The third door: a real Prefect server, `prefect deploy --all`, a real worker, and `prefect deployment run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from conftest import Project

from tasks.core.artifacts import Endpoint
from tasks.core.config import load_params
from tasks.core.process import spare_port

pytestmark = pytest.mark.slow


@contextmanager
def background(project: Project, log: str, *command: str, env: Mapping[str, str]) -> Iterator[None]:
    """A server in its own process group for the length of a block."""
    with (project.root / ".trainyard" / log).open("w") as output:
        child = subprocess.Popen(
            command, cwd=project.root, env={**project.environment, **env}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield
        finally:
            for sig in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(child.pid, sig)
                    child.wait(timeout=15)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue


def wait_for(url: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"{url} did not answer"
            time.sleep(0.5)


@pytest.mark.timeout(900)  # a minute and a half on two idle cores
def test_the_readmes_three_commands(project: Project) -> None:
    port = spare_port()
    api = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    with background(project, "server.log", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), env={}):
        wait_for(f"http://127.0.0.1:{port}/api/health")
        project.python("-m", "flows.setup", env=api)
        project.run("prefect", "--no-prompt", "deploy", "--all", env=api)  # which flows.setup did; again changes nothing
        listed = project.run("prefect", "deployment", "ls", env=api).stdout
        assert "retrain/manual" in listed
        assert "retrain/nightly" in listed
        nightly = json.loads(project.run("prefect", "deployment", "inspect", "retrain/nightly", "--output", "json", env=api).stdout)
        assert nightly["schedules"][0]["schedule"]["timezone"] == "Europe/London"
        with background(project, "worker.log", "prefect", "worker", "start", "--pool", "trainyard", env={**api, "PREFECT_WORKER_QUERY_SECONDS": "1"}):
            overrides = 'overrides={"train":{"threads":1}}'
            command = ("prefect", "deployment", "run", "retrain/manual", "--param", overrides, "--watch", "--watch-interval", "2")
            watched = project.run(*command, check=False, timeout_s=480, env=api)
            log = (project.root / ".trainyard" / "worker.log").read_text(encoding="utf-8")
            assert watched.returncode == 0, f"{watched.stdout}\n{watched.stderr}\n{log}"
            assert load_params(project.root / "params.yaml").train.threads == 1
            endpoint = Endpoint.load(project.root)
            with urllib.request.urlopen(f"{endpoint.url}/provenance", timeout=10) as answer:
                assert json.load(answer)["tag"] == endpoint.tag
            assert project.run("git", "status", "--porcelain").stdout == ""  # the project's folder followed what the run published
            assert "dvc.lock" in project.run("git", "show", "--name-only", "--format=%P", "--first-parent", "-m", "main").stdout
            assert project.run("git", "branch", "--list", "trainyard/runs/*").stdout.count("\n") == 1
            runs = json.loads(
                urllib.request.urlopen(
                    urllib.request.Request(
                        f"{api['PREFECT_API_URL']}/logs/filter", data=b'{"limit": 200}', headers={"Content-Type": "application/json"}, method="POST"
                    ),
                    timeout=10,
                ).read()
            )
            said = "\n".join(entry["message"] for entry in runs)
            assert "epoch 8/8" in said  # the child's lines reached the flow run's log
            project.run("prefect", "deployment", "run", "retrain/nightly", "--watch", "--watch-interval", "2", timeout_s=240, env=api)
            assert "Unchanged('nothing changed (nightly)'" in (project.root / ".trainyard" / "worker.log").read_text(encoding="utf-8")
            assert project.run("git", "branch", "--list", "trainyard/runs/*").stdout.count("\n") == 1
            assert len(list((project.root / ".trainyard" / "worktrees").glob("*/"))) == 0
    assert "stopped classifier" in project.python("-m", "tasks.deploy", "--stop").stdout
    assert endpoint.tag in project.python("-m", "tasks.deploy", "--serve").stdout
    assert "nothing changed" in project.retrain().output  # nor does `make run` find anything to do
