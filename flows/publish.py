"""What a run leaves in git: its branch, and one short step of the main line, by compare-and-swap on refs.

Everything here may be done twice, and a crash between any two steps is made good by the next call. The pair (data.dvc,
dvc.lock) on the main line always comes whole from one run. Nothing is ever forced, here or on the remote.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from flows.follow import follow
from flows.git import NETWORK_TIMEOUT_S, blobs, commit_of, commit_tree, content, git, is_ancestor, last_line, move_ref, tree_with, try_git
from flows.worktree import BASE_TRAILER, Say, Work, cache_of, dvc, manifest, pointers, remote_of, remove, reopen
from tasks.core.config import PARAMS, RunConfig
from tasks.core.errors import BadInput, Transient
from tasks.core.files import STATE, canonical_json, file_lock, write_atomic
from tasks.core.runs import PENDING, WORKTREES, lock_of

Outcome = Literal["approved", "rejected", "ingested", "failed"]
PAIR = ("data.dvc", "dvc.lock")
METRICS = "artifacts/evaluation/metrics.json"
PUBLISHED = STATE / "published.json"
"""In a worktree whose run needs it no more."""
RACE_S = 60.0
"""How long the step of the main line is tried again while other runs are faster."""


@dataclass(frozen=True)
class Published:
    """What git holds of a run. ``branch`` is "" where it left nothing."""

    branch: str
    commit: str
    main_moved: bool
    why: str


def publish(work: Work, outcome: Outcome, message: str) -> Published:
    """Commit the run's branch, push it and its data, move the main line as ``run.publish`` says; and let home's files follow.

    ``outcome`` approved means that its model is in service. A remote that is away fails no run: it is said, and
    ``push_pending`` makes up for it. Raises Transient ``lock_busy`` where the race for the main line is lost for a minute,
    BadInput ``branch_missing`` or ``git_failed``.
    """
    if not work.run_id:
        return Published("", "", False, "a run in the project's folder publishes nothing: commit data.dvc and dvc.lock yourself")
    if work.config.publish == "none":
        return _done(work, outcome, Published("", work.base, False, "run.publish is none"))
    commit = commit_run(work, outcome, message)
    if commit == work.base:
        return _done(work, outcome, Published("", work.base, False, f"nothing changed since {work.config.branch} {work.base[:8]}"))
    away = bool(push_run(work))
    moved, why = False, {"branch": "run.publish is branch", "main": "a failed run moves no main line"}[work.config.publish]
    if work.config.publish == "main" and outcome != "failed":
        moved, why = _move_main(work, commit, outcome, message)
        follow(work.home, work.main, work.say)
        if not away and not push_pending(work.home, work.config, work.say):  # never a main line whose data the remote lacks
            _push_main(work)
    result = Published(work.branch, commit, moved, why)
    work.say(f"published {work.branch} {commit[:8]}; {work.config.branch}: {why}")
    return _done(work, outcome, result, pending=away)


def _done(work: Work, outcome: Outcome, result: Published, pending: bool = False) -> Published:
    if outcome != "failed":
        write_atomic(work.root / (PENDING if pending else PUBLISHED), canonical_json(asdict(result)))
    return result


def commit_run(work: Work, outcome: Outcome, message: str) -> str:
    """Commit what the run changed to its branch and return the branch's head; the run's base where it changed nothing."""
    ref = f"refs/heads/{work.branch}"
    old = commit_of(work.home, ref)
    parent = old or work.base
    files: dict[str, str | None] = {}
    for name, path in {**{name: name for name in (*PAIR, PARAMS.name)}, "metrics.json": METRICS}.items():
        source = work.root / path
        files[name] = git(work.root, "hash-object", "-w", f"--path={name}", "--", str(source)) if source.is_file() else None
    if not old and {name: blob for name, blob in files.items() if name != "metrics.json"} == _all(work.home, work.base):
        return work.base
    tree = tree_with(work.home, parent, files)
    if old and tree == git(work.home, "rev-parse", f"{old}^{{tree}}"):
        return old
    told = f"{message}\n\nTrainyard-Run: {work.run_id}\nTrainyard-Outcome: {outcome}\n{BASE_TRAILER}: {work.base}\n"
    new = commit_tree(work.home, tree, [parent], told, work.config.author)
    if not move_ref(work.home, ref, new, old, outcome):
        raise Transient("lock_busy", f"{work.branch} moved under this run", constraint="this run's alone", knob="nothing: it is tried again")
    return new


def _all(folder: Path, commit: str) -> dict[str, str | None]:
    names = (*PAIR, PARAMS.name)
    found = blobs(folder, commit, names)
    return {name: found.get(name) for name in names}


def _move_main(work: Work, commit: str, outcome: Outcome, message: str) -> tuple[bool, str]:
    """Merge the run's commit into the main line; whether it moved, and why (not), in words."""
    overridden = blobs(work.home, commit, [PARAMS.name]) != blobs(work.home, work.base, [PARAMS.name])
    if overridden and outcome != "approved":
        return False, "a rejected run with overrides moves no main line"
    deadline = time.monotonic() + RACE_S
    while True:
        head = commit_of(work.home, work.main)
        if head is None:
            raise BadInput("branch_missing", "the main line is gone", value=work.config.branch, constraint="a local branch", knob="run.branch")
        if is_ancestor(work.home, commit, head):
            return True, f"holds this run since {head[:8]} or before"
        theirs = _pair(work.home, head)
        if theirs != _pair(work.home, work.base) and not (outcome == "approved" and _contains(work, commit, theirs)):
            return False, "superseded: another run moved it meanwhile"
        files, note = _files(work, commit, head, overridden)
        tree = tree_with(work.home, head, files)
        new = commit_tree(work.home, tree, [head, commit], f"{message}\n\nTrainyard-Run: {work.run_id}\n", work.config.author)
        if move_ref(work.home, work.main, new, head, f"run {work.run_id}"):
            return True, f"moved to {new[:8]}{note}"
        if time.monotonic() > deadline:
            raise Transient("lock_busy", f"the main line {work.config.branch} cannot be moved", value=f"tried for {RACE_S:g} s", constraint="free")
        time.sleep(random.uniform(0.01, 0.2))


