"""Faults injected into real stages: killed processes, full disks, refused memory, locked databases. Each end is honest, nothing is
half published, and the next run completes."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import Done, Project

from flows.bindings import failure_of
from tasks.core import daemons
from tasks.core.artifacts import BentoRef, GateDecision, ImageCache, ModelVersion, TrainedModel
from tasks.core.config import apply_overrides
from tasks.core.errors import BadInput, Transient, of_machine
from tasks.core.files import STATE

DVC = (sys.executable, "-m", "dvc")


def dvc_lines(folder: Path, command: str, shell: str) -> list[str]:
    """The lines that `dvc repro` leaves of a stage whose command is ``command``, run in the user's ``shell``."""
    (folder / "dvc.yaml").write_text(f"stages:\n  boom:\n    cmd: {command}\n    outs: [out]\n", encoding="utf-8")
    done = subprocess.run(
        [*DVC, "repro", "-s", "boom"], cwd=folder, env={**os.environ, "SHELL": shell}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode != 0
    return done.stdout.splitlines()


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_dvcs_words_about_a_killed_stage_become_one_line(tmp_path: Path, shell: str) -> None:
    for setting in (["init", "-q", "--no-scm"], ["config", "core.analytics", "false"]):
        subprocess.run([*DVC, *setting], cwd=tmp_path, check=True, capture_output=True)
    for number, retried, words in ((signal.SIGKILL, True, "for want of memory"), (signal.SIGBUS, True, "/dev/shm"), (signal.SIGSEGV, False, "bug")):
        code = f"import os; print('epoch 3/8', flush=True); os.kill(os.getpid(), {int(number)})"
        failure = failure_of("train", 255, dvc_lines(tmp_path, f'{sys.executable} -c "{code}"', shell))
        assert str(failure).startswith(f"error[stage_killed]: train was ended by {number.name}; got 'epoch 3/8' as its last words; ")
        assert "\n" not in str(failure)
        assert words in str(failure)
        assert (failure.exit_code == 75) is retried


def test_memory_that_is_refused_is_no_bug_of_ours(tmp_path: Path) -> None:
    """A real limit on the address space, in a stage's own frame."""
    code = "import sys; from tasks.core import errors; sys.exit(errors.run(lambda: print(len(bytearray(1 << 40)))))"
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # noqa: E731
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error[out_of_memory]: memory ran out; ")
    assert len(done.stderr.splitlines()) == 1


def test_a_full_disk_is_seen_through_what_libraries_wrap_around_it() -> None:
    full = OSError(28, "No space left on device")
    wrapped = RuntimeError("bentoml build failed with 1:\nTraceback\n  OSError: [Errno 28] No space left on device: '/x'\nmore")
    for error in (full, _chained(BadInput("dvc_failed", "DVC refused"), full), wrapped, sqlite3.OperationalError("database or disk is full")):
        told = of_machine(error)
        assert isinstance(told, Transient)
        assert told.code == "disk_full"
        assert "Traceback" not in str(told)
    assert of_machine(ValueError("No space in this name")) is None
    assert of_machine(_chained(ValueError("x"), KeyError("y"))) is None


def _chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class Small:
    """A project on a disk of its own that can be filled up; where no disk can be mounted, files are limited in size instead."""

    def __init__(self, project: Project, mounted: bool) -> None:
        self.project = project
        self.mounted = mounted
        self.ballast = project.root.parent / "ballast"
        (project.root.parent / "tmp").mkdir(exist_ok=True)
        self.environment = {"TMPDIR": str(project.root.parent / "tmp"), "PYTHONDONTWRITEBYTECODE": "1", "PATH": project.environment["PATH"]}

    def run(self, *command: str, left: int | None = None) -> Done:
        """Run a command with ``left`` bytes free on the disk, or with all of it."""
        limit: Callable[[], None] | None = None
        if left is not None and self.mounted:
            with self.ballast.open("wb") as ballast:
                os.posix_fallocate(ballast.fileno(), 0, shutil.disk_usage(self.project.root).free - left)
        elif left is not None:
            limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (left, left))  # noqa: E731
        try:
            environment = {**self.project.environment, **self.environment}
            return subprocess.run(command, cwd=self.project.root, env=environment, capture_output=True, text=True, preexec_fn=limit, timeout=200)
        finally:
            self.ballast.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def small(finished: Project, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    """A copy of the project on which everything ran, on a disk that can be filled."""
    disk = tmp_path_factory.mktemp("small")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(disk)], capture_output=True).returncode == 0
    try:
        root = shutil.copytree(finished.root, disk / "project", symlinks=True, ignore=shutil.ignore_patterns("prefect", "bentoml", "serve"))
        apply_overrides({"train": {"epochs": 2}}, root / "params.yaml")
        yield Small(Project(root), mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def told_full(done: Done) -> None:
    """One last line that names the full disk, exit code 75, and no traceback."""
    assert done.returncode == 75, f"{done.stdout}\n{done.stderr}"
    assert done.stderr.strip().splitlines()[-1].startswith("error[disk_full]: "), done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def parts(root: Path) -> list[str]:
    """Files that a write left behind unfinished."""
    return [str(path) for folder in ("artifacts", "data") for path in (root / folder).rglob("*.part")]


@pytest.mark.slow
def test_a_full_disk_in_prepare(small: Small) -> None:
    root = small.project.root
    before = ImageCache.load(root)
    for folder in ("artifacts/cache", ".trainyard/pixels"):  # kept pixels would give up their place for the new
        shutil.rmtree(root / folder)
    told_full(small.run(sys.executable, "-m", "tasks.prepare", left=200_000))
    assert not ImageCache.exists(root)
    assert parts(root) == []
    assert small.run(sys.executable, "-m", "tasks.prepare").returncode == 0
    assert ImageCache.load(root).verify().digest == before.digest


@pytest.mark.slow
def test_a_full_disk_as_dvc_stores_what_a_stage_made(small: Small) -> None:
    """The stage ended well; DVC's copy into its cache does not fit, and DVC has its own words for that."""
    folder = small.project.root.parent / "tiny"
    code = "open('out', 'wb').write(b'x' * 3_000_000)"
    folder.mkdir()
    for setting in (["init", "-q", "--no-scm"], ["config", "core.analytics", "false"], ["config", "cache.type", "copy"]):
        subprocess.run([*DVC, *setting], cwd=folder, check=True, capture_output=True)
    (folder / "dvc.yaml").write_text(f'stages:\n  boom:\n    cmd: {sys.executable} -c "{code}"\n    outs: [out]\n', encoding="utf-8")
    if not small.mounted:
        pytest.skip("no small disk could be mounted here (that takes root), and a limit on the size of files ends the stage before DVC stores it")
    done = small.run(*DVC, "--cd", str(folder), "repro", "-s", "boom", left=4_500_000)
    failure = failure_of("boom", done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()])
    assert str(failure).startswith("error[disk_full]: boom could not write"), f"{failure}\n{done.stdout}\n{done.stderr}"
    assert failure.exit_code == 75
    assert small.run(*DVC, "--cd", str(folder), "repro", "-s", "boom").returncode == 0


