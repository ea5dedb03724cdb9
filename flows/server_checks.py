"""The doctor's checks of what answers: MLflow, Prefect, the Bento store, the service, ports, clocks."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from flows.facts import POOL
from flows.place import Finding, Place
from tasks.core.artifacts import Endpoint

NO_PROXY = build_opener(ProxyHandler({}))
SKEW_S = 5.0
START_WORKER = f"prefect worker start --pool {POOL}"
NO_SERVER = Finding(
    "yellow", "no server is set: runs are recorded in .trainyard/prefect; no schedule, event or worker", "make up, or set PREFECT_API_URL"
)


def mlflow(place: Place) -> Finding:
    """The tracking store and registry, and runs that died in it."""
    said = place.ask("mlflow")
    if not said["made"]:
        return Finding("green", f"MLflow {said['client']}, {said['uri']}: made by the first run")
    words = f"MLflow {said['client']}, {said['uri']} answers"
    if said["server"] and said["server"].split(".")[0] != said["client"].split(".")[0]:
        return Finding("red", f"{words}; the server is version {said['server']}", "the same major version on both sides")
    if said["dead"]:
        return Finding("yellow", f"{words}; {len(said['dead'])} runs stand RUNNING and are dead", "python -m flows.sweep")
    champion = f"champion {said['champion']['name']} version {said['champion']['version']}" if said["champion"] else "no champion yet"
    return Finding("green", f"{words}, {champion}, {said['alive']} runs at work")


def prefect_api(place: Place) -> Finding:
    """The Prefect server."""
    said = place.ask("prefect")
    if not said["url"]:
        return NO_SERVER
    if said["error"] == "login":
        return Finding("red", f"{said['url']} refuses the login", "PREFECT_API_AUTH_STRING=user:password")
    if said["error"]:
        return Finding("red", f"{said['url']} does not answer: {said['error']}", "make up; or prefect server start; PREFECT_API_URL")
    if said["server"] != said["client"]:
        return Finding("red", f"{said['url']} is version {said['server']}, this is {said['client']}", "the same version on both sides")
    if said["analytics"]:
        return Finding("red", f"{said['url']}: analytics are on", "prefect config set PREFECT_SERVER_ANALYTICS_ENABLED=false")
    return Finding("green", f"Prefect {said['client']}, {said['url']} answers")


def deployments(place: Place) -> Finding:
    """What schedules, events and people can start."""
    said = place.ask("prefect")
    if not _answers(said):
        return _without(said)
    if not said["deployments"]:
        return Finding("red", "no deployment of this folder", "prefect --no-prompt deploy --all")
    return Finding("green", f"{', '.join(sorted(said['deployments']))}")


def worker(place: Place) -> Finding:
    """The work pool, and who works for it."""
    said = place.ask("prefect")
    if not _answers(said):
        return _without(said)
    if not said["pool"]:
        return Finding("red", f"no work pool {POOL}", f"prefect work-pool create {POOL} --type process")
    if not said["workers"]:
        return Finding("red", f"work pool {POOL}: no worker is online, so nothing that is scheduled runs", START_WORKER)
    return Finding("green", f"work pool {POOL}: {len(said['workers'])} online ({', '.join(said['workers'])})")


def automations(place: Place) -> Finding:
    """The automations that flows.setup makes."""
    said = place.ask("prefect")
    if not _answers(said):
        return _without(said)
    wanted = set(said["wanted"])
    missing = sorted(wanted - set(said["automations"]))
    if missing:
        return Finding("red", f"{len(missing)} of {len(wanted)} automations are missing: {', '.join(missing)}", "python -m flows.setup")
    return Finding("green", f"{len(wanted)} of {len(wanted)} in place")


def bento_store(place: Place) -> Finding:
    """Whether the champion's Bento is at hand, so that `make serve` can start it."""
    said = place.ask("mlflow")
    count = f"{len(said['bentos'])} Bentos in the store"
    if not said["champion"]:
        return Finding("green" if not said["bentos"] else "yellow", f"{count}, no champion", "" if not said["bentos"] else "make run")
    tags = [tag for tag, digest in said["bentos"].items() if digest == said["champion"]["digest"]]
    if not tags:
        return Finding("red", f"{count}, none of the champion (version {said['champion']['version']})", "make run packages and deploys it")
    return Finding("green", f"{count}, the champion's is {tags[0]}")


def service(place: Place) -> Finding:
    """Whether the champion is what answers at the service's address."""
    champion, config = place.ask("mlflow")["champion"], place.params.deploy
    url = Endpoint.load(place.home).url if Endpoint.exists(place.home) else f"http://127.0.0.1:{config.port}"
    served = _provenance(url)
    if served is None and champion is None:
        return Finding("green", f"nothing serves at {url}: no model was approved yet")
    if served is None:
        return Finding("red", f"{url} does not answer; the champion is version {champion['version']}", "make serve")
    digest = served.get("artifacts", {}).get("TrainedModel")
    if champion is None or digest != champion["digest"]:
        other = f"version {champion['version']}" if champion else "no version"
        return Finding("red", f"{url} serves {served.get('tag')}, the champion is {other}", "make run, which deploys the champion")
    return Finding("green", f"{url} serves {served.get('tag')}, the champion (version {champion['version']})")


def ports(place: Place) -> Finding:
    """Whether the service's port is free or ours."""
    config = place.params.deploy
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(2)
        taken = probe.connect_ex((host, config.port)) == 0
    if not taken:
        return Finding("green", f"{config.port} is free for the service")
    mine = _provenance(f"http://{f'[{host}]' if ':' in host else host}:{config.port}")
    if mine is None or not Endpoint.exists(place.home) or urlsplit(Endpoint.load(place.home).url).port != config.port:
        return Finding("red", f"{config.port} is in use by another program", f"ss -ltnp 'sport = :{config.port}'; or set deploy.port")
    return Finding("green", f"{config.port} is the service's")


def clock(place: Place) -> Finding:
    """This machine's clock against the Prefect server's: schedules and leases go by it."""
    said = place.ask("prefect")
    if not _answers(said):
        return Finding("green", "no server to compare with") if not said["url"] else _without(said)
    ahead = said["ahead_s"]
    if ahead is None:
        return Finding("yellow", "the Prefect server sends no date", "chronyc tracking on both machines")
    if abs(ahead) > SKEW_S:
        return Finding(
            "red", f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the Prefect server's", "chronyc makestep, or ntpd, on both machines"
        )
    return Finding("green", f"within {max(1, round(abs(ahead)))} s of the Prefect server's")


def _answers(said: dict[str, Any]) -> bool:
    return bool(said["url"]) and not said["error"]


def _without(said: dict[str, Any]) -> Finding:
    """One trouble is one red line: what follows from it is not known."""
    return Finding("yellow", f"not known: {'the Prefect server does not answer' if said['url'] else 'no Prefect server is set'}", "see prefect api")


def _provenance(url: str) -> dict[str, Any] | None:
    """What the service at ``url`` says it was made from, None where nothing of ours answers."""
    try:
        with NO_PROXY.open(f"{url}/provenance", timeout=5) as answer:
            said = json.load(answer)
    except (URLError, OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None


CHECKS = {
    "mlflow": mlflow,
    "prefect api": prefect_api,
    "deployments": deployments,
    "worker": worker,
    "automations": automations,
    "bento store": bento_store,
    "service": service,
    "ports": ports,
    "clock": clock,
}
