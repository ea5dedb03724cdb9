"""Scores of a classifier, from true and predicted class indices and probabilities. numpy only."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np


class ClassScores(NamedTuple):
    """One number for each class: float64 [C], ``support`` int64 [C]."""

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    support: np.ndarray


class CalibrationBins(NamedTuple):
    """Of each bin of the top probability: images int64 [B], mean probability and accuracy float64 [B] (0 where it is empty)."""

    edges: np.ndarray
    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


def wilson_interval(correct: int, total: int, confidence: float) -> tuple[float, float]:
    """Score interval of a share of ``correct`` in ``total`` at level ``confidence``, within 0..1.

    Wilson 1927, "Probable inference, the law of succession, and statistical inference", JASA 22: unlike the normal
    approximation it keeps its level near 0 and 1, where a good classifier is. (0, 1) for a total of 0.
    """
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # Rounding must not put 100 % right outside its own interval.
    return min(max(0.0, centre - half), share), max(min(1.0, centre + half), share)


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """int64 [C, C] counts: row the true class, column the predicted one. Both inputs int [N] in 0..C-1."""
    return np.bincount(labels * classes + predicted, minlength=classes * classes).reshape(classes, classes).astype(np.int64)


def class_scores(confusion: np.ndarray) -> ClassScores:
    """Precision, recall, F1 (van Rijsbergen 1979) and support of each class; 0 where a denominator is 0.

    A class without test images has recall 0 by this rule, so that no floor on recall is passed unseen.
    """
    hits = np.diag(confusion).astype(np.float64)
    support, named = confusion.sum(1), confusion.sum(0)
    return ClassScores(_share(hits, named), _share(hits, support), _share(2 * hits, support + named), support)


def macro_f1(scores: ClassScores) -> float:
    """Mean F1 over all classes, each weighing the same."""
    return float(scores.f1.mean())


def calibration_bins(labels: np.ndarray, probabilities: np.ndarray, bins: int) -> CalibrationBins:
    """Equal-width bins (lower, upper] of each image's top probability, float32 [N, C]; an exact 0 falls in the first bin."""
    top = probabilities.max(1).astype(np.float64)
    right = probabilities.argmax(1) == labels
    edges = np.linspace(0.0, 1.0, bins + 1)
    index = np.clip(np.searchsorted(edges, top, side="left") - 1, 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    return CalibrationBins(
        edges, counts, _share(np.bincount(index, top, minlength=bins), counts), _share(np.bincount(index, right, minlength=bins), counts)
    )


def expected_calibration_error(bins: CalibrationBins) -> float:
    """Mean gap between confidence and accuracy, each bin weighted by its images: Guo et al. 2017 (arXiv:1706.04599), eq. 3."""
    return float(_share((bins.counts * np.abs(bins.accuracy - bins.confidence)).sum(), bins.counts.sum()))


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """``part / whole`` in float64, 0 where ``whole`` is 0."""
    share: np.ndarray = np.divide(part, whole, out=np.zeros(np.shape(part), np.float64), where=np.asarray(whole) > 0)
    return share