def _pair(folder: Path, commit: str) -> dict[str, str]:
    return blobs(folder, commit, PAIR)


def _files(work: Work, commit: str, head: str, overridden: bool) -> tuple[Mapping[str, str | None], str]:
    """What the main line takes from the run: the pair, and params.yaml where an approved run changed it."""
    mine = blobs(work.home, commit, (*PAIR, PARAMS.name))
    files: dict[str, str | None] = {name: mine.get(name) for name in PAIR}
    if not overridden:
        return files, ""
    base, theirs = (blobs(work.home, one, [PARAMS.name]).get(PARAMS.name) for one in (work.base, head))
    if theirs in (base, mine[PARAMS.name]):
        return {**files, PARAMS.name: mine[PARAMS.name]}, ""
    merged = _merge_text(work.home, mine[PARAMS.name], base, theirs)
    if merged is None:
        return files, "; its params.yaml was edited meanwhile at the same places and stays as it is"
    return {**files, PARAMS.name: merged}, ""


def _merge_text(folder: Path, mine: str, base: str | None, theirs: str | None) -> str | None:
    """The blob of a clean three-way merge, or None."""
    if base is None or theirs is None:
        return None
    with tempfile.TemporaryDirectory(prefix="trainyard-") as aside:
        paths = [Path(aside) / name for name in ("theirs", "base", "mine")]
        for path, blob in zip(paths, (theirs, base, mine), strict=True):
            path.write_bytes(content(folder, blob))
        done = try_git(folder, "merge-file", "-p", "--quiet", *map(str, paths))
        return git(folder, "hash-object", "-w", "--stdin", stdin=done.stdout) if done.returncode == 0 else None


def _contains(work: Work, commit: str, theirs: Mapping[str, str]) -> bool:
    """Whether the run's data version holds every file of the main line's: only then may a later release take its place."""
    mine, other = _pair(work.home, commit).get("data.dvc"), theirs.get("data.dvc")
    if mine is None or other is None or mine == other:
        return mine == other
    listed = [_listed(work, blob) for blob in (mine, other)]
    return listed[0] is not None and listed[1] is not None and listed[1] <= listed[0]


def _listed(work: Work, blob: str) -> set[str] | None:
    """The files of a data.dvc's version as "name md5", but for its index; None where the cache does not say."""
    try:
        found = [manifest(cache_of(work.root), md5) for md5 in pointers(content(work.home, blob))]
    except BadInput:
        return None
    return {entry for files in found if files for entry in files if not entry.startswith("dataset.json ")} if all(found) else None


