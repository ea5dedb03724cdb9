"""The folder of one run on a worker: a git worktree below .trainyard/worktrees, made from the head of the main line.

Its data and artifacts are linked from the DVC cache that it shares with the project's folder ("home"), as is the machine's
own state (SHARED): the registry, the Bento store, the service, checkpoints, the champion's files. It has locks of its own.
"""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from flows.git import commit_of, git, try_git
from tasks.core.config import PARAMS, RunConfig, apply_overrides
from tasks.core.errors import BadInput
from tasks.core.files import STATE, canonical_json, file_lock, write_atomic
from tasks.core.process import run_child
from tasks.core.runs import BRANCHES, GIT_LOCK, GIT_LOCK_TIMEOUT_S, WORKTREES

SHARED = ("mlflow", "bentoml", "serve", "checkpoints", "champion")
"""Folders of .trainyard that all worktrees of a project have in common."""
READY = STATE / "run.json"
"""Written last: a worktree without it is none."""
LINK_TYPES = "reflink,hardlink,symlink,copy"
DVC = (sys.executable, "-m", "tasks.core.process", "dvc")
BASE_TRAILER = "Trainyard-Base"
DVC_TIMEOUT_S = 3600.0
"""A remote that answers slowly may move gigabytes; one that never answers must not hold the run for ever."""
ORPHANS_S = 15.0
"""How long a dead run's children may take to end."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """Where a run works. ``run_id`` is "" for a run in the project's folder itself, which publishes nothing."""

    root: Path
    home: Path
    base: str
    """commit that the run was made from"""
    run_id: str
    config: RunConfig
    say: Say = print

    @property
    def branch(self) -> str:
        """The run's branch: its last path component is the run's id."""
        return f"{BRANCHES}{self.run_id}"

    @property
    def main(self) -> str:
        """The full name of the main line's ref."""
        return f"refs/heads/{self.config.branch}"


def folder_of(home: Path, run_id: str) -> Path:
    """The worktree of a run; beside it, with the ending .lock, the file that its living process holds locked."""
    return home / WORKTREES / run_id


def make_or_reuse(home: Path, run_id: str, overrides: dict[str, Any], config: RunConfig, say: Say) -> Work:
    """The worktree of ``run_id``: as it stands where it was left by a crash or a failure, else new.

    Raises BadInput ``branch_missing``, ``git_failed`` or ``params_invalid``; then no worktree is left.
    """
    root = folder_of(home, run_id)
    head = commit_of(home, f"refs/heads/{config.branch}")
    if head is None:
        raise BadInput(
            "branch_missing",
            "there is no such branch with a commit to make a run from",
            value=config.branch,
            constraint="a local branch with a commit",
            knob=f"run.branch, or git branch {config.branch}",
        )
    if (root / READY).is_file() and (root / ".git").is_file():
        work = reopen(home, run_id, config, say)
        say(f"goes on in {root}, as an earlier attempt of this run left it")
        _recover(root, work.base, say)
        return work
    remove(home, run_id)
    left = commit_of(home, f"refs/heads/{BRANCHES}{run_id}")  # this run was published before and its worktree is gone
    base = (left and git(home, "log", "-1", f"--format=%(trailers:key={BASE_TRAILER},valueonly)", left).strip()) or head
    try:
        with file_lock(home / GIT_LOCK, GIT_LOCK_TIMEOUT_S, "git's list of worktrees"):
            git(home, "worktree", "add", "--quiet", "--detach", str(root), left or head)
        _link(root, home)
        _configure_dvc(root, home)
        apply_overrides(overrides, root / PARAMS)
        bring_back(root, say)
        write_atomic(root / READY, canonical_json({"base": base, "home": str(home), "overrides": overrides}))
    except BaseException:
        remove(home, run_id)
        raise
    say(f"works in {root}, made from {config.branch} {head[:8]}")
    return Work(root, home, base, run_id, config, say)


