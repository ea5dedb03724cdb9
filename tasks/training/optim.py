"""The optimiser and the learning rate, the rate a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from tasks.core.config import TrainConfig

START_SHARE = 1 / 25
"""First rate of one_cycle as a share of its peak (the default of torch's OneCycleLR)."""


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Rate of ``step`` (from 0) out of ``steps``: a rise over ``warmup_share`` of them to ``config.lr``, then a fall to near 0.

    cosine: linear from 0, then half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983). one_cycle: linear up from 1/25 of the
    peak and linear down (Smith & Topin 2018, arXiv:1708.07120, without their momentum cycle). Neither ever returns 0.
    """
    rise = min(round(config.warmup_share * steps), steps - 1)
    if step < rise:
        done = (step + 1) / (rise + 1)
        start = START_SHARE if config.schedule == "one_cycle" else 0.0
        return config.lr * (start + (1 - start) * done)
    left = 1 - (step - rise) / (steps - rise)
    if config.schedule == "one_cycle":
        return config.lr * left
    return config.lr * 0.5 * (1 - math.cos(math.pi * left))


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum or AdamW; weight decay on matrices and kernels only, not on biases and norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.momentum, 0.999))
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0)
