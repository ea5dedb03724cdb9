"""How long `make run` takes after set-up, the first time and with nothing changed, and how good the model is.

Run: python -m bench.spine [RUNS]
"""

from __future__ import annotations

import sys
from statistics import median

from bench.machine import write_result
from bench.projects import fresh_project, run
from tasks.core.artifacts import EvaluationReport


def main(runs: int) -> None:
    """Measure ``runs`` fresh projects, one first and one unchanged flow in each."""
    first, again, accuracy = [], [], []
    for _ in range(runs):
        with fresh_project("digits") as root:
            first.append(run(root, "-m", "flows.local")[0])
            seconds, output = run(root, "-m", "flows.local")
            if "nothing changed" not in output:
                raise RuntimeError(f"the second run did something\n{output}")
            again.append(seconds)
            accuracy.append(EvaluationReport.load(root).accuracy)
    rows = [
        ("first run after set-up, s", first, "<= 60"),
        ("second run, nothing changed, s", again, "<= 15"),
        ("test accuracy, %", [100 * value for value in accuracy], ">= 97"),
    ]
    table = "\n".join(f"| {name} | {median(values):.2f} | {min(values):.2f} to {max(values):.2f} | {bar} |" for name, values, bar in rows)
    head = f"# The spine on the embedded digits\n\n`python -m bench.spine {runs}`: {runs} fresh projects.\n"
    write_result("spine", f"{head}\n| figure | median | range | asked for |\n|---|---|---|---|\n{table}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
