"""What an image looks like in five numbers: brightness, contrast, sharpness, entropy and aspect, from its decoded pixels.

All but aspect come from luma, Y' = 0.299 R' + 0.587 G' + 0.114 B' of ITU-R BT.601-7 (section 2.5.1), rounded to 0-255 by
Pillow's integer weights. Sums are of integers and results are rounded, so equal pixels give equal numbers on every machine.
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


def statistics(luma: np.ndarray) -> Statistics:
    """The statistics of an image's ``luma`` (uint8 [H, W], neither of them 0).

    Sharpness is the variance of the 4-neighbour Laplacian (J. L. Pech-Pacheco et al., "Diatom autofocusing in brightfield
    microscopy: a comparative study", ICPR 2000). Each looked-at pixel is compared with its true neighbours, so sub-sampling
    estimates the variance at full size. Entropy is Shannon's.
    """
    height, width = luma.shape
    step = math.isqrt((height * width - 1) // MOST_PIXELS) + 1
    counts = np.bincount(luma[::step, ::step].ravel(), minlength=256)
    total = int(counts.sum())
    first, second = int(counts @ _LEVELS), int(counts @ _SQUARES)
    filled = counts[counts > 0].astype(np.float64)
    return Statistics(
        brightness=round(first / total, 3),
        contrast=round(math.sqrt(max(0, second * total - first * first)) / total, 3),
        sharpness=_sharpness(luma, step) if min(height, width) > 2 else None,
        entropy=round(abs(math.log2(total) - float(filled @ np.log2(filled)) / total), 3),
        aspect=round(width / height, 4),
    )


_LEVELS = np.arange(256)
_SQUARES = _LEVELS**2


def _sharpness(luma: np.ndarray, step: int) -> float:
    inner = slice(1, -1, step)
    laplacian = np.multiply(luma[inner, inner], -4, dtype=np.int16)
    for neighbour in (luma[:-2:step, inner], luma[2::step, inner], luma[inner, :-2:step], luma[inner, 2::step]):
        laplacian += neighbour
    mean = int(laplacian.sum(dtype=np.int64)) / laplacian.size
    squares: float = int(np.square(laplacian, dtype=np.int32).sum(dtype=np.int64)) / laplacian.size
    variance: float = round(squares - mean * mean, 3)
    return variance
