"""Old files below .trainyard that no run needs: checkpoints, champion files, Bentos, logs, parts of files that a crash left."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.backends import serving
from tasks.core import runs
from tasks.core.artifacts import Endpoint
from tasks.core.files import STATE, is_locked, try_lock

KEPT_BENTOS = 5
"""Bentos of each name that stay at any age, for a quick way back."""
DEPLOY_LOCK = STATE / "serve" / "deploy.lock"

UNFINISHED = (".*.part", "checkpoints/*/.*.part", "known/.*.part", "champion/.*.part", "system/.*.part", "serve/.*.part", "bentoml/tmp/*")
"""What a crash leaves of a write that had not come to its end, below .trainyard."""


@dataclass(frozen=True)
class Leftover:
    """Files or folders that can go, and why."""

    what: str
    why: str
    paths: tuple[Path, ...]
    lock: Path | None = None
    """taken while they go; where it is held they stay"""

    def remove(self) -> None:
        """Remove them. Raises OSError where that fails or the lock is held."""
        if self.lock is None:
            return self._remove()
        with try_lock(self.lock) as mine:
            if not mine:
                raise OSError(f"{self.lock} is held")
            self._remove()

    def _remove(self) -> None:
        for path in self.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Server(Leftover):
    """A server of the classifier that is not in service, with its folder."""

    root: Path = Path()

    def _remove(self) -> None:
        serving.retire(self.root, self.paths[0].name)


def old_files(root: Path, models: set[str], age_s: float, young_s: float) -> Iterator[Leftover | str]:
    """What can go, or in words why it is not looked at. ``models`` are the digests that an alias names.

    Checkpoints, Bentos, logs, copies of sources and samples of system metrics go after ``age_s`` seconds without use; what is made again at need or
    was never finished after ``young_s``.
    """
    yield from _checkpoints(root, age_s)
    yield from _champions(root, models, young_s)
    for path in _older(root, "system/*.csv", age_s):
        yield Leftover(f"system metrics {path.stem[:12]}", _days(path), (path,))
    for path in _older(root, "pixels/*/", age_s):
        yield Leftover(f"decoded pixels {path.name[:12]}", _days(path), (path,), root / STATE / "locks" / "pixels.lock")
    for pattern in UNFINISHED:
        for path in _older(root, pattern, young_s):
            yield Leftover(f"unfinished {path.relative_to(root)}", _days(path), (path,))
    for path in _older(root, "known/*.parquet", age_s):
        yield Leftover(f"what was read of source {path.stem[:12]}", _days(path), (path,))
    for folder in _older(root, "downloads/*/", age_s):
        yield Leftover(f"copy {folder.name[:12]} of a source", _days(folder), (folder,), folder / "lock")
    yield from _servers(root)
    yield from _bentos(root, models, age_s)


def _checkpoints(root: Path, age_s: float) -> Iterator[Leftover]:
    for folder in _older(root, "checkpoints/*/", age_s):
        if not is_locked(folder / "lock"):
            yield Leftover(f"checkpoints {folder.name[:12]}", _days(folder), (folder,), folder / "lock")


def _champions(root: Path, models: set[str], young_s: float) -> Iterator[Leftover]:
    """Files of models fetched from the registry that bear no alias now."""
    for folder in _older(root, "champion/*/", young_s):
        if folder.name not in models:
            yield Leftover(f"files of the former champion {folder.name[:12]}", "no alias names it", (folder,))


def _bentos(root: Path, models: set[str], age_s: float) -> Iterator[Leftover | str]:
    """Bentos that nobody serves, deployed last or needs for an alias, beyond the newest of each name, with their logs."""
    store = root / STATE / "bentoml" / "bentos"
    former = serving.current(root)
    needed = {former.tag if former else "", *_endpoints(root)}
    for name in sorted(store.glob("*/")):
        versions = sorted((path for path in name.glob("*/") if not path.is_symlink()), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in versions[KEPT_BENTOS:]:
            tag = f"{name.name}:{path.name}"
            if tag in needed or model_of(path) in models or time.time() - path.stat().st_mtime < age_s:
                continue
            log = root / STATE / "serve" / f"{name.name}-{path.name}.log"
            yield Leftover(f"Bento {tag}", _days(path), (path, log), root / DEPLOY_LOCK)
    present = {f"{path.parent.name}-{path.name}" for path in store.glob("*/*/")}
    for log in _older(root, "serve/*.log", age_s):
        if log.stem not in present:
            yield Leftover(f"log {log.name}", "its Bento is gone", (log,), root / DEPLOY_LOCK)


def _servers(root: Path) -> Iterator[Leftover | str]:
    """Servers that a crash left beside the one in service, and the folders of dead ones."""
    if is_locked(root / DEPLOY_LOCK):
        yield "a deployment is at work"
        return
    former = serving.current(root)
    alive = set(serving.running(root))
    for name in sorted(alive | {path.name for path in (root / STATE / "serve").glob("*/")}):
        if former is None or name != former.id:
            why = "it runs beside the one in service" if name in alive else "it is dead"
            yield Server(f"server {name}", why, (root / STATE / "serve" / name,), root / DEPLOY_LOCK, root)


def _endpoints(root: Path) -> Iterator[str]:
    """Tags that an endpoint.json names, of the project or of a worktree: `make serve` starts them again."""
    for folder in (root, *(root / runs.WORKTREES).glob("*/")):
        try:
            yield str(json.loads((folder / Endpoint.PATH).read_bytes())["tag"])
        except (OSError, ValueError, KeyError, TypeError):
            continue


def model_of(bento: Path) -> str:
    """The model's digest that a stored Bento's provenance names; "" where there is none."""
    for path in bento.glob("src/model/provenance.json"):
        try:
            return str(json.loads(path.read_bytes())["artifacts"]["TrainedModel"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""


def _older(root: Path, pattern: str, age_s: float) -> list[Path]:
    """What matches below .trainyard and was not written for ``age_s`` seconds (of a folder: no file right in it)."""
    before = time.time() - age_s
    return [path for path in sorted((root / STATE).glob(pattern)) if not path.is_symlink() and _written(path) < before]


def _written(path: Path) -> float:
    inside: Callable[[Path], list[Path]] = lambda folder: list(folder.iterdir()) if folder.is_dir() else []  # noqa: E731
    return max((entry.lstat().st_mtime for entry in (path, *inside(path))), default=0.0)


def _days(path: Path) -> str:
    return f"not written for {(time.time() - _written(path)) / 86400:.0f} days"
