"""The two-team example of docs/teams.md on real servers: what one team may not touch, and whose worker runs what."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Project
from stack_project import Stack
from tiny_project import make_project as make_tiny

from tasks.backends import dvc_repo, model_registry
from tasks.core.errors import BadInput

pytestmark = pytest.mark.slow
DOCUMENT = (Path(__file__).parents[1] / "docs" / "teams.md").read_text(encoding="utf-8")
TEAMS = ("red", "blue")
PASSWORDS = {team: f"{team}-has-a-long-password" for team in TEAMS}


@pytest.fixture(scope="module", autouse=True)
def users(stack: Stack) -> None:
    """The users of both teams, made as the page says."""
    script = next(block for kind, block in re.findall(r"```(\w+)\n(.*?)```", DOCUMENT, re.DOTALL) if kind == "python")
    for team in TEAMS:
        stack.project.python("-c", script, env={**stack.clients, "TEAM": team, "TEAM_PASSWORD": PASSWORDS[team]})


@pytest.fixture
def login(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Log in at MLflow as a team; returns a client."""

    def log_in(team: str) -> Any:
        for key, value in {**stack.clients, "MLFLOW_TRACKING_USERNAME": team, "MLFLOW_TRACKING_PASSWORD": PASSWORDS[team]}.items():
            monkeypatch.setenv(key, value)
        from mlflow import MlflowClient

        return MlflowClient(stack.clients["MLFLOW_TRACKING_URI"])

    return log_in


def publish(root: Path, experiment: str, model_name: str, sharpness: float) -> str:
    """What `register` does with a team's model; returns its version."""
    tiny = make_tiny(root, sharpness=sharpness)
    files = {"trainyard": [tiny.model.path("model.onnx"), tiny.root / tiny.model.PATH, tiny.root / tiny.report.PATH]}
    record = model_registry.RunRecord({}, {}, [], {}, "tiny", "0" * 32, files, {}, tiny.model.path("model.onnx"), ["onnx"])
    options: dict[str, Any] = {"experiment": experiment, "model_name": model_name, "model_digest": tiny.model.digest, "description": ""}
    return model_registry.register(tiny.root, **options, record=record)[0]


def test_a_team_writes_to_its_own_experiment_and_model_and_to_no_other(tmp_path: Path, login: Callable[[str], Any]) -> None:
    login("blue")
    assert publish(tmp_path / "blue", "blue", "blue-classifier", 8.0) == "1"
    client = login("red")
    assert publish(tmp_path / "red", "red", "red-classifier", 9.0) == "1"
    with pytest.raises(BadInput, match="registry_denied.*refuses red"):
        publish(tmp_path / "experiment", "blue", "red-classifier", 10.0)
    with pytest.raises(BadInput, match="registry_denied.*refuses red"):
        publish(tmp_path / "model", "red", "blue-classifier", 11.0)
    with pytest.raises(BadInput, match="registry_denied"):
        model_registry.promote(tmp_path / "red", "blue-classifier", "1", None)
    assert client.get_registered_model("blue-classifier").aliases == {"challenger": "1"}  # it may read
    assert len(client.search_model_versions("name = 'blue-classifier'")) == 1


def test_each_team_pushes_its_data_to_its_own_remote(tmp_path: Path) -> None:
    for team in TEAMS:
        root = tmp_path / team / "project"
        (root / "data").mkdir(parents=True)
        (root / "data" / "dataset.json").write_text(f"the data of {team}")
        commands = [["git", "init", "-q"], ["dvc", "init", "-q"]]
        commands += [["dvc", "remote", "add", "--local", name, str(tmp_path / f"remote-{name}")] for name in TEAMS]
        commands += [["dvc", "remote", "default", "--local", team]]
        for command in commands:
            Project(root).run(*command)
        assert dvc_repo.track_data(root, push=True)[1] == f"moved, pushed to {team}"
    stored = {team: sorted(path.read_text() for path in (tmp_path / f"remote-{team}").rglob("*") if path.is_file()) for team in TEAMS}
    for team, texts in stored.items():
        assert f"the data of {team}" in texts
        assert not any(f"the data of {other}" in texts for other in TEAMS if other != team)


@contextmanager
def worker(stack: Stack, team: str) -> Iterator[None]:
    """A team's worker, started as the page says."""
    variables = {**stack.project.environment, **stack.clients, "TEAM": team, "PREFECT_WORKER_QUERY_SECONDS": "1"}
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", team, "--type", "process"]
    with (stack.root / f"{team}.log").open("w") as log:
        child = subprocess.Popen(command, cwd=stack.root, env=variables, stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def test_each_teams_worker_takes_the_runs_of_its_own_pool_alone(stack: Stack) -> None:
    deployments = {}
    for team in TEAMS:
        stack.project.run("prefect", "work-pool", "create", team, "--type", "process", env=stack.clients)
        deployments[team] = stack.add_probe(team)
    with worker(stack, "red"):
        runs = {team: stack.start(deployments[team], name=f"of-{team}") for team in TEAMS}
        stack.wait_for_run(runs["red"], "COMPLETED")
        assert stack.api(f"/flow_runs/{runs['blue']}")["state_type"] == "SCHEDULED"
    with worker(stack, "blue"):
        stack.wait_for_run(runs["blue"], "COMPLETED")
    assert [(stack.root / f"of-{team}.seen").read_text() for team in TEAMS] == list(TEAMS)
