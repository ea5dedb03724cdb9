"""What users get wrong: each mistake ends with one line that names value, constraint and knob, and leaves nothing half-written."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from conftest import Project

from tasks.core.config import apply_overrides
from tasks.core.process import spare_port

pytestmark = pytest.mark.slow


def png(seed: int, side: int = 16) -> bytes:
    """A random RGB PNG."""
    noise = random.Random(seed)
    raw = b"".join(b"\0" + noise.randbytes(3 * side) for _ in range(side))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(raw))
        + chunk(b"IEND", b"")
    )


def images(folder: Path, **counts: int) -> Path:
    """A folder of class folders with so many images each."""
    seed = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            seed += 1
            (folder / name / f"{index:03d}.png").write_bytes(png(seed))
    return folder


def use(project: Project, location: Path, **overrides: dict[str, object]) -> None:
    apply_overrides({"ingest": {"source": "folder", "location": str(location)}, **overrides}, project.root / "params.yaml")


def told(done: subprocess.CompletedProcess[str], code: str, *parts: str) -> None:
    """Exactly one error line, the last on stderr, with its code and parts; exit code 2; no traceback."""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error[{code}]: "), done.stderr
    for part in parts:
        assert part in last
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout


def nothing_half_written(project: Project) -> None:
    left = [path for path in project.root.rglob("*.part*") if ".git" not in path.parts]
    assert not left
    assert "data.dvc" not in project.run("git", "status", "--porcelain").stdout


def test_a_missing_folder(project: Project) -> None:
    use(project, project.root / "nowhere")
    before = (project.root / "data.dvc").read_bytes()
    told(project.python("-m", "tasks.ingest", check=False), "source_unavailable", "nowhere", "ingest.location")
    nothing_half_written(project)
    assert (project.root / "data.dvc").read_bytes() == before


@pytest.mark.parametrize(("counts", "code"), [({}, "too_few_classes"), ({"cat": 20}, "too_few_classes"), ({"cat": 20, "dog": 0}, "empty_class")])
def test_an_empty_folder_one_class_and_an_empty_class(project: Project, tmp_path: Path, counts: dict[str, int], code: str) -> None:
    location = images(tmp_path / "source", **counts)
    location.mkdir(exist_ok=True)
    use(project, location)
    told(project.python("-m", "tasks.ingest", check=False), code)
    nothing_half_written(project)


def start_over(project: Project, location: Path, **overrides: dict[str, object]) -> None:
    """Forget the embedded data and ingest ``location``."""
    (project.root / "data.dvc").unlink()
    use(project, location, **overrides)
    project.python("-m", "tasks.ingest")


def test_a_class_with_fewer_images_than_splits(project: Project, tmp_path: Path) -> None:
    start_over(project, images(tmp_path / "source", cat=40, dog=40, bird=2), validate={"min_images_per_class": 1})
    done = project.python("-m", "tasks.validate", check=False)
    if done.returncode == 0:
        done = project.python("-m", "tasks.prepare", check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2
    assert "class_too_small" in last or "validation_failed" in last
    assert "bird" in last
    assert "2" in last
    assert not (project.root / "artifacts" / "cache").exists()


def test_corrupt_images_within_the_limit_are_set_aside_and_named_and_beyond_it_stop_the_run(project: Project, tmp_path: Path) -> None:
    location = images(tmp_path / "source", cat=150, dog=150)
    (location / "cat" / "broken.png").write_bytes(png(9999)[:200])
    start_over(project, location)
    project.python("-m", "tasks.validate")
    report = (project.root / "artifacts" / "validation" / "report.json").read_text(encoding="utf-8")
    assert "broken.png" in report
    for index in range(9):
        (location / "dog" / f"bad{index}.png").write_bytes(b"<html>no picture</html>" + bytes([index]))
    project.python("-m", "tasks.ingest")
    done = project.python("-m", "tasks.validate", check=False)
    told(done, "validation_failed", "validate.min_decodable_share")
    assert '"success": false' in (project.root / "artifacts" / "validation" / "report.json").read_text(encoding="utf-8")
    told(project.python("-m", "tasks.prepare", check=False), "validation_failed")


def test_a_typo_in_params_is_said_before_anything_starts(project: Project) -> None:
    path = project.root / "params.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("epochs:", "epoch:"), encoding="utf-8")
    for module in ("flows.local", "tasks.ingest", "tasks.validate", "tasks.train"):
        done = project.python("-m", module, check=False)
        told(done, "params_invalid", "train.epoch", "train.epochs")
    assert not (project.root / "data").exists()


def test_a_folder_without_git(project: Project) -> None:
    (project.root / ".git").rename(project.root / ".git-away")
    told(project.python("-m", "tasks.ingest", check=False), "not_a_repository", "git init")
    told(project.python("-m", "flows.local", check=False), "not_a_repository", "git init")


def test_an_unknown_source_names_the_nearest(project: Project) -> None:
    apply_overrides({"ingest": {"source": "foldr"}}, project.root / "params.yaml")
    told(project.python("-m", "tasks.ingest", check=False), "unknown_source", "foldr", "folder")


def test_an_option_that_does_not_exist(project: Project) -> None:
    told(project.python("-m", "flows.local", "epochs", check=False), "unknown_option", "epochs", "section.key=value")
    told(project.python("-m", "tasks.register", "--force", check=False), "unknown_option", "--force")


def test_a_taken_port_stops_deploy_before_anything_is_stopped_and_the_flow_says_so(finished: Project) -> None:
    """The flow's last line carries the stage's own error through two processes."""
    path = finished.root / "params.yaml"
    params = path.read_bytes()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", spare_port()))
        taken.listen()
        port = taken.getsockname()[1]
        try:
            apply_overrides({"deploy": {"port": port}}, path)
            told(finished.python("-m", "tasks.deploy", check=False), "port_taken", str(port), "deploy.port")
        finally:
            path.write_bytes(params)
    assert "nothing changed" in finished.retrain().output


def test_the_flow_ends_with_the_stages_own_line(project: Project) -> None:
    use(project, project.root / "nowhere")
    done = project.python("-m", "flows.local", check=False)
    told(done, "source_unavailable", "nowhere", "ingest.location")


def test_png_maker_makes_what_pillow_reads() -> None:
    code = "import io, sys; from PIL import Image; print(Image.open(io.BytesIO(sys.stdin.buffer.read())).convert('RGB').size)"
    done = subprocess.run([sys.executable, "-c", code], input=png(1), capture_output=True, check=True)
    assert done.stdout == b"(16, 16)\n"
