"""What a figure was measured on, and where figures are written."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "onnxruntime", "prefect", "dvc", "mlflow", "bentoml", "great-expectations")


def describe() -> str:
    """Processor, cores, memory and versions in one line."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        name = next((line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")), name)
    memory = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, {versions}"


def shared_data(name: str) -> Path | None:
    """A file of the shared data sets ($TRAINYARD_DATA, or ../shared/data beside the checkout), or None."""
    folder = Path(os.environ.get("TRAINYARD_DATA", ROOT.parent / "shared" / "data"))
    path = folder / name
    return path if path.is_file() else None


def write_result(name: str, text: str) -> None:
    """Print a result and keep it as bench/results/NAME.md."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    page = f"{text.rstrip()}\n\nMeasured on: {describe()}\n"
    (RESULTS / f"{name}.md").write_text(page, encoding="utf-8")
    print(page)
