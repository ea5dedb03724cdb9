"""The training loop in one process: schedule, order, weighting, best epoch, plug-ins, bad losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_data import CLASSES, SIZE, make_data, small_config

from tasks.core.config import TrainConfig
from tasks.core.errors import BadInput
from tasks.images.cache import open_split
from tasks.training.distributed import Ranks
from tasks.training.engine import Engine, TrainingData, uses_bf16
from tasks.training.loader import Batch, Loader, sample_order
from tasks.training.models import build_model
from tasks.training.optim import build_optimizer, learning_rate
from tasks.training.plugins import EpochRow, Plugin, TrainState
from tasks.training.progress import Printer, Progress


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread, as in a small rank: with more, tests of tiny batches wait for cores that other programs have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def data(tmp_path: Path) -> TrainingData:
    training_set, cache = make_data(tmp_path)
    return TrainingData(open_split(cache, "train"), open_split(cache, "val"), training_set)


def engine_of(data: TrainingData, config: TrainConfig, *plugins: Plugin, kind: type[Engine] = Engine) -> Engine:
    torch.manual_seed(config.seed)
    return kind(build_model(config.model, len(CLASSES), config.width, SIZE), data, config, Ranks(), plugins)


def test_schedules_by_hand() -> None:
    """Ten steps, two of them rising: the peak is met exactly, the last rate is small but no zero."""
    cosine = [learning_rate(step, 10, small_config(schedule="cosine", warmup_share=0.2, lr=1.0)) for step in range(10)]
    assert cosine[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert cosine[6] == pytest.approx(0.5)
    assert cosine[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    cycle = [learning_rate(step, 10, small_config(schedule="one_cycle", warmup_share=0.2, lr=1.0)) for step in range(10)]
    assert cycle[:3] == pytest.approx([0.04 + 0.96 / 3, 0.04 + 0.96 * 2 / 3, 1.0])
    assert np.diff(cycle[2:]) == pytest.approx([-1 / 8] * 7)


@pytest.mark.parametrize("schedule", ["cosine", "one_cycle"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_rates_stay_between_zero_and_peak(schedule: str, share: float, steps: int) -> None:
    """The corners: one step only, no rise, nothing but rise."""
    rates = [learning_rate(step, steps, small_config(schedule=schedule, warmup_share=share, lr=0.3)) for step in range(steps)]
    assert all(0 < rate <= 0.3 for rate in rates)
    assert max(rates) == pytest.approx(0.3)


def test_no_decay_on_biases_and_norms() -> None:
    model = build_model("small_resnet", 3, 4, SIZE)
    for optimizer in ("sgd", "adamw"):
        decayed, free = build_optimizer(model, small_config(optimizer=optimizer, weight_decay=0.1)).param_groups
        assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
        assert {parameter.ndim for parameter in decayed["params"]} == {2, 4}
        assert {parameter.ndim for parameter in free["params"]} == {1}
        assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))


def test_order_is_a_function_of_seed_and_epoch() -> None:
    first = sample_order(50, 0, 3)
    assert sorted(first) == list(range(50))
    assert np.array_equal(first, sample_order(50, 0, 3))
    assert not np.array_equal(first, sample_order(50, 0, 4))
    assert not np.array_equal(first, sample_order(50, 1, 3))


def test_ranks_share_one_global_batch(data: TrainingData) -> None:
    """Rows of three ranks put together are the one-rank batch, augmentation included, in an epoch that ends with one image."""
    ops = ({"op": "rotate", "max_degrees": 10.0}, {"op": "translate", "max_px": 2}, {"op": "flip", "probability": 0.5})
    training_set = data.training_set.model_copy(update={"class_weights": (0.5, 1.0, 1.5), "ops": ops})
    views = (Ranks(), *(Ranks(rank, 3) for rank in range(3)))
    whole, *parts = (list(Loader(data.train, training_set, batch_size=4, seed=0, ranks=ranks).augmented(2)) for ranks in views)
    assert [batch.size for batch in whole] == [4, 4, 4, 4, 4, 1]
    for batch, *shares in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([share.images for share in shares]), batch.images)
        assert torch.equal(torch.cat([share.labels for share in shares]), batch.labels)
        assert {share.weight for share in shares} == {batch.weight}
        assert batch.weight == pytest.approx(float(torch.tensor([0.5, 1.0, 1.5])[batch.labels].sum()))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_validation_rows_are_each_seen_once(data: TrainingData, world: int) -> None:
    seen = []
    for rank in range(world):
        for rows, batch in Loader(data.val, data.training_set, batch_size=3, seed=0, ranks=Ranks(rank, world)).plain():
            seen += list(range(rows.start, rows.stop))
            assert len(batch.images) == len(batch.labels) == rows.stop - rows.start
    assert sorted(seen) == list(range(10))


def test_loss_is_torchs_weighted_smoothed_cross_entropy(data: TrainingData) -> None:
    """The step's loss against functional.cross_entropy with its own mean, for class weights and smoothing."""
    training_set = data.training_set.model_copy(update={"class_weights": (0.5, 1.0, 1.5)})
    engine = engine_of(data._replace(training_set=training_set), small_config(label_smoothing=0.1, batch_size=21))
    batch = next(engine.train_loader.augmented(0))
    engine.state.model.train()
    with torch.no_grad():
        expected = functional.cross_entropy(engine.state.model(batch.images), batch.labels, weight=torch.tensor([0.5, 1.0, 1.5]), label_smoothing=0.1)
    assert float(engine.train_step(batch)[0]) == pytest.approx(float(expected), rel=1e-5)


