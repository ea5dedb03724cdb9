"""The packaged Bento: refused without the gate's approval, the same bytes for the same inputs, and nothing in it that does not belong there."""

from __future__ import annotations

import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
from tiny_project import CLASSES, REPO, Project, make_project

from tasks.core.artifacts import BentoRef, EvaluationReport, GateDecision, ImageCache, TrainedModel
from tasks.core.config import PackageConfig
from tasks.core.errors import BadInput, Rejected
from tasks.deploy import install
from tasks.package import CODE, data_version, package, pinned, stored_xz, trace

DATA_VERSION = "0123456789abcdef" * 2 + ".dir"


def build(project: Project, out: Path, config: PackageConfig | None = None, code: Path = REPO) -> BentoRef:
    return package(project.model, project.report, project.decision, config or PackageConfig(), data_version=DATA_VERSION, code=code, out=out)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def bento(project: Project) -> BentoRef:
    return build(project, project.root)


@pytest.fixture(scope="module")
def members(bento: BentoRef) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(bento.path("service.bento").read_bytes()), mode="r:xz") as tar:
        return {member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar.getmembers()}


def test_the_same_inputs_give_the_same_bytes_and_nothing_is_left_behind(
    project: Project, bento: BentoRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder, another time, another temporary folder, another umask: the archive is what DVC caches."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    umask = os.umask(0o077)
    try:
        again = build(project, tmp_path / "elsewhere")
    finally:
        os.umask(umask)
    assert again.path("service.bento").read_bytes() == bento.path("service.bento").read_bytes()
    assert again.digest == bento.digest
    assert list(scratch.iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "elsewhere" / "artifacts" / "bento").iterdir()) == ["bento.json", "service.bento"]


def test_it_holds_our_code_the_model_and_its_origin(project: Project, members: dict[str, bytes], bento: BentoRef) -> None:
    assert members["src/model/model.onnx"] == project.model.path("model.onnx").read_bytes()
    for name in CODE:
        assert members[f"src/{name}"] == (REPO / name).read_bytes()
    ours = {name for name in members if name.endswith(".py")}
    assert ours == {f"src/{name}" for name in CODE if name.endswith(".py")}
    origin = json.loads(members["src/model/provenance.json"])
    assert origin["tag"] == bento.tag
    assert origin["classes"] == list(CLASSES)
    assert origin["data"] == {"version": DATA_VERSION, "images": 30, "batches": 1}
    assert origin["accuracy"]["images"] == 24
    chain = {"DatasetRef", "ValidationReport", "ImageCache", "TrainingSet", "TrainedModel", "EvaluationReport", "GateDecision"}
    assert set(origin["artifacts"]) == chain
    assert origin["artifacts"]["DatasetRef"] == project.dataset.digest
    assert origin["artifacts"]["GateDecision"] == project.decision.digest


def test_it_needs_no_torch_and_every_version_is_exact(members: dict[str, bytes]) -> None:
    lines = members["env/python/requirements.txt"].decode().split()
    assert all("==" in line for line in lines)
    names = {line.split("==")[0].lower() for line in lines}
    assert {"bentoml", "numpy", "onnxruntime", "pillow", "starlette", "uvicorn"} <= names
    assert not names & {"torch", "torchvision", "mlflow", "prefect", "dvc", "great-expectations", "pandas"}


def test_no_path_of_this_machine_and_no_time_is_in_it(project: Project, members: dict[str, bytes]) -> None:
    for name, data in members.items():
        for path in (REPO, project.root, Path.home(), Path(sys.prefix)):
            assert path == Path("/root") or str(path).encode() not in data, (name, path)
        assert b"trainyard-bento-" not in data, name
    assert b"creation_time: '2000-01-01T00:00:00" in members["bento.yaml"]


def test_bentoml_imports_the_archive_twice_and_over_half_a_bento(bento: BentoRef, tmp_path: Path) -> None:
    folder = install(bento, tmp_path)
    assert (folder / "bento.yaml").is_file()
    (folder / "bento.yaml").unlink()
    (folder / "src" / "service" / "app.py").write_text("broken")
    assert install(bento, tmp_path) == folder
    assert (folder / "src" / "service" / "app.py").read_bytes() == (REPO / "service" / "app.py").read_bytes()


def test_the_version_follows_the_model_the_code_and_the_config(project: Project, bento: BentoRef, tmp_path: Path) -> None:
    code = tmp_path / "code"
    for name in CODE:
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, code / name)
    with (code / "service" / "page.html").open("a") as handle:
        handle.write("<!-- changed -->")
    other_code = build(project, tmp_path / "a", code=code)
    other_config = build(project, tmp_path / "b", PackageConfig(max_batch=3))
    other_model = build(make_project(tmp_path / "c", sharpness=4.0), tmp_path / "c")
    assert len({bento.tag, other_code.tag, other_config.tag, other_model.tag}) == 4
    assert other_code.model_digest == other_config.model_digest == bento.model_digest != other_model.model_digest


