"""The data version as DVC keeps it: restore data/ from data.dvc, and move data.dvc to what data/ holds.

DVC is used as a library, its progress and hints silenced. Its lock fails at once on contention, so every call here waits.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.core.errors import BadInput, Transient
from tasks.core.files import STATE, write_atomic

if TYPE_CHECKING:
    from dvc.repo import Repo

EMBEDDED = "embedded"
"""The remote inside the repository that ships the embedded digits: only a maintainer pushes there, by ``dvc push -r embedded``."""
TRACKED = "data"
MARKER = Path(TRACKED) / "dataset.json"
OWN_NAMES = {"dataset.json", "shards", "labels"}
LAST_VERSION = STATE / "data.version"
WAIT_S = 60.0
T = TypeVar("T")


def restore_data(root: Path) -> str:
    """Where data/ is absent and data.dvc is there, bring that version back from DVC's cache or its remotes.

    Returns what was done in words, "" where nothing was to do. A version that is nowhere to be had is said as such: the
    caller then makes data/ again from its source. Raises BadInput ``not_a_repository``, ``data_foreign`` where data/ holds
    files that are not ours, ``data_behind`` where data.dvc came from elsewhere and names another version than data/ holds, and
    Transient ``lock_busy``.
    """
    _require_repository(root)
    _require_own_files(root / TRACKED)
    pointer = root / f"{TRACKED}.dvc"
    if not pointer.is_file():
        return ""
    version = _version(pointer)
    if (root / MARKER).is_file():
        if _last_version(root) != version:
            _require_in_step(root, pointer)
        return ""
    _remember(root, version)
    with open_repo(root) as repo:
        for remote in (None, *_remotes(repo)):
            if _fetched(repo, pointer, remote):
                return f"data.dvc {version[:8]} restored from {f'remote {remote}' if remote else 'the cache'}"
    return f"data.dvc {version[:8]} is in no cache or remote that can be reached: data/ is made again from the source"


def _require_own_files(folder: Path) -> None:
    """Raise BadInput ``data_foreign`` if somebody keeps files of theirs in data/, which DVC and ingest replace whole."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if name not in OWN_NAMES and not name.endswith(".part")]
    if foreign:
        raise BadInput(
            "data_foreign",
            "data/ holds files that are not Trainyard's",
            value=foreign[0],
            constraint="left to ingest",
            knob="ingest.location to another folder, and move them there",
        )


def _require_in_step(root: Path, pointer: Path) -> None:
    """Raise BadInput ``data_behind`` if data/ differs from ``pointer``, which another than this project's ingest has moved."""
    with open_repo(root) as repo:
        if _waiting(lambda: repo.status(targets=[str(pointer.resolve())]), "dvc status"):
            raise BadInput(
                "data_behind",
                "data.dvc names another version than data/ holds",
                value=f"data.dvc {_version(pointer)[:8]}",
                constraint="the version in data/",
                knob="dvc pull data.dvc to take it, or dvc add data to keep what is here",
            )


def _last_version(root: Path) -> str:
    """The version of data/ that this folder's last ingest or restore left, "" where there was none."""
    path = root / LAST_VERSION
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _remember(root: Path, version: str) -> None:
    write_atomic(root / LAST_VERSION, version.encode())


def track_data(root: Path, push: bool) -> tuple[str, str]:
    """``dvc add data``, then push that version to the default remote, where one is set that is not the embedded one.

    Equal data give an equal data.dvc. Returns its md5 and what was done: "unchanged" or "moved", and where it was pushed.
    Raises BadInput ``not_a_repository`` or ``dvc_failed``, Transient ``lock_busy`` or ``remote_unavailable``.
    """
    _require_repository(root)
    pointer = root / f"{TRACKED}.dvc"
    before = pointer.read_bytes() if pointer.is_file() else b""
    with open_repo(root) as repo:
        _waiting(lambda: repo.add(str(root.resolve() / TRACKED)), "dvc add data")
        done = "unchanged" if pointer.read_bytes() == before else "moved"
        remote = repo.config["core"].get("remote")
        if push and remote and remote != EMBEDDED:
            try:
                _waiting(lambda: repo.push(targets=[str(pointer.resolve())], remote=remote), "dvc push")
            except (BadInput, Transient):
                raise
            except Exception as error:  # each kind of storage raises its own
                raise Transient(
                    "remote_unavailable",
                    f"data.dvc {done}, and its push to the DVC remote {remote!r} failed",
                    value=_first_line(error),
                    constraint="a remote that can be written",
                    knob=f"dvc remote modify {remote}, or ingest.push: false",
                ) from error
            done += f", pushed to {remote}"
    _remember(root, _version(pointer))
    return _version(pointer), done