def test_it_learns_and_reports_what_it_measured(data: TrainingData) -> None:
    engine = engine_of(data, small_config(epochs=12, batch_size=7, lr=0.1))
    state = engine.fit()
    assert [row.epoch for row in state.history] == list(range(1, 13))
    assert state.history[-1].train_loss < 0.6 * state.history[0].train_loss
    engine.state.model.load_state_dict(state.best_weights)
    best = state.history[state.best_epoch - 1]
    assert engine.validate() == (best.val_loss, best.val_accuracy)
    by_hand = nn.functional.cross_entropy(
        engine.state.model(torch.cat([batch.images for _, batch in engine.val_loader.plain()])), torch.from_numpy(data.val.labels)
    )
    assert best.val_loss == pytest.approx(float(by_hand.detach()), rel=1e-5)


class Scripted(Engine):
    """An engine whose validation answers what a test says."""

    script: Iterator[tuple[float, float]]

    def validate(self) -> tuple[float, float]:
        return next(self.script)


def test_best_epoch_by_accuracy_then_loss_then_the_earliest(data: TrainingData) -> None:
    Scripted.script = iter([(0.9, 0.5), (0.7, 0.8), (0.6, 0.8), (0.6, 0.8), (0.1, 0.7)])
    assert engine_of(data, small_config(epochs=5), kind=Scripted).fit().best_epoch == 3


