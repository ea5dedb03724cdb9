"""One definition of the pipeline: whichever door is taken, dvc.lock comes out the same."""

from __future__ import annotations

import subprocess

import pytest
from conftest import Project

pytestmark = pytest.mark.slow


def test_the_two_routes_leave_the_same_lock(finished: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    """dvc pull data.dvc and dvc repro in a clone of the same commit, as the README has it, against the flow's dvc.lock, byte for byte."""
    clone = tmp_path_factory.mktemp("routes") / "clone"
    subprocess.run(["git", "clone", "-q", str(finished.root), str(clone)], check=True)
    other = Project(clone)
    other.run("dvc", "pull", "data.dvc")
    other.run("dvc", "repro")
    assert (other.root / "dvc.lock").read_bytes() == (finished.root / "dvc.lock").read_bytes()
    assert other.run("git", "diff", "--stat", "data.dvc").stdout == ""
