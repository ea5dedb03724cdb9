"""Files that are whole or absent: canonical JSON, digests, atomic publishing, and a lock that waits."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.core.errors import BadInput, Transient

STATE = Path(".trainyard")
"""Machine-local state (checkpoints, servers, locks), git-ignored, below the project's root."""


def home_of(root: Path) -> Path:
    """The project's folder: ``root`` itself, or where ``root`` is a run's worktree, the folder that it was made from."""
    link = root / STATE / "home"
    return link.resolve() if link.is_symlink() else root


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys, two-space indent, no NaN and a final newline: equal values give equal bytes."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def digest_of(value: Any) -> str:
    """Hex sha256 of ``value`` as canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write aside in the same folder, fsync, rename: readers see the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
            os.fchmod(handle.fileno(), mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def fsync_dir(path: Path) -> None:
    """Make renames in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step by renameat2(2); False where the system or the file system cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return exchange is not None and exchange(here, os.fsencode(one), here, os.fsencode(other), flag) == 0


@contextmanager
def publish_dir(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` to fill; on success it takes ``target``'s place, on error it vanishes.

    Write the marker file (the artifact's JSON) last. Where the file system cannot exchange two names at once (Linux's local
    ones can), a crash between two renames leaves no ``target`` at all, which every reader treats as "not made yet". Left-over
    siblings are removed on the next call.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f".{target.name}.*.part"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        work.chmod(0o755)
        yield work
        for path in work.rglob("*"):
            if path.is_file():
                with path.open("rb") as handle:
                    os.fsync(handle.fileno())
        old = work
        if not (target.exists() and _exchange(work, target)):
            if target.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
                target.replace(old)
            work.replace(target)
        fsync_dir(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file, or a copy where the file system gives none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def file_lock(path: Path, timeout_s: float, what: str) -> Iterator[None]:
    """Hold an advisory lock on ``path``, waiting up to ``timeout_s`` seconds with jitter.

    TRAINYARD_LOCK_TIMEOUT_S, a number of seconds, takes the place of ``timeout_s``. The kernel frees the lock when its
    holder dies, so it is never stale. Raises Transient ``lock_busy``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    asked = os.environ.get("TRAINYARD_LOCK_TIMEOUT_S", "")
    if asked:
        try:
            timeout_s = float(asked)
        except ValueError:
            raise BadInput("unknown_option", "TRAINYARD_LOCK_TIMEOUT_S", value=asked, constraint="a number of seconds") from None
    with path.open("a+") as handle:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    handle.seek(0)
                    raise Transient(
                        "lock_busy",
                        f"{what} is in use",
                        value=f"holder {handle.read().strip() or 'unknown'} after {timeout_s:.0f} s",
                        constraint="free",
                        knob="TRAINYARD_LOCK_TIMEOUT_S, or wait for the other run",
                    ) from None
                time.sleep(random.uniform(0.05, 0.25))
        handle.seek(0)
        handle.truncate()
        handle.write(f"pid {os.getpid()}")
        handle.flush()
        yield


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Take the lock of ``file_lock`` on ``path`` without waiting: yields whether it was free and is held now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock on ``path``; the file is neither made nor written."""
    try:
        handle = path.open("rb")
    except FileNotFoundError:
        return False
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
