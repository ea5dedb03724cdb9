"""git as a child process: the few plumbing commands that publishing needs. No index or file of a person's is touched here.

Hooks are off: `dvc install` would check out or push in the middle of a run, and a person's hooks are for people.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tasks.core.errors import BadInput
from tasks.core.runs import past_half_made

NETWORK_TIMEOUT_S = 120.0
NO_HOOKS = ("-c", "core.hooksPath=/dev/null")
NOTHING = "0" * 40
FOREIGN = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX"}
"""Variables by which a caller (a hook, an editor) would lead our commands into another repository."""


def try_git(
    folder: Path, *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in ``folder``, however it ends; after ``timeout_s`` seconds it is killed and counts as failed."""
    clean = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": os.environ.get("GIT_SSH_COMMAND", "ssh -o BatchMode=yes"), "LC_ALL": "C"}
    command = ["git", *NO_HOOKS, *arguments]
    environment = {**clean, **quiet, **(env or {})}
    try:
        return past_half_made(
            lambda: subprocess.run(command, cwd=folder, env=environment, input=stdin, capture_output=True, timeout=timeout_s, check=False)
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, b"", f"no answer within {timeout_s:g} s".encode())
    except FileNotFoundError:
        raise BadInput(
            "git_failed", f"git {arguments[0]}", value="no git, or no such folder", constraint="installed", knob=f"PATH, or {folder}"
        ) from None


def git(folder: Path, *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> str:
    """Output of git in ``folder`` without its last newline; raises BadInput ``git_failed`` with git's own last line."""
    done = try_git(folder, *arguments, stdin=stdin, env=env)
    if done.returncode != 0:
        raise BadInput("git_failed", f"git {arguments[0]}", value=last_line(done), knob=f"what it names, in {folder}")
    return done.stdout.decode("utf-8", "surrogateescape").removesuffix("\n")


def last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """The last line that says what went wrong."""
    lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip() and not line.startswith("hint:")]
    telling = [line for line in lines if line.startswith(("error:", "fatal:", "!"))]
    return next(reversed(telling or lines), f"exit code {done.returncode}")


def commit_of(folder: Path, name: str) -> str | None:
    """The commit that ``name`` (a full ref or an id) stands for, or None."""
    done = try_git(folder, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    return done.stdout.decode().strip() if done.returncode == 0 else None


def blobs(folder: Path, commit: str, names: Iterable[str]) -> dict[str, str]:
    """name -> id of the file's content in ``commit``, for those of ``names`` that are there."""
    listed = git(folder, "ls-tree", "-z", commit, "--", *names)
    entries = [entry.split("\t", 1) for entry in listed.split("\0") if entry]
    return {name: meta.split()[2] for meta, name in entries}


def content(folder: Path, blob: str) -> bytes:
    """The bytes of a blob."""
    return try_git(folder, "cat-file", "blob", blob).stdout


def is_ancestor(folder: Path, one: str, other: str) -> bool:
    """Whether ``other`` holds ``one``."""
    return try_git(folder, "merge-base", "--is-ancestor", one, other).returncode == 0


def tree_with(folder: Path, commit: str, files: Mapping[str, str | None]) -> str:
    """The tree of ``commit`` with the blobs ``files`` at their names (None: without that name), through an index of its own."""
    with tempfile.TemporaryDirectory(prefix="trainyard-") as aside:
        env = {"GIT_INDEX_FILE": str(Path(aside) / "index")}
        git(folder, "read-tree", commit, env=env)
        entries = "".join(f"{'100644' if blob else '0'} {blob or NOTHING}\t{name}\0" for name, blob in files.items())
        git(folder, "update-index", "-z", "--index-info", stdin=entries.encode(), env=env)
        return git(folder, "write-tree", env=env)


def commit_tree(folder: Path, tree: str, parents: Iterable[str], message: str, author: str) -> str:
    """A new commit by ``author`` ("Name <address>"), which no ref names yet."""
    name, _, address = author.removesuffix(">").rpartition(" <")
    env = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (("NAME", name), ("EMAIL", address))}
    return git(folder, "commit-tree", tree, *(word for parent in parents for word in ("-p", parent)), "-F", "-", stdin=message.encode(), env=env)


def move_ref(folder: Path, ref: str, new: str, old: str | None, why: str) -> bool:
    """Compare-and-swap: whether ``ref`` stood at ``old`` (None: nowhere) and now stands at ``new``."""
    return try_git(folder, "update-ref", "-m", f"trainyard: {why}", ref, new, old or NOTHING).returncode == 0
