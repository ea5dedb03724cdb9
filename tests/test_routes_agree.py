"""One definition of the pipeline: whichever door is taken, dvc.lock comes out the same."""

from __future__ import annotations

import subprocess

import pytest
from conftest import Project

from tasks.core.artifacts import BentoRef, DatasetRef, EvaluationReport, GateDecision, TrainedModel

pytestmark = pytest.mark.slow


def test_the_two_routes_leave_the_same_lock(finished: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    """dvc repro on the data alone, in a clone of the same commit, against the flow's dvc.lock, byte for byte."""
    clone = tmp_path_factory.mktemp("routes") / "clone"
    subprocess.run(["git", "clone", "-q", str(finished.root), str(clone)], check=True)
    other = Project(clone)
    other.run("dvc", "pull", "data.dvc")
    other.run("dvc", "repro")
    assert (other.root / "dvc.lock").read_bytes() == (finished.root / "dvc.lock").read_bytes()
    assert other.run("git", "diff", "--stat", "data.dvc").stdout == ""


def test_a_plain_dvc_pull_brings_the_embedded_data_and_what_was_made_of_them(project: Project) -> None:
    """As the README has it. The lock may be older than the code; what it names must be in the remote inside the repository."""
    project.run("dvc", "pull")
    for kind in (DatasetRef, TrainedModel, EvaluationReport, GateDecision, BentoRef):
        kind.load(project.root).verify()
    assert project.run("git", "status", "--porcelain").stdout == ""
    assert '"accuracy"' in project.run("dvc", "metrics", "show", "--json").stdout
