"""What an image looks like in five numbers: brightness, contrast, sharpness, entropy and aspect, from its decoded pixels.

Images of one shape are looked at together. All but aspect come from luma, Y' = 0.299 R' + 0.587 G' + 0.114 B' of ITU-R BT.601-7
(section 2.5.1), rounded to 0-255 by Pillow's integer weights. Sums are of integers and results are rounded, so equal pixels give
equal numbers on every machine.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

MOST_PIXELS = 1 << 16
"""Pixels that are looked at; of a larger image every s-th of every s-th row, with the smallest s that keeps to it."""
NAMES = ("brightness", "contrast", "sharpness", "entropy", "aspect")


class Statistics(NamedTuple):
    """Brightness and contrast: mean and standard deviation of luma (0-255). Sharpness: variance of luma's Laplacian, None below
    3 px a side. Entropy: bits of luma's histogram (0-8). Aspect: width over height, turned as its EXIF says."""

    brightness: float
    contrast: float
    sharpness: float | None
    entropy: float
    aspect: float


def statistics(lumas: np.ndarray) -> list[Statistics]:
    """The statistics of each of N images of one shape by their ``lumas`` (uint8 [N, H, W], none of them 0).

    Sharpness is the variance of the 4-neighbour Laplacian (J. L. Pech-Pacheco et al., "Diatom autofocusing in brightfield
    microscopy: a comparative study", ICPR 2000). Each looked-at pixel is compared with its true neighbours, so sub-sampling
    estimates the variance at full size. Entropy is Shannon's.
    """
    images, height, width = lumas.shape
    step = math.isqrt((height * width - 1) // MOST_PIXELS) + 1
    seen = lumas[:, ::step, ::step]
    levels = seen + 256 * np.arange(images)[:, None, None]
    counts = np.bincount(levels.ravel(), minlength=256 * images).reshape(images, 256)
    total = seen[0].size
    bits = (counts * np.log2(np.maximum(counts, 1))).sum(axis=1) / total
    sharpness = _sharpness(lumas, step) if min(height, width) > 2 else [None] * images
    aspect = round(width / height, 4)
    return [
        Statistics(
            brightness=round(first / total, 3),
            contrast=round(math.sqrt(max(0, second * total - first * first)) / total, 3),
            sharpness=sharp,
            entropy=round(abs(math.log2(total) - shared), 3),
            aspect=aspect,
        )
        for first, second, sharp, shared in zip((counts @ _LEVELS).tolist(), (counts @ _SQUARES).tolist(), sharpness, bits.tolist(), strict=True)
    ]


_LEVELS = np.arange(256)
_SQUARES = _LEVELS**2


def _sharpness(lumas: np.ndarray, step: int) -> list[float]:
    inner = slice(1, -1, step)
    laplacian = np.multiply(lumas[:, inner, inner], -4, dtype=np.int16)
    for neighbour in (lumas[:, :-2:step, inner], lumas[:, 2::step, inner], lumas[:, inner, :-2:step], lumas[:, inner, 2::step]):
        laplacian += neighbour
    size = laplacian[0].size
    sums = laplacian.sum(axis=(1, 2), dtype=np.int64).tolist()
    squares = np.square(laplacian, dtype=np.int32).sum(axis=(1, 2), dtype=np.int64).tolist()
    return [round(square / size - (first / size) ** 2, 3) for first, square in zip(sums, squares, strict=True)]
