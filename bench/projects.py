"""Throw-away copies of this project to measure in, so that a bench never touches the checkout's own state."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.machine import ROOT
from tasks.core.config import apply_overrides
from tasks.core.process import QUIET, spare_port


@contextmanager
def fresh_project(preset: str, **overrides: dict[str, object]) -> Iterator[Path]:
    """A committed copy of the tree with ``preset`` as its params and a free port; its service is stopped at the end."""
    with TemporaryDirectory(prefix="trainyard-bench-") as folder:
        root = Path(folder) / "project"
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy2(ROOT / name, root / name)
        shutil.copy(ROOT / "presets" / f"{preset}.yaml", root / "params.yaml")
        apply_overrides({"deploy": {"port": spare_port()}, **overrides}, root / "params.yaml")
        (root / ".trainyard" / "prefect").mkdir(parents=True)
        run(root, "-m", "prefect", "server", "database", "upgrade", "-y")  # as `make setup` does
        author = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
        for command in (["init", "-q", "-b", "main"], ["add", "-A"], [*author, "commit", "-qm", "start"]):
            subprocess.run(["git", *command], cwd=root, check=True)
        try:
            yield root
        finally:
            run(root, "-m", "tasks.deploy", "--stop")


def run(root: Path, *arguments: str, show: bool = False) -> tuple[float, str]:
    """``python ARGUMENTS`` in the project: (seconds, output). Raises RuntimeError with the output where it fails."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "BENTOML_"))}
    home = {"PREFECT_HOME": str(root / ".trainyard" / "prefect"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**clean, **QUIET, **home},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - start
    if show:
        print(done.stdout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}\n{done.stdout}")
    return seconds, done.stdout
