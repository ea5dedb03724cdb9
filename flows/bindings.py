"""Stage -> Prefect task. A task brings one stage up to date in a child process and returns a reference to its artifact.

DVC stages run as ``dvc repro --single-item STAGE``, effects (ingest, register, deploy) as ``python -m tasks.EFFECT``:
a stage's memory, imports and crash never touch the flow's process, and cancelling the run ends the whole process group.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import httpx
from prefect import Task, get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.states import Completed, Failed
from ruamel.yaml import YAML

from flows.secrets import masked, secrets_of
from flows.worktree import DVC
from tasks.core.artifacts import Artifact, BentoRef, Endpoint, GateDecision, TrainedModel
from tasks.core.config import PARAMS, DeployConfig, load_params
from tasks.core.errors import FREE_SPACE, FULL_WORDS, MEMORY_KNOBS, SWEEP_KNOB, BadInput, StageFailed
from tasks.core.process import run_child

PYTHON = sys.executable
ENVIRONMENT = {"PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ.get('PATH', '')}", "PYTHONUNBUFFERED": "1"}
ERROR_LINE = re.compile(r"error\[(?P<code>[a-z_]+)\]: .*")
EXIT_CODE = re.compile(r"exited with (?P<code>-?\d+)")
CHATTER = re.compile(r"To track the changes|To enable auto staging|\s+(git add|dvc config) |Use `dvc push`|(Updating|Generating) lock file")
"""Advice that DVC repeats after each stage."""
DVC_BUSY = "Unable to acquire lock"
RUN_CACHE_RACE = re.compile(r"No such file or directory: '[^']*/runs/[0-9a-f]{2}/[0-9a-f]{64}/[^/']+'")
"""DVC takes the half-written entry of another run that does the same work at the same time for a damaged one, and removes it."""
TRANSIENT_EXIT = 75
TRAINING_LIMIT = "trainyard-training"
"""The global concurrency limit around training: as many at once as it has slots, over all machines of the server."""
LEASE_S = 60.0
"""A training renews its slot this often, so the slot of one that was killed is free within a minute and a half."""
AWAY_S = 900.0
"""A run waits so long for a server that refuses its connections: as long as Prefect's client tries a request again by prefect.yaml."""
TIME_LIMITS_S = {"train": 7 * 86_400.0}
"""Longest time of a stage in seconds, where it is not TIME_LIMIT_S. TRAINYARD_TIME_LIMIT_S[_STAGE] takes its place."""
TIME_LIMIT_S = 6 * 3600.0
EMBEDDED = "TRAINYARD_EMBEDDED_SERVER"
"""Set by flows.local where PREFECT_API_URL is the server that lives as long as the run."""
NO_PROXY = build_opener(ProxyHandler({}))
A = TypeVar("A", bound=Artifact)
T = TypeVar("T")


class StageTimedOut(StageFailed):
    """A stage ran past its time limit and was ended, with every process of its group."""


class Stage(Generic[A]):
    """A stage as a Prefect task: called in a flow it returns its artifact, or raises StageFailed."""

    def __init__(self, name: str, function: Callable[[Path], State[Any]], tags: Sequence[str] = ("light",)) -> None:
        def in_time(root: Path) -> State[Any]:
            try:
                return function(root)
            except StageTimedOut as error:
                return Failed(name="TimedOut", message=str(error), data=error)

        self.tags = set(tags)
        self._task: Task[[Path], Any] = Task(
            in_time,
            name=name,
            retries=3,
            retry_delay_seconds=[2, 10, 30],
            retry_jitter_factor=0.5,
            retry_condition_fn=is_transient,
            cache_policy=NO_CACHE,
            persist_result=False,
        )

    @property
    def task(self) -> Task[[Path], Any]:
        """The task. On a real server it carries its tags: for each of them Prefect asks that server for a concurrency slot.

        The embedded server, busy with its own bookkeeping after a long task, answers 503 and costs a retry of 1.7 s.
        """
        return self._task.with_options(tags=self.tags) if has_server() else self._task

    def __call__(self, root: Path) -> A:
        """Run it now."""
        artifact: A = outlasting(lambda: self.task(root, return_state=True)).result()
        return artifact

    def start(self, root: Path) -> Callable[[], A]:
        """Run it beside what follows; the returned function waits for its artifact."""
        future = self.task.submit(root)
        tries = iter([future.result])
        return lambda: outlasting(next(tries, lambda: self(root)))


