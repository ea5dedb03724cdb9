"""Flower photographs from archive to endpoint, in full: accuracy over seeds and the time of each stage.

Run: python -m bench.flowers [SEEDS]   (looks for flowers.zip in $TRAINYARD_DATA or ../shared/data)
"""

from __future__ import annotations

import sys
from statistics import mean

from bench.machine import shared_data, write_result
from bench.projects import fresh_project, run
from tasks.core.artifacts import EvaluationReport, GateDecision


def main(seeds: int) -> None:
    """The whole flow once for each seed of the training; the split stays the same."""
    archive = shared_data("flowers.zip")
    if archive is None:
        sys.exit("bench.flowers: no flowers.zip in $TRAINYARD_DATA or ../shared/data; nothing was measured")
    rows, accuracies = [], []
    for seed in range(seeds):
        with fresh_project("flowers", ingest={"location": str(archive)}, train={"seed": seed}) as root:
            seconds, _ = run(root, "-m", "flows.local", show=True)
            report, decision = EvaluationReport.load(root), GateDecision.load(root)
            accuracies.append(report.accuracy)
            interval = f"{report.accuracy_low:.2%} to {report.accuracy_high:.2%}"
            rows.append(f"| {seed} | {report.accuracy:.2%} | {interval} | {report.macro_f1:.4f} | {decision.approved} | {seconds:.0f} |")
    head = f"# Flower photographs\n\n`python -m bench.flowers {seeds}`, presets/flowers.yaml, mean test accuracy {mean(accuracies):.2%}.\n"
    columns = "| seed | test accuracy | 95 % interval | macro F1 | approved | whole flow, s |\n|---|---|---|---|---|---|\n"
    write_result("flowers", f"{head}\n{columns}" + "\n".join(rows))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
