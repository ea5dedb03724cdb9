"""A tiny image cache and training set made by hand, as the contracts in tasks/core/artifacts.py say, for the training tests."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tasks.core.artifacts import SPLITS, CacheForm, DecodeSpec, ImageCache, TrainingSet, file_digests, lineage
from tasks.core.config import TrainConfig
from tasks.images.cache import file_of

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
    form: CacheForm = "pixels",
) -> tuple[TrainingSet, ImageCache]:
    """Write artifacts/cache and artifacts/training_set below ``root``: noise with one bright channel or corner for each class.

    ``form`` "encoded" keeps the same pixels as PNGs.
    """
    rng = np.random.default_rng(0)
    folder = (root / ImageCache.PATH).parent
    folder.mkdir(parents=True)
    kept: list[bytes] = []
    for split, count in zip(SPLITS, counts, strict=True):
        labels = np.arange(count) % len(classes)
        pixels = rng.integers(0, 120, (count, size, size, 3), dtype=np.uint8)
        for row, label in enumerate(labels):
            pixels[row, : size // 2, :, label % 3] += np.uint8(100)
            pixels[row, :, : size // 2, (label // 3) % 3] += np.uint8(20)
        start = sum(map(len, kept))
        files = [image.tobytes() if form == "pixels" else png(image) for image in pixels]
        kept += files
        table = {
            "row": pa.array(range(count), pa.int64()),
            "sha256": [hashlib.sha256(image.tobytes()).hexdigest() for image in pixels],
            "path": [f"{split}/{row}.png" for row in range(count)],
            "label_index": pa.array(labels.tolist(), pa.int32()),
            "shard": ["000001-00000"] * count,
            "start": pa.array([start + sum(map(len, files[:row])) for row in range(count)], pa.int64()),
            "bytes": pa.array([len(data) for data in files], pa.int64()),
        }
        pq.write_table(pa.table(table), folder / f"{split}.parquet")
    name = file_of("000001-00000", form)
    (folder / name).write_bytes(b"".join(kept))
    cache = ImageCache(
        files=file_digests(folder, name, *(f"{split}.parquet" for split in SPLITS)),
        classes=classes,
        counts=dict(zip(SPLITS, counts, strict=True)),
        decode=DecodeSpec(image_size=size, resize="stretch", max_pixels=10**6, max_bytes=10**6, background=(255, 255, 255)),
        form=form,
        shards={"000001-00000": sum(map(len, kept))},
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


def png(pixels: np.ndarray) -> bytes:
    """An image uint8 [S, S, 3] as a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def small_config(**changes: Any) -> TrainConfig:
    """A training of seconds: batches of 4 leave a last one of a single image out of 21, so that one of two ranks has none."""
    values = {"model": "small_resnet", "width": 4, "epochs": 3, "batch_size": 4, "lr": 0.02, "threads": 1, "precision": "fp32", "max_restarts": 1}
    return TrainConfig(**{**values, **changes})
