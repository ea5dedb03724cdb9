"""A real local stack without Docker: PostgreSQL, a Prefect server, an MLflow server, one process worker, and the service.

    python -m flows.stack up       (make up)      start what is not running, mend what died, wait until it answers, print a table
    python -m flows.stack down     (make down)    end all of it, runs first; nothing is left
    python -m flows.stack status   (make status)  the table alone
    python -m flows.stack env      lines for a shell: eval "$(python -m flows.stack env)"

What runs is read from the machine (tasks.core.daemons), never from a file, so a killed or half-finished `up` is put right
by the next one. A server whose settings changed is started again.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from flows import postgres
from flows.servers import (
    AMBIENT,
    DIGEST_VARIABLE,
    ENV_FILE,
    FOLDER,
    MLFLOW_DATABASE,
    PART_VARIABLE,
    PREFECT_DATABASE,
    ROOT_VARIABLE,
    Part,
    client_environment,
    database,
    load_credentials,
    load_settings,
    parts,
    request,
)
from tasks.core import daemons, errors
from tasks.core.artifacts import Endpoint
from tasks.core.errors import BadInput, StageFailed, Transient
from tasks.core.files import STATE, digest_of, file_lock, write_atomic
from tasks.core.process import QUIET
from tasks.core.runs import run_of

READY_S = 120.0
"""A server that just started may take this long: Prefect's first start makes a hundred migrations."""
HUNG_S = 20.0
"""A server that has run for longer than READY_S must answer within this time, or it is started again."""
RUN_GRACE_S = 25.0
"""A flow run that is asked to end has this long to end its stage (10 s) and to report itself as crashed."""
SERVER_GRACE_S = 15.0
LOG_BYTES = 20_000_000
"""A log that is longer is put aside as NAME.log.1 when its server starts."""
ORDER = ("postgres", "prefect", "mlflow", "worker")
WIDTHS = (10, 34, 32)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


def up(root: Path) -> None:
    """Bring every part into its running state. Raises BadInput ``port_taken``, ``stack_invalid`` or ``server_not_ready`` (a
    server died; with its last log line), Transient ``server_not_ready`` (too slow) or ``lock_busy``."""
    with _locked(root):
        settings, credentials = load_settings(root), load_credentials(root)
        found = database(root, settings)
        cluster = None if isinstance(found, str) else found
        all_parts = parts(root, settings, credentials, cluster)
        row("name", "state", "address", "log")
        if cluster is None:
            row("postgres", "not used", f"SQLite: {found}")
        else:
            cluster.make(credentials.postgres_password)
            if leader(root, all_parts["postgres"]) is None:
                end(root, "postgres")
                cluster.unlock()
            ensure(root, all_parts["postgres"])
            postgres.make_databases(settings.postgres_port, credentials.postgres_password, (PREFECT_DATABASE, MLFLOW_DATABASE))
        ensure(root, all_parts["prefect"], all_parts["mlflow"])
        clients = client_environment(settings, credentials)
        ensure(root, all_parts["worker"])
        _deploy_flows(root, {**clients, "PATH": all_parts["worker"].environment["PATH"]})
        write_atomic(root / ENV_FILE, _exports(clients).encode(), mode=0o600)
        _serve(root)
        print(f"\nuse these servers in a shell:  source {ENV_FILE}      (make run does so by itself)")
        if settings.auth:
            print(f"log in as trainyard with the passwords in {FOLDER / 'credentials.env'}")


def down(root: Path) -> None:
    """End the worker and its runs, the service, and the servers. A run that is cut off is reported as Crashed, never left RUNNING."""
    with _locked(root):
        settings, credentials = load_settings(root), load_credentials(root)
        clients = client_environment(settings, credentials)
        cut = end_worker(root, clients)
        row("worker", "stopped", f"{len(cut)} runs cut off and reported as Crashed" if cut else "")
        row("service", _task(root, "deploy", "--stop"))
        for name in reversed(ORDER[:-1]):
            row(name, "stopped" if end(root, name) else "was not running")
        (root / ENV_FILE).unlink(missing_ok=True)


def status(root: Path) -> None:
    """Print what runs, as the machine tells it."""
    settings, credentials = load_settings(root), load_credentials(root)
    found = database(root, settings)
    row("name", "state", "address", "log")
    if isinstance(found, str):
        row("postgres", "not used", f"SQLite: {found}")
    for part in parts(root, settings, credentials, None if isinstance(found, str) else found).values():
        process = leader(root, part)
        state = "down" if process is None else "running" if part.ready(0.0) else "not answering"
        row(part.name, state, part.address, _log(part.name))
    served = daemons.tagged("TRAINYARD_SERVICE_ROOT", root / STATE / "serve", "TRAINYARD_SERVICE_ID")
    row("service", "running" if served else "down", Endpoint.load(root).url if Endpoint.exists(root) else "nothing deployed yet")


