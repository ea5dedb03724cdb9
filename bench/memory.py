"""Peak memory of ingest, validate and prepare over ten times as many images, each stage a process of its own.

Run: python -m bench.memory [FEWER] [MORE]
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from bench.machine import ROOT, write_result
from tasks.core.process import QUIET

CLASSES, SIDE_PX = 10, 32
STAGES = ("ingest", "validate", "prepare")
RUN = """
import resource, sys
from pathlib import Path
from tasks.core.artifacts import DatasetRef, ValidationReport
from tasks.core.config import IngestConfig, PrepareConfig, ValidateConfig
stage, root = sys.argv[1], Path(sys.argv[2])
prepared = PrepareConfig(image_size=32)
if stage == "ingest":
    from tasks.ingest import ingest
    ingest(IngestConfig(source="archive", location=sys.argv[3]), root)
elif stage == "validate":
    from tasks.validate import validate
    validate(DatasetRef.load(root), ValidateConfig(suite=""), prepared, root)
else:
    from tasks.prepare import prepare
    prepare(DatasetRef.load(root), ValidationReport.load(root), prepared, root)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def pictures(path: Path, count: int) -> Path:
    """A zip of ``count`` different smooth JPEGs in class folders."""
    generator = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            coarse = Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=np.uint8))
            buffer = io.BytesIO()
            coarse.resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC).save(buffer, "JPEG")
            archive.writestr(f"{number % CLASSES}/{number:06d}.jpg", buffer.getvalue())
    return path


def peak(stage: str, root: Path, source: Path) -> float:
    """MB (10^6 bytes) that a process needs at most to run ``stage``."""
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", RUN, stage, str(root), str(source)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[-1]) * 1024 / 1e6


def main(fewer: int, more: int) -> None:
    """Measure both sizes and write the result."""
    found: dict[int, list[float]] = {}
    for count in (fewer, more):
        with tempfile.TemporaryDirectory() as folder:
            source, root = pictures(Path(folder) / "images.zip", count), Path(folder) / "project"
            root.mkdir()
            found[count] = [peak(stage, root, source) for stage in STAGES]
    rows = [f"| {stage} | {less:.0f} | {lots:.0f} | {lots - less:.0f} |" for stage, less, lots in zip(STAGES, found[fewer], found[more], strict=True)]
    head = f"# Memory\n\n`python -m bench.memory {fewer} {more}`: JPEGs of 32 x 32 from a zip; peak resident set of each stage's process, MB.\n"
    table = f"\n| stage | {fewer:,} images | {more:,} images | more by |\n|---|---|---|---|\n"
    write_result("memory", head + table + "\n".join(rows) + "\n\nAsked for: at most 200 MB more.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, int(sys.argv[2]) if len(sys.argv) > 2 else 100_000)
