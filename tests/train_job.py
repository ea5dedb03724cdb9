"""A training process of its own for the tests: ``python tests/train_job.py ROOT CONFIG_JSON [HOOK]``.

Ranks are forked, so they must not be started by pytest's process, in which torch's threads have run. HOOK names a function
below that makes plug-ins. With TRAIN_JOB=stage the whole stage function runs, else the ranks alone; with TRAIN_JOB=spawn they are not forked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tasks.core import errors
from tasks.core.artifacts import ImageCache, TrainedModel, TrainingSet
from tasks.core.config import TrainConfig
from tasks.core.process import die_with_parent
from tasks.train import train
from tasks.training.checkpoint import Checkpoint, Checkpoints
from tasks.training.engine import Engine
from tasks.training.launch import Job, run_ranks
from tasks.training.plugins import Plugin, TrainState

ROOT = Path(__file__).parent.parent
KILL_AT = (1, 2)
"""Epochs finished and step, at which the killers strike: the middle of the second epoch."""


class ValidateFirst(Engine):
    """Writes what validation says of the untrained weights, which are the same at any world size."""

    def fit(self) -> TrainState:
        answer = self.validate()
        if self.ranks.first:
            Path(os.environ["TRAIN_JOB_ROOT"], "untrained.json").write_text(json.dumps(answer))
        return super().fit()


class Strike(Plugin):
    """Does ``act`` on rank ``rank`` in the middle of the second epoch: once, or each time that it comes there."""

    def __init__(self, act: str, *, rank: int = 0, once: bool = True) -> None:
        self.act, self.rank, self.once = act, rank, once
        self.marker = Path(os.environ["TRAIN_JOB_ROOT"], "struck")

    def on_step_end(self, state: TrainState) -> None:
        if (state.epoch, state.step) != KILL_AT or state.ranks.rank != self.rank or (self.once and self.marker.exists()):
            return
        self.marker.write_text(str(os.getpid()))
        if self.act == "kill rank":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.act == "kill stage":
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        else:
            raise ValueError("a bug\nof two lines")


HOOKS: dict[str, dict[str, Any]] = {
    "": {},
    "kill_rank_1": {"act": "kill rank", "rank": 1},
    "kill_stage": {"act": "kill stage"},
    "kill_always": {"act": "kill rank", "once": False},
    "raise_always": {"act": "raise", "once": False},
}


def run_job(root: Path, config: TrainConfig, hook: str = "", *, stage: bool = False, spawn: bool = False) -> subprocess.CompletedProcess[str]:
    """Train below ``root`` in a process of its own; its output and exit code."""
    return subprocess.run(
        [sys.executable, __file__, str(root), config.model_dump_json(), hook],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRAIN_JOB_ROOT": str(root), "TRAIN_JOB": "stage" if stage else "spawn" if spawn else "ranks"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def result_of(root: Path) -> Checkpoint:
    """The newest checkpoint that ``run_job`` left below ``root``."""
    found = Checkpoints(root / "job", print).newest()
    assert found is not None
    return found


def main() -> None:
    die_with_parent()
    root, config, hook = Path(sys.argv[1]), TrainConfig.model_validate_json(sys.argv[2]), HOOKS[sys.argv[3]]
    plugins = (Strike(**hook),) if hook else ()
    training_set, cache = TrainingSet.load(root), ImageCache.load(root)
    if os.environ["TRAIN_JOB"] == "stage":
        model: TrainedModel = train(training_set, cache, config, root, root / "checkpoints", fork=True, plugins=plugins)
        print("digest", model.digest)
    else:
        run_ranks(Job(training_set, cache, config, None, root / "job", plugins, ValidateFirst), fork=os.environ["TRAIN_JOB"] != "spawn")


if __name__ == "__main__":
    sys.exit(errors.run(main))
