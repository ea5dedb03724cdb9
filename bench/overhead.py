"""What orchestration costs: a stage by the flow against the same stage by dvc, and a nightly run that finds nothing to do.

python -m bench.overhead [PAIRS] [NIGHTS]
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from statistics import median

from bench.machine import write_result
from bench.yard import Yard, yard

SIDE_BY_SIDE = """
import json, subprocess, sys, time
from pathlib import Path
from prefect import flow
from flows.retrain import prepare

@flow
def side_by_side(pairs: int):
    seconds = []
    for _ in range(pairs):
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "dvc", "repro", "--single-item", "prepare"], check=True, capture_output=True)
        between = time.monotonic()
        prepare(Path.cwd())
        seconds.append([between - start, time.monotonic() - between])
    print("SECONDS", json.dumps(seconds))

side_by_side(int(sys.argv[1]))
"""
"""The stage is up to date, so what is timed is all that either route adds to the work."""


def stages(place: Yard, pairs: int) -> list[list[float]]:
    """[seconds by dvc, seconds by the flow] of an up-to-date stage, ``pairs`` times in turns."""
    place.python("-m", "dvc", "checkout", "-q")
    output = place.python("-c", SIDE_BY_SIDE, str(pairs + 1))
    found: list[list[float]] = json.loads(next(line for line in output.splitlines() if line.startswith("SECONDS")).removeprefix("SECONDS"))
    return found[1:]  # the first pays for cold caches


def nights(place: Yard, count: int) -> list[float]:
    """Seconds from start to end of ``count`` nightly runs with nothing to do."""
    seconds = []
    for _ in range(count):
        run_id = place.trigger("retrain/nightly")
        state = place.wait(run_id)
        if state["name"] != "Unchanged":
            raise RuntimeError(f"{state['name']}: {state['message']}\n{place.log(run_id)}")
        facts = place.call("GET", f"/flow_runs/{run_id}")
        start, end = (datetime.fromisoformat(facts[key]) for key in ("start_time", "end_time"))
        seconds.append((end - start).total_seconds())
    return seconds


def main(pairs: int, count: int) -> None:
    """Measure and write the result."""
    with yard() as place:
        first = place.wait(place.trigger("retrain/manual", reason="a first model"))
        if first["name"] != "Completed":
            raise RuntimeError(f"{first['name']}: {first['message']}")
        idle = nights(place, count)
        both = stages(place, pairs)
    extra = [by_flow - by_dvc for by_dvc, by_flow in both]
    rows = [
        ("an up-to-date stage by `dvc repro --single-item`, s", [by_dvc for by_dvc, _ in both], ""),
        ("the same by the flow, s", [by_flow for _, by_flow in both], ""),
        ("the flow's extra, s", extra, "<= 0.5"),
        ("a nightly run with nothing to do, start to end, s", idle, "<= 10"),
    ]
    table = "\n".join(f"| {name} | {median(values):.2f} | {min(values):.2f} to {max(values):.2f} | {bar} |" for name, values, bar in rows)
    head = f"# What orchestration costs\n\n`python -m bench.overhead {pairs} {count}`: {pairs} pairs in turns, {count} nights.\n"
    write_result("overhead", f"{head}\n| figure | median | range | asked for |\n|---|---|---|---|\n{table}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9, int(sys.argv[2]) if len(sys.argv) > 2 else 5)
