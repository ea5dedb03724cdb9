"""How well wrong labels are found: the embedded digits with a share of the labels changed by lot.

Run: python -m bench.label_issues [PERCENT] [FOLDS]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq

from bench.machine import ROOT, write_result
from tasks.augment import augment
from tasks.core.config import IngestConfig, ValidateConfig, load_params
from tasks.ingest import ingest
from tasks.prepare import prepare
from tasks.sources import Item, open_source
from tasks.training.label_issues import label_issues
from tasks.validate import validate

SEEDS = (0, 1, 2)


def spoilt(folder: Path, share: float, seed: int) -> dict[str, str]:
    """The digits in class folders below ``folder``, a ``share`` of them in a wrong one: file name -> true class of those."""
    generator, wrong = random.Random(seed), {}
    items = [item for item in open_source("digits", "", folder).items if isinstance(item, Item)]
    classes = sorted({item.label for item in items})
    for number, item in enumerate(items):
        label, name = item.label, f"{number:04d}.png"
        if generator.random() < share:
            label = generator.choice([other for other in classes if other != item.label])
            wrong[name] = item.label
        path = folder / label / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.data)
    return wrong


def search(share: float, folds: int, seed: int) -> list[float]:
    """Wrong labels, those named, those named rightly, rightly of the first 50, estimated share in %, seconds."""
    params = load_params(ROOT / "presets" / "digits.yaml")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        wrong = spoilt(root / "source", share, seed)
        ref = ingest(IngestConfig(source="folder", location=str(root / "source")), root)
        report = validate(ref, ValidateConfig(suite=""), params.prepare, root)
        cache = prepare(ref, report, params.prepare, root)
        training_set = augment(cache, params.augment, root)
        start = time.perf_counter()
        found = label_issues(report, cache, training_set, params.train, folds, root)
        seconds = time.perf_counter() - start
        rows = pq.read_table(found.path("issues.parquet"), columns=["path", "suggested"]).to_pylist()
    right = [wrong.get(Path(row["path"]).name) == row["suggested"] for row in rows]
    return [len(wrong), len(rows), sum(right), sum(right[:50]), 100 * found.noise, seconds]


def main(percent: float, folds: int) -> None:
    """Search once for each of SEEDS and write the result."""
    runs = [search(percent / 100, folds, seed) for seed in SEEDS]
    rows = [
        f"| {seed} | {wrong:.0f} | {named:.0f} | {right:.0f} | {first:.0f} | {100 * wrong / 1797:.2f} % | {noise:.2f} % | {seconds:.0f} |"
        for seed, (wrong, named, right, first, noise, seconds) in zip(SEEDS, runs, strict=True)
    ]
    recall, precision = (median(run[2] / run[part] for run in runs) for part in (0, 1))
    head = f"# Wrong labels\n\n`python -m bench.label_issues {percent:g} {folds}`: the 1,797 digits, each label wrong by a chance of {percent:g} %.\n"
    table = "| seed | wrong | named | with the true class | of the first 50 | truly wrong | estimated | s |\n|---|---|---|---|---|---|---|---|\n"
    foot = (
        f"\n\nMedians: {100 * recall:.0f} % of the wrong labels are named with their true class; {100 * precision:.0f} % of what is named is right."
    )
    write_result("label_issues", f"{head}\n{table}" + "\n".join(rows) + foot)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0, int(sys.argv[2]) if len(sys.argv) > 2 else 5)