@pytest.mark.slow
def test_a_full_disk_at_a_checkpoint(small: Small) -> None:
    root = small.project.root
    shutil.rmtree(root / STATE / "checkpoints")
    told_full(small.run(sys.executable, "-m", "tasks.train", left=150_000))
    assert not TrainedModel.exists(root)
    assert parts(root / STATE) == []
    assert small.run(sys.executable, "-m", "tasks.train").returncode == 0
    TrainedModel.load(root).verify()


@pytest.mark.slow
def test_a_full_disk_in_register_and_package(small: Small, finished: Project) -> None:
    root = small.project.root
    shutil.rmtree(root / "artifacts" / "model")  # the model that was approved, not the one of the test above
    shutil.copytree(finished.root / "artifacts" / "model", root / "artifacts" / "model")
    decision = GateDecision.load(root)
    shutil.rmtree(root / STATE / "mlflow")
    (root / ModelVersion.PATH).unlink()
    done = small.run(sys.executable, "-m", "tasks.register", left=900_000)
    if small.mounted:
        told_full(done)
    else:  # SQLite says of a limited file no more than "disk I/O error"
        assert done.returncode == 75, done.stderr
    assert not ModelVersion.exists(root)
    done = small.run(sys.executable, "-m", "tasks.register")
    assert done.returncode == 0, done.stderr
    assert ModelVersion.load(root).version == "1"
    assert ModelVersion.load(root).model_digest == decision.model_digest
    bento = BentoRef.load(root)
    shutil.rmtree(root / "artifacts" / "bento")
    told_full(small.run(sys.executable, "-m", "tasks.package", left=100_000))
    assert not BentoRef.exists(root)
    assert parts(root) == []
    done = small.run(sys.executable, "-m", "tasks.package")
    assert done.returncode == 0, done.stderr
    assert BentoRef.load(root).digest == bento.digest
    assert not list((root.parent / "tmp").glob("trainyard-*"))


