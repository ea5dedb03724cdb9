"""Make a Prefect server ready for this project: python -m flows.setup [--notify BLOCK ...] [--trainings N] [--no-deploy]

Creates the work pool, its queues, the limit on trainings, the automations, and the deployments of prefect.yaml. It can be called
again at any time: what is as it should be is left alone, and so is what people set by hand on the server (a queue's priority, a
limit, an automation switched off). --notify names a block as Prefect does, for instance slack-webhook/team; each gets a message of
every failure, crash, rejection, promotion, rollback and drift. --trainings N is how many trainings may run at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx
from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate, WorkPoolCreate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

from flows.automations import keepers, tellers
from flows.bindings import ENVIRONMENT, PYTHON, TRAINING_LIMIT
from tasks.core import errors
from tasks.core.errors import BadInput, Transient
from tasks.core.process import quiet_environment, run_child

POOL = "trainyard"
QUEUES = {"light": 1, "training": 2}
"""Work queues of the pool and their priorities, 1 first: what ends in seconds never waits behind a training."""
DEPLOYED = (
    "description",
    "parameters",
    "tags",
    "path",
    "entrypoint",
    "work_queue_name",
    "work_pool_name",
    "job_variables",
    "pull_steps",
    "concurrency_options",
    "global_concurrency_limit",
    "parameter_openapi_schema",
    "enforce_parameter_schema",
)
"""What `prefect deploy` sets of a deployment, beside its schedules and triggers."""
VOLATILE = {"id", "created", "updated", "active_slots"}


async def set_up(notify: Sequence[str], trainings: int | None, deploy: bool) -> None:
    """Bring the server at PREFECT_API_URL in step with this project, printing one line a thing.

    Raises BadInput ``no_server``, ``login_refused``, ``unknown_block`` or ``deploy_failed``, Transient ``server_unavailable``.
    """
    url = os.environ.get("PREFECT_API_URL", "") or configured_url()
    if not url:
        raise BadInput(
            "no_server",
            "setup needs a Prefect server",
            constraint="running",
            knob="PREFECT_API_URL, by `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`",
        )
    try:
        async with get_client() as client:
            await client.hello()
            await _pool(client)
            await _limit(client, trainings)
            automations = keepers()
            for block in notify:
                automations += await _tellers(client, block)
            for automation in automations:
                await _automation(client, automation)
            if deploy:
                await _deployments(client)
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in (401, 403):
            raise
        raise BadInput(
            "login_refused",
            f"{url} refused the login",
            value=error.response.status_code,
            constraint="the server's PREFECT_SERVER_API_AUTH_STRING",
            knob="PREFECT_API_AUTH_STRING=user:password",
        ) from None
    except httpx.TransportError as error:
        raise Transient(
            "server_unavailable", "the Prefect server does not answer", value=f"{url}: {error or type(error).__name__}", knob="PREFECT_API_URL"
        ) from None


def configured_url() -> str:
    """PREFECT_API_URL of Prefect's profile, "" where none is set."""
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value() or ""


def tell(done: str, what: str) -> None:
    """One line of the report: created, updated or unchanged."""
    print(f"{done:<10} {what}", flush=True)


async def _pool(client: PrefectClient) -> None:
    try:
        await client.read_work_pool(POOL)
        tell("unchanged", f"work pool {POOL}")
    except ObjectNotFound:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type="process", description="Trainyard's runs, as processes of the worker's machine"))
        tell("created", f"work pool {POOL}")
    there = {queue.name for queue in await client.read_work_queues(work_pool_name=POOL)}
    for name, priority in QUEUES.items():
        if name not in there:
            await client.create_work_queue(name=name, work_pool_name=POOL, priority=priority)
        tell("unchanged" if name in there else "created", f"work queue {POOL}/{name}")


async def _limit(client: PrefectClient, trainings: int | None) -> None:
    """The limit that flows.bindings holds around training; an existing one changes only where a number was asked for."""
    what = f"concurrency limit {TRAINING_LIMIT}"
    try:
        there = await client.read_global_concurrency_limit_by_name(TRAINING_LIMIT)
    except ObjectNotFound:
        await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=TRAINING_LIMIT, limit=trainings or 1))
        return tell("created", f"{what}: {trainings or 1} at once")
    if trainings in (None, there.limit):
        return tell("unchanged", f"{what}: {there.limit} at once")
    await client.update_global_concurrency_limit(TRAINING_LIMIT, GlobalConcurrencyLimitUpdate(limit=trainings))
    return tell("updated", f"{what}: {trainings} at once")


