"""The deployments of prefect.yaml on a real server with a real worker: events, schedules, overlap, cancelling, crashes, messages.

The tests run in this order on one server: a run whose worker is killed at first is looked at again at the end, when the server
had the time to notice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx
import psutil
import pytest
from real_server import Deployed, gone, until

from flows.automations import MAX_STARTS, RETRY_S
from flows.watch import Seen

pytestmark = pytest.mark.slow

SLEEP = {"env": {"ACT": "sleep"}}
HOLD = """
import os, sys, time
from flows.bindings import slot
with slot("trainyard-training"):
    print("held", flush=True)
    time.sleep(float(sys.argv[1]))
"""


def active_slots(deployed: Deployed) -> int:
    return int(httpx.get(f"{deployed.api}/v2/concurrency_limits/trainyard-training", timeout=30).json()["active_slots"])


def emit(deployed: Deployed, call: str) -> None:
    """Send an event from a process of its own, which ends at once."""
    deployed.project.python("-c", f"from flows import events; events.{call}", env=deployed.env)


def flow_processes(sleeper: int) -> list[psutil.Process]:
    """The flow's process above the stage whose grandchild sleeps, then those between it and the worker."""
    above: list[psutil.Process] = psutil.Process(sleeper).parents()[1:]  # [0] is the stage
    return above[: next(i for i, process in enumerate(above) if "worker" in process.cmdline())]


def crash_again_and_again(deployed: Deployed) -> tuple[int, list[str]]:
    """Say of a run without a process that it runs and crashes; how often it was started, and its states afterwards."""
    nightly = deployed.deployment("retrain/nightly")  # only a run of a deployment can go back to its queue; this one is in none
    body = {"flow_id": nightly["flow_id"], "deployment_id": nightly["id"], "tags": ["trainyard"], "state": {"type": "SCHEDULED"}}
    run_id = str(deployed.post("flow_runs/", **body)["id"])
    starts = 0
    while starts <= MAX_STARTS:
        for state in ("PENDING", "RUNNING", "CRASHED"):
            deployed.post(f"flow_runs/{run_id}/set_state", state={"type": state})
        starts += 1
        deadline = time.monotonic() + RETRY_S + 45
        while deployed.run(run_id)["state_name"] == "Crashed":
            if time.monotonic() > deadline:
                return starts, [state["name"] for state in deployed.states(run_id)]
            time.sleep(1)
    return starts, []


@dataclass
class Killed:
    """What was killed -9 while it ran, a retrain with its worker, and a process that held the training slot; and what becomes
    of a run that crashes again and again."""

    run_id: str
    at: float
    crashes: Future[tuple[int, list[str]]]