def _require_repository(root: Path) -> None:
    here = root.resolve()
    if not any((folder / ".git").exists() for folder in (here, *here.parents)):
        raise BadInput("not_a_repository", "no git repository here", value=here, constraint="a git repository", knob="git init && dvc init")
    if not (here / ".dvc").is_dir():
        raise BadInput("not_a_repository", "no DVC repository here", value=here, constraint="a DVC repository", knob="git init && dvc init")


def _require_merged(path: Path) -> None:
    """Raise BadInput ``lock_conflict`` where git left its marks of a merge that nobody finished."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    marked = next((number for number, line in enumerate(lines, 1) if line.startswith((b"<<<<<<< ", b">>>>>>> "))), 0)
    if marked:
        raise BadInput(
            "lock_conflict",
            f"{path.name} holds an unfinished merge",
            value=f"marks in line {marked}",
            constraint="one side, whole",
            knob=f"git checkout --ours {path.name} (or --theirs), then dvc repro",
        )


@contextlib.contextmanager
def open_repo(root: Path) -> Iterator[Repo]:
    """The repository, with DVC's own words on stdout, stderr and in the log withheld while it is open."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    for name in ("dvc.lock", "data.dvc", "dvc.yaml"):
        _require_merged(root / name)
    logger = logging.getLogger("dvc")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), Repo(str(root.resolve())) as repo:
            yield repo
    except DvcException as error:
        raise BadInput("dvc_failed", "DVC refused", value=_first_line(error), knob="what it names; `dvc doctor` tells more") from error
    finally:
        logger.setLevel(level)


def _remotes(repo: Repo) -> list[str]:
    """Names of the remotes, the default one first."""
    default = repo.config["core"].get("remote")
    return sorted(repo.config["remote"], key=lambda name: (name != default, name))


def _fetched(repo: Repo, pointer: Path, remote: str | None) -> bool:
    """Whether data/ could be brought back, from ``remote`` or with None from the cache alone; else it is absent again."""
    target = [str(pointer.resolve())]
    bring: Callable[[], Any] = (lambda: repo.pull(target, remote=remote, force=True)) if remote else (lambda: repo.checkout(target, force=True))
    try:
        _waiting(bring, "dvc pull")
    except Transient:
        raise
    except Exception:  # away, empty or broken alike: the next remote may have it
        pass
    else:
        if (pointer.parent / MARKER).is_file():
            return True
    shutil.rmtree(pointer.parent / TRACKED, ignore_errors=True)  # a part of a version is none
    return False


def _waiting(action: Callable[[], T], what: str) -> T:
    """``action``, tried again with jitter for WAIT_S seconds while another DVC command holds the lock."""
    from dvc.lock import LockError
    from dvc.rwlock import RWLockFileCorruptedError, RWLockFileFormatError

    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return action()
        except (LockError, RWLockFileCorruptedError, RWLockFileFormatError) as error:
            if time.monotonic() > deadline:
                raise Transient(
                    "lock_busy", f"{what}: another DVC command holds the lock", value=f"busy for {WAIT_S:.0f} s", constraint="free"
                ) from error
            time.sleep(random.uniform(0.1, 0.5))


def _version(pointer: Path) -> str:
    """The md5 of data/ that data.dvc holds, without ".dir"."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        version = str(YAML(typ="safe", pure=True).load(pointer)["outs"][0]["md5"])
    except (YAMLError, KeyError, IndexError, TypeError) as error:
        raise BadInput(
            "dvc_failed", f"{pointer.name} is no DVC file", constraint="written by dvc add", knob=f"git checkout {pointer.name}"
        ) from error
    return version.removesuffix(".dir")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
