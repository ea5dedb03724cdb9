"""Kill -9 in the middle of an epoch, damage a checkpoint: the rerun ends with the bits of an unbroken run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from train_job import result_of, run_job
from training_data import make_data, small_config

from tasks.core.artifacts import ImageCache, TrainedModel, TrainingSet
from tasks.core.files import file_lock
from tasks.training.checkpoint import Checkpoints, fingerprint, prune


def bits(weights: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: value.contiguous().numpy().tobytes() for name, value in weights.items()}


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_nothing_is_lost(tmp_path: Path) -> None:
    """Rank 1 of 2 gets SIGKILL in epoch 2: the same process goes on from epoch 1, bit for bit."""
    config = small_config(processes=2)
    roots = [tmp_path / "whole", tmp_path / "killed"]
    for root, hook in zip(roots, ("", "kill_rank_1"), strict=True):
        root.mkdir()
        make_data(root)
        done = run_job(root, config, hook)
        assert done.returncode == 0, done.stderr
    assert "[rank0] resuming after epoch 1 of 3" in done.stdout
    whole, killed = (result_of(root) for root in roots)
    assert bits(killed.model) == bits(whole.model)
    assert killed.history == whole.history


@pytest.fixture(scope="module")
def killed_stage(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A project whose whole stage was killed in epoch 2 and run again, and one that was left alone; the rerun's output."""
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    for root in (whole, killed):
        make_data(root)
    assert run_job(whole, small_config(), stage=True).returncode == 0
    first = run_job(killed, small_config(), "kill_stage", stage=True)
    assert first.returncode == -9
    assert not TrainedModel.exists(killed)
    rank = int((killed / "struck").read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _alive(rank):
        time.sleep(0.05)
    assert not _alive(rank), "the rank outlived its launcher"
    again = run_job(killed, small_config(), "kill_stage", stage=True)
    assert again.returncode == 0, again.stderr
    return whole, killed, again.stdout


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_killed_stage_resumes_to_the_same_artifact(killed_stage: tuple[Path, Path, str]) -> None:
    whole, killed, output = killed_stage
    assert "resuming after epoch 1 of 3" in output
    expected = TrainedModel.load(whole).verify()
    assert TrainedModel.load(killed).verify().digest == expected.digest
    for name in expected.files:
        assert (killed / "artifacts/model" / name).read_bytes() == expected.path(name).read_bytes()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(killed_stage: tuple[Path, Path, str]) -> None:
    """One flipped byte in the newest checkpoint; the outputs are gone, as DVC leaves them before a run."""
    whole, killed, _ = killed_stage
    (newest,) = (killed / "checkpoints").glob("*/epoch-000003.*.pt")
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    for path in (killed / "artifacts/model").iterdir():
        path.unlink()
    done = run_job(killed, small_config(), stage=True)
    assert done.returncode == 0, done.stderr
    assert "checkpoint epoch-000003 is damaged" in done.stdout
    assert "resuming after epoch 2 of 3" in done.stdout
    assert TrainedModel.load(killed).verify().digest == TrainedModel.load(whole).digest


@pytest.mark.slow
def test_a_finished_training_is_not_run_again(killed_stage: tuple[Path, Path, str]) -> None:
    whole, _, _ = killed_stage
    before = TrainedModel.load(whole)
    for path in (whole / "artifacts/model").iterdir():
        path.unlink()
    done = run_job(whole, small_config(), stage=True)
    assert done.returncode == 0, done.stderr
    assert "epoch" not in done.stdout
    assert TrainedModel.load(whole).verify().digest == before.digest


def test_fingerprint_follows_what_decides_the_result(tmp_path: Path) -> None:
    """Another rate, data or starting file must never resume from this checkpoint; another count of restarts may."""
    training_set, cache = make_data(tmp_path)
    config = small_config()
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"1")

    def of(training_set: TrainingSet = training_set, cache: ImageCache = cache, weights: Path | None = None, **changes: object) -> str:
        return fingerprint(training_set, cache, small_config(**changes), weights, "cpu, 1 threads")

    assert of() == fingerprint(training_set, cache, config, None, "cpu, 1 threads") == of(max_restarts=7)
    others = {
        of(lr=0.03),
        of(seed=1),
        of(weights=weights),
        of(training_set=training_set.model_copy(update={"digest": "f" * 64})),
        of(cache=cache.model_copy(update={"digest": "f" * 64})),
    }
    assert len(others) == 5
    assert of() not in others


def test_old_folders_are_pruned_but_never_the_one_in_use(tmp_path: Path) -> None:
    for age in range(8):
        folder = tmp_path / f"f{age}"
        folder.mkdir()
        os.utime(folder, (1000 - age, 1000 - age))
    (tmp_path / "new").mkdir()  # another run has made it and is about to take its lock
    with file_lock(tmp_path / "f6" / "lock", 1.0, "a training beside this one"):
        os.utime(tmp_path / "f6", (1, 1))
        prune(tmp_path, keep="f7")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f0", "f1", "f2", "f6", "f7", "new"]


def test_a_foreign_checkpoint_is_not_used(tmp_path: Path) -> None:
    """A file of another training that was moved in, whole and well named, still bears the other fingerprint."""
    import hashlib
    import io

    content = {"epoch": 1, "model": {}, "optimizer": {}, "best_weights": {}, "best_epoch": 1, "history": [], "fingerprint": "another"}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path = tmp_path / f"epoch-000001.{hashlib.sha256(buffer.getvalue()).hexdigest()}.pt"
    path.write_bytes(buffer.getvalue())
    assert Checkpoints(tmp_path, print).newest() is None