async def _tellers(client: PrefectClient, block: str) -> list[Automation]:
    kind, _, name = block.partition("/")
    try:
        document = await client.read_block_document_by_name(name, kind, include_secrets=False)
    except ObjectNotFound:
        _unknown(block)
    capabilities = (document.block_schema.capabilities if document.block_schema else []) or []
    if kind != "webhook" and "notify" not in capabilities:
        _unknown(block)
    return tellers(block, document.id, is_webhook=kind == "webhook")


def _unknown(block: str) -> NoReturn:
    raise BadInput(
        "unknown_block",
        "no such notification block on the server",
        value=block,
        constraint="TYPE/NAME, such as slack-webhook/team, as `prefect block ls` shows it",
        knob="--notify",
    )


async def _automation(client: PrefectClient, wanted: Automation) -> None:
    """Create or update one automation, known by its name; whether it is switched on is left to people."""
    what = f"automation {wanted.name!r}"
    core = AutomationCore(**wanted.model_dump(exclude={"id", "owner_resource"}))  # the server takes no owner in an update
    there = await client.read_automations_by_name(wanted.name)
    if not there:
        await client.create_automation(core)
        return tell("created", what)
    core.enabled = there[0].enabled
    if _plain(there[0]) == _plain(core):
        return tell("unchanged", what)
    await client.update_automation(there[0].id, core)
    return tell("updated", what)


async def _deployments(client: PrefectClient) -> None:
    """`prefect deploy --all` as a child, and what came of it."""
    before = await _snapshot(client)
    lines: list[str] = []
    command = [PYTHON, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    result = await asyncio.to_thread(run_child, command, cwd=Path.cwd(), on_line=lines.append, env=ENVIRONMENT)
    if result.returncode:
        told = " ".join(line.strip() for line in lines[-6:] if line.strip())
        raise BadInput(
            "deploy_failed", "prefect deploy --all", value=told or result.returncode, constraint="a valid prefect.yaml", knob="what it names"
        )
    after = await _snapshot(client)
    for name, facts in sorted(after.items()):
        tell("created" if name not in before else "unchanged" if before[name] == facts else "updated", f"deployment {name}")


async def _snapshot(client: PrefectClient) -> dict[str, Any]:
    """What `prefect deploy` sets of each deployment on this server that belongs to our pool, by FLOW/NAME."""
    found: dict[str, Any] = {}
    flows: dict[Any, str] = {}
    for deployment in await client.read_deployments(limit=200):
        if deployment.work_pool_name != POOL:
            continue
        if deployment.flow_id not in flows:
            flows[deployment.flow_id] = (await client.read_flow(deployment.flow_id)).name
        triggers = await client.read_resource_related_automations(f"prefect.deployment.{deployment.id}")
        found[f"{flows[deployment.flow_id]}/{deployment.name}"] = [
            _without(deployment.model_dump(mode="json", include=set(DEPLOYED))),
            [[schedule.schedule.model_dump(mode="json", exclude={"anchor_date"}), schedule.active] for schedule in deployment.schedules],
            sorted((_plain(trigger) for trigger in triggers), key=str),
        ]
    return found


def _plain(automation: AutomationCore) -> Any:
    """An automation as comparable data, without what the server adds."""
    return _without(AutomationCore(**automation.model_dump(exclude={"id"}, include=set(AutomationCore.model_fields))).model_dump(mode="json"))


def _without(tree: Any) -> Any:
    """``tree`` without ids, times and counts; sets, which JSON has as lists in any order, sorted."""
    if isinstance(tree, dict):
        return {key: _without(value) for key, value in tree.items() if key not in VOLATILE}
    if isinstance(tree, list):
        return sorted((_without(value) for value in tree), key=str) if all(isinstance(value, str) for value in tree) else [_without(v) for v in tree]
    return tree


def main() -> None:
    """Read the options, set up."""
    quiet_environment()
    parser = argparse.ArgumentParser(prog="python -m flows.setup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--notify", nargs="+", default=[], metavar="BLOCK", help="blocks that are told, such as slack-webhook/team")
    parser.add_argument("--trainings", type=int, metavar="N", help="how many trainings may run at once (1)")
    parser.add_argument("--no-deploy", action="store_true", help="leave the deployments alone")
    options = parser.parse_args()
    if options.trainings is not None and options.trainings < 1:
        raise BadInput("unknown_option", "--trainings", value=options.trainings, constraint="at least 1")
    asyncio.run(set_up(options.notify, options.trainings, not options.no_deploy))


if __name__ == "__main__":
    sys.exit(errors.run(main))
