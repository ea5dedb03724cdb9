"""What is right and wrong with this project and its machine, in one table: python -m flows.doctor [--json], or make doctor.

Every check of flows/checks.py runs side by side with the others and has a time limit; one that crashes or hangs is a red line.
Exit code 0 without red, 1 with red.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from flows.checks import CHECKS
from flows.place import LIMIT_S, Finding, Place
from tasks.core import errors

WIDTH = 100
COLOURS = {"green": "32", "yellow": "33", "red": "31"}
Check = Callable[[Place], Finding]


def examine(place: Place, checks: Mapping[str, Check]) -> dict[str, Finding]:
    """Run ``checks`` side by side, ``place.limit_s`` seconds at most; the findings in their order."""
    found: dict[str, Finding] = {}

    def work(name: str, check: Check) -> None:
        try:
            found[name] = check(place)
        except Exception as error:
            reason = " ".join(str(error).split()) or "no reason given"
            found[name] = Finding("red", f"the check itself failed: {type(error).__name__}: {reason}", "look at what it names")

    # Daemons, not a pool: the end of the program must not wait for one that hangs.
    threads = {name: threading.Thread(target=work, args=(name, check), daemon=True) for name, check in checks.items()}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + place.limit_s
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    hung = Finding("red", f"no answer within {place.limit_s:g} s", "try again on a quieter machine; if it stays, what it asks is away or hangs")
    return {name: found.get(name, hung) for name in checks}


def table(findings: Mapping[str, Finding], coloured: bool) -> str:
    """The findings as lines of WIDTH columns: state, check, what was seen, and what to do where it is not green."""
    indent = 8 + max(map(len, findings)) + 2
    lines: list[str] = []
    for name, finding in findings.items():
        state = f"\033[{COLOURS[finding.state]}m{finding.state:<8}\033[0m" if coloured else f"{finding.state:<8}"
        said = textwrap.wrap(finding.said, WIDTH - indent, break_on_hyphens=False) or [""]
        do = textwrap.wrap(f"-> {finding.do}", WIDTH - indent, subsequent_indent="   ", break_on_hyphens=False) if finding.do else []
        lines.append(f"{state}{name:<{indent - 8}}{said[0]}")
        lines += [" " * indent + line for line in (*said[1:], *do)]
    return "\n".join(lines)


def may_colour(stream: TextIO) -> bool:
    """Whether colour is welcome: on a terminal, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def main() -> None:
    """Examine the project in the current folder; raises SystemExit 1 where something is red."""
    parser = argparse.ArgumentParser(prog="python -m flows.doctor")
    parser.add_argument("--json", action="store_true", help="one JSON object for machines")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for each check (they run side by side)")
    chosen = parser.parse_args()
    start = time.monotonic()
    findings = examine(Place(Path.cwd(), limit_s=chosen.limit_s), CHECKS)
    count = {state: sum(finding.state == state for finding in findings.values()) for state in COLOURS}
    if chosen.json:
        print(json.dumps({"checks": [{"name": name, **finding._asdict()} for name, finding in findings.items()], **count}, indent=2))
    else:
        print(table(findings, may_colour(sys.stdout)))
        print(f"\ndoctor: {count['green']} green, {count['yellow']} yellow, {count['red']} red ({time.monotonic() - start:.1f} s)")
    sys.stdout.flush()
    if count["red"]:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(errors.run(main))
