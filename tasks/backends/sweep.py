"""What dead and old runs left on this machine, ended and removed by policy. The flow `sweep` runs it as a child.

    python -m tasks.backends.sweep [--dry-run] [--young-s SECONDS]

Each deed is one JSON line ({"did", "what", "why", "bytes"}) on stdout. A part that cannot be done now (a lock is held, MLflow is
away) is said and left for the next sweep: nothing here waits long, and nothing is removed on a guess.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tasks.backends import dvc_cache, upkeep
from tasks.backends.leftovers import Leftover, old_files
from tasks.backends.serving import ROOT_VARIABLE
from tasks.core import errors, runs
from tasks.core.config import Params, load_params
from tasks.core.errors import TrainyardError
from tasks.core.files import STATE, file_lock, try_lock
from tasks.core.process import die_with_parent, quiet_environment

GRACE_S = 5.0
"""An orphaned process has this long to end by itself."""
LOCAL_LOCK = STATE / "locks" / "pipeline.lock"


@dataclass(frozen=True)
class Deed:
    """One thing that was done (or, in a dry run, would be): closed, ended, removed; or kept, against expectation."""

    did: str
    what: str
    why: str
    bytes: int = 0


@dataclass(frozen=True)
class Sweep:
    """One sweep of the project at ``root``."""

    root: Path
    params: Params
    dry_run: bool
    young_s: float
    tell: Callable[[Deed], None]

    def do(self, deed: Deed, action: Callable[[], object]) -> None:
        """Do it, unless this is a dry run, and tell."""
        if not self.dry_run:
            try:
                action()
            except (OSError, subprocess.CalledProcessError) as error:
                said = error.stderr.decode(errors="replace").strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
                return self.tell(Deed("kept", deed.what, f"could not be {deed.did}: {said}"))
        self.tell(deed)

    def run(self) -> None:
        """The whole sweep, in the order in which one part frees what the next one looks at."""
        self._part("orphaned processes", self.end_orphans)
        self._part("MLflow runs", self.close_mlflow_runs)
        try:
            in_use = upkeep.in_use(self.root, self.params.register_.model_name)
        except TrainyardError as error:
            return self.tell(Deed("kept", "branches, caches and Bentos", f"which of them an alias names cannot be known: {error}"))
        doomed = dvc_cache.Doomed(frozenset(), frozenset())
        with try_lock(self.root / runs.STARTING_LOCK) as mine:
            if mine:
                doomed = self.remove_runs(in_use)
            else:
                self.tell(Deed("kept", "runs", "a run is starting"))
        self._part("old files", lambda: self.remove_files(in_use))
        self._part("DVC's cache", lambda: self.clear_cache(in_use, doomed))

    def _part(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except TrainyardError as error:
            self.tell(Deed("kept", name, str(error)))

    def end_orphans(self) -> None:
        """End the processes of runs whose flow died on this host, found by the run's id in their environment."""
        dead = {run_id for run_id in runs.known(self.root) if runs.lives(self.root, run_id) is False}
        own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        orphans: list[tuple[psutil.Process, str]] = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                run_id = environment.get(runs.RUN_VARIABLE, "")
                # The service outlives the run that deployed it: it is no orphan.
                if run_id in dead and ROOT_VARIABLE not in environment and process.pid not in own and process.status() != psutil.STATUS_ZOMBIE:
                    orphans.append((process, run_id))
            except (psutil.Error, OSError):  # another user's, or it ended meanwhile
                continue
        for process, run_id in orphans:
            with suppress(psutil.Error):
                what = f"process {process.pid} ({' '.join(process.cmdline())[:60]})"
                self.do(Deed("ended", what, f"its run {run_id} is dead"), process.terminate)
        if not self.dry_run:
            for process in psutil.wait_procs([process for process, _ in orphans], timeout=GRACE_S)[1]:
                with suppress(psutil.Error):
                    process.kill()

    def close_mlflow_runs(self) -> None:
        """Mark MLflow runs KILLED whose process died on this host."""
        dead, _ = upkeep.dead_runs(self.root, self.params.register_.experiment)
        for run in dead:
            deed = Deed("closed", f"MLflow run {run.name} ({run.run_id[:8]})", f"its process {run.pid} is dead: KILLED")
            self.do(deed, lambda run=run: upkeep.close_run(self.root, run.run_id))  # type: ignore[misc]

    def remove_runs(self, in_use: list[upkeep.InUse]) -> dvc_cache.Doomed:
        """Remove worktrees, branches and locks of runs that ended, beyond the newest ``run.keep_runs`` and after ``run.keep_days``.

        The caller holds the lock that a starting run takes first. Returns what went, or would go.
        """
        branches = _branches(self.root)
        seen = {
            run_id: max(_last_sign(self.root, run_id), branches[run_id][1] if run_id in branches else 0.0) for run_id in _all(self.root, branches)
        }
        ended = sorted((run_id for run_id in seen if not runs.lives(self.root, run_id)), key=lambda run_id: seen[run_id], reverse=True)
        now, keep = time.time(), self.params.run
        old = [run_id for run_id in ended[keep.keep_runs :] if now - seen[run_id] > max(keep.keep_days * 86400, self.young_s)]
        models = {upkeep.model_hash(version.dvc_files): f"{version.name} version {version.version}" for version in in_use}
        refs, worktrees = set(), set()
        for run_id in old:
            why = f"ended {(now - seen[run_id]) / 86400:.0f} days ago"
            folder = self.root / runs.WORKTREES / run_id
            if (folder / runs.PENDING).exists():
                self.tell(Deed("kept", f"worktree {run_id}", "what it made is not pushed yet"))
                continue
            if folder.exists():
                self.do(Deed("removed", f"worktree {run_id}", why, size_of(folder)), lambda folder=folder: _remove_worktree(self.root, folder))  # type: ignore[misc]
                worktrees.add(folder.resolve())
            if run_id in branches:
                name, head = f"refs/heads/{runs.BRANCHES}{run_id}", branches[run_id][0]
                model = upkeep.model_hash(_git(self.root, "show", f"{head}:./dvc.lock"))
                if model and model in models:
                    self.tell(Deed("kept", f"branch {runs.BRANCHES}{run_id}", f"{models[model]} was made there, and an alias names it"))
                elif name in _checked_out(self.root, worktrees):
                    self.tell(Deed("kept", f"branch {runs.BRANCHES}{run_id}", "it is checked out"))
                else:
                    self.do(Deed("removed", f"branch {runs.BRANCHES}{run_id}", why), lambda n=name, h=head: _git(self.root, "update-ref", "-d", n, h))  # type: ignore[misc]
                    refs.add(name)
            if not self.dry_run and not folder.exists():
                runs.lock_of(self.root, run_id).unlink(missing_ok=True)
        return dvc_cache.Doomed(frozenset(refs), frozenset(worktrees))

    def remove_files(self, in_use: list[upkeep.InUse]) -> None:
        """Remove checkpoints, champion files, Bentos, logs and parts of files that are old and out of use."""
        age_s = max(self.params.run.keep_days * 86400, self.young_s)
        for found in old_files(self.root, {version.model_digest for version in in_use}, age_s, self.young_s):
            if isinstance(found, Leftover):
                self.do(Deed("removed", found.what, found.why, sum(map(size_of, found.paths))), found.remove)
            else:
                self.tell(Deed("kept", "servers", found))

    def clear_cache(self, in_use: list[upkeep.InUse], doomed: dvc_cache.Doomed) -> None:
        """Remove the files of DVC's cache that nothing refers to, while no run lives, none can start, and no DVC command runs."""

        def clear() -> None:
            found = dvc_cache.unreferenced(self.root, doomed, [version.dvc_files for version in in_use], self.params.run.keep_days, self.young_s)
            if found:
                size = sum(map(size_of, found))
                deed = Deed("removed", f"{len(found)} files of DVC's cache", "no branch, tag, alias, worktree or kept history names them", size)
                self.do(deed, lambda: _unlink(found))

        with try_lock(self.root / runs.STARTING_LOCK) as none_starts, try_lock(self.root / LOCAL_LOCK) as none_here:
            alive = [run_id for run_id in runs.known(self.root) if runs.lives(self.root, run_id)]
            if alive or not (none_starts and none_here):
                return self.tell(Deed("kept", "DVC's cache", f"{len(alive) or 1} living runs may use files that no dvc.lock names yet"))
            if not dvc_cache.while_locked(self.root, clear):
                self.tell(Deed("kept", "DVC's cache", "a dvc command is at work"))


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    """Bytes on the disk that go with ``path``: files that have another hard link elsewhere free nothing."""
    files = [path] if not path.is_dir() or path.is_symlink() else [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        try:
            stat = file.lstat()
        except OSError:
            continue
        total += stat.st_blocks * 512 if stat.st_nlink == 1 else 0
    return total


def _all(root: Path, branches: dict[str, tuple[str, float]]) -> set[str]:
    return runs.known(root) | branches.keys()


def _last_sign(root: Path, run_id: str) -> float:
    """When the run last wrote to its lock or its worktree, in Unix seconds; 0 where it has neither."""
    folder = root / runs.WORKTREES / run_id
    paths = (runs.lock_of(root, run_id), folder, folder / "dvc.lock", folder / STATE, folder / "artifacts")
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _branches(root: Path) -> dict[str, tuple[str, float]]:
    """Run id -> (commit, its time) of the branches that runs left."""
    listed = _git(root, "for-each-ref", "--format=%(refname) %(objectname) %(committerdate:unix)", f"refs/heads/{runs.BRANCHES}")
    rows = [line.split() for line in listed.splitlines()]
    return {name.removeprefix(f"refs/heads/{runs.BRANCHES}"): (head, float(at)) for name, head, at in rows}


def _checked_out(root: Path, but: set[Path]) -> set[str]:
    """Branches that some worktree, outside ``but``, has checked out."""
    entries = [entry.splitlines() for entry in _git(root, "worktree", "list", "--porcelain").split("\n\n")]
    return {
        line.removeprefix("branch ")
        for entry in entries
        if entry and Path(entry[0].removeprefix("worktree ")).resolve() not in but
        for line in entry
        if line.startswith("branch ")
    }


def _remove_worktree(root: Path, folder: Path) -> None:
    """Remove a run's worktree. Its links into the project's state go, what they point to stays."""
    # Not `git worktree prune`: that would also forget a worktree of somebody's whose disk is not mounted now.
    with file_lock(root / runs.GIT_LOCK, runs.GIT_LOCK_TIMEOUT_S, "git's list of worktrees"):
        subprocess.run(["git", "worktree", "remove", "--force", "--force", str(folder.resolve())], cwd=root, capture_output=True, check=False)
        if folder.exists():
            shutil.rmtree(folder)


def _git(root: Path, *arguments: str) -> str:
    done = runs.past_half_made(lambda: subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False))
    if arguments[0] != "show":
        done.check_returncode()
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def main() -> None:
    """Sweep the project in the current folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--young-s", type=float, default=3600.0)
    chosen = parser.parse_args()
    Sweep(Path(), load_params(), chosen.dry_run, chosen.young_s, lambda deed: print(json.dumps(asdict(deed)), flush=True)).run()


if __name__ == "__main__":
    die_with_parent()
    quiet_environment()
    sys.exit(errors.run(main))
