"""The folder a run works in: checked, changed only by its overrides, and held by one run at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.core.config import PARAMS, apply_overrides, load_params
from tasks.core.errors import BadInput
from tasks.core.files import STATE, file_lock

LOCK_TIMEOUT_S = 3600.0


@contextmanager
def workspace(overrides: dict[str, dict[str, Any]] | None = None) -> Iterator[Path]:
    """Yield the project root, which is the current folder, while holding its pipeline lock.

    ``overrides`` ({section: {key: value}}) are checked and then written into params.yaml, so that DVC, MLflow and the
    next run see the same numbers. Raises BadInput ``not_a_repository``, ``params_missing`` or ``params_invalid``,
    Transient ``lock_busy`` after an hour, or TRAINYARD_LOCK_TIMEOUT_S seconds.
    """
    root = Path.cwd()
    load_params(root / PARAMS)
    for name, command in ((".git", "git init"), (".dvc", "dvc init")):
        if not (root / name).exists():
            raise BadInput("not_a_repository", f"{root} has no {name}", constraint="a git and DVC repository", knob=command)
    with file_lock(root / STATE / "locks" / "pipeline.lock", LOCK_TIMEOUT_S, "the pipeline"):
        apply_overrides(overrides or {}, root / PARAMS)
        yield root
