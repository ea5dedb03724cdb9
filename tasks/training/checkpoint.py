"""Checkpoints: the whole state after each epoch, in a folder named by everything that decides the result.

A file is written aside, synced and renamed by rank 0; its name carries the sha256 of its bytes, so a torn or edited one is
known before torch reads it, and the one before it is used. `torch.load` runs with weights_only.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tasks.core.artifacts import ImageCache, TrainingSet
from tasks.core.config import TrainConfig
from tasks.core.files import digest_of, is_locked, sha256_file, write_atomic
from tasks.images import augment_ops
from tasks.images import cache as cache_module
from tasks.training.plugins import EpochRow, Plugin, TrainState

KEEP = 2
"""Checkpoints kept in a folder: the newest, and the one before it in case the newest is damaged."""

KEEP_FOLDERS = 5
YOUNG_S = 600.0
NOT_DECIDING = {"export.py", "folds.py", "label_issues.py", "metrics.py", "plots.py", "predict.py", "progress.py", "resources.py"}
"""Modules beside this one that cannot change the weights: their edits leave checkpoints valid."""
_NAME = re.compile(r"epoch-(\d{6})\.([0-9a-f]{64})\.pt")


def fingerprint(training_set: TrainingSet, cache: ImageCache, config: TrainConfig, weights: Path | None, machine: str) -> str:
    """Hex digest of all that decides the trained weights: data, policy, params, starting weights, code, torch, and ``machine``
    (the kind of device and how many cores it has)."""
    return digest_of(
        {
            "training_set": training_set.digest,
            "cache": cache.digest,
            "config": config.model_dump(mode="json", exclude={"max_restarts", "weights"}),
            "weights": sha256_file(weights) if weights is not None else "",
            "code": _code_digest(),
            "torch": torch.__version__,
            "machine": machine,
        }
    )


def _code_digest() -> str:
    """Digest of the sources that training runs: a checkpoint of other code is never resumed."""
    here = Path(__file__).parent
    names = {path.name for path in here.glob("*.py")} - NOT_DECIDING
    paths = [*(here / name for name in sorted(names)), Path(augment_ops.__file__), Path(cache_module.__file__)]
    return digest_of([[path.name, sha256_file(path)] for path in paths])


class Checkpoint(NamedTuple):
    """A checkpoint's content, on the CPU."""

    epoch: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    best_weights: dict[str, Tensor]
    best_epoch: int
    history: list[EpochRow]


class Checkpoints:
    """The checkpoints of one fingerprint. ``folder`` is <checkpoints>/<fingerprint>."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say

    def save(self, state: TrainState) -> Path:
        """Write ``state`` after a finished epoch and drop all but the newest ``KEEP``."""
        buffer = io.BytesIO()
        content = Checkpoint(
            state.epoch,
            state.model.state_dict(),
            state.optimizer.state_dict(),
            state.best_weights,
            state.best_epoch,
            state.history,
        )._asdict()
        torch.save({**content, "history": [tuple(row) for row in state.history], "fingerprint": self.folder.name}, buffer)
        data = buffer.getvalue()
        path = self.folder / f"epoch-{state.epoch:06d}.{hashlib.sha256(data).hexdigest()}.pt"
        write_atomic(path, data)
        for old in [other for other in self.files() if other != path][KEEP - 1 :]:
            old.unlink(missing_ok=True)
        return path

    def files(self) -> list[Path]:
        """All checkpoint files, newest epoch first."""
        return sorted((path for path in self.folder.glob("epoch-*.pt") if _NAME.fullmatch(path.name)), reverse=True)

    def newest(self, epoch: int | None = None) -> Checkpoint | None:
        """The newest sound checkpoint (of ``epoch``, where given), or None. Each damaged one is named and removed."""
        for path in self.files():
            matched = _NAME.fullmatch(path.name)
            assert matched is not None
            if epoch is not None and int(matched[1]) != epoch:
                continue
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != matched[2]:
                self.say(f"checkpoint {path.name[:12]} is damaged (its sha256 is not the one it was written with): using the one before it")
                path.unlink(missing_ok=True)
                continue
            try:
                content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception as error:  # of hostile or foreign bytes anything
                self.say(f"checkpoint {path.name[:12]} cannot be read ({type(error).__name__}): using the one before it")
                path.unlink(missing_ok=True)
                continue
            if content.pop("fingerprint") == self.folder.name:
                return Checkpoint(**{**content, "history": [EpochRow(*row) for row in content["history"]]})
        return None


class Resume(Plugin):
    """Puts the newest checkpoint into the state at the start."""

    priority = -50

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def on_start(self, state: TrainState) -> None:
        # Rank 0 chooses; the others read the same epoch, and never a newer or older one than it.
        found = self.checkpoints.newest() if state.ranks.first else None
        epoch = state.ranks.from_first(found.epoch if found else 0)
        if epoch == 0:
            return
        if not state.ranks.first:
            found = self.checkpoints.newest(epoch)
        assert found is not None, f"rank {state.ranks.rank} cannot read the checkpoint of epoch {epoch}"
        state.model.load_state_dict(found.model)
        state.optimizer.load_state_dict(found.optimizer)
        state.epoch, state.history = found.epoch, found.history
        state.best_epoch, state.best_weights = found.best_epoch, found.best_weights
        if state.ranks.first:
            self.checkpoints.say(f"resuming after epoch {epoch} of {state.config.epochs}")


class Save(Plugin):
    """Writes a checkpoint after each epoch, on rank 0."""

    priority = 50

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def on_epoch_end(self, state: TrainState) -> None:
        if state.ranks.first:
            self.checkpoints.save(state)


def prune(checkpoints: Path, keep: str) -> None:
    """Leave the ``KEEP_FOLDERS`` newest fingerprint folders below ``checkpoints``, and whatever the runs beside this one use.

    ``keep`` always stays, as does a folder whose lock a training holds, or that is younger than ``YOUNG_S``: its lock may come.
    """
    found: list[tuple[bool, float, Path]] = []
    for path in checkpoints.iterdir():
        with suppress(FileNotFoundError):  # another run prunes too
            if path.is_dir():
                found.append((path.name == keep, path.stat().st_mtime, path))
    for _, changed, folder in sorted(found)[:-KEEP_FOLDERS]:
        if changed < time.time() - YOUNG_S and not is_locked(folder / "lock"):
            shutil.rmtree(folder, ignore_errors=True)