def row(*cells: object) -> None:
    """Print one line of the table."""
    *left, last = [str(cell) for cell in cells if cell != ""]
    print("".join(f"{cell:<{width}}" for cell, width in zip(left, WIDTHS, strict=False)) + last, flush=True)


def members(root: Path, name: str) -> list[psutil.Process]:
    """Every living process of a part, its children included."""
    found = daemons.tagged(ROOT_VARIABLE, root, PART_VARIABLE).get(name, [])
    if name == "postgres":  # its children write their titles over their environment, but all work in its folder
        folder, known = str((root / STATE / "postgres").resolve()), {process.pid for process in found}
        found += [process for process in psutil.process_iter() if process.pid not in known and _works_in(process) == folder]
    return found


def _works_in(process: psutil.Process) -> str:
    try:
        return str(process.cwd())
    except (psutil.Error, OSError):
        return ""


def leader(root: Path, part: Part) -> psutil.Process | None:
    """The process that `up` started for ``part`` as it is set now, or None where that died or was started with other settings."""
    for process in members(root, part.name):
        try:
            if process.cmdline() == list(part.command) and process.environ().get(DIGEST_VARIABLE) == _digest(part):
                return process
        except (psutil.Error, OSError):
            continue
    return None


def _digest(part: Part) -> str:
    chosen = {key: value for key, value in part.environment.items() if key not in AMBIENT}
    return digest_of([part.command, chosen, part.files, str(part.cwd), part.user])[:16]


def ensure(root: Path, *wanted: Part) -> None:
    """Start those of ``wanted`` that do not run as they are set, then wait until all answer, and print their rows."""
    states, started = {}, {}
    for part in wanted:
        process = leader(root, part)
        states[part.name] = "running"
        if process is None or not _answers(part, process, max(HUNG_S, process.create_time() + READY_S - time.time())):
            left = end(root, part.name)
            states[part.name] = "started again" if left else "started"
            if part.port is not None:
                daemons.require_port(_host(part), part.port, part.port_knob)
            started[part.name] = launch(root, part)
    for part in wanted:
        if part.name in started:
            _require_answer(root, part, started[part.name])
        row(part.name, states[part.name], part.address, _log(part.name))


def _host(part: Part) -> str:
    return part.command[part.command.index("--host") + 1] if "--host" in part.command else "127.0.0.1"


