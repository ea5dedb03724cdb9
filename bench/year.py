"""A year of nightly retraining, a day at a time, with everything that a year brings, on a real server, worker, registry and service.

    python -m bench.year [DAYS] [SEED] [HOURS]        at least 14 days; 365 take hours, and HOURS ends it with the days lived so far

The clock is the caller's: a day is one trigger of retrain/nightly, delivered with that day as its key (sometimes twice), after
what happens on that day. That Prefect fires it once on each local day, whatever the clocks do, is tests/test_schedule.py's.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.machine import write_result
from bench.yard import STAGES, Yard, end_hard, yard
from tasks.backends import serving
from tasks.core.config import PARAMS, load_params
from tasks.core.files import STATE

START = date(2028, 1, 1)
DATA, BAD, MENDED, WORSE, DRIFT, CRASH, TWICE = "new data", "bad data", "mended", "worse model", "drift", "crash", "delivered twice"


@dataclass(frozen=True)
class Day:
    """A local day and what happens on it before its nightly run is due."""

    day: date
    happens: frozenset[str]


@dataclass(frozen=True)
class Lived:
    """How a day went: its run's final state, seconds from trigger to end, the champion's version, bytes on disk, whether
    a crash struck (a process may have ended first)."""

    day: Day
    state: str
    seconds: float
    champion: str
    disk: int
    struck: bool


def calendar(days: int, seed: int) -> list[Day]:
    """``days`` days: new data on one day in nine, two drifts, one bad data version and its mending, one worse model, a crash a week.

    Raises ValueError for less than two weeks.
    """
    if days < 14:
        raise ValueError(f"{days} days; a calendar needs at least 14")
    generator = random.Random(seed)
    happens: dict[int, set[str]] = {index: set() for index in range(days)}
    happens[0].add(DATA)
    for index in range(1, days):
        if generator.random() < 1 / 9:
            happens[index].add(DATA)
    for week in range(0, days, 7):
        happens[min(week + generator.randrange(7), days - 1)].add(CRASH)
    bad = generator.choice([index for index in range(2, days - 2) if DATA not in happens[index] | happens[index + 1]])
    happens[bad].add(BAD)
    happens[bad + 1].add(MENDED)
    happens[generator.choice([index for index in range(1, days) if index not in (bad, bad + 1)])].add(WORSE)
    for index in generator.sample(range(1, days), k=2):
        happens[index].add(DRIFT)
    for index in range(1, days):
        if generator.random() < 1 / 5:
            happens[index].add(TWICE)
    return [Day(START + timedelta(index), frozenset(events)) for index, events in happens.items()]


def live(place: Yard, day: Day, generator: random.Random) -> Lived:
    """One day. Raises AssertionError at the first thing that does not hold."""
    before = place.champion()
    main = place.git("rev-parse", "main")
    if DATA in day.happens and day.day != START:
        place.source.grow(4)
    if BAD in day.happens:
        place.source.spoil()
    if MENDED in day.happens:
        place.source.mend()
    if WORSE in day.happens:
        worse(place, day)
    start = time.monotonic()
    key = f"nightly {day.day}"
    run_id = place.trigger("retrain/nightly", key, reason=f"night of {day.day}")
    same = ""
    if TWICE in day.happens:
        assert place.trigger("retrain/nightly", key) == run_id, "a trigger delivered twice is one run"
        same = place.trigger("retrain/manual", reason="the same at once, by another door")
    struck = CRASH in day.happens and crash(place, run_id, generator, STAGES if DATA in day.happens else STAGES[:1])
    state = place.wait(run_id)
    seconds = time.monotonic() - start
    expected = {"Failed"} if BAD in day.happens else {"Completed"} if DATA in day.happens else {"Unchanged"}
    assert state["name"] in expected, f"{day}: {state['name']}: {state['message']}\n{place.log(run_id)}"
    if BAD in day.happens:
        assert place.git("rev-parse", "main") == main, "refused data moved the main line"
        assert "validation_failed" in place.log(run_id)
    if same:
        other = place.wait(same)
        assert other["name"] in expected | {"Unchanged"}, f"{day}: {other['name']}: {other['message']}\n{place.log(same)}"
    if DRIFT in day.happens:
        drift(place, {"Failed"} if BAD in day.happens else {"Unchanged"})
    after = place.champion()
    if DATA not in day.happens:
        assert after == before, f"{day}: the champion moved without a reason"
    elif BAD not in day.happens:
        assert after, "nothing was promoted"
        assert int(after[0]) == int(before[0] if before else 0) + 1, f"{day}: one reason made {before} into {after}"
    assert after is None or place.newest_version() == after[0], f"{day}: a version that was never in service"
    return Lived(day, str(state["name"]), seconds, after[0] if after else "", disk(place.root), struck)


def worse(place: Yard, day: Day) -> None:
    """A person asks for a model that cannot be any good."""
    main = place.git("rev-parse", "main")
    run_id = place.trigger("retrain/manual", overrides={"train": {"lr": 1e-9, "seed": day.day.toordinal()}}, reason="a bad idea")
    state = place.wait(run_id)
    assert state["name"] == "Rejected", f"{state['name']}: {state['message']}\n{place.log(run_id)}"
    assert place.git("rev-parse", "main") == main, "a rejected idea moved the main line"


def drift(place: Yard, expected: set[str]) -> None:
    """A monitor says that the world has changed; a run comes of it by itself."""
    known = {run["id"] for run in place.runs("retrain/on-drift")}
    place.python("-c", "from flows.events import drift_detected; drift_detected('classifier', 'brightness of requests')")
    deadline = time.monotonic() + 60
    while not (new := [run["id"] for run in place.runs("retrain/on-drift") if run["id"] not in known]):
        assert time.monotonic() < deadline, "no run came of the drift event"
        time.sleep(0.5)
    state = place.wait(new[0])
    assert state["name"] in expected, f"{state['name']}: {state['message']}\n{place.log(new[0])}"
    assert "brightness of requests" in state["message"] + place.log(new[0])


def crash(place: Yard, run_id: str, generator: random.Random, stages: Sequence[str]) -> bool:
    """kill -9 the run's flow process or one of ``stages``, chosen at random, once it is there; whether it was.

    The flow's process dies once the run has begun: one that dies before stays Crashed (docs/orchestration.md).
    """
    stage = generator.choice((*stages, "flow"))
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and (state := place.state(run_id)["type"]) in ("SCHEDULED", "PENDING", "RUNNING"):
        victims = place.flow_processes(run_id) if stage == "flow" else place.processes(f"tasks.{stage}")
        if victims and (stage != "flow" or state == "RUNNING"):
            end_hard(generator.choice(victims))
            return True
        time.sleep(0.02)
    return False


def check(place: Yard) -> None:
    """What must hold at the end of every day."""
    champion = place.champion()
    assert champion, "no champion"
    deploy = load_params(place.root / PARAMS).deploy
    status, said = serving.ask(serving.url_of(deploy.host, deploy.port), "GET", "/provenance")
    assert status == 200, "nothing is served"
    assert said["model_digest"] == champion[1], "another model than the champion is served"
    assert not place.processes("tasks."), f"orphans: {place.processes('tasks.')}"
    limit = place.call("GET", "/v2/concurrency_limits/trainyard-training")
    assert limit["active_slots"] == 0, "a leaked slot"
    running = place.call("POST", "/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}})
    assert not running, f"runs that never ended: {running}"


def restorable(place: Yard) -> int:
    """Check that ``dvc checkout`` alone brings back every pair that a run ever put on the main line; how many there are."""
    seen: set[str] = set()
    with TemporaryDirectory(prefix="trainyard-restore-") as folder:
        clone = Path(folder) / "clone"
        place.git("clone", "-q", "--no-hardlinks", str(place.root), str(clone))
        elsewhere = Yard(clone, place.source, place.api)
        elsewhere.python("-m", "dvc", "cache", "dir", "--local", str((place.root / ".dvc" / "cache").resolve()))
        for commit in elsewhere.git("log", "--first-parent", "--merges", "--format=%H", "main").split():
            pair = elsewhere.git("ls-tree", commit, "data.dvc", "dvc.lock")
            if len(pair.splitlines()) == 2 and pair not in seen:
                seen.add(pair)
                elsewhere.git("checkout", "-q", commit)
                elsewhere.python("-m", "dvc", "checkout", "--force", "-q")
                status = elsewhere.python("-m", "dvc", "data", "status", "--json")
                assert '"not_in_cache"' not in status, f"{commit}: {status}"
                assert '"uncommitted"' not in status, f"{commit}: {status}"
    return len(seen)


def disk(root: Path) -> int:
    """Bytes of the project's state and DVC cache, links counted once."""
    seen: dict[tuple[int, int], int] = {}
    for folder in (root / STATE, root / ".dvc" / "cache"):
        for path in folder.rglob("*"):
            try:
                facts = path.lstat()
            except OSError:
                continue
            if path.is_file() and not path.is_symlink():
                seen[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(seen.values())


def simulate(days: Sequence[Day], seed: int, hours: float = float("inf"), tell: Callable[[str], None] = print) -> list[Lived]:
    """Live through ``days``, no new one after ``hours``, sweeping on Sundays, and hold every invariant.

    Raises AssertionError where one does not hold.
    """
    generator = random.Random(seed)
    lived: list[Lived] = []
    end = time.monotonic() + 3600 * hours
    with yard(seed) as place:
        for day in days:
            if time.monotonic() > end:
                break
            lived.append(live(place, day, generator))
            check(place)
            if day.day.weekday() == 6:
                state = place.wait(place.trigger("sweep/sweep", young_s=0.0))
                assert state["name"] == "Completed", state
                check(place)
            last = lived[-1]
            size, happened = last.disk / 1e6, ", ".join(sorted(day.happens))
            tell(f"{day.day} {last.state:<10} {last.seconds:6.1f} s  champion {last.champion:>3}  {size:7.1f} MB  {happened}")
        nights = Counter(run["parameters"]["reason"] for run in place.runs("retrain/nightly"))
        assert all(count == 1 for count in nights.values()), nights
        assert set(nights) == {f"night of {one.day.day}" for one in lived}, "a night without a run, or a run without a night"
        tell(f"{restorable(place)} pairs of data.dvc and dvc.lock restored by dvc checkout")
    return lived


def main(days: int, seed: int, hours: float) -> None:
    """Simulate and write the result."""
    lived = simulate(calendar(days, seed), seed, hours)
    quiet = [day.seconds for day in lived if day.state == "Unchanged" and CRASH not in day.day.happens]
    trained = [day.seconds for day in lived if day.state == "Completed" and CRASH not in day.day.happens]
    happened = Counter(event for day in lived for event in day.day.happens)
    rows = [
        ("nights", f"{len(lived)} of {days}"),
        ("ended as", ", ".join(f"{name} {count}" for name, count in sorted(Counter(day.state for day in lived).items()))),
        ("happened", ", ".join(f"{name} {count}" for name, count in sorted(happened.items()))),
        ("crashes that struck a process", str(sum(day.struck for day in lived))),
        ("model versions in service, one after the other", str(len({day.champion for day in lived}))),
        ("trigger to end, nothing changed, s", f"{median(quiet):.1f} ({min(quiet):.1f} to {max(quiet):.1f})" if quiet else "none"),
        ("trigger to end, retrained, s", f"{median(trained):.1f} ({min(trained):.1f} to {max(trained):.1f})" if trained else "none"),
        ("state and cache on disk, MB", f"{lived[0].disk / 1e6:.0f} after the first night, {lived[-1].disk / 1e6:.0f} after the last"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    write_result("year", f"# {len(lived)} nights\n\n`python -m bench.year {days} {seed}`\n\n| | |\n|---|---|\n{table}")


if __name__ == "__main__":
    asked = sys.argv[1:]
    main(int(asked[0]) if asked else 365, int(asked[1]) if len(asked) > 1 else 0, float(asked[2]) if len(asked) > 2 else float("inf"))
