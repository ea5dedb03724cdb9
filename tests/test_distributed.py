"""Several ranks against one: the same weights within rounding, exactly the same metrics, and errors that reach the user."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from train_job import result_of, run_job
from training_data import make_data, small_config

from tasks.training.checkpoint import Checkpoint
from tasks.training.distributed import GlobalBatchNorm2d, Ranks, _Normalise, with_global_norms

WEIGHTS = (0.5, 1.0, 1.5)


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same training by one rank and by two: 21 images in batches of 4 with class weights and clipping."""
    roots = {}
    for processes in (1, 2):
        roots[processes] = tmp_path_factory.mktemp(f"ranks{processes}")
        make_data(roots[processes], class_weights=WEIGHTS)
        done = run_job(roots[processes], small_config(processes=processes, clip_norm=1.0))
        assert done.returncode == 0, done.stderr
    return roots


def test_two_ranks_train_the_weights_of_one(one_and_two: dict[int, Path]) -> None:
    """Under attack: gradient scaling of uneven batches, a rank without rows, batch norm's statistics, running statistics."""
    one, two = (result_of(one_and_two[processes]) for processes in (1, 2))
    assert one.model.keys() == two.model.keys()
    for name, value in one.model.items():
        torch.testing.assert_close(two.model[name], value, rtol=2e-4, atol=2e-5)
    for row, other in zip(one.history, two.history, strict=True):
        assert other.train_loss == pytest.approx(row.train_loss, rel=1e-4)
        assert other.train_accuracy == row.train_accuracy


def test_equal_weights_give_exactly_equal_metrics(one_and_two: dict[int, Path]) -> None:
    """Under attack: a sample counted twice or not at all, and sums whose order depends on the number of ranks."""
    one, two = ((one_and_two[processes] / "untrained.json").read_text() for processes in (1, 2))
    assert one == two


@pytest.mark.slow
def test_spawned_ranks_are_forked_ranks(one_and_two: dict[int, Path], tmp_path: Path) -> None:
    """With a GPU, or from a process with threads, ranks start as fresh interpreters: all they are told must survive a pickle."""
    make_data(tmp_path, class_weights=WEIGHTS)
    done = run_job(tmp_path, small_config(processes=2, clip_norm=1.0), spawn=True)
    assert done.returncode == 0, done.stderr
    spawned, forked = result_of(tmp_path), result_of(one_and_two[2])
    assert all(torch.equal(value, forked.model[name]) for name, value in spawned.model.items())


def test_weights_moved(one_and_two: dict[int, Path]) -> None:
    """The comparison above is not between two untouched networks."""
    done: Checkpoint = result_of(one_and_two[1])
    assert done.history[-1].train_loss < done.history[0].train_loss
    assert done.model["stem.1.num_batches_tracked"] == 3 * 6


@pytest.mark.parametrize(("hook", "code", "words"), [("kill_always", 75, "SIGKILL"), ("raise_always", 2, "ValueError: a bug of two lines")])
def test_used_up_restarts_end_in_one_line(tmp_path: Path, hook: str, code: int, words: str) -> None:
    make_data(tmp_path)
    done = run_job(tmp_path, small_config(max_restarts=1), hook)
    assert done.returncode == code
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error[training_failed]: rank 0 died and its 1 restarts are used up")
    assert words in last
    assert "Traceback" not in done.stderr
    assert "restart 1 of 1" in done.stdout
    assert "resuming after epoch 1 of 3" in done.stdout


def test_a_rank_keeps_its_own_error_code_and_is_not_restarted(tmp_path: Path) -> None:
    """A loss that is no number is the same after every restart, and must never reach a checkpoint."""
    make_data(tmp_path)
    done = run_job(tmp_path, small_config(processes=2, lr=1e12, batch_size=8))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error[loss_not_finite]: the loss is no number")
    assert "train.lr" in last
    assert "restart" not in done.stdout
    assert not list((tmp_path / "job").glob("*.pt"))


@pytest.mark.parametrize(("count", "world"), [(1, 2), (5, 2), (7, 3), (0, 2), (64, 4)])
def test_rows_are_shared_whole_and_evenly(count: int, world: int) -> None:
    taken = [list(range(count))[Ranks(rank, world).rows(count)] for rank in range(world)]
    assert list(itertools.chain(*taken)) == list(range(count))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_own_batch_norm_is_torchs() -> None:
    """Forward, gradients and statistics of our formula against nn.BatchNorm2d, with a large mean that naive sums would lose."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, 3, 3, generator=generator) + 1000
    upstream = torch.randn(6, 5, 3, 3, generator=generator)
    weight, bias = torch.rand(5, generator=generator) + 0.5, torch.rand(5, generator=generator)
    answers = []
    for own in (True, False):
        inputs = [tensor.clone().double().requires_grad_() if not own else tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        if own:
            out, mean, variance, count = _Normalise.apply(*inputs, 1e-5, Ranks())
            assert count == 54
            torch.testing.assert_close(mean, x.double().mean((0, 2, 3)).float())
            torch.testing.assert_close(variance, x.double().var((0, 2, 3), correction=0).float(), rtol=1e-4, atol=0)
        else:
            out = torch.nn.functional.batch_norm(inputs[0], None, None, inputs[1], inputs[2], training=True)
        out.backward(upstream.to(out.dtype))
        answers.append([out.float(), *(tensor.grad.float() for tensor in inputs if tensor.grad is not None)])
    for mine, torchs in zip(*answers, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-3, atol=1e-3)


def test_batch_norm_of_a_single_value_is_the_bias() -> None:
    """A last batch of one image whose map is one pixel, which torch's own batch norm refuses."""
    norm = with_global_norms(nn.BatchNorm2d(3), Ranks()).train()
    assert isinstance(norm, GlobalBatchNorm2d)
    assert norm.running_mean is not None
    nn.init.constant_(norm.bias, 0.25)
    x = torch.full((1, 3, 1, 1), 7.0, requires_grad=True)
    out = norm(x)
    out.sum().backward()
    assert torch.equal(out, torch.full((1, 3, 1, 1), 0.25))
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(1, 3, 1, 1))