def launch(root: Path, part: Part) -> psutil.Process:
    """Start ``part`` in a session of its own, its output appended to its log; do not wait until it answers."""
    log = root / _log(part.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    part.cwd.mkdir(parents=True, exist_ok=True)
    for name, text in part.files.items():
        write_atomic(Path(name), text.encode(), mode=0o600)
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_name(f"{log.name}.1"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(part.sheds)} if part.sheds else dict(os.environ)
    environment |= QUIET | part.environment | {ROOT_VARIABLE: str(root.resolve()), PART_VARIABLE: part.name, DIGEST_VARIABLE: _digest(part)}
    with log.open("ab") as sink:
        child = psutil.Popen(
            part.command,
            cwd=part.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            **postgres.identity(part.user),
        )
    # For a moment after exec the kernel shows no environment yet: a server that is not seen would be taken for dead.
    while child.poll() is None and leader(root, part) is None:
        time.sleep(0.01)
    return child


def _answers(part: Part, process: psutil.Process, timeout_s: float) -> bool:
    """Wait for ``part`` to answer; False where it ended first or did not within ``timeout_s`` seconds."""
    deadline, since = time.monotonic() + timeout_s, process.create_time()
    while daemons.lives(process):
        if part.ready(since):
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return False


def _require_answer(root: Path, part: Part, process: psutil.Process) -> None:
    if _answers(part, process, READY_S):
        return
    dead, log = not daemons.lives(process), root / _log(part.name)
    raise (BadInput if dead else Transient)(
        "server_not_ready",
        f"{part.name} {'ended' if dead else 'does not answer'}",
        value=daemons.last_line(log),
        constraint=f"ready within {READY_S:.0f} s",
        knob=f"what its log says: {_log(part.name)}",
    )


def end(root: Path, name: str) -> bool:
    """End what is left of a part, gently and then not; whether there was anything."""
    if name == "worker":
        settings, credentials = load_settings(root), load_credentials(root)
        end_worker(root, client_environment(settings, credentials))
    found = members(root, name)
    # PostgreSQL takes SIGINT as "now, but orderly"; its SIGTERM waits for clients to leave.
    daemons.send(found, signal.SIGINT if name == "postgres" else signal.SIGTERM)
    _end_all(lambda: members(root, name), SERVER_GRACE_S)
    return bool(found)


def _end_all(find: Callable[[], Iterable[psutil.Process]], grace_s: float) -> None:
    daemons.wait_gone(find(), grace_s)
    while left := list(find()):
        daemons.send(left, signal.SIGKILL)
        daemons.wait_gone(left, 2.0)


def end_worker(root: Path, clients: dict[str, str]) -> list[str]:
    """End the worker and its runs; returns the ids of the runs that were cut off.

    A worker that is asked to end kills its runs without a word, and they stay RUNNING for ever. So it is stopped where it
    stands, which also keeps it from taking the next run; its runs are asked to end, which they do by ending their stage and
    reporting themselves as Crashed; whatever did not is ended hard and reported from here. Runs whose worker died before go
    the same way.
    """
    workers = [process for process in members(root, "worker") if not run_of(process.pid)]
    daemons.send(workers, signal.SIGSTOP)

    def of_runs() -> list[psutil.Process]:
        return [process for process in members(root, "worker") if run_of(process.pid)]

    running = of_runs()
    runs = sorted({run for process in running if (run := run_of(process.pid))})
    ids = {process.pid for process in running}
    daemons.send([process for process in running if _parent(process) not in ids], signal.SIGTERM)
    _end_all(of_runs, RUN_GRACE_S)
    _end_all(lambda: [process for process in members(root, "worker") if not run_of(process.pid)], 0.0)
    return [run for run in runs if _report_crash(clients, run)]


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.Error:
        return 0


def _report_crash(clients: dict[str, str], run: str) -> bool:
    """See to it that ``run``, whose process is gone, is not RUNNING; whether it was cut off rather than done."""
    api, login = clients["PREFECT_API_URL"], clients.get("PREFECT_API_AUTH_STRING", "")
    status, found = request(f"{api}/flow_runs/{run}", login=login)
    if status != 200:
        return True  # no server that could be told: its automation on missing heartbeats will see to it
    if found["state_type"] not in ENDED:
        state = {"type": "CRASHED", "name": "Crashed", "message": "cut off: its worker was stopped"}
        request(f"{api}/flow_runs/{run}/set_state", {"state": state}, login)
        return True
    return bool(found["state_type"] == "CRASHED")


def _deploy_flows(root: Path, environment: dict[str, str]) -> None:
    """Put what flows.setup makes on the server, the deployments of prefect.yaml only where there is none yet: those that a
    person paused or changed stay as they are. Raises StageFailed."""
    status, count = request(f"{environment['PREFECT_API_URL']}/deployments/count", {}, environment.get("PREFECT_API_AUTH_STRING", ""))
    command = [sys.executable, "-m", "flows.setup", *([] if status == 200 and not count else ["--no-deploy"])]
    done = subprocess.run(command, cwd=root, env={**os.environ, **QUIET, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        told = next((line for line in reversed(lines) if line.startswith("error[")), "")
        raise StageFailed(told or f"error[stage_failed]: {' '.join(command[1:])}; got {lines[-1:]}", done.returncode if told else 1)


def _serve(root: Path) -> None:
    """Start again what was deployed last, if anything was."""
    if not Endpoint.exists(root):
        return row("service", "nothing deployed yet", "make run, or prefect deployment run 'retrain/manual'")
    said = _task(root, "deploy", "--serve")
    row("service", "running", said.split()[-1], f"{STATE / 'serve'}")


def _task(root: Path, name: str, *options: str) -> str:
    """The last line of ``python -m tasks.NAME``. Raises StageFailed with its own error line."""
    done = subprocess.run([sys.executable, "-m", f"tasks.{name}", *options], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode:
        raise StageFailed(lines[-1] if lines else f"error[stage_failed]: tasks.{name} ended with {done.returncode}", done.returncode)
    return lines[-1]


def _log(name: str) -> Path:
    return FOLDER / f"{name}.log"


def _exports(variables: dict[str, str]) -> str:
    return "".join(f"export {key}={shlex.quote(value)}\n" for key, value in variables.items())


def _locked(root: Path) -> AbstractContextManager[None]:
    return file_lock(root / STATE / "locks" / "stack.lock", 300.0, "the stack")


def main() -> None:
    """Do what the verb says, in the current folder."""
    root = Path.cwd()

    def environment(root: Path) -> None:
        print(_exports(client_environment(load_settings(root), load_credentials(root))), end="")

    verbs: dict[str, Callable[[Path], None]] = {"up": up, "down": down, "status": status, "env": environment}
    verb = " ".join(sys.argv[1:])
    if verb not in verbs:
        raise BadInput("unknown_option", "flows.stack takes one verb", value=verb, constraint=", ".join(verbs))
    if not (root / "prefect.yaml").is_file():
        raise BadInput("not_a_repository", "the stack runs in a project's folder", value=root, constraint="a folder with prefect.yaml")
    verbs[verb](root)


if __name__ == "__main__":
    sys.exit(errors.run(main))