def dvc_stage(
    name: str, artifact: type[A], *, forced_when: Callable[[Path], bool] = lambda root: False, limit: str = "", tags: Sequence[str] = ("light",)
) -> Stage[A]:
    """The task that brings DVC stage ``name`` up to date; ends as "Cached" where DVC had nothing to do.

    ``limit`` is a global concurrency limit of which it holds a slot while it runs.
    """

    def bring_up_to_date(root: Path) -> State[Any]:
        force = ["--force"] if forced_when(root) else []
        with slot(limit):
            lines = _run([*DVC, "repro", "--single-item", *force, name], root, name, timeout_s=time_limit(name))
        ran = any(line.startswith(f"Running stage '{name}'") for line in lines)
        return _reference(artifact, root, ran)

    return Stage(name, bring_up_to_date, tags)


def effect(name: str, artifact: type[A], *arguments: str) -> Stage[A]:
    """The task of a stage that acts on the outside world, idempotent by digest, and so is no DVC stage."""

    def act(root: Path) -> State[Any]:
        secrets = secrets_of(root) if name == "ingest" else {}
        _run([PYTHON, "-m", f"tasks.{name}", *arguments], root, name, timeout_s=time_limit(name), secrets=secrets)
        return _reference(artifact, root, ran=True)

    return Stage("-".join([name, *arguments]).replace("--", ""), act)


def has_server() -> bool:
    """Whether runs are recorded on a server that outlives them."""
    return bool(os.environ.get("PREFECT_API_URL")) and not os.environ.get(EMBEDDED)


def outlasting(call: Callable[[], T]) -> T:
    """``call()``, called again while the server refuses connections, AWAY_S seconds at most.

    Prefect's client tries a request again unless the first connection of a new client is refused, and a server that is
    restarted refuses for seconds. A stage called again does only what is left of it.
    """
    deadline, wait = time.monotonic() + AWAY_S, 1.0
    while True:
        try:
            return call()
        except (httpx.TransportError, ConcurrencySlotAcquisitionError) as error:
            cause = error.__cause__ if isinstance(error, ConcurrencySlotAcquisitionError) else error
            if not isinstance(cause, httpx.TransportError) or time.monotonic() + wait > deadline:
                raise
            get_run_logger().warning("the Prefect server does not answer (%s); asked again in %.0f s", error, wait)
        time.sleep(random.uniform(0.5, 1.5) * wait)
        wait = min(2 * wait, 30.0)


@contextmanager
def slot(limit: str) -> Iterator[None]:
    """Hold a slot of the global concurrency limit ``limit``, waiting for one as long as it takes.

    The slot is leased: it comes free on its own after LEASE_S seconds where the holder was killed. Without a real server, or
    where the server has no limit of that name, nothing is held. Raises StageFailed (transient) where the server is away.
    """
    if not (limit and has_server()):
        yield
        return
    waiting = concurrency(limit, lease_duration=LEASE_S)
    try:
        waiting.__enter__()
    except ConcurrencySlotAcquisitionError as error:
        raise StageFailed(
            f"error[server_unavailable]: no slot of {limit} could be asked for; got {error.__cause__ or error}", TRANSIENT_EXIT
        ) from error
    try:
        yield
    finally:
        waiting.__exit__(*sys.exc_info())


def time_limit(name: str) -> float:
    """The longest time in seconds that the stage ``name`` may take; raises BadInput ``unknown_option``."""
    for variable in (f"TRAINYARD_TIME_LIMIT_S_{name.upper()}", "TRAINYARD_TIME_LIMIT_S"):
        asked = os.environ.get(variable, "")
        if asked:
            try:
                seconds = float(asked)
            except ValueError:
                seconds = 0.0
            if not 0 < seconds < float("inf"):
                raise BadInput("unknown_option", variable, value=asked, constraint="a number of seconds above 0")
            return seconds
    return TIME_LIMITS_S.get(name, TIME_LIMIT_S)


def find_changes(root: Path) -> list[str]:
    """Why the pipeline has something to do, in words; empty where nothing changed and the right model is in service."""
    if not (root / "dvc.lock").exists() or not GateDecision.exists(root):
        return ["first run here"]
    output = _run([*DVC, "status", "--json"], root, "dvc status", quiet=True)
    status = json.loads(next((line for line in reversed(output) if line.startswith("{")), "{}"))
    rejected = not GateDecision.load(root).approved
    if rejected:
        status.pop("package", None)  # it never runs on a rejected model
    reasons = explain_status(status, changed_params(root))
    if reasons:
        return reasons
    if not rejected:
        return [] if in_service(root, load_params(root / PARAMS).deploy) else ["what was approved and packaged is not in service"]
    return ["the champion changed after the verdict"] if verdict_is_stale(root) else []


