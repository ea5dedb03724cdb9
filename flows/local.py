"""Run the retrain flow here, without a worker: python -m flows.local [section.key=value ...], or make run.

With PREFECT_API_URL set the run is recorded on that server. Otherwise an embedded one is started for the length of the run, on
a free loopback port, with its database in PREFECT_HOME (default .trainyard/prefect). It starts while this process imports
Prefect, and it dies with this process; Prefect's own temporary server starts later and outlives a killed run.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tasks.core import errors
from tasks.core.config import load_params
from tasks.core.errors import BadInput, StageFailed, TrainyardError, Transient
from tasks.core.files import STATE
from tasks.core.process import end_group, quiet_environment, spare_port

START_TIMEOUT_S = 120.0
SERVER = ("uvicorn", "--factory", "prefect.server.api.server:create_app", "--host", "127.0.0.1", "--log-level", "error", "--lifespan", "on")


def start_server() -> None:
    """Start the embedded Prefect server unless PREFECT_API_URL names one; it is ready once ``wait_for_server`` returns.

    Call it before Prefect is imported: exit handlers run in reverse, so the server ends after Prefect's own handlers have
    sent it the last logs and events.
    """
    if os.environ.get("PREFECT_API_URL"):
        return
    home = Path(os.environ.setdefault("PREFECT_HOME", str(Path.cwd() / STATE / "prefect")))
    home.mkdir(parents=True, exist_ok=True)
    port = spare_port()
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
    os.environ |= {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "TRAINYARD_EMBEDDED_SERVER": "1"}
    with (home / "server.log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "tasks.core.process", *SERVER, "--port", str(port)],
            env={**os.environ, "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end() -> None:
        end_group(child.pid, grace_s=5.0)
        child.wait()

    atexit.register(end)


def wait_for_server() -> None:
    """Return once the API answers; raises Transient ``server_unavailable`` after START_TIMEOUT_S seconds."""
    url, deadline = os.environ["PREFECT_API_URL"], time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it answers; a login is the client's business
        except OSError as error:
            if time.monotonic() > deadline:
                raise Transient(
                    "server_unavailable",
                    "the Prefect server does not answer",
                    value=f"{url}: {error}",
                    knob="PREFECT_API_URL, or see server.log in PREFECT_HOME",
                ) from None
            time.sleep(0.05)


class ForPeople(logging.Filter):
    """Drops the traceback of errors that a user can cause (their one line says it all) and links to a server that ends."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show ``record``; it may lose its traceback."""
        if record.exc_info and isinstance(record.exc_info[1], StageFailed | TrainyardError):
            record.exc_info = None
        return not str(record.msg).startswith("View at")


def parse_overrides(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """``train.epochs=3 prepare.decode.max_pixels=9`` as {"train": {"epochs": 3}, "prepare": {"decode": {"max_pixels": 9}}}.

    Raises BadInput ``unknown_option`` or ``params_invalid``.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    tree: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        names = key.split(".")
        if not equals or len(names) < 2 or not all(names):
            raise BadInput("unknown_option", "flows.local", value=argument, constraint="section.key=value")
        place = tree
        for name in names[:-1]:
            place = place.setdefault(name, {})
        try:
            place[names[-1]] = YAML(typ="safe", pure=True).load(value)
        except YAMLError:
            raise BadInput("params_invalid", "flows.local: the value is not YAML", value=argument, constraint="section.key=value") from None
    return tree


def retrain_here(overrides: dict[str, dict[str, Any]]) -> str:
    """Run the flow and return its summary. Raises TrainyardError, or StageFailed with a stage's own error."""
    from flows.parameters import Overrides

    asked = Overrides.checked(overrides)
    start_server()
    from flows.retrain import retrain
    from flows.summary import summary_lines

    wait_for_server()
    if os.environ.get("TRAINYARD_DEBUG", "") in ("", "0"):
        for name in ("prefect", "prefect.flow_runs", "prefect.task_runs"):
            logging.getLogger(name).addFilter(ForPeople())
    state = retrain(asked, return_state=True)
    result = state.result(raise_on_failure=False)
    if isinstance(result, StageFailed | TrainyardError):
        raise result
    if not state.is_completed():
        state.result()
    reasons: list[str] = result if isinstance(result, list) else []
    said = "nothing changed" if state.name == "Unchanged" else str(state.name).lower()
    return "\n".join(["", f"retrain: {said}", *(f"  {line}" for line in summary_lines(Path.cwd(), reasons))])


def main() -> None:
    """Check the command and params before anything starts, run, and end with the summary or one error line."""
    quiet_environment()
    overrides = parse_overrides(sys.argv[1:])
    load_params()
    last_words: list[str] = []
    # Registered before Prefect's own exit handlers, so it runs after them: the error is the last line.
    atexit.register(lambda: print(*last_words, sep="\n", end="", file=sys.stderr, flush=True))
    try:
        print(retrain_here(overrides), flush=True)
    except (TrainyardError, StageFailed) as error:
        if os.environ.get("TRAINYARD_DEBUG", "") not in ("", "0"):
            traceback.print_exception(error)
        last_words.append(f"{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    sys.exit(errors.run(main))