@pytest.fixture(scope="module")
def killed(deployed: Deployed) -> Killed:
    worker = deployed.worker()
    run_id = deployed.trigger("retrain/manual", job_variables=SLEEP)
    sleeper = deployed.sleeper(run_id)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, "600"], cwd=deployed.project.root, env={**deployed.project.environment, **deployed.env}, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert active_slots(deployed) == 1
    for pid in (worker.pid, *(process.pid for process in flow_processes(sleeper)), holder.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    holder.wait()
    at = time.time()
    assert gone(sleeper, 15), "the stage's grandchild outlived the flow's process"
    deployed.worker()
    return Killed(run_id, at, ThreadPoolExecutor(1).submit(crash_again_and_again, deployed))


def test_new_data_starts_a_retrain_and_its_failure_is_told(deployed: Deployed, killed: Killed) -> None:
    emit(deployed, "data_changed('classifier', 'a' * 32, 'f', 100, 10)")
    run = until(lambda: next(iter(deployed.runs("retrain/on-new-data")), None), "run on new data", 30, deployed)
    assert run["parameters"] == {"reason": "new data " + "a" * 32}
    failed = deployed.until(run["id"], "Failed", "Crashed", "Completed")
    assert failed["state_name"] == "Failed"
    assert "error[source_empty]: the test says so" in failed["state"]["message"]
    told = until(lambda: next((said for said in deployed.told if "failed" in said["subject"]), None), "message of the failure", 30, deployed)
    assert told["subject"] == f"Trainyard: retrain/{run['name']} failed"
    assert "error[source_empty]: the test says so" in told["body"]


def test_drift_starts_one_retrain_and_a_second_is_cancelled_and_both_are_told(deployed: Deployed, killed: Killed) -> None:
    deployed.act("sleep")
    emit(deployed, "drift_detected('classifier', 'brightness fell by 20 %')")
    run = until(lambda: next(iter(deployed.runs("retrain/on-drift")), None), "run on drift", 30, deployed)
    assert run["parameters"] == {"reason": "drift: brightness fell by 20 %"}
    deployed.until(run["id"], "Running")
    sleeper = deployed.sleeper(run["id"])
    second = deployed.trigger("retrain/on-drift")
    assert "concurrency limit" in deployed.until(second, "Cancelled")["state"]["message"]

    cancelled = time.monotonic()
    deployed.post(f"flow_runs/{run['id']}/set_state", state={"type": "CANCELLING"})
    assert gone(sleeper, 20), "the stage's grandchild outlived the cancelled run"
    deployed.until(run["id"], "Cancelled", seconds=30)
    assert time.monotonic() - cancelled < 25
    deployed.act("fail")
    assert any(said["subject"] == "Trainyard: classifier: drift" and said["body"] == "brightness fell by 20 %" for said in deployed.told)


def test_a_manual_run_waits_for_the_one_before_it_and_a_stage_past_its_limit_is_ended(deployed: Deployed, killed: Killed) -> None:
    environment = {"env": {"ACT": "sleep", "TRAINYARD_TIME_LIMIT_S_INGEST": "8"}}
    name = "retrain/on-new-data"  # ENQUEUE too, and no crashed run of it is about to come back
    first = deployed.trigger(name, job_variables=environment, parameters={"reason": "first"})
    deployed.until(first, "Running")
    sleeper = deployed.sleeper(first)
    second = deployed.trigger(name)
    assert deployed.until(second, "AwaitingConcurrencySlot", "Running")["state_name"] == "AwaitingConcurrencySlot"
    message = deployed.until(first, "Failed")["state"]["message"]
    assert "error[time_limit]: ingest was ended; got more than 8 s; must be faster; set TRAINYARD_TIME_LIMIT_S_INGEST" in message
    assert gone(sleeper, 5)
    tasks = deployed.post("task_runs/filter", flow_runs={"id": {"any_": [first]}})
    assert [(task["state_name"], task["run_count"], sorted(task["tags"])) for task in tasks] == [("TimedOut", 1, ["light"])]
    deployed.until(second, "Failed")


def test_a_schedule_fires_and_an_unmoved_source_is_left_alone(deployed: Deployed, killed: Killed) -> None:
    root = deployed.project.root
    found = deployed.project.python("-m", "tasks.sources").stdout.split()[1]
    Seen(found, "v", 1).save(root, "classifier")
    watch = deployed.deployment("ingest/watch")["id"]
    fast = {"schedule": {"interval": 10.0}, "active": True}
    httpx.post(f"{deployed.api}/deployments/{watch}/schedules", json=[fast], timeout=30).raise_for_status()
    run = until(lambda: next((run for run in deployed.runs("ingest/watch") if run["state_name"] == "Unchanged"), None), "scheduled run", 75, deployed)
    assert run["auto_scheduled"]
    assert "the source did not move" in run["state"]["message"]
    schedules = httpx.get(f"{deployed.api}/deployments/{watch}/schedules", timeout=30).json()
    assert [schedule["active"] for schedule in schedules if "cron" in schedule["schedule"]] == [False]  # so that none but this one fired
    for schedule in schedules:
        if "interval" in schedule["schedule"]:
            httpx.delete(f"{deployed.api}/deployments/{watch}/schedules/{schedule['id']}", timeout=30)


def test_a_run_whose_worker_and_process_were_killed_is_crashed_within_two_minutes_and_its_slots_are_free(deployed: Deployed, killed: Killed) -> None:
    def crashed() -> dict[str, Any] | None:
        return next((state for state in deployed.states(killed.run_id) if state["name"] == "Crashed"), None)

    state = until(crashed, "crash of the killed run", max(killed.at + 125 - time.time(), 5), deployed)
    assert "no heartbeat" in state["message"]
    assert datetime.fromisoformat(state["timestamp"].replace("Z", "+00:00")).timestamp() - killed.at < 120
    until(lambda: True if active_slots(deployed) == 0 else None, "free training slot", max(killed.at + 120 - time.time(), 5), deployed)

    sleeper = deployed.sleeper(killed.run_id)  # the same run comes back
    assert deployed.run(killed.run_id)["run_count"] == 2
    flow_processes(sleeper)[0].kill()
    deployed.until(killed.run_id, "Crashed", seconds=20)
    assert gone(sleeper, 15)
    after = deployed.trigger("retrain/manual")  # its slot of the deployment is free, until it comes back once more
    deployed.until(after, "Failed", seconds=60)


def test_a_run_that_crashed_three_times_stays_crashed(killed: Killed) -> None:
    starts, states = killed.crashes.result(timeout=240)
    assert starts == MAX_STARTS
    assert states.count("AwaitingRetry") == MAX_STARTS - 1
    assert states[-1] == "Crashed"


def test_the_training_limit_cost_nothing_where_there_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.bindings import slot

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    before = time.monotonic()
    with slot("trainyard-training"):
        assert time.monotonic() - before < 0.1
