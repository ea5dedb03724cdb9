"""Batches from the memory-mapped cache: the order and the augmentation are functions of seed, epoch and step.

Every rank sees the same global batches and takes its rows of each, so N ranks train on what one rank would, and a
resumed run needs no generator's state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tasks.core.artifacts import TrainingSet
from tasks.images import augment_ops
from tasks.images.cache import SplitView
from tasks.images.pixels import EncodedPixels
from tasks.training.distributed import Ranks

AHEAD = 2
"""Batches of encoded images that are decoded while one is trained on."""


class Batch(NamedTuple):
    """This rank's rows of a global batch: images float32 [B, 3, S, S] and labels int64 [B], on the device.

    ``weight`` is the summed class weight and ``size`` the number of images of the whole global batch.
    """

    images: Tensor
    labels: Tensor
    weight: float
    size: int


def sample_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of ``count`` samples in ``epoch``, int64 [count]: a pure function of its arguments."""
    return np.random.default_rng([seed, epoch, 0x6F72646572]).permutation(count)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Float32 [B, 3, S, S] on the 0-255 scale to about zero mean and unit variance; ``mean`` and ``std`` are float32 [3]."""
    return (images - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)


class Loader:
    """Batches of one split for one rank."""

    def __init__(self, view: SplitView, training_set: TrainingSet, *, batch_size: int, seed: int, ranks: Ranks) -> None:
        self.view = view
        self.ops = training_set.ops
        self.batch_size = batch_size
        self.seed = seed
        self.ranks = ranks
        self.count = len(view.labels)
        self.steps = -(-self.count // batch_size)
        self.class_weights = np.asarray(training_set.class_weights)
        self.mean = torch.tensor(training_set.mean, dtype=torch.float32, device=ranks.device)
        self.std = torch.tensor(training_set.std, dtype=torch.float32, device=ranks.device)

    def augmented(self, epoch: int) -> Generator[Batch, None, None]:
        """The training batches of ``epoch`` (from 0), augmented; the last one may be short."""
        order = sample_order(self.count, self.seed, epoch)
        size = self.view.pixels.shape[1]
        batches = [order[step * self.batch_size : (step + 1) * self.batch_size] for step in range(self.steps)]
        ours = [self.ranks.rows(len(chosen)) for chosen in batches]
        pixels = self._read(chosen[rows] for chosen, rows in zip(batches, ours, strict=True))
        for step, (chosen, rows, read) in enumerate(zip(batches, ours, pixels, strict=True)):
            drawn = augment_ops.draw(self.ops, seed=self.seed, epoch=epoch, step=step, batch=len(chosen), size=size)
            images = self._to_device(read)
            if len(images):
                images = augment_ops.apply(images, self.ops, augment_ops.take(drawn, rows))
            yield self._batch(images, chosen, rows)

    def plain(self) -> Iterator[tuple[slice, Batch]]:
        """The split once over all ranks, in order, as (rows of the split, batch), without augmentation.

        Whole batches go to the ranks in turn: an image meets the same neighbours, hence the same rounding, at any world size.
        """
        starts = range(self.ranks.rank * self.batch_size, self.count, self.ranks.world * self.batch_size)
        batches = [np.arange(start, min(start + self.batch_size, self.count)) for start in starts]
        for chosen, read in zip(batches, self._read(batches), strict=True):
            yield slice(chosen[0], chosen[-1] + 1), self._batch(self._to_device(read), chosen, slice(None))

    def _read(self, batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Pixels uint8 [B, S, S, 3] of each batch of rows. Encoded images are decoded some batches ahead while others are trained on."""
        pixels = self.view.pixels
        if not isinstance(pixels, EncodedPixels):
            yield from (pixels[rows] for rows in batches)
            return
        with ThreadPoolExecutor(1, "ahead") as thread:
            waiting: deque[Future[np.ndarray]] = deque()
            try:
                for rows in batches:
                    waiting.append(thread.submit(pixels.__getitem__, rows))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _to_device(self, read: np.ndarray) -> Tensor:
        """Pixels uint8 [B, S, S, 3] as float32 [B, 3, S, S] on the device, 0-255; bytes cross to it as uint8."""
        pixels = torch.from_numpy(np.ascontiguousarray(read))
        if self.ranks.device.type == "cuda":
            pixels = pixels.pin_memory().to(self.ranks.device, non_blocking=True)
        return pixels.permute(0, 3, 1, 2).float()

    def _batch(self, images: Tensor, chosen: np.ndarray, rows: slice) -> Batch:
        labels = self.view.labels[chosen]
        images = normalise(images, self.mean, self.std).contiguous(memory_format=torch.channels_last)
        mine = torch.from_numpy(np.ascontiguousarray(labels[rows])).to(self.ranks.device)
        return Batch(images, mine, float(self.class_weights[labels].sum()), len(chosen))
