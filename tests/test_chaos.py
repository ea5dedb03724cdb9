"""Twenty kills of worker, server, flow, stage and rank, and what must hold afterwards all the same (200 of them: bench/chaos.py)."""

from __future__ import annotations

import pytest

from bench.chaos import VICTIMS, play
from bench.yard import yard


@pytest.mark.timeout(2400)
def test_whatever_is_killed_the_champion_serves_and_nothing_is_left_behind() -> None:
    """``play`` holds after each run what must hold, and that an undisturbed run at the end completes.

    Kills come thick here, so that twenty take minutes, and while a run runs. In the bench they come at any time, fewer a run.
    """
    with yard(seed=5) as place:
        struck, ended, _ = play(place, rounds=20, seed=5, each=5, longest_s=4.0, present_s=8.0, begun=True)
    assert struck.total() == 20
    assert set(struck) == set(VICTIMS)
    assert set(ended) <= {"Completed", "Unchanged", "Crashed", "Failed"}
