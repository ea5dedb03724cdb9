"""The training loop, whole: one rank's part of it, in plain torch.

    Engine(data, config, ranks, plugins).fit()

Extend it with plug-ins (tasks/training/plugins.py) or by a subclass that overrides ``train_step``. Everything random is a
function of seed, epoch and step, so a run that was killed and resumed ends with the bits of an unbroken one on the CPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.core.artifacts import TrainingSet
from tasks.core.config import TrainConfig
from tasks.core.errors import BadInput
from tasks.images.cache import SplitView
from tasks.training.distributed import Ranks, with_global_norms
from tasks.training.loader import Batch, Loader
from tasks.training.optim import build_optimizer, learning_rate
from tasks.training.plugins import EpochRow, Plugin, TrainState

CHECK_EVERY = 32
"""Steps between looks at the losses: on a GPU each look waits for the device."""

BF16_MIN_SIDE_PX = 32
"""Smallest image side for which `auto` takes bf16 on a CPU. It was measured to win from 32 px on; below that the casts weigh
more, and plain float32 rounds alike on processors with and without bf16."""


class TrainingData(NamedTuple):
    """What the engine reads: the two splits and the policy. The test split is never among it."""

    train: SplitView
    val: SplitView
    training_set: TrainingSet


class Engine:
    """Trains ``model`` on this rank's rows of each global batch. Raises BadInput ``loss_not_finite``."""

    def __init__(self, model: nn.Module, data: TrainingData, config: TrainConfig, ranks: Ranks, plugins: Sequence[Plugin] = ()) -> None:
        make_deterministic(ranks.device)
        model = with_global_norms(model, ranks).to(ranks.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.config = config
        self.ranks = ranks
        self.train_loader = Loader(data.train, data.training_set, batch_size=config.batch_size, seed=config.seed, ranks=ranks)
        self.val_loader = Loader(data.val, data.training_set, batch_size=config.batch_size, seed=config.seed, ranks=ranks)
        self.class_weights = torch.tensor(data.training_set.class_weights, dtype=torch.float32, device=ranks.device)
        self.bf16 = uses_bf16(config.precision, ranks.device, data.train.pixels.shape[1])
        self.plugins = sorted(plugins, key=lambda plugin: plugin.priority)
        self.state = TrainState(
            config, ranks, model, build_optimizer(model, config), steps_per_epoch=self.train_loader.steps, images_per_epoch=self.train_loader.count
        )

    def fit(self) -> TrainState:
        """Train from the state's epoch to ``config.epochs``; the state's ``best_weights`` are the result."""
        state = self.state
        for plugin in self.plugins:
            plugin.on_start(state)
        while state.epoch < self.config.epochs:
            for plugin in self.plugins:
                plugin.on_epoch_start(state)
            train_loss, train_accuracy = self.train_epoch()
            val_loss, val_accuracy = self.validate()
            state.epoch, state.step = state.epoch + 1, 0
            state.history.append(EpochRow(state.epoch, state.lr, train_loss, train_accuracy, val_loss, val_accuracy))
            self._keep_best()
            for plugin in self.plugins:
                plugin.on_epoch_end(state)
        for plugin in self.plugins:
            plugin.on_end(state)
        return state

    def train_epoch(self) -> tuple[float, float]:
        """One pass over the training split; mean loss and accuracy, every image weighted as in its batch's loss."""
        state = self.state
        state.model.train()
        answers: list[Tensor] = []
        weights: list[float] = []
        look_every = 1 if self.ranks.device.type == "cpu" else CHECK_EVERY
        for step, batch in enumerate(self.train_loader.augmented(state.epoch)):
            state.lr = learning_rate(state.epoch * state.steps_per_epoch + step, self.config.epochs * state.steps_per_epoch, self.config)
            for group in state.optimizer.param_groups:
                group["lr"] = state.lr
            # Dropout draws from the global generator: seeded for each step, it too is a function of seed, epoch, step and rank.
            torch.manual_seed(int(np.random.SeedSequence([self.config.seed, state.epoch, step, self.ranks.rank]).generate_state(1)[0]))
            answers.append(self.train_step(batch))
            weights.append(batch.weight)
            state.step = step + 1
            if state.step % look_every == 0 or state.step == state.steps_per_epoch:
                self._require_finite(answers[-look_every:])
            for plugin in self.plugins:
                plugin.on_step_end(state)
        loss, correct = torch.stack(answers).double().cpu().unbind(1)
        return float(loss @ torch.tensor(weights, dtype=torch.float64)) / sum(weights), float(correct.sum()) / self.train_loader.count

    def train_step(self, batch: Batch) -> Tensor:
        """Forward, backward, sum over ranks, update. Returns (loss, right answers) of the whole global batch, float32 [2]."""
        model, optimizer = self.state.model, self.state.optimizer
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.bf16):
            logits = model(batch.images)
        losses = functional.cross_entropy(
            logits.float(), batch.labels, weight=self.class_weights, label_smoothing=self.config.label_smoothing, reduction="sum"
        )
        loss = losses / batch.weight  # of the global batch: the ranks' losses and gradients add up to its weighted mean
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        right = (logits.detach().argmax(1) == batch.labels).sum()
        answer = self.ranks.sum_gradients(model.parameters(), torch.stack([loss.detach(), right.float()]))
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), self.config.clip_norm)
        optimizer.step()
        return answer

    def validate(self) -> tuple[float, float]:
        """Mean cross-entropy and accuracy on val in float32, each image once at any world size.

        Losses of single images are put in the split's order and summed in float64: equal weights give equal numbers, however
        many ranks there are.
        """
        self.state.model.eval()
        losses = torch.zeros(self.val_loader.count, dtype=torch.float64, device=self.ranks.device)
        right = torch.zeros((), dtype=torch.int64, device=self.ranks.device)
        with torch.inference_mode():
            for rows, batch in self.val_loader.plain():
                logits = self.state.model(batch.images)
                losses[rows] = functional.cross_entropy(logits, batch.labels, reduction="none").double()
                right += (logits.argmax(1) == batch.labels).sum()
        loss = float(self.ranks.sum_(losses).sum()) / self.val_loader.count
        if not math.isfinite(loss):
            raise self._not_finite(loss, "on val after epoch", self.state.steps_per_epoch)
        return loss, int(self.ranks.sum_(right)) / self.val_loader.count

    def _keep_best(self) -> None:
        state = self.state
        best = max(state.history, key=lambda row: (row.val_accuracy, -row.val_loss, -row.epoch))
        if best.epoch == state.epoch:
            state.best_epoch = state.epoch
            state.best_weights = {name: value.detach().clone() for name, value in state.model.state_dict().items()}

    def _require_finite(self, answers: Sequence[Tensor]) -> None:
        """All ranks see the same sums, so all raise together and none waits for another."""
        for back, loss in enumerate(reversed(torch.stack(list(answers))[:, 0].tolist())):
            if not math.isfinite(loss):
                raise self._not_finite(loss, "in epoch", self.state.step - back)

    def _not_finite(self, loss: float, where: str, step: int) -> BadInput:
        place = f"{where} {self.state.epoch + 1}, step {step} of {self.state.steps_per_epoch}, at learning rate {self.state.lr:.4g}"
        return BadInput(
            "loss_not_finite", f"the loss is no number {place}", value=loss, constraint="finite", knob="train.lr lower or train.clip_norm"
        )


def uses_bf16(precision: str, device: torch.device, side_px: int) -> bool:
    """Whether to run the forward pass under bf16 autocast: as asked, or where `auto` finds that the device has it natively."""
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    native: bool = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cpu" and native and side_px >= BF16_MIN_SIDE_PX


def make_deterministic(device: torch.device) -> None:
    """Same inputs, same bits, on the CPU. On a GPU some of torch's operations have no deterministic form and stay as they are."""
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    if device.type != "cpu":
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
