"""The folder in which a person has the main line checked out follows it, and no edit of theirs is touched.

The main line moves under that folder's feet. Left alone, its index would undo the move with the person's next commit. So
the index follows first, then each file that holds a version which the main line held before, then what DVC tracks.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from flows.git import NOTHING, blobs, commit_of, git, last_line, move_ref, try_git
from flows.worktree import Say, dvc
from tasks.core.errors import BadInput, Transient
from tasks.core.files import STATE, file_lock

FOLLOWED = "refs/trainyard/followed"
"""The commit of the main line at which the last folder that followed arrived."""
STEPS = 100
INDEX_S = 5.0
"""How long to wait for another git command that holds the folder's index."""


def follow(home: Path, ref: str, say: Say, before: str | None = None) -> None:
    """Bring the folder that has ``ref`` checked out to its head, as far as that is possible; what stays behind is said.

    ``before`` is where ``ref`` stood, if it was moved by more than merges of runs. Called again it makes good what a crash left.
    """
    folder = _checked_out(home, ref)
    if folder is None:
        return
    try:
        with file_lock(folder / STATE / "locks" / "follow.lock", 60.0, "the project's folder"):
            stays = _follow(folder, ref, before)
    except (Transient, BadInput) as error:
        stays = str(error)
    if stays:
        say(f"WARNING {ref.removeprefix('refs/heads/')} moved and {folder} could not follow whole: {stays}")


def _checked_out(home: Path, ref: str) -> Path | None:
    """The folder whose HEAD is ``ref``, if there is one."""
    for entry in git(home, "worktree", "list", "--porcelain").split("\n\n"):
        lines = entry.splitlines()
        if f"branch {ref}" in lines:
            folder = Path(lines[0].removeprefix("worktree "))
            return folder if (folder / ".git").exists() else None
    return None


def _follow(folder: Path, ref: str, before: str | None) -> str:
    """What stays behind, in words; "" where nothing does."""
    head, followed = commit_of(folder, ref), commit_of(folder, FOLLOWED)
    if head is None:
        return ""
    former = _former(folder, head, followed, before)
    failure = _move_index(folder, former, head)
    if failure:
        return f"its index could not be moved ({failure}): see git diff --cached before your next commit, git reset -q takes the main line's"
    try:
        with file_lock(folder / STATE / "locks" / "pipeline.lock", 0.0, "the pipeline"):
            arrived, left = _move_files(folder, former, head)
            move_ref(folder, FOLLOWED, head, followed, "followed")
            targets = [target for name, target in (("data.dvc", "data.dvc"), ("dvc.lock", "dvc.yaml")) if name in arrived]
            refused = dvc(folder, "checkout", "--quiet", "--allow-missing", *targets) if targets else ""
    except Transient:
        return "a run is at work there, and its files stay"
    if left:
        return f"edits of yours stay in {', '.join(left)}; git checkout {' '.join(left)} && dvc checkout takes the main line's"
    return f"dvc checkout: {refused}" if refused else ""


def _former(folder: Path, head: str, followed: str | None, before: str | None) -> list[str]:
    """Where the index may stand: at what the main line was before each merge of a run, back to where it followed last."""
    found = [before] if before else []
    line = git(folder, "log", "--first-parent", f"-{STEPS}", "--format=%H%x09%P%x09%(trailers:key=Trainyard-Run,valueonly,separator=%x2C)", head)
    for row in line.splitlines():
        commit, parents, run = row.split("\t")
        if commit == followed or not run or " " not in parents:
            break
        found.append(parents.split()[0])
    return found


def _move_index(folder: Path, former: list[str], head: str) -> str:
    """Let the index go from one of ``former`` to ``head``, changes of other files kept; why it cannot, "" where it did."""
    deadline = time.monotonic() + INDEX_S
    failure = ""
    for old in former:
        while (done := try_git(folder, "read-tree", "-m", "-i", old, head)).returncode != 0:
            failure = last_line(done)
            if "index.lock" not in done.stderr.decode("utf-8", "replace") or time.monotonic() > deadline:
                break
            time.sleep(random.uniform(0.05, 0.25))
        else:
            return ""
    return failure


def _move_files(folder: Path, former: list[str], head: str) -> tuple[set[str], list[str]]:
    """Bring each file that holds what one of ``former`` held to ``head``: names of those that stand there now, and of the others."""
    known: dict[str, set[str]] = {}
    for old in former:
        fields = git(folder, "diff-tree", "-r", "-z", "--no-renames", old, head).split("\0")
        for meta, name in zip(fields[::2], fields[1::2], strict=False):
            known.setdefault(name, set()).add(meta.split()[2])
    wanted = blobs(folder, head, known) if known else {}
    arrived, left = set(), []
    for name, versions in sorted(known.items()):
        path, new = folder / name, wanted.get(name, NOTHING)
        now = git(folder, "hash-object", f"--path={name}", "--", str(path)) if path.is_file() else NOTHING
        if now != new and now not in versions:
            left.append(name)
            continue
        if now != new and new == NOTHING:
            path.unlink()
        elif now != new:
            git(folder, "checkout-index", "--force", "--", name)
        arrived.add(name)
    try_git(folder, "update-index", "-q", "--refresh")
    return arrived, left
