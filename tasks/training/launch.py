"""Starts the ranks with torch elastic, as child processes of the stage's own process, and brings back their errors.

A rank that dies takes its group down; elastic starts all ranks again, which resume from the last checkpoint. The ranks die
with their launcher.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks.core.artifacts import ImageCache, TrainingSet
from tasks.core.config import TrainConfig
from tasks.core.errors import BadInput, Rejected, TrainyardError, Transient, of_machine
from tasks.core.files import canonical_json, write_atomic
from tasks.core.process import die_with_parent
from tasks.images.cache import open_split
from tasks.training.checkpoint import Checkpoints, Resume, Save
from tasks.training.distributed import joined
from tasks.training.engine import Engine, TrainingData
from tasks.training.models import build_model, start_from
from tasks.training.plugins import Plugin
from tasks.training.progress import Printer, Progress
from tasks.training.resources import ResourceMonitor

MONITOR_S = 0.1
_FATAL = "fatal.json"


@dataclass(frozen=True)
class Job:
    """What every rank is told. ``folder`` holds the job's checkpoints; ``plugins`` and ``engine`` extend the loop."""

    training_set: TrainingSet
    cache: ImageCache
    config: TrainConfig
    weights: Path | None
    folder: Path
    plugins: tuple[Plugin, ...] = ()
    engine: type[Engine] = Engine

    @property
    def scratch(self) -> Path:
        """The launcher's folder: elastic's error files, and the error that must not be retried."""
        return self.folder / "ranks"


def device_kind(processes: int) -> str:
    """``cuda`` where there is a GPU, else ``cpu``. Raises BadInput ``params_invalid`` if ranks would have to share a GPU."""
    gpus = torch.cuda.device_count()
    if gpus and processes > gpus:
        raise BadInput("params_invalid", "more ranks than GPUs", value=processes, constraint=f"at most {gpus}", knob="train.processes")
    return "cuda" if gpus else "cpu"


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_ranks(job: Job, *, fork: bool) -> None:
    """Train on ``job.config.processes`` ranks until all end; their checkpoints in ``job.folder`` are the result.

    ``fork`` saves each rank the imports. It is for callers that are a process of their own in which no torch operation has
    run yet: a forked OpenMP pool hangs. With a GPU ranks are always spawned.
    Raises a rank's own TrainyardError, or ``training_failed`` (Transient where a signal killed the rank, else BadInput).
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    shutil.rmtree(job.scratch, ignore_errors=True)
    job.scratch.mkdir(parents=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.config.processes,
        run_id=job.folder.name[:16],
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=job.config.max_restarts,
        monitor_interval=MONITOR_S,
        start_method="fork" if fork and device_kind(job.config.processes) == "cpu" else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(job.scratch)),
    )
    failure: ChildFailedError | None = None
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with _own_signals(), _quiet_elastic():
            elastic_launch(config, rank_main)(job)
    except ChildFailedError as error:
        failure = error
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    fatal = _read_fatal(job)
    if fatal is not None:
        raise fatal
    if failure is not None:
        raise _failed(failure, job.config) from failure
    shutil.rmtree(job.scratch, ignore_errors=True)


def rank_main(job: Job) -> None:
    """One rank, in its own process. An error that no restart can mend is written down, not raised."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # a forked rank has the launcher's handlers, which wait for Python
    die_with_parent()
    if (job.scratch / _FATAL).exists():
        return
    try:
        train_rank(job)
    except Exception as error:
        fatal = of_machine(error) or error
        if not isinstance(fatal, TrainyardError):
            raise
        _write_fatal(job, fatal)


def train_rank(job: Job) -> None:
    """Join the ranks, build the data and the model, and train."""
    config = job.config
    kind = device_kind(config.processes)
    if kind == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products need a fixed workspace
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    else:
        device = torch.device("cpu")
    threads = config.threads or max(1, cpu_cores() // config.processes)
    torch.set_num_threads(threads)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with joined(device) as ranks:
        printer = Printer(ranks.rank, ranks.world)
        if attempt:
            printer.say(f"a rank died: restart {attempt} of {config.max_restarts}")
        torch.manual_seed(config.seed)
        model = build_model(config.model, len(job.cache.classes), config.width, job.cache.decode.image_size)
        if job.weights is not None:
            start_from(model, job.weights, printer.say)
        data = TrainingData(open_split(job.cache, "train", threads), open_split(job.cache, "val", threads), job.training_set)
        checkpoints = Checkpoints(job.folder, printer.say)
        ours = (Resume(checkpoints), Save(checkpoints), Progress(printer), ResourceMonitor(job.folder))
        job.engine(model, data, config, ranks, (*ours, *job.plugins)).fit()


def _write_fatal(job: Job, error: TrainyardError) -> None:
    words = {
        "kind": type(error).__name__,
        "code": error.code,
        "what": error.what,
        "value": None if error.value is None else str(error.value),
        "constraint": error.constraint,
        "knob": error.knob,
    }
    write_atomic(job.scratch / _FATAL, canonical_json(words))


def _read_fatal(job: Job) -> TrainyardError | None:
    """The TrainyardError that a rank wrote down, if any."""
    path = job.scratch / _FATAL
    if not path.exists():
        return None
    words = json.loads(path.read_bytes())
    kind = {"BadInput": BadInput, "Transient": Transient, "Rejected": Rejected}[words.pop("kind")]
    return kind(words.pop("code"), words.pop("what"), **words)


def _failed(error: Exception, config: TrainConfig) -> TrainyardError:
    """``training_failed`` with the first failed rank's last words in one line."""
    rank, first = error.get_first_failure()  # type: ignore[attr-defined]
    message = first.message if isinstance(first.message, str) else first.message.get("message", "")
    kind: type[TrainyardError] = Transient if first.exitcode < 0 else BadInput
    return kind(
        "training_failed",
        f"rank {rank} died and its {config.max_restarts} restarts are used up",
        value=" ".join(message.split())[:300] or f"exit code {first.exitcode}",
        knob="TRAINYARD_DEBUG=1 to see the traceback, or train.max_restarts",
    )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Put back the handlers that elastic replaces for the time of its run."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Hold back the log of elastic and its spawner, which repeats a dead rank's traceback: its error comes back as an exception."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(("torch.distributed.elastic", "torch.multiprocessing"))]
    levels = {name: logging.getLogger(name).level for name in names}  # each has a level of its own
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
