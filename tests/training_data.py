"""A tiny image cache and training set made by hand, as the contracts in tasks/core/artifacts.py say, for the training tests."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.core.artifacts import SPLITS, DecodeSpec, ImageCache, TrainingSet, file_digests, lineage
from tasks.core.config import TrainConfig

CLASSES = ("circle", "plus", "square")
SIZE = 8


def make_data(
    root: Path,
    *,
    counts: tuple[int, int, int] = (21, 10, 9),
    size: int = SIZE,
    classes: tuple[str, ...] = CLASSES,
    ops: tuple[dict[str, Any], ...] = (),
    class_weights: tuple[float, ...] = (),
) -> tuple[TrainingSet, ImageCache]:
    """Write artifacts/cache and artifacts/training_set below ``root``: noise with one bright channel or corner for each class."""
    rng = np.random.default_rng(0)
    folder = (root / ImageCache.PATH).parent
    folder.mkdir(parents=True)
    for split, count in zip(SPLITS, counts, strict=True):
        labels = np.arange(count) % len(classes)
        pixels = rng.integers(0, 120, (count, size, size, 3), dtype=np.uint8)
        for row, label in enumerate(labels):
            pixels[row, : size // 2, :, label % 3] += np.uint8(100)
            pixels[row, :, : size // 2, (label // 3) % 3] += np.uint8(20)
        pixels.tofile(folder / f"{split}.u8")
        table = {
            "row": pa.array(range(count), pa.int64()),
            "sha256": [hashlib.sha256(image.tobytes()).hexdigest() for image in pixels],
            "path": [f"{split}/{row}.png" for row in range(count)],
            "label_index": pa.array(labels.tolist(), pa.int32()),
        }
        pq.write_table(pa.table(table), folder / f"{split}.parquet")
    cache = ImageCache(
        files=file_digests(folder, *(f"{split}.{kind}" for split in SPLITS for kind in ("u8", "parquet"))),
        classes=classes,
        counts=dict(zip(SPLITS, counts, strict=True)),
        decode=DecodeSpec(image_size=size, resize="stretch", max_pixels=10**6, max_bytes=10**6, background=(255, 255, 255)),
        test_digest="0" * 64,
    ).save(root)
    training_set = TrainingSet(
        made_from=lineage(cache),
        mean=(80.0, 75.0, 75.0),
        std=(50.0, 45.0, 45.0),
        class_weights=class_weights or (1.0,) * len(classes),
        ops=ops,
    ).save(root)
    return training_set, cache


def small_config(**changes: Any) -> TrainConfig:
    """A training of seconds: batches of 4 leave a last one of a single image out of 21, so that one of two ranks has none."""
    values = {"model": "small_resnet", "width": 4, "epochs": 3, "batch_size": 4, "lr": 0.02, "threads": 1, "precision": "fp32", "max_restarts": 1}
    return TrainConfig(**{**values, **changes})
