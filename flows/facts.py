"""What the Prefect server says, as one JSON object: the doctor's child. python -m flows.facts"""

from __future__ import annotations

import json
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx

from tasks.core.process import die_with_parent, quiet_environment

POOL = "trainyard"


def ask() -> dict[str, Any]:
    """The server's address, version and clock, this project's deployments, the pool, its workers, the automations."""
    import prefect
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    said: dict[str, Any] = {"client": prefect.__version__, "analytics": settings.server.analytics_enabled, "error": ""}
    said["url"] = (settings.api.url or "").split("@")[-1]
    if not settings.api.url:
        return said
    try:
        with get_client(sync_client=True) as client:
            answer = client._client.get("/admin/version")
            said["server"] = answer.json()
            said["ahead_s"] = round(time.time() - parsedate_to_datetime(answer.headers["date"]).timestamp(), 1) if "date" in answer.headers else None
            here = json.dumps(str(Path.cwd().resolve()))
            deployments = client.read_deployments(limit=200)
            said["deployments"] = [deployment.name for deployment in deployments if here in json.dumps(deployment.pull_steps or [])]
            try:
                client.read_work_pool(POOL)
                said["workers"] = [worker.name for worker in client.read_workers_for_work_pool(POOL) if str(worker.status).endswith("ONLINE")]
                said["pool"] = True
            except ObjectNotFound:
                said["pool"], said["workers"] = False, []
            said["wanted"] = wanted_automations()
            said["automations"] = [automation["name"] for automation in client._client.post("/automations/filter", json={}).json()]
    except (OSError, httpx.HTTPError, RuntimeError, ValueError) as error:
        refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403)
        said["error"] = "login" if refused else f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return said


def wanted_automations() -> list[str]:
    """Names of the automations that `python -m flows.setup` makes in any case."""
    from flows.automations import keepers

    return [automation.name for automation in keepers()]


if __name__ == "__main__":
    die_with_parent()
    quiet_environment()
    print(json.dumps(ask()))