def changed_params(root: Path) -> list[str]:
    """The keys of params.yaml that differ from what dvc.lock was made with: DVC itself names whole sections only."""
    reader = YAML(typ="safe", pure=True)
    now = reader.load(root / PARAMS)
    made = [stage.get("params", {}).get(PARAMS.name, {}) for stage in reader.load(root / "dvc.lock")["stages"].values()]
    return sorted({key for sections in made for name, section in sections.items() for key in _differences(name, section, now.get(name))})


def _differences(key: str, one: Any, other: Any) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        return [found for name in one.keys() | other.keys() for found in _differences(f"{key}.{name}", one.get(name), other.get(name))]
    return [] if one == other else [key]


def explain_status(status: dict[str, Any], params: Sequence[str] = ()) -> list[str]:
    """The output of ``dvc status --json`` as a sorted list of reasons such as "new data" or "changed params train.lr".

    ``params`` are the keys that changed, in place of DVC's names of sections.
    """
    reasons: set[str] = set()
    behind: set[str] = set()
    for stage, changes in status.items():
        for change in changes:
            if isinstance(change, str):
                reasons.add(f"changed command of {stage}" if change == "changed command" else f"{stage} {change}")
                continue
            for path, what in change.get("changed deps", {}).items():
                if path == "params.yaml":
                    keys = params or (sorted(what) if isinstance(what, dict) else [str(what)])
                    reasons.add(f"changed params {', '.join(keys)}")
                elif path == "data":
                    reasons.add("new data")
                elif path.startswith("artifacts/"):
                    behind.add(f"{stage} is behind {path}")  # worth a word only where nothing says why
                else:
                    reasons.add(f"changed code {path}")
            if change.get("changed outs"):
                reasons.add(f"no output of {stage} yet")
    return sorted(reasons or behind)


def source_fingerprint(root: Path) -> str:
    """The fingerprint of the source that params.yaml names, "" where that kind of source has none. Raises StageFailed."""
    lines = _run([PYTHON, "-m", "tasks.sources"], root, "fingerprint", quiet=True, timeout_s=time_limit("ingest"), secrets=secrets_of(root))
    return next((line.removeprefix("fingerprint").strip() for line in reversed(lines) if line.startswith("fingerprint")), "")