def reopen(home: Path, run_id: str, config: RunConfig, say: Say) -> Work:
    """The worktree of a run that was made before, as it stands."""
    root = folder_of(home, run_id)
    return Work(root, home, str(json.loads((root / READY).read_bytes())["base"]), run_id, config, say)


def remove(home: Path, run_id: str) -> None:
    """Take a worktree away, however complete it is; what it shares stays."""
    root = folder_of(home, run_id)
    for link in (root / STATE).glob("*"):
        if link.is_symlink():
            link.unlink()
    with file_lock(home / GIT_LOCK, GIT_LOCK_TIMEOUT_S, "git's list of worktrees"):
        if root.exists():
            try_git(home, "worktree", "remove", "--force", "--force", str(root))
        shutil.rmtree(root, ignore_errors=True)
        registered = Path(git(home, "rev-parse", "--path-format=absolute", "--git-common-dir")) / "worktrees" / run_id
        if registered.is_dir() and Path((registered / "gitdir").read_text().strip()).parent == root.resolve():
            shutil.rmtree(registered, ignore_errors=True)


def _link(root: Path, home: Path) -> None:
    (root / STATE / "home").parent.mkdir(parents=True, exist_ok=True)
    (root / STATE / "home").symlink_to(home, target_is_directory=True)
    for name in SHARED:
        (home / STATE / name).mkdir(parents=True, exist_ok=True)
        (root / STATE / name).symlink_to(home / STATE / name, target_is_directory=True)


