"""Close what died, remove what is old: deployment sweep/sweep, or here by python -m flows.sweep [--dry-run].

Prefect's dead flow runs are closed here; everything else is done by the child ``python -m tasks.backends.sweep``, which knows
MLflow and DVC. Safe beside living runs. docs/operations.md says what goes and what never does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from prefect import flow, get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.settings import get_current_settings
from prefect.states import Completed, Crashed

from flows.bindings import failure_of
from flows.publish import push_pending
from tasks.core import errors, runs
from tasks.core.config import PARAMS, load_params
from tasks.core.process import quiet_environment, run_child

SILENT_S = 600.0
"""Without a sign of life for so long a run of an unknown host is dead. Heartbeats come every 30 s by prefect.yaml, every 180 s by default."""
DEAD_HERE_S = 30.0
"""The same where this host knows that the run's process is gone: what it reported last may still be on its way."""
PAGE = 200
Deed = dict[str, Any]


@flow(name="sweep", retries=0)
def sweep(dry_run: bool = False, young_s: float = 3600.0) -> State[Any]:
    """End and close dead runs, and remove old leftovers by ``run.keep_runs`` and ``run.keep_days``.

    ``dry_run`` changes nothing and says the same. Leftovers younger than ``young_s`` seconds always stay.
    """
    logger = get_run_logger()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        logger.info(line)

    deeds = sweep_project(Path.cwd(), dry_run, young_s, say)
    return Completed(message=said[-1], data=deeds)


def sweep_project(home: Path, dry_run: bool, young_s: float, say: Callable[[str], None]) -> list[Deed]:
    """Sweep the project at ``home``, telling each deed and at last the sum; runs that are pending are pushed first.

    Raises BadInput ``params_missing`` or ``params_invalid``, StageFailed where the child failed.
    """
    deeds: list[Deed] = []

    def tell(deed: Deed) -> None:
        deeds.append(deed)
        size = f"  {megabytes(deed['bytes'])}" if deed["bytes"] else ""
        say(f"  {deed['did']:<8} {deed['what']}{size}  ({deed['why']})")

    say("sweep: a dry run, nothing is changed" if dry_run else "sweep:")
    if not dry_run:
        push_pending(home, load_params(home / PARAMS).run, say)
    for deed in close_flow_runs(home, dry_run):
        tell(deed)
    command = [sys.executable, "-m", "tasks.backends.sweep", "--young-s", str(young_s), *(["--dry-run"] if dry_run else [])]
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        if line.startswith('{"did":'):
            tell(json.loads(line))

    done = run_child(command, cwd=home, on_line=on_line)
    if done.returncode != 0:
        raise failure_of("sweep", done.returncode, lines)
    say(total(deeds, dry_run))
    return deeds


def total(deeds: list[Deed], dry_run: bool) -> str:
    """What was done in one line."""
    count = {did: sum(deed["did"] == did for deed in deeds) for did in ("closed", "ended", "removed")}
    freed = megabytes(sum(deed["bytes"] for deed in deeds if deed["did"] == "removed"))
    if not any(count.values()):
        return "sweep: nothing to do"
    would = "would be " if dry_run else ""
    return f"sweep: {count['closed']} runs {would}closed, {count['ended']} processes {would}ended, {count['removed']} things {would}removed: {freed}"


def megabytes(size: float) -> str:
    """``size`` bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def close_flow_runs(home: Path, dry_run: bool) -> Iterator[Deed]:
    """Set this project's flow runs Crashed that stand RUNNING (PENDING, CANCELLING) though nothing of them lives.

    Dead is a run that does not hold its lock on this host and gave no sign of life: for DEAD_HERE_S where its lock was taken
    here, else for SILENT_S.
    """
    if not get_current_settings().api.url:
        return
    try:
        with get_client(sync_client=True) as client:
            for run in list(_unfinished(client, home)):
                alive = runs.lives(home, str(run.id))
                silent_s = time.time() - _last_sign(client, run)
                if alive or silent_s < (DEAD_HERE_S if alive is False else SILENT_S):
                    continue
                why = "its process is dead" if alive is False else "it does not live here"
                what = f"no sign of life for {silent_s / 60:.0f} min, {why}"
                if not dry_run and not _crash(client, run, f"swept: {what}"):
                    continue
                yield {"did": "closed", "what": f"Prefect run {run.name}", "why": f"{what}: Crashed", "bytes": 0}
    except (OSError, httpx.HTTPError) as error:  # the rest of the sweep goes on without it
        yield {"did": "kept", "what": "Prefect's runs", "why": f"the Prefect server does not answer: {type(error).__name__}", "bytes": 0}


def _unfinished(client: SyncPrefectClient, home: Path) -> Iterator[FlowRun]:
    """The runs of deployments whose folder is ``home`` that Prefect takes for living."""
    here, offset = json.dumps(str(home.resolve())), 0
    mine = []
    while page := client.read_deployments(limit=PAGE, offset=offset):
        mine += [deployment.id for deployment in page if here in json.dumps(deployment.pull_steps or [])]
        offset += PAGE
    if not mine:
        return
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]))
    chosen = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=mine), state=states)
    offset = 0
    while batch := client.read_flow_runs(flow_run_filter=chosen, limit=PAGE, offset=offset):
        yield from batch
        offset += PAGE


def _last_sign(client: SyncPrefectClient, run: FlowRun) -> float:
    """When the run last gave a sign of life: its newest event or change of state, in Unix seconds."""
    resource = EventResourceFilter(id=[f"prefect.flow-run.{run.id}"])
    heartbeats = client.read_events(EventFilter(event=EventNameFilter(prefix=["prefect.flow-run."]), resource=resource), limit=1).events
    times: list[datetime | None] = [*(event.occurred for event in heartbeats), run.state.timestamp if run.state else None, run.start_time]
    return max((moment.timestamp() for moment in times if moment is not None), default=0.0)


def _crash(client: SyncPrefectClient, run: FlowRun, message: str) -> bool:
    """Set the run Crashed, unless it moved on by itself meanwhile."""
    now = client.read_flow_run(run.id)
    if now.state is None or run.state is None or now.state.id != run.state.id:
        return False
    client.set_flow_run_state(run.id, Crashed(message=message), force=True)
    return True


def main() -> None:
    """Sweep the project in the current folder, without a flow run."""
    quiet_environment()
    parser = argparse.ArgumentParser(prog="python -m flows.sweep")
    parser.add_argument("--dry-run", action="store_true", help="change nothing, say what would be done")
    parser.add_argument("--young-s", type=float, default=3600.0, help="leftovers younger than so many seconds always stay")
    chosen = parser.parse_args()
    sweep_project(Path.cwd(), chosen.dry_run, chosen.young_s, print)


if __name__ == "__main__":
    sys.exit(errors.run(main))