def test_same_seed_same_bits_and_another_seed_others(data: TrainingData) -> None:
    runs = [engine_of(data, small_config(seed=seed, epochs=2)).fit() for seed in (0, 0, 1)]
    first, again, other = (torch.cat([value.flatten().double() for value in run.best_weights.values()]) for run in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Poison(Engine):
    """Breaks the weights after the last step of an epoch: only validation can see it."""

    def train_step(self, batch: Batch) -> Tensor:
        answer = super().train_step(batch)
        if self.state.step == self.state.steps_per_epoch - 1:
            nn.init.constant_(next(self.state.model.parameters()), float("inf"))
        return answer


def test_a_loss_that_is_no_number_stops_with_place_and_knob(data: TrainingData) -> None:
    ended: list[int] = []

    class Watch(Plugin):
        def on_epoch_end(self, state: TrainState) -> None:
            ended.append(state.epoch)

    with pytest.raises(BadInput) as caught:
        engine_of(data, small_config(lr=1e15, batch_size=4), Watch()).fit()
    assert caught.value.code == "loss_not_finite"
    assert "epoch 1, step" in str(caught.value)
    assert "train.lr" in str(caught.value)
    with pytest.raises(BadInput, match="on val after epoch 1"):
        engine_of(data, small_config(), Watch(), kind=Poison).fit()
    assert ended == [], "an epoch with a broken loss must not reach the checkpoint hook"


def test_plugins_run_by_priority_and_share_the_state(data: TrainingData) -> None:
    calls: list[tuple[str, str, int, int]] = []

    class Note(Plugin):
        def __init__(self, name: str, priority: int) -> None:
            self.name, self.priority = name, priority

        def _note(self, hook: str, state: TrainState) -> None:
            calls.append((hook, self.name, state.epoch, state.step))

        def on_start(self, state: TrainState) -> None:
            self._note("start", state)

        def on_epoch_start(self, state: TrainState) -> None:
            self._note("epoch", state)

        def on_step_end(self, state: TrainState) -> None:
            self._note("step", state)

        def on_epoch_end(self, state: TrainState) -> None:
            self._note("done", state)

        def on_end(self, state: TrainState) -> None:
            self._note("end", state)

    engine_of(data, small_config(epochs=1, batch_size=11), Note("b", 1), Note("a", -1)).fit()
    hooks = [("start", 0, 0), ("epoch", 0, 0), ("step", 0, 1), ("step", 0, 2), ("done", 1, 0), ("end", 1, 0)]
    assert calls == [(hook, name, epoch, step) for hook, epoch, step in hooks for name in "ab"]


def test_clipping_bounds_the_gradient(data: TrainingData) -> None:
    engine = engine_of(data, small_config(clip_norm=1e-3))
    engine.train_step(next(engine.train_loader.augmented(0)))
    total = math.sqrt(sum(float(p.grad.double().square().sum()) for p in engine.state.model.parameters() if p.grad is not None))
    assert total == pytest.approx(1e-3, rel=1e-3)


def test_a_single_image_in_the_last_batch_of_a_one_pixel_map(data: TrainingData) -> None:
    """torchvision nets on small images end in maps of one pixel, where torch's batch norm refuses a batch of one."""
    net = nn.Sequential(nn.Conv2d(3, 4, SIZE), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))
    state = Engine(net, data, small_config(epochs=1, batch_size=20), Ranks()).fit()
    assert math.isfinite(state.history[0].val_loss)
    assert state.steps_per_epoch == 2


def test_dropout_is_a_function_of_the_step(data: TrainingData) -> None:
    """What the generator did before must not matter, or a resumed run would draw other masks."""

    def run(noise: int) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * SIZE * SIZE, 3))
        engine = Engine(net, data, small_config(epochs=1), Ranks())
        torch.rand(noise)
        return engine.fit().best_weights["2.weight"]

    assert torch.equal(run(0), run(17))


def test_bf16_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert uses_bf16("bf16", cpu, 8)
    assert not uses_bf16("fp32", cpu, 224)
    for native, side in itertools.product((True, False), (16, 64)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert uses_bf16("auto", cpu, side) == (native and side == 64)


def test_bf16_trains(data: TrainingData) -> None:
    state = engine_of(data, small_config(precision="bf16", epochs=2)).fit()
    assert all(value.dtype != torch.bfloat16 for value in state.best_weights.values())


def test_progress_on_a_pipe_is_one_plain_line_an_epoch(data: TrainingData, capsys: pytest.CaptureFixture[str]) -> None:
    engine_of(data, small_config(epochs=2), Progress(Printer(0, 2))).fit()
    engine_of(data, small_config(epochs=2), Progress(Printer(1, 2))).fit()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("[rank0] epoch 1/2 loss ")
    for part in (" val ", " % ", " images/s", " eta 0 s"):
        assert part in lines[1]
    assert "\r" not in "".join(lines)


def test_history_rows_have_the_columns_of_history_csv() -> None:
    assert EpochRow._fields == ("epoch", "lr", "train_loss", "train_accuracy", "val_loss", "val_accuracy")
