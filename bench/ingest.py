"""Ingest from an archive in images/s, `dvc add` of the shards against `dvc add` of the files, and the no-change check against `dvc status`.

Run: python -m bench.ingest [IMAGES]   (looks for cifar10.zip in $TRAINYARD_DATA or ../shared/data)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench.machine import ROOT, shared_data, write_result
from bench.prepare import seconds, subset, unpack
from tasks.core.config import IngestConfig
from tasks.ingest import ingest

ROUNDS = 5
CHECK = "import sys; from pathlib import Path; from tasks.sources import fingerprint_of; print(fingerprint_of('archive', sys.argv[1], Path()))"


def command(root: Path, *words: str) -> float:
    """Wall time of a command in ``root``, start-up included."""
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(root), "DVC_NO_ANALYTICS": "1"}
    return seconds(lambda: subprocess.run(words, cwd=root, env=environment, check=True, capture_output=True))


def repository(root: Path) -> Path:
    """A fresh git and DVC repository."""
    root.mkdir()
    command(root, "git", "init", "-q")
    command(root, "dvc", "init", "-q")
    return root


def main(images: int) -> None:
    """Each figure the median of ROUNDS, the ways of a pair interleaved."""
    archive = shared_data("cifar10.zip")
    if archive is None:
        sys.exit("bench.ingest: no cifar10.zip in $TRAINYARD_DATA or ../shared/data; nothing was measured")
    times: dict[str, list[float]] = {name: [] for name in ("ingest", "add shards", "add files", "check", "status")}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        source = subset(archive, base / "images.zip", images) if images < 60_000 else archive
        config = IngestConfig(source="archive", location=str(source))
        for _ in range(ROUNDS):
            shards, files = repository(base / "shards"), repository(base / "files")
            times["ingest"].append(seconds(lambda root=shards: ingest(config, root)))  # type: ignore[misc]
            ref = ingest(config, shards)
            unpack(files, ref)
            times["add shards"].append(command(shards, "dvc", "add", "-q", "data"))
            times["add files"].append(command(files, "dvc", "add", "-q", "files"))
            times["check"].append(command(shards, sys.executable, "-c", CHECK, str(source)))
            times["status"].append(command(files, "dvc", "status"))
            shutil.rmtree(shards)
            shutil.rmtree(files)
    count = sum(ref.counts.values())
    middle = {name: median(found) for name, found in times.items()}
    rows = [
        f"| ingest from a zip | {middle['ingest']:.2f} s, {count / middle['ingest']:,.0f} images/s | |",
        f"| `dvc add` of the shards, of the files | {middle['add shards']:.2f} s, {middle['add files']:.2f} s | "
        f"{middle['add files'] / middle['add shards']:.1f} |",
        f"| no change: check of the source, `dvc status` of the files | {middle['check']:.2f} s, {middle['status']:.2f} s | "
        f"{middle['status'] / middle['check']:.1f} |",
    ]
    head = f"# Ingest\n\n`python -m bench.ingest {images}`: {count:,} JPEGs of 32 x 32, medians of {ROUNDS}; commands with their start-up.\n"
    write_result("ingest", f"{head}\n| what | time | ratio |\n|---|---|---|\n" + "\n".join(rows))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60_000)