@pytest.mark.slow
def test_mlflows_database_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    """Killed while it makes its tables, MLflow leaves a file that it can never use again."""
    code = "from pathlib import Path; from tasks.backends.model_registry import alias_version; print(alias_version(Path(), 'm', 'champion'))"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")} | {"PYTHONPATH": str(Path(__file__).parents[1])}
    folder = tmp_path / STATE / "mlflow"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    wait_until(lambda: any(path.stat().st_size > 50_000 for path in folder.glob("*mlflow.db*")) or child.poll() is not None, 60, "no database")
    child.kill()
    assert child.wait() == -signal.SIGKILL
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert {path.name for path in folder.iterdir()} <= {"mlflow.db", "mlflow.db-wal", "mlflow.db-shm", "create.lock"}
    assert {path.name for path in tmp_path.iterdir()} == {STATE.name}


@contextlib.contextmanager
def locked(database: Path, seconds: float) -> Iterator[None]:
    """Hold an SQLite database exclusively for ``seconds`` at most."""
    connection = sqlite3.connect(database, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(seconds, connection.rollback)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        connection.close()


@pytest.mark.slow
def test_a_registry_that_is_locked_for_a_while_is_waited_for(small: Small) -> None:
    root = small.project.root
    apply_overrides({"register": {"experiment": "locked"}}, root / "params.yaml")
    with locked(root / STATE / "mlflow" / "mlflow.db", 12.0):
        done = small.run(sys.executable, "-m", "tasks.register", "--rejected")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "was recorded;" in done.stdout


def own_processes(root: Path) -> list[psutil.Process]:
    """Living processes that work in ``root``, the service left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(process.cwd()) == root and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.slow
def test_kill_the_stage_then_the_flow_then_run_again(finished: Project, tmp_path: Path) -> None:
    """A stage that the kernel kills is retried and resumes; a flow that is killed leaves nothing running, and the next run resumes."""
    root = shutil.copytree(finished.root, tmp_path / "project", symlinks=True)
    shutil.rmtree(root / STATE / "serve", ignore_errors=True)
    project = Project(root)
    log = tmp_path / "log"

    def text() -> str:
        return log.read_text(encoding="utf-8", errors="replace")

    with log.open("w") as sink:
        command = [sys.executable, "-m", "flows.local", "train.seed=7", "train.epochs=12", "train.max_restarts=0"]
        flow = subprocess.Popen(command, cwd=root, env=project.environment, stdout=sink, stderr=sink, start_new_session=True)
        try:
            wait_until(lambda: "epoch 2/12" in text() or flow.poll() is not None, 120, "no epoch 2")
            stage = next(process for process in own_processes(root) if _trains(process) and not _trains(process.parent()))
            stage.kill()
            wait_until(lambda: "resuming after epoch" in text() or flow.poll() is not None, 120, "no second attempt")
            assert "error[stage_killed]: train was ended by SIGKILL; " in text(), text()
            assert "resuming after epoch" in text(), text()
        finally:
            flow.kill()
            flow.wait()
    wait_until(lambda: not own_processes(root), 20, f"left running: {own_processes(root)}")
    assert not (root / TrainedModel.PATH).exists() or TrainedModel.load(root).verify()
    before = text()
    done = project.python("-m", "tasks.train")
    assert "resuming after epoch" in done.stdout, f"{before}\n{done.stdout}"
    TrainedModel.load(root).verify()


def _trains(process: psutil.Process | None) -> bool:
    return process is not None and daemons.command_line(process).endswith("-m tasks.train")