def _read_ini(*paths: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    for path in paths:
        if path.is_file():
            parser.read_string(path.read_text(encoding="utf-8"), str(path))
    return parser


def _value(parser: configparser.ConfigParser, section: str, key: str) -> str:
    return parser.get(section, key, fallback="").strip().strip("\"'")


def _configure_dvc(root: Path, home: Path) -> None:
    """Write the worktree's .dvc/config.local: home's own, its cache, and its paths made absolute, which DVC takes from .dvc/."""
    known = _read_ini(home / ".dvc" / "config", home / ".dvc" / "config.local")
    local = _read_ini(home / ".dvc" / "config.local")
    for path, parser in ((root / ".dvc" / "config", known), (home / ".dvc" / "config.local", local)):
        for section in _read_ini(path).sections():
            url = _value(_read_ini(path), section, "url")
            if section.startswith("'remote ") and url and "://" not in url and not Path(url).is_absolute():
                parser = local
                _set(parser, section, "url", str((home / ".dvc" / url).resolve()))
    cache = _value(known, "cache", "dir")
    if cache or not _cache_elsewhere():
        _set(local, "cache", "dir", str((home / ".dvc" / (cache or "cache")).resolve()))
    if not _value(known, "cache", "type"):
        _set(local, "cache", "type", f'"{LINK_TYPES}"')
    _set(local, "core", "site_cache_dir", str(root / STATE / "dvc"))
    with (root / ".dvc" / "config.local").open("w", encoding="utf-8") as handle:
        local.write(handle)


def _set(parser: configparser.ConfigParser, section: str, key: str, value: str) -> None:
    if not parser.has_section(section):
        parser.add_section(section)
    parser.set(section, key, value)


def _cache_elsewhere() -> bool:
    """Whether the user's own DVC config puts every cache into one place."""
    base = Path(os.environ.get("DVC_GLOBAL_CONFIG_DIR") or Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dvc")
    return bool(_value(_read_ini(base / "config"), "cache", "dir"))


def cache_of(root: Path) -> Path:
    """The DVC cache of a worktree (or of home)."""
    cache = _value(_read_ini(root / ".dvc" / "config", root / ".dvc" / "config.local"), "cache", "dir")
    return root / ".dvc" / (cache or "cache")


def remote_of(root: Path) -> str:
    """The name of the default DVC remote, "" where none is set."""
    return _value(_read_ini(root / ".dvc" / "config", root / ".dvc" / "config.local"), "core", "remote")


def manifest(cache: Path, md5: str) -> list[str] | None:
    """The files of a tracked folder as "name md5" (or of one file: none), or None where the cache lacks its object."""
    path = cache / "files" / "md5" / md5[:2] / md5[2:]
    if not path.is_file():
        return None
    return [f"{entry['relpath']} {entry['md5']}" for entry in json.loads(path.read_bytes())] if md5.endswith(".dir") else []


def _whole(cache: Path, md5: str) -> bool:
    files = manifest(cache, md5)
    return files is not None and all(manifest(cache, entry.rsplit(" ", 1)[1]) is not None for entry in files)


def pointers(text: bytes) -> list[str]:
    """The md5 of every output that a .dvc file or dvc.lock names. Raises BadInput ``dvc_failed`` for what is neither."""
    try:
        tree = YAML(typ="safe", pure=True).load(text.decode())
        stages = tree["stages"].values() if "stages" in tree else [tree]
        return [str(out["md5"]) for stage in stages for out in stage.get("outs", []) if out.get("md5")]
    except (YAMLError, TypeError, AttributeError, KeyError, UnicodeDecodeError) as error:
        raise BadInput(
            "dvc_failed", "data.dvc or dvc.lock is no DVC file", constraint="written by DVC", knob="git log -- data.dvc dvc.lock"
        ) from error


def bring_back(root: Path, say: Say) -> None:
    """Link what data.dvc and dvc.lock name from the cache, or fetch it where a remote is set; what is nowhere is stale, no error.

    DVC brings a folder back whole or not at all, so part of a data version is never taken for the whole.
    """
    names = {"data.dvc": "data.dvc", "dvc.lock": "dvc.yaml"}
    found = [name for name in names if (root / name).is_file()]
    whole = all(_whole(cache_of(root), md5) for name in found for md5 in pointers((root / name).read_bytes()))
    verb = "checkout" if whole or remote_of(root) in ("", "embedded") else "pull"
    if found:
        failure = dvc(root, verb, "--quiet", "--allow-missing", *(names[name] for name in found))
        if failure:
            say(f"dvc {verb} brought back only a part: {failure}")


def dvc(root: Path, *arguments: str) -> str:
    """Run dvc in ``root`` for DVC_TIMEOUT_S seconds at most; the last line of what went wrong, "" where nothing did."""
    try:
        result = run_child([*DVC, *arguments], cwd=root, on_line=lambda line: None, timeout_s=DVC_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no end after {DVC_TIMEOUT_S:g} s"
    said = [line for line in result.tail if line.startswith("ERROR")] or [line for line in result.tail if line.strip()] or ["no output"]
    return "" if result.returncode == 0 else said[-1]


def _recover(root: Path, base: str, say: Say) -> None:
    """Put right what a killed process can leave in a worktree. The caller holds the run's lock, so nobody else works here."""
    locks = root / ".dvc" / "tmp" / "rwlock"
    holders = _holders(locks)
    deadline = time.monotonic() + ORPHANS_S
    while any(_works_in(pid, root) for pid in holders) and time.monotonic() < deadline:
        time.sleep(0.2)
    if holders:
        locks.unlink()
        say(f"recovered the DVC lock that a process of the former attempt left when it died ({', '.join(map(str, holders))})")
    lock = root / "dvc.lock"
    try:
        if lock.is_file():
            pointers(lock.read_bytes())
    except BadInput:
        lock.unlink()
        if try_git(root, "cat-file", "-e", f"{base}:dvc.lock").returncode == 0:
            lock.write_bytes(try_git(root, "cat-file", "blob", f"{base}:dvc.lock").stdout)
        say("dvc.lock was cut short by the crash and is put back as it was at the run's start")


def _holders(rwlock: Path) -> list[int]:
    """Process ids that DVC's rwlock names."""
    try:
        tree = json.loads(rwlock.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError:
        return [0]  # the process died while it wrote
    entries: Iterable[Any] = [one for place in tree.values() for held in place.values() for one in (held if isinstance(held, list) else [held])]
    return sorted({int(entry["pid"]) for entry in entries if isinstance(entry, dict) and "pid" in entry})


def _works_in(pid: int, root: Path) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(root)
    except (psutil.Error, OSError, ValueError):
        return False
