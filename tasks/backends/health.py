"""What MLflow, the Bento store and DVC say of themselves, as one JSON object: the doctor's children.

    python -m tasks.backends.health mlflow|dvc

Nothing is made or changed but a few bytes beside DVC's cache, written and removed to see what the disk can do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks.backends import model_registry, upkeep
from tasks.backends.dvc_repo import open_repo
from tasks.backends.leftovers import model_of
from tasks.core import errors
from tasks.core.config import load_params
from tasks.core.errors import BadInput
from tasks.core.files import STATE
from tasks.core.process import die_with_parent, process_mark, quiet_environment

FICLONE = 0x40049409
"""ioctl_ficlone(2): the target shares the source's blocks."""


def mlflow(root: Path) -> dict[str, Any]:
    """The store, its dead runs, the champion, and the Bentos at hand by the digest of their model."""
    uri = model_registry.tracking_uri(root)
    store = root / STATE / "bentoml" / "bentos"
    said: dict[str, Any] = {"uri": uri.split("@")[-1], "client": version("mlflow"), "server": "", "champion": None, "dead": [], "alive": 0}
    said["bentos"] = {f"{path.parent.name}:{path.name}": model_of(path) for path in store.glob("*/*/") if not path.is_symlink()}
    said["made"] = not uri.startswith("sqlite:///") or Path(uri.removeprefix("sqlite:///")).is_file()
    if not said["made"]:
        return said  # to look would be to make it
    params = load_params(root / "params.yaml").register_
    if uri.startswith("http"):
        with urllib.request.urlopen(f"{uri.rstrip('/')}/version", timeout=5) as answer:
            said["server"] = answer.read(40).decode(errors="replace")
    dead, said["alive"] = upkeep.dead_runs(root, params.experiment)
    said["dead"] = [run.run_id for run in dead]
    for found in upkeep.in_use(root, params.model_name):
        if found.version == model_registry.alias_version(root, params.model_name, model_registry.CHAMPION):
            said["champion"] = {"name": found.name, "version": found.version, "digest": found.model_digest}
    return said


def dvc(root: Path) -> dict[str, Any]:
    """Version, cache, links that work between cache and project, remotes with what is wrong with each, and held locks."""
    said: dict[str, Any] = {"version": version("dvc"), "remotes": {}}
    with open_repo(root) as repo:
        cache = Path(repo.cache.local.path)
        said["cache"] = str(cache)
        said["default"] = repo.config["core"].get("remote", "")
        for name in repo.config["remote"]:
            try:
                odb = repo.cloud.get_remote_odb(name)
                said["remotes"][name] = "" if odb.fs.exists(odb.path) else "not there yet: made by the first push"
            except Exception as error:  # each kind of storage raises its own
                said["remotes"][name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no answer'}"
    said["links"] = _links(cache, root)
    said["stale"], said["busy"] = _locks(root)
    return said


def _links(cache: Path, root: Path) -> dict[str, bool] | str:
    """Which link types work from the cache into the project; in words why none could be tried."""
    folder = next(parent for parent in (cache, *cache.parents) if parent.is_dir())
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as one, tempfile.TemporaryDirectory(dir=root, prefix=".doctor-") as other:
            source = Path(one) / "source"
            source.write_bytes(b"trainyard")
            ways: dict[str, Callable[[Path], object]] = {
                "reflink": lambda target: _reflink(source, target),
                "hardlink": lambda target: os.link(source, target),
                "symlink": lambda target: target.symlink_to(source),
            }
            return {name: _works(way, Path(other) / name) for name, way in ways.items()}
    except OSError as error:
        return f"{folder} or {root.resolve()}: {error.strerror}"


def _reflink(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        fcntl.ioctl(writer, FICLONE, reader.fileno())


def _works(way: Callable[[Path], object], target: Path) -> bool:
    try:
        way(target)
    except OSError:
        return False
    return target.read_bytes() == b"trainyard"


def _locks(root: Path) -> tuple[list[int], list[str]]:
    """Process ids of dead holders of DVC's read-write lock, and the commands of living ones."""
    stale, busy = set(), set()
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        for entry in json.loads((root / ".dvc" / "tmp" / "rwlock").read_bytes()).values():
            writers = [entry["write"]] if entry.get("write") else []
            for holder in (*writers, *entry.get("read", [])):
                if process_mark(int(holder["pid"])):
                    busy.add(str(holder["cmd"])[:60])
                else:
                    stale.add(int(holder["pid"]))
    return sorted(stale), sorted(busy)


def main() -> None:
    """Print what the tool says."""
    tools = {"mlflow": mlflow, "dvc": dvc}
    name = " ".join(sys.argv[1:])
    if name not in tools:
        raise BadInput("unknown_option", "tasks.backends.health", value=name, constraint=" or ".join(tools))
    print(json.dumps(tools[name](Path())))


if __name__ == "__main__":
    die_with_parent()
    quiet_environment()
    sys.exit(errors.run(main))
