"""Drift of the last batch against those before it: the formula, sizes that were all equal, and what warns, stops or cannot be told."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from source_trees import from_folder, write_tree

from tasks.core.artifacts import CheckResult, ValidationReport
from tasks.core.config import DriftConfig, PrepareConfig, ValidateConfig
from tasks.core.errors import BadInput
from tasks.images.drift import drift, drift_of_labels, drift_of_values
from tasks.ingest import ingest
from tasks.validate import validate

COUNTS = st.lists(st.integers(0, 1000), min_size=2, max_size=12)


def test_the_index_is_its_formula() -> None:
    p, q = np.array([10.5, 30.5, 0.5]) / 41.5, np.array([20.5, 20.5, 5.5]) / 46.5
    expected = sum((after - before) * math.log(after / before) for before, after in zip(p, q, strict=True))
    found = drift(np.array([10, 30, 0, 0]), np.array([20, 20, 5, 0]))
    assert found.psi == pytest.approx(expected, abs=1e-6)
    assert found.chance == pytest.approx(2 * (1 / 40 + 1 / 45), abs=1e-6)  # the bin that both leave empty does not count


@given(COUNTS, COUNTS)
def test_it_is_symmetric_never_negative_and_nothing_for_equal_counts(one: list[int], other: list[int]) -> None:
    size = min(len(one), len(other))
    former, new = (np.array(counts[:size]) + np.eye(1, size, dtype=int)[0] for counts in (one, other))
    assert drift(former, new).psi == drift(new, former).psi >= 0
    assert drift(former, former).psi == 0


def test_the_same_population_stays_below_the_bound_and_another_does_not() -> None:
    rng = np.random.default_rng(0)
    former = rng.normal(100, 20, 3000)
    assert max(drift_of_values(former, rng.normal(100, 20, 200)).psi for _ in range(200)) < 0.25
    assert drift_of_values(former, rng.normal(70, 20, 200)).psi > 0.25
    assert drift_of_values(former, rng.normal(100, 5, 200)).psi > 0.25


@pytest.mark.parametrize("side", [31.0, 33.0, 1.0])
def test_sizes_that_were_all_equal_are_seen_to_change_either_way(side: float) -> None:
    assert drift_of_values(np.full(500, 32.0), np.full(200, side)).psi > 1
    assert drift_of_values(np.full(500, 32.0), np.full(200, 32.0)).psi == 0


def test_a_class_that_was_not_there_before_counts() -> None:
    assert drift_of_labels(["cat"] * 100 + ["dog"] * 100, ["cat"] * 50 + ["dog"] * 50).psi < 0.001
    assert drift_of_labels(["cat"] * 100 + ["dog"] * 100, ["bird"] * 100).psi > 1


def batch(first: int, count: int, light: int) -> dict[str, bytes]:
    """Pictures of noise around ``light``, by turns of cats and dogs."""
    found = {}
    for number in range(first, first + count):
        noise = np.random.default_rng(number).integers(-40, 41, (10, 10, 3)) + light + number % 11
        buffer = io.BytesIO()
        Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8)).save(buffer, "PNG")
        found[f"{'cat' if number % 2 else 'dog'}/{number:04d}.png"] = buffer.getvalue()
    return found


def checks(report: ValidationReport) -> dict[str, CheckResult]:
    return {check.name.split()[0]: check for check in report.checks if check.name.endswith("of the last batch as before")}


def test_a_batch_in_another_light_warns_or_stops_and_only_its_light_does(tmp_path: Path) -> None:
    config = ValidateConfig(drift=DriftConfig(max_psi=1.0))
    first = batch(0, 110, 120)
    report = validate(ingest(from_folder(write_tree(tmp_path / "source", first)), tmp_path), config, PrepareConfig(), tmp_path)
    assert {name: (check.value, check.passed) for name, check in checks(report).items()} == dict.fromkeys(
        ("classes", "brightness", "size"), ("no batch before it", True)
    )
    write_tree(tmp_path / "source", batch(1000, 110, 60))
    ref = ingest(from_folder(tmp_path / "source"), tmp_path)
    assert len(ref.shards) == 2
    report = validate(ref, config, PrepareConfig(), tmp_path)
    found = checks(report)
    assert report.success
    assert {name: (check.passed, check.severity) for name, check in found.items()} == {
        "classes": (True, "warn"), "brightness": (False, "warn"), "size": (True, "warn")
    }  # fmt: skip
    assert (found["classes"].value, found["size"].value) == (0, 0)
    assert float(str(found["brightness"].value)) > 1
    with pytest.raises(BadInput, match=r"brightness of the last batch.*validate\.drift"):
        validate(ref, config.model_copy(update={"drift": DriftConfig(max_psi=1.0, severity="fail")}), PrepareConfig(), tmp_path)
    few = checks(validate(ref, ValidateConfig(drift=DriftConfig(severity="fail")), PrepareConfig(), tmp_path))
    assert (few["brightness"].value, few["brightness"].passed) == ("too few to tell", True)
