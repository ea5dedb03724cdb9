"""Twenty kills at random times on a real server and worker; bench/chaos.py plays two hundred."""

from __future__ import annotations

import pytest

from bench.chaos import play
from bench.yard import yard

pytestmark = pytest.mark.slow


@pytest.mark.timeout(2400)
def test_whatever_is_killed_the_champion_serves_and_nothing_is_left_behind() -> None:
    """``play`` holds after each run what must hold, and that an undisturbed run at the end completes."""
    with yard(seed=5) as place:
        struck, ended, _ = play(place, rounds=20, seed=5)
    assert struck.total() == 20
    assert len(struck) >= 4, f"too few kinds of victims to show anything: {struck}"
    assert ended["Completed"], f"no run outlived its kills: {ended}"
    assert set(ended) <= {"Completed", "Unchanged", "Crashed", "Failed"}
