"""Real photographs: presets/flowers.yaml and the shared archive end with a served flower classifier (few epochs here)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, make_project

from tasks.core.artifacts import DatasetRef, Endpoint, EvaluationReport, GateDecision
from tasks.core.config import apply_overrides
from tasks.core.process import spare_port

ARCHIVE = Path(os.environ.get("TRAINYARD_DATA", ROOT.parent / "shared" / "data")) / "flowers.zip"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not ARCHIVE.is_file(), reason=f"no {ARCHIVE.name} in $TRAINYARD_DATA or ../shared/data")
def test_flowers_from_archive_to_a_curl(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    shutil.copy(ROOT / "presets" / "flowers.yaml", project.root / "params.yaml")
    few = {"train": {"epochs": 3}, "gate": {"min_accuracy": 0.4, "min_class_recall": 0.1, "min_macro_f1": 0.35}}
    apply_overrides({"ingest": {"location": str(ARCHIVE)}, "deploy": {"port": spare_port()}, **few}, project.root / "params.yaml")
    try:
        project.retrain()
        data, report = DatasetRef.load(project.root), EvaluationReport.load(project.root)
        assert data.classes == ("daisy", "dandelion", "rose", "sunflower", "tulip")
        assert sum(data.counts.values()) > 4250
        assert {"duplicate", "conflicting_label"} >= {item.code for item in data.set_aside}
        assert GateDecision.load(project.root).approved
        assert report.accuracy > 0.4
        photo = tmp_path / "photo.jpg"
        with zipfile.ZipFile(ARCHIVE) as archive:
            name = next(name for name in sorted(archive.namelist()) if "sunflower" in name and name.endswith(".jpg"))
            photo.write_bytes(archive.read(name))
        url = f"{Endpoint.load(project.root).url}/classify"
        answer = json.loads(subprocess.run(["curl", "-sf", url, "-F", f"image=@{photo}"], capture_output=True, text=True, check=True).stdout)
        assert answer["label"] in data.classes
        assert sum(entry["probability"] for entry in answer["probabilities"]) == pytest.approx(1, abs=1e-4)
    finally:
        project.python("-m", "tasks.deploy", "--stop", check=False)
