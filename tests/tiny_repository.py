"""A git and DVC repository with data versions and a one-stage pipeline, written by hand in milliseconds, as DVC would leave them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tasks.core.process import QUIET

PARAMS = (Path(__file__).parents[1] / "presets" / "digits.yaml").read_text(encoding="utf-8")
PIPELINE = """stages:
  model:
    cmd: python make.py
    deps: [data]
    outs: [artifacts/model.txt]
    metrics: [artifacts/evaluation/metrics.json]
"""
ENV = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "User"), ("EMAIL", "user@localhost"))}


def git(root: Path, *arguments: str, check: bool = True) -> str:
    """Output of git as the user of the repository."""
    import os

    done = subprocess.run(["git", *arguments], cwd=root, env={**os.environ, **QUIET, **ENV}, capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"git {arguments}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@dataclass
class Repository:
    """A project's folder and what a run's ``say`` was told."""

    root: Path
    said: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.said.append(line)

    def commit(self, *names: str) -> str:
        """Commit ``names`` as the user; returns the commit."""
        git(self.root, "add", "--", *names)
        git(self.root, "commit", "-qm", f"edit {' '.join(names)}")
        return git(self.root, "rev-parse", "HEAD")


def stored(cache: Path, data: bytes, ending: str = "") -> str:
    """Put bytes into a DVC cache; returns their md5."""
    md5 = hashlib.md5(data).hexdigest() + ending
    path = cache / "files" / "md5" / md5[:2] / md5[2:]
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(data)
        path.chmod(0o444)
    return md5


def make_version(root: Path, cache: Path, data: Mapping[str, str], model: str) -> None:
    """Write data/, artifacts/, data.dvc and dvc.lock below ``root`` as an ingest of ``data`` and a run of the pipeline leave them."""
    files = {"dataset.json": json.dumps(sorted(data)), **{f"shards/{name}": text for name, text in data.items()}}
    listed = [{"md5": stored(cache, text.encode()), "relpath": name} for name, text in sorted(files.items())]
    version = stored(cache, json.dumps(listed, sort_keys=True).encode(), ".dir")
    shutil.rmtree(root / "data", ignore_errors=True)
    outs = {"artifacts/evaluation/metrics.json": json.dumps({"accuracy": model}), "artifacts/model.txt": model}
    for name, text in {**{f"data/{name}": text for name, text in files.items()}, **outs}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).unlink(missing_ok=True)
        (root / name).write_text(text)
    size = sum(len(text) for text in files.values())
    (root / "data.dvc").write_text(f"outs:\n- md5: {version}\n  size: {size}\n  nfiles: {len(files)}\n  hash: md5\n  path: data\n")
    lock = "schema: '2.0'\nstages:\n  model:\n    cmd: python make.py\n    deps:\n    - path: data\n      hash: md5\n"
    lock += f"      md5: {version}\n      size: {size}\n      nfiles: {len(files)}\n    outs:\n"
    lock += "".join(
        f"    - path: {name}\n      hash: md5\n      md5: {stored(cache, text.encode())}\n      size: {len(text)}\n" for name, text in outs.items()
    )
    (root / "dvc.lock").write_text(lock)


def make_repository(root: Path) -> Repository:
    """A new one, on branch main, whose only commit holds the version of one shard "a" and of model "0"."""
    (root / ".dvc").mkdir(parents=True)
    (root / ".dvc" / "config").write_text("[core]\n    analytics = false\n    check_update = false\n")
    (root / ".dvc" / ".gitignore").write_text("/config.local\n/tmp\n/cache\n")
    (root / ".gitignore").write_text("/.trainyard/\n/artifacts/\n/data\n")
    (root / "dvc.yaml").write_text(PIPELINE)
    (root / "params.yaml").write_text(PARAMS)
    (root / "make.py").write_text("raise SystemExit('the tests run no stage')\n")
    make_version(root, root / ".dvc" / "cache", {"a": "first"}, "0")
    git(root, "init", "-q", "-b", "main")
    repository = Repository(root)
    repository.commit(".")
    return repository
