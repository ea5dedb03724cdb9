"""Scores against numbers worked out by hand or published."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.training.metrics import calibration_bins, class_scores, confusion_matrix, expected_calibration_error, macro_f1, wilson_interval

LABELS = np.array([0, 0, 0, 1, 1, 2])
PREDICTED = np.array([0, 0, 1, 1, 1, 0])


def test_wilson_interval_published_values() -> None:
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3."""
    for correct, total, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)):
        assert wilson_interval(correct, total, 0.95) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("correct", "total"), [(0, 7), (7, 7), (3, 7), (0, 1), (1, 1), (99999, 100000)])
def test_wilson_interval_holds_its_own_share(correct: int, total: int) -> None:
    low, high = wilson_interval(correct, total, 0.95)
    assert 0 <= low <= correct / total <= high <= 1
    assert high > low
    wider = wilson_interval(correct, total, 0.99)
    assert wider[0] <= low
    assert high <= wider[1]
    assert wilson_interval(0, 0, 0.95) == (0.0, 1.0)


def test_confusion_and_class_scores_by_hand() -> None:
    confusion = confusion_matrix(LABELS, PREDICTED, 3)
    assert confusion.tolist() == [[2, 1, 0], [0, 2, 0], [1, 0, 0]]
    scores = class_scores(confusion)
    assert scores.precision.tolist() == pytest.approx([2 / 3, 2 / 3, 0])
    assert scores.recall.tolist() == pytest.approx([2 / 3, 1, 0])
    assert scores.f1.tolist() == pytest.approx([2 / 3, 0.8, 0])
    assert scores.support.tolist() == [3, 2, 1]
    assert macro_f1(scores) == pytest.approx((2 / 3 + 0.8) / 3)


def test_a_class_without_test_images_scores_zero_and_no_nan() -> None:
    """It must fail a floor on recall, not vanish from the mean."""
    scores = class_scores(confusion_matrix(np.array([0, 0]), np.array([0, 0]), 2))
    assert scores.recall.tolist() == [1.0, 0.0]
    assert macro_f1(scores) == 0.5


def test_scores_agree_with_sklearn() -> None:
    from sklearn.metrics import confusion_matrix as sklearn_confusion
    from sklearn.metrics import precision_recall_fscore_support

    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(0, 7, 500), rng.integers(0, 7, 500)
    confusion = confusion_matrix(labels, predicted, 7)
    assert np.array_equal(confusion, sklearn_confusion(labels, predicted))
    for mine, theirs in zip(class_scores(confusion), precision_recall_fscore_support(labels, predicted), strict=True):
        np.testing.assert_allclose(mine, theirs)


def test_calibration_error_by_hand() -> None:
    """Four images, five bins: two in (0.8, 1.0] of which one is right, two in (0.4, 0.6] both right."""
    probabilities = np.array([[0.9, 0.1], [0.95, 0.05], [0.55, 0.45], [0.6, 0.4]])
    bins = calibration_bins(np.array([0, 1, 0, 0]), probabilities, 5)
    assert bins.counts.tolist() == [0, 0, 2, 0, 2]
    assert bins.confidence[[2, 4]].tolist() == pytest.approx([0.575, 0.925])
    assert bins.accuracy[[2, 4]].tolist() == [1.0, 0.5]
    assert expected_calibration_error(bins) == pytest.approx((2 * 0.425 + 2 * 0.425) / 4)


def test_calibration_bins_hold_every_image_once() -> None:
    """The edges: probabilities of exactly 0, a bin's edge and 1, and rounding above 1."""
    top = np.array([0.0, 0.2, 0.4, 1.0, np.nextafter(1.0, 2.0)])
    bins = calibration_bins(np.zeros(5, np.int64), np.stack([top, np.zeros(5)], 1), 5)
    assert bins.counts.tolist() == [2, 1, 0, 0, 2]
    assert expected_calibration_error(calibration_bins(np.zeros(3, np.int64), np.array([[1.0, 0.0]] * 3), 15)) == 0.0
