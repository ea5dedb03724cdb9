"""The folder a run works in: the project's own for `make run`, a git worktree of its own for a run on a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from flows.publish import PUBLISHED, commit_run, publish
from flows.worktree import Say, Work, make_or_reuse, remove
from tasks.core.config import PARAMS, RunConfig, apply_overrides, check_params, load_params
from tasks.core.errors import BadInput
from tasks.core.files import STATE, file_lock
from tasks.core.runs import PENDING, STARTING_LOCK, lock_of

LOCK_TIMEOUT_S = 3600.0
SAME_RUN_S = 60.0
"""How long a run waits for a former attempt of itself, which may be dying."""


@contextmanager
def workspace(
    overrides: dict[str, dict[str, Any]] | None = None, *, run_id: str = "", config: RunConfig | None = None, say: Say = print
) -> Iterator[Work]:
    """Yield where to work, held against others for the length of the block. The current folder is the project's ("home").

    Without ``run_id`` that is home itself, and ``overrides`` ({section: {key: value}}) are checked and then written into its
    params.yaml, so that DVC, MLflow and the next run see the same numbers.

    With it, it is a git worktree made from the head of ``run.branch``: what home holds uncommitted does not enter, but for its
    section `run` (``config`` takes its place). The same id entered again goes on in the worktree as it stands. Once the run
    is published the worktree is removed; one that fails leaves a branch and its worktree.

    Raises BadInput ``not_a_repository``, ``params_missing``, ``params_invalid`` or ``branch_missing``, Transient ``lock_busy``
    after an hour (a minute for the same run), or TRAINYARD_LOCK_TIMEOUT_S seconds.
    """
    home = Path.cwd()
    changes = dict(overrides or {})
    params = load_params(home / PARAMS)
    config = config or params.run
    if run_id and "run" in changes:  # how the run is kept, not what it is made from
        config = check_params({**params.model_dump(by_alias=True), "run": {**config.model_dump(), **changes.pop("run")}}).run
    for name, command in ((".git", "git init"), (".dvc", "dvc init")):
        if not (home / name).exists():
            raise BadInput("not_a_repository", f"{home} has no {name}", constraint="a git and DVC repository", knob=command)
    if not run_id:
        with file_lock(home / STATE / "locks" / "pipeline.lock", LOCK_TIMEOUT_S, "the pipeline"):
            apply_overrides(changes, home / PARAMS)
            yield Work(home, home, "", "", config, say)
        return
    with _living(home, run_id):
        work = make_or_reuse(home, run_id, changes, config, say)
        for marker in (PUBLISHED, PENDING):
            (work.root / marker).unlink(missing_ok=True)
        try:
            yield work
        except Exception as error:
            _leave_branch(work, error)
            raise
        except BaseException:  # cancelled: a branch is quick, a remote may not be
            with suppress(Exception):
                if work.config.publish != "none":
                    commit_run(work, "failed", f"run {run_id}: cancelled")
            raise
        if (work.root / PUBLISHED).is_file():
            remove(home, run_id)


@contextmanager
def _living(home: Path, run_id: str) -> Iterator[None]:
    """Hold the run's lock, by which everybody sees that it lives. None is taken while the sweep clears DVC's cache."""
    with ExitStack() as held:
        with file_lock(home / STARTING_LOCK, LOCK_TIMEOUT_S, "the start of runs"):
            held.enter_context(file_lock(lock_of(home, run_id), SAME_RUN_S, f"run {run_id}"))
        yield


def _leave_branch(work: Work, error: Exception) -> None:
    """A failed run's branch; whatever goes wrong with it must not hide why the run failed."""
    try:
        publish(work, "failed", f"run {work.run_id}: failed\n\n{error}")
    except Exception as second:
        work.say(f"WARNING the failed run left no branch: {second}")
