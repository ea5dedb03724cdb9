"""What models say of images that they were not trained on: each fold is answered by a model of the others."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tasks.core.artifacts import SPLITS, ImageCache, Split, TrainingSet
from tasks.core.config import TrainConfig
from tasks.core.errors import BadInput
from tasks.core.files import digest_of, file_lock, write_atomic
from tasks.images.cache import CacheWriter, Entry, entries_of, file_of, members_of, open_split, publish_cache
from tasks.images.splits import uniform
from tasks.training import launch, models
from tasks.training.checkpoint import Checkpoints, fingerprint
from tasks.training.export import Served

LOCK_TIMEOUT_S = 5.0


class Answers(NamedTuple):
    """One row for each image of a cache, train then val then test: its split, sha256, path and label, and the ``probabilities``
    float32 [N, C] of the model whose training it had no part in."""

    splits: list[Split]
    sha256: list[str]
    paths: list[str]
    labels: np.ndarray
    probabilities: np.ndarray


def out_of_fold(
    training_set: TrainingSet,
    cache: ImageCache,
    config: TrainConfig,
    weights: Path | None,
    groups: Mapping[str, str],
    folds: int,
    work: Path,
    say: Callable[[str], None] = print,
) -> Answers:
    """Train ``folds`` models as ``config`` says, from ``weights`` or at random, and let each answer for images that it was not trained on.

    An image's fold is a function of its group (``groups``: sha256 -> group, where it has one) or of its sha256; a model chooses
    its epoch on those val images that are not in its fold. Finished folds lie in ``work`` until all are, so a run that was killed goes
    on from the last epoch. Raises BadInput ``class_too_small`` for a fold without images to train, choose or answer by, whatever
    training raises, or Transient ``lock_busy``.
    """
    cache.verify()
    entries = {split: entries_of(cache, split) for split in SPLITS}
    fold_of = {one.sha256: fold_number(groups.get(one.sha256), one.sha256, folds) for split in SPLITS for one in entries[split]}
    everything = [(split, one) for split in SPLITS for one in entries[split]]
    answers = np.empty((len(everything), len(cache.classes)), np.float32)
    place = {one.sha256: row for row, (_, one) in enumerate(everything)}
    folder = work / digest_of([fingerprint(training_set, cache, config, weights, ""), folds, sorted(groups.items())])[:20]
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(work / "lock", LOCK_TIMEOUT_S, "another look for label issues"):
        for stale in work.iterdir():
            if stale.is_dir() and stale != folder:
                shutil.rmtree(stale)
        for fold in range(folds):
            inside = {split: [one for one in entries[split] if fold_of[one.sha256] == fold] for split in SPLITS}
            parts: dict[Split, list[Entry]] = {
                "train": [one for split in SPLITS if split != "val" for one in entries[split] if fold_of[one.sha256] != fold],
                "val": [one for one in entries["val"] if fold_of[one.sha256] != fold],
                "test": [one for split in SPLITS for one in inside[split]],
            }
            if not all(parts.values()):
                raise BadInput(
                    "class_too_small", f"fold {fold + 1} leaves a split empty", value=len(everything), constraint="more images", knob="--folds"
                )
            for part in parts.values():
                part.sort()
            done = folder / f"{fold}.npy"
            if not done.exists():
                say(f"fold {fold + 1} of {folds}: {len(parts['train'])} images teach, {len(parts['test'])} are asked about")
                found = _fold(training_set, cache, config, parts, folder / f"fold-{fold}", weights)
                buffer = io.BytesIO()
                np.save(buffer, found)
                write_atomic(done, buffer.getvalue())
                shutil.rmtree(folder / f"fold-{fold}")
            answers[[place[one.sha256] for one in parts["test"]]] = np.load(done)
        shutil.rmtree(folder)
    of_all = [one for _, one in everything]
    labels = np.array([one.label_index for one in of_all], np.int64)
    return Answers([split for split, _ in everything], [one.sha256 for one in of_all], [one.path for one in of_all], labels, answers)


def fold_number(group: str | None, sha256: str, folds: int) -> int:
    """The fold, from 0, of an image; those of one group share it."""
    return int(uniform(f"fold of group:{group}" if group is not None else f"fold of image:{sha256}", 0) * folds)


def _fold(
    training_set: TrainingSet, cache: ImageCache, config: TrainConfig, parts: dict[Split, list[Entry]], root: Path, weights: Path | None
) -> np.ndarray:
    """Probabilities float32 [M, C] of ``parts``' test images by a model of its train images."""

    def fill(writer: CacheWriter) -> None:
        for shard, names in members_of(cache).items():
            assert writer.members[shard] == names, "every image is in one part of the fold"
            name = file_of(shard, cache.form)
            writer.link(shard, cache.path(name), cache.files[name])

    fold = publish_cache(root, parts, cache.classes, cache.decode, {"ImageCache": cache.digest}, fill, cache.form)
    job = launch.Job(training_set, fold, config, weights, root / "checkpoints")
    job.folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(job.folder, print)
    done = checkpoints.newest()
    if done is None or done.epoch < config.epochs:
        launch.run_ranks(job, fork=False)
        done = checkpoints.newest()
    assert done is not None, "the ranks ended without a checkpoint"
    model = models.build_model(config.model, len(cache.classes), config.width, cache.decode.image_size)
    model.load_state_dict(done.best_weights)
    served = Served(model, training_set.mean, training_set.std).eval()
    pixels = open_split(fold, "test").pixels
    answers = np.empty((len(pixels), len(cache.classes)), np.float32)
    with torch.inference_mode():
        for start in range(0, len(pixels), config.batch_size):
            batch = torch.from_numpy(np.array(pixels[start : start + config.batch_size]))
            answers[start : start + len(batch)] = served(batch).numpy()
    return answers