def push_run(work: Work) -> str:
    """Push the run's data and branch to where remotes are set; what went wrong in words, "" where nothing did."""
    problems = []
    remote = remote_of(work.root)
    if remote not in ("", "embedded") and (failure := dvc(work.root, "push", "--quiet", "--run-cache", "--remote", remote)):
        problems.append(f"the DVC remote {remote} did not take this run's data: {failure}")
    if has_git_remote(work) and (failure := _push(work, f"refs/heads/{work.branch}")):
        problems.append(f"{work.config.git_remote} did not take {work.branch}: {failure}")
    for problem in problems:
        work.say(f"WARNING {problem}; it stays pending and is pushed by a later run or the sweep")
    return "; ".join(problems)


def has_git_remote(work: Work) -> bool:
    """Whether the git remote that ``run.git_remote`` names is set."""
    return work.config.git_remote in git(work.home, "remote").split()


def _push(work: Work, ref: str) -> str:
    """Push one ref, never by force; what went wrong, "" where nothing did."""
    done = try_git(work.home, "push", "--quiet", work.config.git_remote, f"{ref}:{ref}", timeout_s=NETWORK_TIMEOUT_S)
    return "" if done.returncode == 0 else last_line(done)


def _push_main(work: Work) -> None:
    """Push the main line; where the remote's went on meanwhile, merge it by the same rule and try again."""
    if not has_git_remote(work):
        return
    failure = ""
    for _ in range(5):
        failure = _push(work, work.main)
        if not failure:
            return
        tracking = f"refs/remotes/{work.config.git_remote}/{work.config.branch}"
        fetched = try_git(work.home, "fetch", "--quiet", work.config.git_remote, f"+{work.main}:{tracking}", timeout_s=NETWORK_TIMEOUT_S)
        theirs = commit_of(work.home, tracking) if fetched.returncode == 0 else None
        head = commit_of(work.home, work.main)
        if theirs is None or head is None or is_ancestor(work.home, theirs, head):
            break
        new = _merged(work, head, theirs)
        if new is None:
            failure = "both lines changed the same files; merge them by hand"
            break
        move_ref(work.home, work.main, new, head, f"merge of {tracking}")
        follow(work.home, work.main, work.say, before=head)
        time.sleep(random.uniform(0.0, 0.5))
    work.say(f"WARNING {work.config.git_remote} did not take {work.config.branch}: {failure}; a later run pushes it too")


def _merged(work: Work, ours: str, theirs: str) -> str | None:
    """A merge of the remote's main line into ours, the pair whole from one side; None where other files conflict."""
    if is_ancestor(work.home, ours, theirs):
        return theirs
    base = git(work.home, "merge-base", ours, theirs)
    done = try_git(work.home, "merge-tree", "--write-tree", "--name-only", "--no-messages", "-z", ours, theirs)
    tree, *conflicts = [name for name in done.stdout.decode("utf-8", "surrogateescape").split("\0") if name] or [""]
    if done.returncode not in (0, 1) or not tree or not set(conflicts) <= set(PAIR):
        return None
    keep = ours if _pair(work.home, theirs) == _pair(work.home, base) else theirs
    if _pair(work.home, ours) != _pair(work.home, base) and _contains(work, ours, _pair(work.home, theirs)):
        keep = ours
    pair = _pair(work.home, keep)
    whole = tree_with(work.home, tree, {name: pair.get(name) for name in PAIR})
    message = f"Merge {work.config.git_remote}/{work.config.branch}\n\nTrainyard-Run: {work.run_id}\n"
    return commit_tree(work.home, whole, [ours, theirs], message, work.config.author)


def push_pending(home: Path, config: RunConfig, say: Say) -> list[str]:
    """Push the runs whose push failed, each from its worktree, which then goes; the ids of those that are pending still."""
    left = []
    for marker in sorted((home / WORKTREES).glob(f"*/{PENDING}")):
        run_id = marker.relative_to(home / WORKTREES).parts[0]
        try:
            with file_lock(lock_of(home, run_id), 0.0, f"run {run_id}"):
                if push_run(reopen(home, run_id, config, say)):
                    left.append(run_id)
                else:
                    remove(home, run_id)
        except Transient:  # it runs
            continue
    return left
