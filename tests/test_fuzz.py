"""Thousands of broken inputs, each with a verdict and nothing else; bench/fuzz.py makes more of them."""

from __future__ import annotations

import random

import pytest

from bench.fuzz import at_most, fuzz, fuzz_images, fuzz_sources, mutate


def test_images() -> None:
    found = fuzz_images(5_000, seed=0)
    assert found.verdicts.total() == 5_000
    assert {"accept", "image_corrupt", "image_truncated", "not_an_image"} <= found.verdicts.keys()


@pytest.mark.parametrize(("kind", "count", "seen"), [("table", 500, "manifest_corrupt"), ("archive", 500, "archive_corrupt")])
def test_sources(kind: str, count: int, seen: str) -> None:
    found = fuzz_sources(kind, count, seed=0)
    assert found.verdicts.total() == count
    assert {"accept", "quarantine", seen} <= found.verdicts.keys()


def test_what_is_no_verdict_fails_and_names_its_case() -> None:
    def wrong(number: int, generator: random.Random) -> str:
        if number == 3:
            raise KeyError("x")
        return "accept"

    with pytest.raises(AssertionError, match="image 7 3: KeyError"):
        fuzz("image", wrong, 5, seed=7)
    with pytest.raises(TimeoutError), at_most(0.05):
        while True:
            pass
    kept: list[bytearray] = []

    def greedy(number: int, generator: random.Random) -> str:
        kept.append(bytearray(30_000_000))
        kept[-1][::4096] = b"x" * len(kept[-1][::4096])
        return "accept"

    with pytest.raises(AssertionError, match="memory grew"):
        fuzz("image", greedy, 12, seed=0)


def test_a_mutation_is_a_function_of_its_case() -> None:
    data, others = bytes(range(256)), [b"other" * 10]
    made = [mutate(data, others, random.Random(f"x 0 {number}")) for number in range(200)]
    assert made == [mutate(data, others, random.Random(f"x 0 {number}")) for number in range(200)]
    assert len(set(made)) > 190
    assert sum(one == data for one in made) < 5