def test_a_build_that_fails_leaves_no_marker(project: Project, tmp_path: Path) -> None:
    code = tmp_path / "code"
    for name in CODE:
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, code / name)
    (code / "service" / "app.py").write_text("raise SystemError('broken service')")
    with pytest.raises(RuntimeError, match="broken service"):
        build(project, tmp_path / "out", code=code)
    assert not (tmp_path / "out").exists()


def test_the_function_refuses_whatever_the_gate_did_not_approve(project: Project, tmp_path: Path) -> None:
    """A caller that skips require_approval gets no further."""
    rejected = make_project(tmp_path / "rejected", approved=False)
    with pytest.raises(Rejected, match="rejected"):
        build(rejected, tmp_path / "out")
    other = make_project(tmp_path / "other", sharpness=2.0)
    for mixed in (
        Project(project.root, (), project.dataset, project.model, other.report, project.decision),
        Project(project.root, (), project.dataset, other.model, other.report, project.decision),
        Project(project.root, (), project.dataset, project.model, project.report, other.decision),
    ):
        with pytest.raises(BadInput, match="artifact_foreign"):
            build(mixed, tmp_path / "out")
    forged = project.decision.model_copy(update={"checks": ()})
    with pytest.raises(Rejected):
        package(project.model, project.report, forged, PackageConfig(), data_version=None, code=REPO, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_model_file_than_the_judged_one_is_refused(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    with project.model.path("model.onnx").open("ab") as handle:
        handle.write(b"\0")
    with pytest.raises(BadInput, match="artifact_edited"):
        build(project, tmp_path)
    assert not BentoRef.exists(tmp_path)


def test_the_chain_to_the_data_must_be_whole(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    cache = ImageCache.load(tmp_path)
    cache.model_copy(update={"test_digest": "1" * 64}).save(tmp_path)
    with pytest.raises(BadInput, match="artifact_foreign"):
        trace(project.model, project.report)
    orphan = project.model.model_copy(update={"made_from": {}})
    with pytest.raises(BadInput, match="which data"):
        trace(orphan)


def stage(root: Path) -> subprocess.CompletedProcess[str]:
    """The stage as dvc.yaml runs it."""
    shutil.copy(REPO / "presets" / "digits.yaml", root / "params.yaml")
    return subprocess.run(
        [sys.executable, "-m", "tasks.package"], cwd=root, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True
    )


def test_the_stage_packages_what_the_project_holds(tmp_path: Path) -> None:
    make_project(tmp_path)
    (tmp_path / "data.dvc").write_text(f"outs:\n- md5: {DATA_VERSION}\n  size: 1\n  path: data\n")
    done = stage(tmp_path)
    assert done.returncode == 0, done.stderr
    bento = BentoRef.load(tmp_path).verify()
    assert bento.tag in done.stdout
    bento.require_made_from(TrainedModel.load(tmp_path), EvaluationReport.load(tmp_path), GateDecision.load(tmp_path))


@pytest.mark.parametrize(
    ("attack", "code", "exit_code"),
    [("missing", "no_verdict", 2), ("edited", "artifact_edited", 2), ("foreign", "artifact_foreign", 2), ("rejected", "rejected", 3)],
)
def test_the_stage_fails_closed_on_the_verdict(tmp_path: Path, attack: str, code: str, exit_code: int) -> None:
    project = make_project(tmp_path, approved=attack != "rejected")
    path = tmp_path / GateDecision.PATH
    if attack == "missing":
        path.unlink()
    elif attack == "edited":
        path.write_text(path.read_text().replace("first model", "worse model"))
    elif attack == "foreign":
        make_project(tmp_path, sharpness=3.0)
        project.decision.save(tmp_path)
    done = stage(tmp_path)
    assert done.returncode == exit_code
    assert done.stderr.splitlines()[-1].startswith(f"error[{code}]")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "artifacts" / "bento").exists()


@pytest.mark.parametrize("size", [0, 1, 3, 4, 127, 128, 65_535, 65_536, 65_537, 300_000, 2_097_152])
def test_the_stored_xz_stream_is_one_that_liblzma_reads(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert lzma.decompress(stored_xz(data), format=lzma.FORMAT_XZ) == data


def test_pins_follow_what_packages_need_here() -> None:
    pins = pinned(["starlette"])
    assert any(pin.startswith("anyio==") for pin in pins)
    assert pins == sorted(set(pins))
    assert pinned(["no-such-distribution"]) == []


def test_the_data_version_is_what_data_dvc_says(tmp_path: Path) -> None:
    assert data_version(tmp_path) is None
    (tmp_path / "data.dvc").write_text(f"outs:\n- md5: {DATA_VERSION}\n  hash: md5\n  path: data\n")
    assert data_version(tmp_path) == DATA_VERSION
