"""Photographs kept encoded in the image cache against their pixels: room on disk, time to prepare, and reading in batches.

Run: python -m bench.encoded [IMAGES]
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image

from bench.machine import write_result
from tasks.augment import augment
from tasks.core.artifacts import SPLITS, ImageCache
from tasks.core.config import AugmentConfig, IngestConfig, PrepareConfig, TrainConfig, ValidateConfig
from tasks.images.cache import open_split
from tasks.ingest import ingest
from tasks.prepare import prepare
from tasks.training.distributed import Ranks
from tasks.training.engine import Engine, TrainingData
from tasks.training.models import build_model
from tasks.validate import validate

ROUNDS = 5
SIZE, WIDTH, HEIGHT, BATCH = 224, 640, 480, 64


def photographs(path: Path, count: int) -> Path:
    """A zip of ``count`` JPEGs with some detail and some noise, in two class folders."""
    generator = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            coarse = Image.fromarray(generator.integers(0, 256, (HEIGHT // 12, WIDTH // 12, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
            noisy = np.clip(smooth + generator.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(noisy).save(buffer, "JPEG", quality=85)
            archive.writestr(f"{number % 2}/{number:06d}.jpg", buffer.getvalue())
    return path


def read(cache: ImageCache) -> float:
    """Seconds to read the training split once, in random order, in batches."""
    view = open_split(cache, "train")
    order = np.random.default_rng(0).permutation(len(view.labels))
    start = time.perf_counter()
    for at in range(0, len(order), BATCH):
        np.ascontiguousarray(view.pixels[order[at : at + BATCH]])
    return time.perf_counter() - start


def epoch(cache: ImageCache, root: Path) -> float:
    """Seconds of one epoch of a small net, its validation included."""
    config = TrainConfig(width=8, epochs=1, batch_size=BATCH, precision="fp32")
    training_set = augment(cache, AugmentConfig(flip=True), root)
    data = TrainingData(open_split(cache, "train"), open_split(cache, "val"), training_set)
    torch.manual_seed(0)
    engine = Engine(build_model("small_resnet", 2, config.width, SIZE), data, config, Ranks(), ())
    start = time.perf_counter()
    engine.fit()
    return time.perf_counter() - start


def main(images: int) -> None:
    """Interleaved rounds of both forms."""
    with tempfile.TemporaryDirectory() as folder:
        source = photographs(Path(folder) / "images.zip", images)
        times: dict[str, dict[str, list[float]]] = {form: {"prepare": [], "read": [], "epoch": []} for form in ("pixels", "encoded")}
        room, roots = {}, {form: Path(folder) / form for form in times}
        inputs = {}
        for form, root in roots.items():
            root.mkdir()
            ref = ingest(IngestConfig(source="archive", location=str(source)), root)
            inputs[form] = ref, validate(ref, ValidateConfig(suite=""), PrepareConfig(), root)
        for _ in range(ROUNDS):
            for form, root in roots.items():
                config = PrepareConfig(image_size=SIZE, resize="crop", reuse_mb=0.0, cache=form)
                start = time.perf_counter()
                cache = prepare(*inputs[form], config, root)
                times[form]["prepare"].append(time.perf_counter() - start)
                times[form]["read"].append(read(cache))
                times[form]["epoch"].append(epoch(cache, root))
                room[form] = sum(path.stat().st_size for path in cache.folder.iterdir()) / 1e6
        count = sum(cache.counts[split] for split in SPLITS)
        train = cache.counts["train"]
    rows = [
        f"| {form} | {room[form]:.0f} | {median(of['prepare']):.2f} | {train / median(of['read']):,.0f} | {median(of['epoch']):.1f} |"
        for form, of in times.items()
    ]
    head = f"# Encoded images in the cache\n\n`python -m bench.encoded {images}`: {count:,} JPEGs of {WIDTH} x {HEIGHT}, read at {SIZE} x {SIZE}; "
    head += f"medians of {ROUNDS} interleaved rounds.\n\n"
    table = f"| kept | MB | prepare, s | random batches of {BATCH}, images/s | an epoch of a small net, s |\n|---|---|---|---|---|\n"
    write_result("encoded", head + table + "\n".join(rows))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2_000)
