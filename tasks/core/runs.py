"""Runs on a worker as the disk shows them: a run holds the lock ``.trainyard/worktrees/<run id>.lock`` for as long as it lives."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tasks.core.files import STATE, is_locked

WORKTREES = STATE / "worktrees"
BRANCHES = "trainyard/runs/"
STARTING_LOCK = WORKTREES / "starting.lock"
"""Held while a run takes its own lock, and by the sweep while it clears DVC's cache: no run starts in between."""
GIT_LOCK = STATE / "locks" / "worktrees.lock"
"""Held while a worktree is made or removed: git reads the others' entries meanwhile, and gives up on one that is half made."""
PENDING = STATE / "pending.json"
"""In the worktree of a run whose data and branch are not pushed yet: it holds what a remote that was away still lacks."""
RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Prefect puts a run's id into the environment of the flow's process, and every child inherits it."""


GIT_LOCK_TIMEOUT_S = 300.0
HALF_MADE_S = 5.0
"""How long a git command is tried again that met a worktree which another process is just making or removing."""


def past_half_made(ask: Callable[[], subprocess.CompletedProcess[bytes]]) -> subprocess.CompletedProcess[bytes]:
    """The answer of a git command; asked again where it gave up on another worktree's entry that was not whole at that moment."""
    deadline = time.monotonic() + HALF_MADE_S
    while True:
        done = ask()
        if done.returncode == 0 or not (b"failed to read" in done.stderr and b"/worktrees/" in done.stderr) or time.monotonic() > deadline:
            return done
        time.sleep(0.05)


def lock_of(home: Path, run_id: str) -> Path:
    """The lock file that the run holds while it lives."""
    return home / WORKTREES / f"{run_id}.lock"


def known(home: Path) -> set[str]:
    """Ids of the runs that left a lock file or a worktree below ``home``."""
    folder = home / WORKTREES
    entries = list(folder.iterdir()) if folder.is_dir() else []
    return {entry.name.removesuffix(".lock") for entry in entries if entry.is_dir() or entry.suffix == ".lock"} - {STARTING_LOCK.stem}


def lives(home: Path, run_id: str) -> bool | None:
    """Whether the run's process lives on this host; None where it never took its lock here, so nothing is known.

    A flow gives its lock back a moment before it reports its end: its process, whose number the lock holds, still counts.
    """
    lock = lock_of(home, run_id)
    try:
        holder = re.search(r"pid (\d+)", lock.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None
    return is_locked(lock) or (holder is not None and run_of(int(holder[1])) == run_id)


def run_of(pid: int) -> str:
    """The run that a process belongs to by its environment, "" where it belongs to none or cannot be seen."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    found = [entry for entry in environment.split(b"\0") if entry.startswith(f"{RUN_VARIABLE}=".encode())]
    return found[0].partition(b"=")[2].decode(errors="replace") if found else ""
