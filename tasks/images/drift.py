"""Whether the last batch of images looks like those before it: the population stability index.

PSI = sum over bins of (q - p) ln(q / p), with p a bin's share of the former images and q of the new ones (B. Yurdakul,
"Statistical Properties of Population Stability Index", 2018; S. Lewis, 1994, gives the usual reading: below 0.1 the same, above 0.25 another
population). Half an image is added to each bin on both sides, so that an empty one has a logarithm; bins empty on both are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MEASURES = ("classes", "brightness", "size")
CHANCE = 0.2
"""Largest part of the bound that chance alone may make, or else there are too few images to tell."""


class Drift(NamedTuple):
    """PSI of a measure, and what chance alone gives on average: (bins - 1) (1 / former + 1 / new), after Yurdakul (2018)."""

    psi: float
    chance: float


def drift(former: np.ndarray, new: np.ndarray) -> Drift:
    """The drift from counts per bin ``former`` to ``new`` (int64 [bins], the same bins, neither all 0)."""
    used = (former + new) > 0
    before, after = former[used] + 0.5, new[used] + 0.5
    p, q = before / before.sum(), after / after.sum()
    psi = float(((q - p) * np.log(q / p)).sum())
    return Drift(round(psi, 6), round((int(used.sum()) - 1) * (1 / float(former.sum()) + 1 / float(new.sum())), 6))


def drift_of_values(former: np.ndarray, new: np.ndarray) -> Drift:
    """The drift of numbers (float64 [N] and [M]), in bins between the deciles of ``former``.

    A value that more than a tenth of ``former`` share has a bin of its own, so that a change of sizes that were all equal is seen.
    """
    edges = np.unique(np.quantile(former, np.arange(1, 10) / 10, method="lower"))
    shared = np.array([edge for edge in edges if (former == edge).mean() > 0.1])
    most = 2 * len(edges) + 2
    return drift(*(np.bincount(2 * np.searchsorted(edges, values) + np.isin(values, shared), minlength=most) for values in (former, new)))


def drift_of_labels(former: Sequence[str], new: Sequence[str]) -> Drift:
    """The drift of class shares."""
    names = sorted({*former, *new})
    place = {name: index for index, name in enumerate(names)}
    return drift(*(np.bincount([place[label] for label in labels], minlength=len(names)) for labels in (former, new)))
