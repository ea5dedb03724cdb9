"""kill -9 of worker, server, flow, stage and rank at random times, and what must hold afterwards all the same.

    python -m bench.chaos [ROUNDS] [SEED]        a round is one kill

Several rounds fall into one run: it ends in an honest state within two minutes of its last death, or goes on to its end. Then
the champion is in service, nothing is half published, no process is an orphan, no slot is held, no run says that it runs.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from statistics import median

import psutil

from bench.machine import write_result
from bench.yard import Yard, end_hard, yard
from bench.year import check, restorable

VICTIMS = ("worker", "server", "flow", "stage", "stage", "rank")
KILLS_A_RUN = 3
PRESENT_S = 20.0
HONEST_S = 120.0
"""So long after a death everything must be in order again."""


def strike(place: Yard, victim: str, run_id: str, generator: random.Random, present_s: float = PRESENT_S) -> bool:
    """kill -9 one victim, waited for ``present_s`` at most; False where there was none. A worker or server is started again by whoever keeps it."""
    if victim == "worker":
        place.workers.pop().kill()
        place.start_worker()
        return True
    if victim == "server":
        for process in (found := psutil.Process(place.server.pop().pid)).children(recursive=True):
            end_hard(process)
        end_hard(found)
        time.sleep(generator.uniform(0.5, 3.0))
        place.start_server()
        return True
    deadline = time.monotonic() + present_s
    while time.monotonic() < deadline:
        if victim == "flow":
            victims = place.flow_processes(run_id)
        elif victim == "rank":
            victims = [child for process in place.processes("tasks.train") for child in process.children(recursive=True)]
        else:
            victims = place.processes("-m tasks.")
        if victims:
            end_hard(generator.choice(victims))
            return True
        time.sleep(0.1)
    return False


def in_order(place: Yard) -> float:
    """Seconds until ``check`` holds; raises its AssertionError after HONEST_S."""
    start = time.monotonic()
    while True:
        try:
            check(place)
            return time.monotonic() - start
        except AssertionError:
            if time.monotonic() - start > HONEST_S:
                raise
            time.sleep(1.0)


def play(
    place: Yard,
    rounds: int,
    seed: int,
    *,
    each: int = KILLS_A_RUN,
    longest_s: float = 12.0,
    present_s: float = PRESENT_S,
    begun: bool = False,
    tell: Callable[[str], None] = print,
) -> tuple[Counter[str], Counter[str], list[float]]:
    """``rounds`` kills: how often each victim was hit, how the runs ended, seconds until all was in order after each run.

    A run gets ``each`` kills at most, half a second to ``longest_s`` apart; with ``begun`` only while it runs: what is killed between a
    worker's taking a run and its start comes back after five minutes alone (flows/automations.py).
    """
    generator = random.Random(seed)
    struck: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    seconds: list[float] = []
    first = place.wait(place.trigger("retrain/manual", reason="a first model"))
    assert first["name"] == "Completed", first
    while struck.total() < rounds:
        place.source.grow(2)
        run_id = place.trigger("retrain/manual", reason=f"after {struck.total()} kills")
        hits: list[str] = []
        while len(hits) < each and struck.total() < rounds and place.state(run_id)["type"] in ("SCHEDULED", "PENDING", "RUNNING"):
            time.sleep(generator.uniform(0.5, longest_s))
            if begun and place.state(run_id)["type"] != "RUNNING":
                continue
            victim = generator.choice(VICTIMS)
            if strike(place, victim, run_id, generator, present_s):
                hits.append(victim)
                struck[victim] += 1
        if place.workers[-1].poll() is not None:  # it ends by itself where it finds no server as it starts; whoever keeps it starts it again
            place.start_worker()
        state = place.wait(run_id, timeout_s=900.0)
        seconds.append(in_order(place))
        ended[state["name"]] += 1
        tell(f"{struck.total():4d}  {state['name']:<10} in order after {seconds[-1]:5.1f} s  {', '.join(hits)}  {state['message'] or ''}"[:150])
    last = place.wait(place.trigger("retrain/manual", reason="an undisturbed run"))
    assert last["name"] in ("Completed", "Unchanged"), f"{last['name']}: {last['message']}"
    in_order(place)
    tell(f"{restorable(place)} pairs of data.dvc and dvc.lock restored by dvc checkout")
    return struck, ended, seconds


def main(rounds: int, seed: int) -> None:
    """Play and write the result."""
    with yard(seed) as place:
        struck, ended, seconds = play(place, rounds, seed)
    table = "\n".join(
        f"| {name} | {value} |"
        for name, value in (
            ("killed", ", ".join(f"{name} {count}" for name, count in sorted(struck.items()))),
            ("runs ended as", ", ".join(f"{name} {count}" for name, count in sorted(ended.items()))),
            ("in order after a run's end, s", f"{median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"),
        )
    )
    write_result("chaos", f"# {rounds} kills\n\n`python -m bench.chaos {rounds} {seed}`\n\n| | |\n|---|---|\n{table}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
