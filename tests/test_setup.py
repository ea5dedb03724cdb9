"""flows.setup on a real server: what it makes, that it can be called again, and what it says when it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
from conftest import prefect_home
from real_server import Deployed, answers, until

from tasks.core.process import spare_port

pytestmark = pytest.mark.slow


def setup(deployed: Deployed, *arguments: str) -> dict[str, str]:
    """Run it; thing -> created, updated or unchanged."""
    return reported(deployed.project.python("-m", "flows.setup", *arguments, env=deployed.env).stdout)


def reported(output: str) -> dict[str, str]:
    return {what: done for done, _, what in (line.partition(" ") for line in output.splitlines()) for what in [what.strip()]}


def test_the_first_call_makes_everything_and_the_second_nothing(deployed: Deployed) -> None:
    first = reported((deployed.project.root / ".trainyard" / "setup.out").read_text())
    assert set(first.values()) == {"created"}
    for thing in (
        "work pool trainyard",
        "work queue trainyard/light",
        "deployment sweep/sweep",
        "automation 'trainyard: failure to custom-webhook/team'",
    ):
        assert thing in first
    assert len([thing for thing in first if thing.startswith("deployment")]) == 6
    automations = deployed.post("automations/filter", limit=200)
    crash = next(found for found in automations if found["name"] == "trainyard: no heartbeat, crashed")
    described = {**{key: crash[key] for key in ("name", "trigger", "actions", "enabled")}, "description": "edited by hand", "enabled": False}
    httpx.put(f"{deployed.api}/automations/{crash['id']}", json=described, timeout=30).raise_for_status()

    second = setup(deployed, "--notify", "custom-webhook/team", "--trainings", "2")
    changed = {what: done for what, done in second.items() if done != "unchanged"}
    assert changed == {
        "automation 'trainyard: no heartbeat, crashed'": "updated",
        "concurrency limit trainyard-training: 2 at once": "updated",
    }
    mended = httpx.get(f"{deployed.api}/automations/{crash['id']}", timeout=30).json()
    assert mended["description"] == crash["description"]
    assert mended["enabled"] is False  # what a person switched off stays off
    httpx.patch(f"{deployed.api}/automations/{crash['id']}", json={"enabled": True}, timeout=30).raise_for_status()
    third = setup(deployed, "--no-deploy", "--notify", "custom-webhook/team", "--trainings", "1")
    assert [what for what, done in third.items() if done != "unchanged"] == ["concurrency limit trainyard-training: 1 at once"]
    names = [found["name"] for found in deployed.post("automations/filter", limit=200)]
    assert len(names) == len(set(names)) == 3 + 6 + 2  # keepers, tellers, the triggers of two deployments


def test_an_unknown_block_is_named(deployed: Deployed) -> None:
    done = deployed.project.python("-m", "flows.setup", "--no-deploy", "--notify", "slack-webhook/nobody", env=deployed.env, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error[unknown_block]: no such notification block on the server; got slack-webhook/nobody")


def last_line(deployed: Deployed, env: dict[str, str]) -> tuple[int, str]:
    done = deployed.project.python("-m", "flows.setup", env=env, check=False)
    return done.returncode, done.stderr.splitlines()[-1]


def test_no_server_a_dead_one_and_a_closed_one_are_told_apart(deployed: Deployed, tmp_path: Path) -> None:
    code, line = last_line(deployed, {})
    assert (code, line.partition(":")[0]) == (2, "error[no_server]")
    dead = f"http://127.0.0.1:{spare_port()}/api"
    code, line = last_line(deployed, {"PREFECT_API_URL": dead})
    assert code == 75
    assert line.startswith(f"error[server_unavailable]: the Prefect server does not answer; got {dead}")

    home, port = tmp_path / "home", spare_port()
    shutil.copytree(prefect_home(), home)
    api = f"http://127.0.0.1:{port}/api"
    command = ("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port))
    closed = deployed.start("closed.log", *command, PREFECT_SERVER_API_AUTH_STRING="team:secret", PREFECT_HOME=str(home))
    until(lambda: answers(f"{api}/health") or None, "server with a login", 120, deployed)
    code, line = last_line(deployed, {"PREFECT_API_URL": api})
    assert code == 2
    assert line.startswith(f"error[login_refused]: {api} refused the login; got 401")
    assert "PREFECT_API_AUTH_STRING" in line
    done = deployed.project.python("-m", "flows.setup", "--no-deploy", env={"PREFECT_API_URL": api, "PREFECT_API_AUTH_STRING": "team:secret"})
    assert "created    work pool trainyard" in done.stdout
    deployed.end(closed)
