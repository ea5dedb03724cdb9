"""Many runs at once: eight retrainings of one repository, and two hundred queued runs for four workers, on PostgreSQL.

python -m bench.crowd [RETRAININGS] [QUEUED]
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from statistics import median

from bench.machine import write_result
from bench.yard import Yard, yard
from bench.year import check, restorable

WORKERS, RUNS = 4, 2
"""Workers, and how many runs each has under way."""


def retrain_at_once(place: Yard, count: int) -> tuple[float, Counter[str]]:
    """``count`` runs with overrides of their own, asked for at once: seconds, and how they ended. Every one leaves its branch."""
    identity = place.call("GET", "/deployments/name/retrain/manual")["id"]
    place.call("PATCH", f"/deployments/{identity}", {"concurrency_limit": count})
    start = time.monotonic()
    ids = [place.trigger("retrain/manual", overrides={"train": {"seed": seed}}, reason=f"seed {seed}") for seed in range(1, count + 1)]
    states = [place.wait(run_id, timeout_s=3600.0) for run_id in ids]
    seconds = time.monotonic() - start
    for run_id, state in zip(ids, states, strict=True):
        assert state["type"] == "COMPLETED", f"{state['name']}: {state['message']}\n{place.log(run_id)}"
        lock = place.git("show", f"trainyard/runs/{run_id}:dvc.lock")
        assert lock.startswith("schema:"), "a run's branch holds its own lock"
    locks = {place.git("rev-parse", f"trainyard/runs/{run_id}:dvc.lock") for run_id in ids}
    assert len(locks) == count, "runs with other seeds left the same lock"
    pair = (place.git("rev-parse", "main:data.dvc"), place.git("rev-parse", "main:dvc.lock"))
    owners = [
        run_id for run_id in ids if pair == tuple(place.git("rev-parse", f"trainyard/runs/{run_id}:{name}") for name in ("data.dvc", "dvc.lock"))
    ]
    assert len(owners) <= 1, "the main line's pair comes whole from one run"
    check(place)
    restorable(place)
    return seconds, Counter(state["name"] for state in states)


def queue(place: Yard, count: int) -> tuple[float, list[int]]:
    """``count`` short runs in the queue of the workers that there are: seconds, and how often each was started."""
    identity = place.call("GET", "/deployments/name/ingest/watch")["id"]
    place.call("PATCH", f"/deployments/{identity}", {"concurrency_limit": None})
    start = time.monotonic()
    ids = [place.trigger("ingest/watch", key=f"look {index}") for index in range(count)]  # a key: a busy server may be asked twice
    for run_id in ids:
        state = place.wait(run_id, timeout_s=7200.0)
        assert state["type"] == "COMPLETED", f"{state['name']}: {state['message']}\n{place.log(run_id)}"
    seconds = time.monotonic() - start
    return seconds, [int(place.call("GET", f"/flow_runs/{run_id}")["run_count"]) for run_id in ids]


def main(retrainings: int, queued: int) -> None:
    """Measure and write the result."""
    with yard(workers=WORKERS, runs=RUNS, on_postgres=True) as place:
        first = place.wait(place.trigger("retrain/manual", reason="a first model"))
        assert first["name"] == "Completed", first
        alone = time.monotonic()
        assert place.wait(place.trigger("ingest/watch"))["type"] == "COMPLETED"
        alone = time.monotonic() - alone
        seconds, starts = queue(place, queued)
        assert set(starts) == {1}, Counter(starts)
        together, ended = retrain_at_once(place, retrainings)
    rows = [
        (f"{queued} queued runs, {WORKERS} workers with {RUNS} runs each: each started", "once, none lost, none twice"),
        ("seconds a run, alone / in the queue", f"{alone:.1f} / {seconds / queued:.2f}"),
        (f"{retrainings} retrainings at once ended as", ", ".join(f"{name} {count}" for name, count in sorted(ended.items()))),
        ("seconds for all of them", f"{together:.0f}"),
        ("median starts of a queued run", f"{median(starts):g}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    write_result("crowd", f"# Many runs at once\n\n`python -m bench.crowd {retrainings} {queued}`\n\n| | |\n|---|---|\n{table}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8, int(sys.argv[2]) if len(sys.argv) > 2 else 200)
