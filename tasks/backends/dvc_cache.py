"""DVC's cache cleared of what nothing refers to any more, beside runs that go on.

``dvc gc`` would not do (docs/decisions/0009): it looks at the tips of branches alone, knows neither the versions that MLflow's
aliases name nor other worktrees, drops the files of a folder whose list is missing, and counts no bytes. Here a file of the
cache stays if its hash stands in any ``*.dvc`` or ``dvc.lock``

- of the project's folder and of every git worktree, committed or not;
- at any git ref (branch, tag, stash, remote branch, DVC experiment), but for run branches that the sweep removes;
- in the history within ``days``; and in the whole history for ``*.dvc``: data that came from outside cannot be made again;
- in the run of a model version that bears an alias.

Whatever else looks like an MD5 there keeps its file too: the error is on the side of keeping.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tasks.backends.dvc_repo import open_repo
from tasks.core.runs import past_half_made

MD5 = re.compile(rb"\b[0-9a-f]{32}(?:\.dir)?\b")
NAMES = re.compile(r"(^|/)(dvc\.lock|[^/]+\.dvc)$")
OBJECT = re.compile(r"[0-9a-f]{30}(\.dir)?|\.[\w-]{22}\.tmp")
"""A file in the cache below the first two digits of its hash, or a part of one that a crash left."""
NOT_SEARCHED = {".git", ".venv", ".trainyard", "__pycache__"}


class Doomed(NamedTuple):
    """What the sweep removes, so that it does not count: full names of refs, and folders of git worktrees."""

    refs: frozenset[str]
    worktrees: frozenset[Path]


def unreferenced(root: Path, doomed: Doomed, texts: Iterable[str], days: float, young_s: float) -> list[Path]:
    """The files of the cache of the project at ``root`` that nothing refers to; [] where the cache lies outside the project.

    ``texts`` are more content that refers to them. Files that came less than ``young_s`` seconds ago stay: they may be those of
    a command that has not written its dvc.lock yet. Raises BadInput ``dvc_failed``.
    """
    with open_repo(root) as repo:
        objects = Path(repo.cache.local.path)
    if not objects.resolve().is_relative_to(root.resolve()) or not objects.is_dir():
        return []  # a cache that other projects may share is theirs to clear
    kept: set[str] = set()
    worktrees = {folder: head for folder, head in _worktrees(root).items() if folder not in doomed.worktrees}
    for text in (*_on_disk(worktrees), *_in_git(root, doomed.refs, list(worktrees.values()), days), *(text.encode() for text in texts)):
        kept.update(found.decode() for found in MD5.findall(text))
    for name in [name for name in kept if name.endswith(".dir")]:
        kept.update(_members(objects / name[:2] / name[2:]))
    before = time.time() - young_s
    found = [path for prefix in sorted(objects.iterdir()) if len(prefix.name) == 2 for path in sorted(prefix.iterdir())]
    return [path for path in found if OBJECT.fullmatch(path.name) and _name(path) not in kept and path.stat().st_ctime < before]


def while_locked(root: Path, action: Callable[[], None]) -> bool:
    """Run ``action`` while no DVC command can start in the project; False, and nothing done, where one runs."""
    from dvc.lock import LockError

    with open_repo(root) as repo:
        try:
            repo.lock.lock()
        except LockError:
            return False
        try:
            action()
        finally:
            repo.lock.unlock()
    return True


def _name(path: Path) -> str:
    return path.parent.name + path.name


def _members(listing: Path) -> list[str]:
    """The hashes in the list of a folder's files."""
    try:
        return [str(entry["md5"]) for entry in json.loads(listing.read_bytes()) if "md5" in entry]
    except (OSError, ValueError, TypeError):
        return []


def _worktrees(root: Path) -> dict[Path, str]:
    """The git worktrees of the project, its own folder first, whoever made them: folder -> commit."""
    found = {root.resolve(): ""}
    for entry in _git(root, "worktree", "list", "--porcelain", "-z").decode(errors="surrogateescape").split("\0\0"):
        lines = dict(line.partition(" ")[::2] for line in entry.split("\0"))
        if "worktree" in lines:
            found[Path(lines["worktree"]).resolve()] = lines.get("HEAD", "")
    return found


def _on_disk(folders: Iterable[Path]) -> Iterator[bytes]:
    """Every DVC file below ``folders``, committed or not."""
    for folder in folders:
        for path, below, names in os.walk(folder):
            below[:] = [name for name in below if name not in NOT_SEARCHED and (name, Path(path).name) != ("cache", ".dvc")]
            for name in filter(NAMES.search, names):
                yield (Path(path) / name).read_bytes()


def _in_git(root: Path, doomed: frozenset[str], heads: list[str], days: float) -> Iterator[bytes]:
    """Every DVC file at a ref or head, or in the history that is kept."""
    listed = _git(root, "for-each-ref", "--format=%(refname) %(objecttype) %(*objecttype)").decode(errors="surrogateescape").splitlines()
    refs = [name for name, _, kind in (line.partition(" ") for line in listed) if "commit" in kind and name not in doomed and not _remote_run(name)]
    refs += [*_git(root, "stash", "list", "--format=%H").decode().split(), *(head for head in heads if head.strip("0"))]
    blobs: set[str] = set()
    for ref in refs:
        for entry in _git(root, "ls-tree", "-r", "-z", "--full-tree", ref).decode(errors="surrogateescape").split("\0"):
            head, _, path = entry.partition("\t")
            if NAMES.search(path):
                blobs.add(head.split()[2])
    changes = ("log", "-m", "--raw", "--no-abbrev", "--no-renames", "--format=")
    recent = f"--since={days * 86400:.0f} seconds ago"
    for command in () if not refs else ((*changes, *refs, "--", "*.dvc"), (*changes, recent, *refs, "--", "*dvc.lock")):
        blobs.update(line.split()[3] for line in _git(root, *command).decode(errors="surrogateescape").splitlines() if line.startswith(":"))
    for blob in sorted(blobs - {"0" * 40}):
        yield _git(root, "cat-file", "blob", blob)


def _remote_run(ref: str) -> bool:
    """Whether the ref is this clone's memory of a run branch on a remote, where it stays until somebody deletes it."""
    return bool(re.match(r"refs/remotes/[^/]+/trainyard/runs/", ref))


def _git(root: Path, *arguments: str) -> bytes:
    """The output of a git command; raises CalledProcessError, since half a list of references would be deadly."""
    done = past_half_made(lambda: subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False))
    done.check_returncode()
    return done.stdout
