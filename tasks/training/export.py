"""The trained network as one ONNX file that takes pixels and answers probabilities: normalisation and softmax are inside."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from tasks.core.errors import BadInput
from tasks.training.predict import INPUT, OUTPUT, predict

if TYPE_CHECKING:
    from tasks.images.pixels import Pixels

OPSET = 17
TOLERANCE = 1e-4
"""Largest difference of a probability between ONNX Runtime and torch, both in float32."""

CHECK_IMAGES = 256


class Served(nn.Module):
    """uint8 [N, S, S, 3] -> float32 probabilities [N, C]: ``network`` between normalisation and softmax."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        pixels = image.permute(0, 3, 1, 2).float()
        probabilities: Tensor = self.network((pixels - self.mean) / self.std).softmax(1)
        return probabilities


def to_onnx(served: Served, image_size: int) -> bytes:
    """``served`` as an ONNX file's bytes, any batch size; equal weights give equal bytes, and no path of this machine is in them.

    By torch's TorchScript exporter: the newer one (dynamo=True) gives an equally good graph for 5 s of the 60 that a whole run
    may take on two cores, against 0.4 s, and writes source lines with absolute paths into each node. See docs/decisions/.
    """
    example = torch.zeros(2, image_size, image_size, 3, dtype=torch.uint8)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its deprecation, and the tracer's notes on shapes that are constant here
        torch.onnx.export(
            served.eval(),
            (example,),
            buffer,  # type: ignore[arg-type]
            dynamo=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_axes={INPUT: {0: "N"}, OUTPUT: {0: "N"}},
            opset_version=OPSET,
        )
    return buffer.getvalue()


def check_export(path: Path, served: Served, pixels: np.ndarray | Pixels) -> float:
    """Largest difference of any probability between the file at ``path`` and torch on ``pixels`` uint8 [N, S, S, 3].

    Two batch sizes are run, so that a graph that froze its example's batch is found. Raises BadInput ``export_mismatch``
    above ``TOLERANCE``.
    """
    pixels = np.array(pixels[:CHECK_IMAGES])  # a copy: torch wants memory that it could write to
    with torch.inference_mode():
        expected = np.concatenate([served.eval()(torch.from_numpy(part)).numpy() for part in np.array_split(pixels, -(-len(pixels) // 64))])
    try:
        answers = [predict(path, pixels, 64), np.concatenate([predict(path, pixels[:3], 1), predict(path, pixels[3:], 61)])]
    except Exception as error:  # ONNX Runtime raises a dozen classes of its own, with no common base but Exception
        raise BadInput("export_mismatch", "the exported model does not run", value=" ".join(str(error).split())[:200], knob="train.model") from error
    difference = max(float(np.abs(answer - expected).max()) for answer in answers)
    if not difference <= TOLERANCE:
        raise BadInput(
            "export_mismatch",
            "the exported model's probabilities differ from the trained one's",
            value=f"{difference:.3g}",
            constraint=f"at most {TOLERANCE}",
            knob="train.model",
        )
    return difference
