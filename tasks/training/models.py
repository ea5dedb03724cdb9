"""Networks by name: our small residual net, or any of torchvision's classifiers with a head for our classes."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.core.config import TrainConfig
from tasks.core.errors import BadInput
from tasks.core.files import home_of

SMALL_RESNET = "small_resnet"


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2016, arXiv:1512.03385), float [B, C, H, W] -> [B, C', H/s, W/s].

    The second norm starts at zero, so that a new block is the identity (Goyal et al. 2017, arXiv:1706.02677).
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        nn.init.zeros_(self.norm2.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            # Averaging before the 1x1 keeps three of four pixels that a strided 1x1 would drop (He et al. 2019, arXiv:1812.01187).
            pool = [nn.AvgPool2d(stride, ceil_mode=True, count_include_pad=False)] if stride != 1 else []
            self.shortcut = nn.Sequential(*pool, nn.Conv2d(channels_in, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        inner = self.norm2(self.conv2(inner))
        return functional.relu(inner + self.shortcut(x))


class SmallResNet(nn.Module):
    """A residual net for images of about 8 to 128 pixels a side, float [B, 3, S, S] -> logits [B, classes].

    The stem halves the map until it is at most 32 pixels a side; then a stage of one block at ``width`` channels, and
    up to three more, each halving the map and doubling the channels, until it is at most 4 pixels a side.
    """

    def __init__(self, classes: int, width: int, image_size: int) -> None:
        super().__init__()
        stem: list[nn.Module] = []
        side, channels_in = image_size, 3
        while True:
            stride = 2 if side > 32 else 1
            stem += [nn.Conv2d(channels_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            side, channels_in = -(-side // stride), width
            if side <= 32:
                break
        self.stem = nn.Sequential(*stem)
        blocks: list[nn.Module] = [ResidualBlock(width, width, 1)]
        channels = width
        while side > 4 and len(blocks) < 4:
            blocks.append(ResidualBlock(channels, channels * 2, 2))
            side, channels = -(-side // 2), channels * 2
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def build_model(name: str, classes: int, width: int, image_size: int) -> nn.Module:
    """A network of float32 [B, 3, S, S] (normalised) -> float32 logits [B, classes], with random weights.

    ``name`` is small_resnet (of ``width`` channels) or a torchvision classification model. The weights come from
    torch's global generator. Raises BadInput ``unknown_model`` with the nearest names.
    """
    if name == SMALL_RESNET:
        return SmallResNet(classes, width, image_size)
    from torchvision import models

    known = [SMALL_RESNET, *models.list_models(module=models)]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
        raise BadInput("unknown_model", "no model of that name", value=name, constraint=f"one of {', '.join(close)} ...", knob="train.model")
    options: dict[str, Any] = {"weights": None, "num_classes": classes}
    if name.startswith("vit_"):
        options["image_size"] = image_size
    if name in ("googlenet", "inception_v3"):
        # Their auxiliary heads answer with tuples in training; without them they are plain classifiers.
        options |= {"aux_logits": False, "init_weights": True}
    model: nn.Module = models.get_model(name, **options)
    return model


def check_model(name: str, classes: int, width: int, image_size: int) -> None:
    """Build the network and pass a batch through it without memory or arithmetic (torch's meta device).

    Raises BadInput ``unknown_model``, also where the network cannot take images of ``image_size`` pixels.
    """
    try:
        with torch.device("meta"):
            model = build_model(name, classes, width, image_size).eval()
            shape = tuple(model(torch.empty(2, 3, image_size, image_size)).shape)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        raise BadInput(
            "unknown_model",
            f"model {name} does not take images of {image_size} x {image_size} pixels",
            value=" ".join(str(error).split())[:160],
            knob="prepare.image_size or train.model",
        ) from error
    assert shape == (2, classes), f"{name} answers with shape {shape}"


def starting_weights(config: TrainConfig, root: Path) -> Path | None:
    """The file of ``train.weights``, relative paths below ``root`` or else the project's folder; raises BadInput ``unreadable``."""
    if not config.weights:
        return None
    path = root / config.weights
    if not path.is_file():
        path = home_of(root) / config.weights
    if not path.is_file():
        raise BadInput("unreadable", "the starting weights are not there", value=path, constraint="a safetensors file", knob="train.weights")
    return path


def start_from(model: nn.Module, path: Path, say: Callable[[str], None]) -> None:
    """Load the safetensors file at ``path`` into ``model``; a head for other classes is left at its random start.

    Raises BadInput ``unsafe_model_file`` (a pickle, as torch.save makes: it is not opened), ``checkpoint_corrupt`` (no bytes),
    ``unreadable`` (missing or no safetensors) or ``params_invalid`` (weights of another network).
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with path.open("rb") as handle:
            start = handle.read(8)
        if start.startswith((b"\x80", b"PK\x03\x04")):
            raise BadInput(
                "unsafe_model_file",
                "the starting weights are a pickle, which could run code",
                value=path,
                constraint="a safetensors file",
                knob="train.weights, after safetensors.torch.save_file(state_dict, path) where you trust the file",
            )
        if not start:
            raise BadInput(
                "checkpoint_corrupt", "the starting weights hold no bytes", value=path, constraint="a safetensors file", knob="train.weights"
            )
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(
            "unreadable", "the starting weights cannot be read", value=f"{path}: {error}", constraint="a safetensors file", knob="train.weights"
        ) from None
    wanted = model.state_dict()
    head = _head_of(model)
    strange = sorted(found.keys() - wanted.keys())
    missing = sorted(key for key in wanted.keys() - found.keys() if not key.endswith("num_batches_tracked"))
    other = sorted(key for key in found.keys() & wanted.keys() if found[key].shape != wanted[key].shape)
    skipped = [key for key in other if key.rpartition(".")[0] == head]
    for kind, keys in (
        ("does not know", strange),
        ("lacks a value for", [key for key in missing if key.rpartition(".")[0] != head]),
        ("has another shape for", [key for key in other if key not in skipped]),
    ):
        if keys:
            raise BadInput(
                "params_invalid",
                f"the starting weights are of another network: it {kind} {len(keys)} of its keys",
                value=keys[0],
                constraint="weights of the same train.model and train.width",
                knob="train.weights",
            )
    for key in skipped:
        del found[key]
    model.load_state_dict(found, strict=False)
    note = f", but not its head ({', '.join(skipped)}), which is for other classes" if skipped else ""
    say(f"starting from {path.name}: {len(found)} tensors{note}")


def _head_of(model: nn.Module) -> str:
    """Name of the last linear or 1x1 convolution layer, which holds one row for each class."""
    names: list[str] = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return names[-1]
