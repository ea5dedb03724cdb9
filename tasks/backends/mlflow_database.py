"""MLflow's SQLite file, made whole or not at all.

MLflow makes its some fifty tables one by one and outside a transaction: killed or out of disk in between, it leaves a file that it can
neither use nor mend ("table ... already exists"). So the first one is made aside and renamed.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tasks.core.files import file_lock, fsync_dir


def prepare(path: Path) -> None:
    """Make the database where it is absent, and switch it to write-ahead logging once, so that readers never block a writer.

    Raises Transient ``lock_busy``, or what SQLite and MLflow raise.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with file_lock(path.with_name("create.lock"), 120.0, "the making of MLflow's database"):
            if not path.exists():
                _create(path)
    with sqlite3.connect(path, timeout=60) as connection:
        connection.execute("PRAGMA journal_mode=WAL")


def _create(path: Path) -> None:
    import mlflow

    part = path.with_name(f".{path.name}.part")
    for left in path.parent.glob(f"{part.name}*"):
        left.unlink()
    mlflow.MlflowClient(f"sqlite:///{part}").search_experiments(max_results=1)
    part.replace(path)
    fsync_dir(path.parent)
