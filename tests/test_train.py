"""The train stage's own promises: it refuses wrong inputs before any rank starts, and a failure leaves no artifact."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_job import run_job
from training_data import CLASSES, SIZE, make_data, small_config

from tasks.core.artifacts import ImageCache, TrainedModel, TrainingSet, lineage
from tasks.core.errors import BadInput
from tasks.train import train
from tasks.training.models import build_model


def refused(root: Path, training_set: TrainingSet, cache: ImageCache, **changes: Any) -> BadInput:
    """The error of a training that must not start; nothing may be written by it."""
    with pytest.raises(BadInput) as caught:
        train(training_set, cache, small_config(**changes), root, root / "checkpoints")
    assert not (root / "artifacts/model").exists()
    assert not (root / "checkpoints").exists()
    return caught.value


def test_wrong_inputs_are_refused_before_any_rank_starts(tmp_path: Path) -> None:
    training_set, cache = make_data(tmp_path)
    assert refused(tmp_path, training_set, cache.model_copy(update={"digest": "f" * 64})).code == "artifact_foreign"
    assert refused(tmp_path, training_set, cache, model="resnet19").code == "unknown_model"
    assert refused(tmp_path, training_set, cache, weights="absent.safetensors").code == "unreadable"
    pixels = cache.path("000001-00000.u8")
    pixels.write_bytes(pixels.read_bytes()[:-1] + b"\0")
    assert refused(tmp_path, training_set, cache).code == "artifact_edited"


def test_a_failed_training_leaves_no_artifact(tmp_path: Path) -> None:
    """A model.json of an earlier run must not pass for this run's."""
    make_data(tmp_path)
    stale = tmp_path / TrainedModel.PATH
    stale.parent.mkdir()
    stale.write_text("{}")
    done = run_job(tmp_path, small_config(lr=1e12), stage=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error[loss_not_finite]")
    assert list(stale.parent.iterdir()) == []


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A training from given weights whose path is relative to the project, and what it said."""
    root = tmp_path_factory.mktemp("started")
    make_data(root)
    torch.manual_seed(5)
    save_file(build_model("small_resnet", 7, 4, SIZE).state_dict(), root / "start.safetensors")
    done = run_job(root, small_config(weights="start.safetensors", epochs=1, lr=1e-9, batch_size=21), stage=True)
    assert done.returncode == 0, done.stderr
    return root, done.stdout


def test_training_starts_from_the_given_weights(started: tuple[Path, str]) -> None:
    """One tiny step: all but the head, which is for seven classes, is where the file put it."""
    root, said = started
    assert "starting from start.safetensors" in said
    given, found = load_file(root / "start.safetensors"), load_file(root / "artifacts/model/weights.safetensors")
    for name, value in given.items():
        if name.startswith("head."):
            assert found[name].shape[0] == len(CLASSES)
        elif name.endswith("weight"):
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


def test_artifact_says_what_it_is(started: tuple[Path, str]) -> None:
    root, _ = started
    model = TrainedModel.load(root).verify()
    assert model.made_from == lineage(TrainingSet.load(root), ImageCache.load(root))
    assert model.classes == CLASSES
    assert model.parameters == sum(p.numel() for p in build_model("small_resnet", 3, 4, SIZE).parameters())
    assert {path.name for path in (root / "artifacts/model").iterdir()} == {*model.files, "model.json"}
    with model.path("history.csv").open(newline="") as handle:
        (row,) = csv.DictReader(handle)
    assert list(row) == ["epoch", "lr", "train_loss", "train_accuracy", "val_loss", "val_accuracy"]
    assert (float(row["val_accuracy"]), float(row["val_loss"])) == pytest.approx((model.val_accuracy, model.val_loss))
