"""Hooks into the training loop, and the state that the loop and its plug-ins share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tasks.core.config import TrainConfig
from tasks.training.distributed import Ranks


class EpochRow(NamedTuple):
    """One row of history.csv. ``epoch`` counts from 1, ``lr`` is that of the epoch's last step, accuracies are shares."""

    epoch: int
    lr: float
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float


@dataclass
class TrainState:
    """Everything that changes while training; plug-ins read it and talk through it. The same on every rank."""

    config: TrainConfig
    ranks: Ranks
    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps_per_epoch: int
    images_per_epoch: int
    epoch: int = 0
    """Epochs finished."""
    step: int = 0
    """Steps finished in the running epoch."""
    lr: float = 0.0
    history: list[EpochRow] = field(default_factory=list)
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    best_epoch: int = 0
    """Epoch (from 1) of ``best_weights``: the highest val accuracy, then the lowest val loss, then the earliest."""


class Plugin:
    """Base of plug-ins. Hooks run on every rank, lower ``priority`` first; each may change the state in place."""

    priority: int = 0

    def on_start(self, state: TrainState) -> None:
        """Before the first epoch; a restored checkpoint is in ``state`` from priority -50 on."""

    def on_epoch_start(self, state: TrainState) -> None:
        """Before the first step of an epoch."""

    def on_step_end(self, state: TrainState) -> None:
        """After the optimiser's step."""

    def on_epoch_end(self, state: TrainState) -> None:
        """After validation; the epoch stands in ``state.history``. The checkpoint is written at priority 50."""

    def on_end(self, state: TrainState) -> None:
        """After the last epoch."""
