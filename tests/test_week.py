"""A week of nights on a real server and worker: data, a crash, refused data, a worse model, drift, a trigger delivered twice.

bench/year.py lives through a year of them.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from bench.year import BAD, CRASH, DATA, DRIFT, MENDED, START, TWICE, WORSE, Day, simulate

pytestmark = pytest.mark.slow

WEEK = ({DATA}, {TWICE, DRIFT}, {DATA, CRASH}, {BAD}, {MENDED, WORSE}, {CRASH}, {DATA, TWICE})


@pytest.mark.timeout(1500)
def test_a_week_of_nights() -> None:
    lived = simulate([Day(START + timedelta(index), frozenset(happens)) for index, happens in enumerate(WEEK)], seed=3)
    assert [day.state for day in lived] == ["Completed", "Unchanged", "Completed", "Failed", "Unchanged", "Unchanged", "Completed"]
    assert lived[-1].disk < 60e6
