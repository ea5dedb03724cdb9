"""Answers of an exported model, by ONNX Runtime: what evaluate, the gate and the export's own check call. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tasks.images.pixels import Pixels

INPUT, OUTPUT = "image", "probabilities"


def predict(model_path: Path, pixels: np.ndarray | Pixels, batch_size: int, threads: int = 0) -> np.ndarray:
    """Probabilities float32 [N, C] of ``pixels`` uint8 [N, S, S, 3], each image once and in order, on the CPU.

    ``threads`` per session; 0 lets ONNX Runtime take the cores. Only ``batch_size`` images are read from ``pixels`` (a memory
    map, or encoded images) at a time.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model_path), options, providers=["CPUExecutionProvider"])
    classes = session.get_outputs()[0].shape[-1]
    answers = np.empty((len(pixels), classes), np.float32)
    for start in range(0, len(pixels), batch_size):
        batch = np.ascontiguousarray(pixels[start : start + batch_size])
        answers[start : start + len(batch)] = session.run([OUTPUT], {INPUT: batch})[0]
    return answers
