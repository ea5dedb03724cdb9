"""Train the classifier on as many ranks as there are, resume what was killed, and export it.

python -m tasks.train        in a project's root; reads artifacts/cache and artifacts/training_set, writes artifacts/model
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core import errors
from tasks.core.artifacts import ImageCache, TrainedModel, TrainingSet, file_digests, lineage
from tasks.core.config import TrainConfig, load_params
from tasks.core.files import STATE, file_lock, write_atomic
from tasks.core.process import die_with_parent, quiet_environment

if TYPE_CHECKING:
    from tasks.training.checkpoint import Checkpoint
    from tasks.training.engine import Engine
    from tasks.training.launch import Job
    from tasks.training.plugins import EpochRow, Plugin

LOCK_TIMEOUT_S = 60.0
OPENMP_SPINS = "10000"
"""How long a thread of torch's spins at a barrier before it sleeps. The default all but stands still (5 to 20 times slower steps)
when another program wants one of the cores; this is as fast on a quiet machine."""
FILES = ("weights.safetensors", "model.onnx", "history.csv")


def train(
    training_set: TrainingSet,
    cache: ImageCache,
    config: TrainConfig,
    out: Path,
    checkpoints: Path,
    *,
    fork: bool = False,
    plugins: tuple[Plugin, ...] = (),
    engine: type[Engine] | None = None,
) -> TrainedModel:
    """Train, keep the best epoch on val, export it, check the export against torch, and write artifacts/model below ``out``.

    A run of the same data, params and code that was killed goes on from its last epoch under ``checkpoints``; what it cost the
    machine goes to ``system/<model digest>.csv`` beside that folder. ``fork`` starts ranks faster; it is for callers that are
    a process of their own (see launch.run_ranks). ``plugins`` and ``engine`` extend the loop. Raises BadInput
    ``artifact_foreign``, ``artifact_edited``, ``unknown_model``, ``unreadable``, ``params_invalid``, ``loss_not_finite``,
    ``export_mismatch`` or ``training_failed``, or Transient ``lock_busy``.
    """
    from tasks.training import checkpoint, launch, models, resources

    training_set.require_made_from(cache).verify()
    cache.verify()
    models.check_model(config.model, len(cache.classes), config.width, cache.decode.image_size)
    weights = models.starting_weights(config, out)
    machine = f"{launch.device_kind(config.processes)}, {config.threads or launch.cpu_cores()} threads"
    folder = checkpoints / checkpoint.fingerprint(training_set, cache, config, weights, machine)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.prune(checkpoints, folder.name)
    job = launch.Job(training_set, cache, config, weights, folder, plugins, **({"engine": engine} if engine else {}))
    with file_lock(folder / "lock", LOCK_TIMEOUT_S, "this training"):
        (out / TrainedModel.PATH).unlink(missing_ok=True)
        store = checkpoint.Checkpoints(folder, print)
        done = store.newest()
        if done is None or done.epoch < config.epochs:
            launch.run_ranks(job, fork=fork)
            done = store.newest()
        assert done is not None, "the ranks ended without a checkpoint"
        assert done.epoch == config.epochs, "the ranks ended without a checkpoint of the last epoch"
        model = _publish(done, job, out)
    resources.keep(folder, checkpoints.with_name("system"), model.digest)
    return model


def _publish(done: Checkpoint, job: Job, out: Path) -> TrainedModel:
    """Export and check the best epoch's weights, then write them, the ONNX file and the history, and the marker last."""
    import safetensors.torch

    from tasks.images.cache import open_split
    from tasks.training import export, models

    cache, training_set, config = job.cache, job.training_set, job.config
    size = cache.decode.image_size
    model = models.build_model(config.model, len(cache.classes), config.width, size)
    model.load_state_dict(done.best_weights)
    served = export.Served(model, training_set.mean, training_set.std)
    onnx = export.to_onnx(served, size)
    aside = job.folder / FILES[1]
    write_atomic(aside, onnx)
    export.check_export(aside, served, open_split(cache, "test").pixels)
    aside.unlink()
    folder = (out / TrainedModel.PATH).parent
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    write_atomic(folder / FILES[0], safetensors.torch.save(weights))
    write_atomic(folder / FILES[1], onnx)
    write_atomic(folder / FILES[2], _history_csv(done.history))
    best = done.history[done.best_epoch - 1]
    return TrainedModel(
        made_from=lineage(training_set, cache),
        files=file_digests(folder, *FILES),
        architecture=config.model,
        classes=cache.classes,
        decode=cache.decode,
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        best_epoch=done.best_epoch,
        val_accuracy=best.val_accuracy,
        val_loss=best.val_loss,
    ).save(out)


def _history_csv(history: list[EpochRow]) -> bytes:
    """One row for each epoch: epoch, lr, train_loss, train_accuracy, val_loss, val_accuracy; nothing that depends on the clock."""
    lines = [",".join(history[0]._fields)]
    lines += [",".join(_number(value) for value in row) for row in history]
    return ("\n".join(lines) + "\n").encode()


def _number(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{value:.8g}"


def main() -> None:
    die_with_parent()
    quiet_environment()
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
    root = Path()
    params = load_params()
    model = train(TrainingSet.load(root), ImageCache.load(root), params.train, root, root / STATE / "checkpoints", fork=True)
    print(
        f"train: {model.architecture} with {model.parameters:,} parameters, best epoch {model.best_epoch} of {params.train.epochs}: "
        f"val accuracy {100 * model.val_accuracy:.2f} %, written to {model.folder}"
    )


if __name__ == "__main__":
    sys.exit(errors.run(main))
