"""Labels that are likely wrong, by confident learning: from what models that never saw an image say of it. Pure.

C. G. Northcutt, L. Jiang, I. L. Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels", JAIR 70 (2021). An image
counts as one of class j where its probability of j reaches the mean of those that bear the label j (equation 2). The counts, scaled to
the labels' own numbers (equation 3), say how many images of label i are truly of class j; so many are named, those with the largest
difference of the two probabilities ("prune by noise rate", section 3.2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST = 1e-12


class Found(NamedTuple):
    """``places`` int64 [M] of the labels that are likely wrong, the likeliest first, ``suggested`` int64 [M] the class instead of each,
    ``margin`` float64 [M] the probability of its label less that of the class, -1 to 1, and ``noise`` the estimated share of wrong labels."""

    places: np.ndarray
    suggested: np.ndarray
    margin: np.ndarray
    noise: float


def find(labels: np.ndarray, probabilities: np.ndarray) -> Found:
    """Look at N labels (int64 [N], below C) beside out-of-sample ``probabilities`` (float [N, C], rows summing to 1)."""
    images = len(labels)
    probabilities = probabilities.astype(np.float64)
    truly = np.rint(confident_joint(labels, probabilities)).astype(np.int64)
    margins = np.full(images, np.inf)
    suggested = labels.copy()
    for label, other in np.argwhere(truly > 0).tolist():
        if label == other:
            continue
        rows = np.flatnonzero(labels == label)
        margin = probabilities[rows, label] - probabilities[rows, other]
        for row in np.argsort(margin, kind="stable")[: truly[label, other]]:
            if margin[row] < min(margins[rows[row]], 0.0):
                margins[rows[row]], suggested[rows[row]] = margin[row], other
    places = np.flatnonzero(suggested != labels)
    places = places[np.argsort(margins[places], kind="stable")]
    return Found(places, suggested[places], margins[places], float(1 - np.trace(truly) / images))


def confident_joint(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """How many images of each label are truly of each class, estimated: float64 [C, C], each row summing to its label's images."""
    images, classes = probabilities.shape
    counts = np.bincount(labels, minlength=classes)
    own = np.bincount(labels, probabilities[np.arange(images), labels], classes)
    thresholds = np.where(counts > 0, own / np.maximum(counts, 1), np.inf)
    confident = np.where(probabilities >= thresholds - LEAST, probabilities, -1.0)
    most = confident.max(axis=1)
    likeliest = np.where(confident[np.arange(images), labels] >= most - LEAST, labels, confident.argmax(axis=1))  # a tie speaks for the label
    joint = np.zeros((classes, classes))
    np.add.at(joint, (labels[most >= 0], likeliest[most >= 0]), 1)
    sums = joint.sum(axis=1, keepdims=True)
    scaled: np.ndarray = np.where(sums > 0, joint / np.maximum(sums, 1), np.eye(classes)) * counts[:, None]
    return scaled