def in_service(root: Path, config: DeployConfig) -> bool:
    """Whether the address of ``config`` answers and serves exactly the Bento of the model below ``root``."""
    if not all(kind.exists(root) for kind in (Endpoint, TrainedModel, BentoRef)):
        return False
    endpoint, model, bento = Endpoint.load(root), TrainedModel.load(root), BentoRef.load(root)
    if (endpoint.model_digest, endpoint.tag) != (model.digest, bento.tag) or urlsplit(endpoint.url).port != config.port:
        return False
    try:
        with NO_PROXY.open(f"{endpoint.url}/provenance", timeout=5) as answer:
            said = json.load(answer)
    except (URLError, OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("tag") == endpoint.tag


def outcome(root: Path) -> Literal["approved", "rejected"]:
    """The verdict that lies below ``root``; without one nothing was approved."""
    return "approved" if GateDecision.exists(root) and GateDecision.load(root).approved else "rejected"


def verdict_is_stale(root: Path) -> bool:
    """Whether a decision lies there that compared with another champion than the one now in service."""
    if not GateDecision.exists(root):
        return False
    return "stale" in _run([PYTHON, "-m", "tasks.gate", "--stale"], root, "gate", quiet=True)


def is_transient(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Retry only what a retry can help: Transient errors and a DVC repository that another command holds."""
    failure = state.result(raise_on_failure=False)
    return isinstance(failure, StageFailed) and failure.exit_code == TRANSIENT_EXIT


def _reference(artifact: type[Artifact], root: Path, ran: bool) -> State[Any]:
    """A finished state that holds (the loaded artifact) and says whether work was done."""
    loaded = artifact.load(root)
    reference = f"{artifact.PATH} {loaded.digest[:12]}"
    return Completed(data=loaded, message=reference) if ran else Completed(name="Cached", data=loaded, message=f"{reference} did not change")


def _run(
    command: Sequence[str], root: Path, name: str, quiet: bool = False, timeout_s: float | None = None, secrets: Mapping[str, str] = {}
) -> list[str]:
    """Run a child below ``root``, its lines into the run's log; returns them. ``secrets`` join its environment, and leave no trace in lines.

    Raises StageFailed with the stage's own error, or StageTimedOut after ``timeout_s`` seconds.
    """
    logger = get_run_logger()
    lines: list[str] = []

    def on_line(line: str) -> None:
        line = masked(line, secrets.values())
        lines.append(line)
        if line.strip() and not quiet and not CHATTER.match(line):
            logger.info(line)

    try:
        result = run_child(command, cwd=root, on_line=on_line, env={**ENVIRONMENT, **secrets}, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        knob = f"set TRAINYARD_TIME_LIMIT_S_{name.upper()}"
        raise StageTimedOut(f"error[time_limit]: {name} was ended; got more than {timeout_s:g} s; must be faster; {knob}", 2) from None
    if result.returncode == 0:
        return lines
    raise failure_of(name, result.returncode, lines)


def failure_of(name: str, returncode: int, lines: Sequence[str]) -> StageFailed:
    """The error that ``lines`` end with, its exit code taken from DVC's words where DVC stood in between."""
    if any(DVC_BUSY in line for line in lines):
        return StageFailed(f"error[lock_busy]: another dvc command holds the repository; got it during {name}; must be free", TRANSIENT_EXIT)
    if any(RUN_CACHE_RACE.search(line) for line in lines):
        return StageFailed(f"error[lock_busy]: another run did the same work at once; got it during {name}; must be tried again", TRANSIENT_EXIT)
    through_dvc = [int(found["code"]) for line in lines if (found := EXIT_CODE.search(line))]
    code = through_dvc[-1] if through_dvc else returncode
    told = [found.group(0) for line in lines if (found := ERROR_LINE.search(line))]
    if told:
        return StageFailed(told[-1], code)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    if any(words in line for line in lines for words in FULL_WORDS):  # DVC's own, as it stores what a stage made
        line = next(line.strip() for line in lines if any(words in line for words in FULL_WORDS))
        return StageFailed(f"error[disk_full]: {name} could not write; got {line!r}; must be {FREE_SPACE}; set {SWEEP_KNOB}", TRANSIENT_EXIT)
    if code < 0 or 128 < code <= 192:  # a shell, which DVC puts around a stage, adds 128
        number = -code if code < 0 else code - 128
        said = [line.strip() for line in lines if line.strip() and not _told_by_others(line, number)]
        return killed(name, number, (said or [last])[-1])
    return StageFailed(f"error[stage_failed]: {name} ended with exit code {code}; got {last!r}; set TRAINYARD_DEBUG=1 for more", 1)


def _told_by_others(line: str, number: int) -> bool:
    """Whether DVC or a shell says in ``line`` that signal ``number`` ended the stage (`sh` prints `Killed`, bash its pid before it)."""
    word = re.escape(signal.strsignal(number) or "")
    by_shell = rf"{word}( \(core dumped\))?$|\S+: +(line \d+: +)?\d+ {word}\b"
    return line.startswith("ERROR: failed to reproduce") or bool(re.match(by_shell, line))


def killed(name: str, number: int, last: str) -> StageFailed:
    """The error of a stage that signal ``number`` ended, with the likely cause. Tried again where that can help."""
    name_of = {int(one): one.name for one in signal.Signals}
    causes: dict[int, tuple[str, int]] = {
        signal.SIGKILL: (f"enough memory: the kernel or a person ended it, most often for want of memory; set {MEMORY_KNOBS}", TRANSIENT_EXIT),
        signal.SIGBUS: ("enough room on the disk and in /dev/shm: a mapped file could not be read or written", TRANSIENT_EXIT),
        signal.SIGTERM: ("left to end by itself: somebody asked it to end", 1),
        signal.SIGINT: ("left to end by itself: somebody interrupted it", 1),
        signal.SIGXCPU: ("within the limit of CPU time; set ulimit -t", 2),
    }
    cause, code = causes.get(number, ("left to end by itself: a bug in a native library, or a machine that fails", 1))
    return StageFailed(
        f"error[stage_killed]: {name} was ended by {name_of.get(number, number)}; got {last!r} as its last words; must be {cause}", code
    )
