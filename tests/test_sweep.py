"""The sweep under attack: what lives, is in use or is young must stay, and every byte that anything names must come back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conftest import Project
from own_server import prefect_server

from tasks.backends.sweep import Sweep
from tasks.core import runs
from tasks.core.config import apply_overrides, load_params
from tasks.core.files import STATE, file_lock, write_atomic

pytestmark = pytest.mark.slow
OLD = time.time() - 90 * 86400


@pytest.fixture(scope="module")
def trained(finished: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of the project on which everything ran, its dvc.lock committed. Tests copy it again."""
    root = tmp_path_factory.mktemp("trained") / "project"
    shutil.copytree(finished.root, root, symlinks=True, ignore=shutil.ignore_patterns("prefect"))
    project = Project(root)
    for server in (root / STATE / "serve").glob("*/"):
        shutil.rmtree(server)  # it serves the other project
    project.run("git", "add", "-A")
    project.run("git", "commit", "--allow-empty", "-qm", "trained")
    return project


@pytest.fixture
def swept(trained: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project of this test's own, which keeps one run and everything of the last day."""
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "PREFECT_"))]:
        monkeypatch.delenv(name)
    root = shutil.copytree(trained.root, tmp_path / "project", symlinks=True)
    apply_overrides({"run": {"keep_runs": 1, "keep_days": 1}}, root / "params.yaml")
    return Project(root)


def sweep(project: Project, dry_run: bool = False) -> list[dict[str, Any]]:
    """Sweep in this process, which has MLflow and DVC loaded already, and return the deeds."""
    deeds: list[dict[str, Any]] = []
    Sweep(project.root, load_params(project.root / "params.yaml"), dry_run, 0.0, lambda deed: deeds.append(asdict(deed))).run()
    return deeds


def said(deeds: list[dict[str, Any]], did: str) -> list[str]:
    return [deed["what"] for deed in deeds if deed["did"] == did]


def old_run(project: Project, name: str, branch: bool = True, age: float = OLD) -> Path:
    """A run that ended at ``age``: worktree, branch, lock. Its worktree holds one more data version, uncommitted."""
    folder = project.root / runs.WORKTREES / name
    when = {"GIT_AUTHOR_DATE": f"{age:.0f} +0000", "GIT_COMMITTER_DATE": f"{age:.0f} +0000"}
    project.run("git", "worktree", "add", "-q", "--detach", str(folder), "HEAD")
    if branch:
        subprocess.run(["git", "commit", "-q", "--allow-empty", "-m", name], cwd=folder, env={**project.environment, **when}, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
        project.run("git", "branch", f"{runs.BRANCHES}{name}", head)
    (folder / STATE).mkdir(exist_ok=True)
    (folder / STATE / "mlflow").symlink_to(project.root / STATE / "mlflow")
    lock = runs.lock_of(project.root, name)
    lock.write_text("pid 4194305", encoding="utf-8")  # above the largest process id
    for path in (folder / STATE, folder / "dvc.lock", folder, lock):
        os.utime(path, (age, age))
    return folder


@contextmanager
def process(code: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A python process that says a line when it is ready."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "ready"
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


SLEEP = "import time; print('ready', flush=True); time.sleep(300)"
HOLD = """
import sys, time
from pathlib import Path
from tasks.core.files import file_lock
with file_lock(Path(sys.argv[1]), 5, "the run"):
    print("ready", flush=True); time.sleep(300)
"""


def add_object(project: Project, text: str) -> Path:
    """Bytes in DVC's cache as a command leaves them, named by nothing."""
    import hashlib

    name = hashlib.md5(text.encode()).hexdigest()
    path = project.root / ".dvc" / "cache" / "files" / "md5" / name[:2] / name[2:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def new_version(project: Project, text: str) -> Path:
    """Track extra.txt with DVC, holding ``text``; returns its file in the cache."""
    (project.root / "extra.txt").write_text(text, encoding="utf-8")
    project.run("dvc", "add", "-q", "extra.txt")
    md5 = next(line.split()[-1] for line in (project.root / "extra.txt.dvc").read_text().splitlines() if "md5:" in line)
    return project.root / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]


def commit(project: Project, message: str) -> None:
    project.run("git", "add", "-A")
    project.run("git", "commit", "-qm", message)


def test_what_anything_names_stays_in_the_cache_and_the_rest_goes(swept: Project) -> None:
    commit(swept, "params")
    kept = {}
    for place in ("history", "branch", "tag", "stash", "worktree", "workspace"):
        kept[place] = new_version(swept, place)
        if place == "workspace":
            break
        if place == "stash":
            swept.run("git", "add", "-A")
            swept.run("git", "stash", "-q")
            continue
        if place == "worktree":  # a user's own, elsewhere, with a version that was never committed
            theirs = swept.root.parent / "theirs"
            swept.run("git", "worktree", "add", "-q", "--detach", str(theirs), "HEAD")
            shutil.copy2(swept.root / "extra.txt.dvc", theirs / "extra.txt.dvc")
            swept.run("git", "checkout", "-q", "--", "extra.txt.dvc")
            continue
        commit(swept, place)
        if place == "history":
            new_version(swept, "what came after")
            commit(swept, "after")
        if place in ("branch", "tag"):
            swept.run("git", place, f"of-{place}")
            swept.run("git", "reset", "-q", "--hard", "HEAD~1")
    run = old_run(swept, "run-old")
    doomed = [new_version(swept, "only in an old run's folder"), add_object(swept, "by nothing")]
    shutil.move(swept.root / "extra.txt.dvc", run / "extra.txt.dvc")
    os.utime(run, (OLD, OLD))
    os.utime(runs.lock_of(swept.root, "run-old"), (OLD, OLD))
    old_run(swept, "run-new", branch=False, age=OLD + 86400)
    (swept.root / "extra.txt.dvc").write_bytes(kept["workspace"].read_bytes() and _pointer(kept["workspace"]))
    whole = new_version(swept, "workspace")
    assert whole == kept["workspace"]
    dry = sweep(swept, dry_run=True)
    assert all(path.exists() for path in (*kept.values(), *doomed, run))
    assert sweep(swept) == dry
    assert {place: path.exists() for place, path in kept.items()} == dict.fromkeys(kept, True)
    assert not [path for path in (*doomed, run) if path.exists()]
    assert {"worktree run-old"} < set(said(dry, "removed"))
    assert (swept.root / STATE / "mlflow" / "mlflow.db").is_file()  # what the worktree linked to
    for rev in ("HEAD", "of-branch", "of-tag"):
        swept.run("git", "checkout", "-qf", rev)
        swept.run("dvc", "checkout", "--force", "-q")
    assert "classes" in (swept.root / "data" / "dataset.json").read_text(encoding="utf-8")


def _pointer(path: Path) -> bytes:
    return f"outs:\n- md5: {path.parent.name + path.name}\n  size: 9\n  hash: md5\n  path: extra.txt\n".encode()


def test_the_champions_files_outlive_their_branch_and_commit(swept: Project) -> None:
    """The alias alone names them: dvc.lock is gone from the folder, from git and from every branch."""
    model = next((swept.root / ".dvc" / "cache" / "files" / "md5").glob("*/*.dir"), None)
    assert model is not None
    lock = (swept.root / "dvc.lock").read_bytes()
    (swept.root / "dvc.lock").unlink()
    shutil.rmtree(swept.root / ".git")
    for command in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "anew"]):
        swept.run("git", *command)
    doomed = add_object(swept, "by nothing")
    sweep(swept)
    assert not doomed.exists()
    (swept.root / "dvc.lock").write_bytes(lock)
    shutil.rmtree(swept.root / "artifacts")
    swept.run("dvc", "checkout", "--force", "-q", "train", "prepare", "evaluate")


def test_the_branch_that_made_the_champion_stays(swept: Project) -> None:
    old_run(swept, "run-champion")
    old_run(swept, "run-newest", age=OLD + 86400)
    deeds = sweep(swept)
    assert f"branch {runs.BRANCHES}run-champion" in said(deeds, "kept")
    assert "worktree run-champion" in said(deeds, "removed")
    assert swept.run("git", "branch", "--list", f"{runs.BRANCHES}*").stdout.split() == [
        f"{runs.BRANCHES}run-{name}" for name in ("champion", "newest")
    ]


def test_what_is_not_pushed_yet_stays(swept: Project) -> None:
    """A remote was away when the run ended: its worktree and branch are the only place of what it made."""
    folder = old_run(swept, "run-pending")
    write_atomic(folder / runs.PENDING, b"{}")
    os.utime(folder / STATE, (OLD, OLD))
    old_run(swept, "run-newest", age=OLD + 86400)
    deeds = sweep(swept)
    assert "worktree run-pending" in said(deeds, "kept")
    assert (folder / "data.dvc").is_file()
    assert f"{runs.BRANCHES}run-pending" in swept.run("git", "branch", "--list", f"{runs.BRANCHES}*").stdout


def test_a_living_run_is_left_alone_with_everything_it_may_use(swept: Project) -> None:
    folder = old_run(swept, "run-alive", branch=False)
    old_run(swept, "run-other", branch=False, age=OLD + 86400)
    orphaned = add_object(swept, "written a moment ago by the living run")
    lock = runs.lock_of(swept.root, "run-alive")
    with process(HOLD, str(lock), PYTHONPATH=str(swept.root)), process(SLEEP, **{runs.RUN_VARIABLE: "run-alive"}) as stage:
        os.utime(lock, (OLD, OLD))
        deeds = sweep(swept)
        assert stage.poll() is None
        assert folder.is_dir()
        assert orphaned.exists()
        assert any("1 living runs" in deed["why"] for deed in deeds)
    assert said(sweep(swept), "removed")


@pytest.mark.parametrize("lock", [runs.STARTING_LOCK, STATE / "locks" / "pipeline.lock"])
def test_no_file_of_the_cache_goes_while_a_run_starts_or_works_in_the_folder(swept: Project, lock: Path) -> None:
    orphaned = add_object(swept, "by nothing yet")
    with file_lock(swept.root / lock, 5, "a run"):
        start = time.monotonic()
        deeds = sweep(swept)
        assert time.monotonic() - start < 60
    assert orphaned.exists()
    assert "DVC's cache" in said(deeds, "kept")


def test_processes_of_dead_runs_end_and_no_others(swept: Project) -> None:
    (swept.root / runs.WORKTREES).mkdir(parents=True)
    for name in ("dead", "alive"):
        runs.lock_of(swept.root, name).write_text("pid 4194305", encoding="utf-8")
    service = {runs.RUN_VARIABLE: "dead", "TRAINYARD_SERVICE_ROOT": str(swept.root)}
    with (
        file_lock(runs.lock_of(swept.root, "alive"), 5, "a run"),
        process(SLEEP, **{runs.RUN_VARIABLE: "dead"}) as orphan,
        process(SLEEP, **{runs.RUN_VARIABLE: "alive"}) as stage,
        process(SLEEP, **{runs.RUN_VARIABLE: "of another project"}) as foreign,
        process(SLEEP, **service) as served,
    ):
        assert len(said(sweep(swept, dry_run=True), "ended")) == 1
        assert orphan.poll() is None
        assert f"process {orphan.pid} " in said(sweep(swept), "ended")[0]
        assert orphan.poll() is not None
        assert [other.poll() for other in (stage, foreign, served)] == [None] * 3


def test_a_flow_that_is_about_to_report_its_end_is_no_orphan(swept: Project) -> None:
    """It gave its lock back, which still holds its process id."""
    (swept.root / runs.WORKTREES).mkdir(parents=True)
    with process(SLEEP, **{runs.RUN_VARIABLE: "ending"}) as flow:
        runs.lock_of(swept.root, "ending").write_text(f"pid {flow.pid}", encoding="utf-8")
        assert runs.lives(swept.root, "ending") is True
        assert not said(sweep(swept), "ended")
        assert flow.poll() is None
    assert runs.lives(swept.root, "ending") is False
    assert runs.lives(swept.root, "never here") is None


MLFLOW_RUN = """
import os, sys
os.environ["MLFLOW_TRACKING_URI"] = sys.argv[1]
import mlflow
from tasks.core.process import owner_tags
run = mlflow.start_run(experiment_id=mlflow.get_experiment_by_name("trainyard").experiment_id, run_name=sys.argv[2], tags=owner_tags())
print("ready", flush=True)
import time; time.sleep(300)
"""


def test_dead_mlflow_runs_are_closed_and_living_ones_are_not(swept: Project) -> None:
    uri = f"sqlite:///{swept.root / STATE / 'mlflow' / 'mlflow.db'}"
    with process(MLFLOW_RUN, uri, "alive", PYTHONPATH=str(swept.root)):
        with process(MLFLOW_RUN, uri, "killed", PYTHONPATH=str(swept.root)):
            pass
        assert [what.split()[2] for what in said(sweep(swept, dry_run=True), "closed")] == ["killed"]
        assert [what.split()[2] for what in said(sweep(swept), "closed")] == ["killed"]
        assert not said(sweep(swept), "closed")


def test_without_the_registry_nothing_goes_that_an_alias_may_name(swept: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, orphaned = old_run(swept, "run-old"), add_object(swept, "by nothing")
    old_run(swept, "run-newer", age=OLD + 86400)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    deeds = sweep(swept)
    assert folder.is_dir()
    assert orphaned.exists()
    assert not said(deeds, "removed")
    assert any("registry_unavailable" in deed["why"] for deed in deeds)


def write_old(path: Path, age: float = OLD) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 5000)
    for entry in (path, path.parent):
        os.utime(entry, (age, age))
    return path


def test_old_files_go_and_those_in_use_stay(swept: Project) -> None:
    state = swept.root / STATE
    champion = next(path for path in (state / "champion").glob("*/")) if (state / "champion").is_dir() else None
    bentos = next((state / "bentoml" / "bentos").glob("*/"))
    (served,) = (path for path in bentos.glob("*/") if not path.is_symlink())
    os.utime(served, (OLD, OLD))
    spare = [shutil.copytree(served, bentos / f"{number:016d}") for number in range(6)]
    for number, path in enumerate(spare):
        (path / "src" / "model" / "provenance.json").write_text("{}", encoding="utf-8")
        os.utime(path, (OLD + 10 + number, OLD + 10 + number))
    goes: list[Path] = [
        write_old(state / "checkpoints" / "f1" / "epoch-000001.x.pt").parent,
        write_old(state / "champion" / "0000" / "trainyard").parent,
        write_old(state / "serve" / "classifier-gone.log"),
        write_old(state / "pixels" / "00ff" / "train.u8").parent,
        write_old(state / "system" / "0000.csv"),
        write_old(state / "checkpoints" / "f9" / ".epoch.pt.abc.part"),
        write_old(state / "downloads" / "d1" / "lock").parent,
        write_old(state / "known" / "k1.parquet"),
        write_old(state / "known" / ".k2.parquet.abc.part"),
        spare[0],
    ]
    held = write_old(state / "checkpoints" / "f2" / "epoch-000001.x.pt").parent
    copy = write_old(state / "downloads" / "d2" / "lock", time.time()).parent
    stays = [held, copy, write_old(state / "checkpoints" / "f3" / "epoch-000001.x.pt", time.time()).parent, served, *spare[1:]]
    with file_lock(held / "lock", 5, "a training"):
        os.utime(held / "lock", (OLD, OLD))
        os.utime(held, (OLD, OLD))
        deeds = sweep(swept)
    assert [path.name for path in goes if path.exists()] == []
    assert [path.name for path in stays if not path.exists()] == []
    assert champion is None or champion.is_dir()
    assert all(deed["bytes"] > 4000 for deed in deeds if "f1" in deed["what"])


def tree(root: Path) -> dict[str, tuple[int, float]]:
    skipped: Callable[[Path], bool] = lambda path: bool({"__pycache__", "tmp"} & set(path.parts)) or path.suffix in {".lock", ".db-shm", ".db-wal"}  # noqa: E731
    return {
        str(path.relative_to(root)): (path.lstat().st_size, path.lstat().st_mtime) for path in root.rglob("*") if path.is_file() and not skipped(path)
    }


def test_a_dry_run_changes_nothing(swept: Project) -> None:
    old_run(swept, "run-old")
    old_run(swept, "run-newer", age=OLD + 86400)
    write_old(swept.root / STATE / "checkpoints" / "f1" / "epoch-000001.x.pt")
    add_object(swept, "by nothing")
    before = tree(swept.root)
    done = swept.python("-m", "flows.sweep", "--dry-run", "--young-s", "0")
    assert tree(swept.root) == before
    lines = done.stdout.splitlines()
    assert lines[0] == "sweep: a dry run, nothing is changed"
    assert "would be removed" in lines[-1]
    assert swept.python("-m", "flows.sweep", "--young-s", "0").stdout.splitlines()[-1] == lines[-1].replace("would be ", "")
    assert {deed["did"] for deed in sweep(swept)} <= {"kept"}


def test_prefects_dead_runs_are_closed_and_living_ones_are_not(swept: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real server: a run whose lock is free here, one that holds it, one of another host, one of another project."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import Running

    from flows import sweep as module

    @flow
    def swept_flow() -> None:
        pass

    (swept.root / runs.WORKTREES).mkdir(parents=True)
    with temporary_settings({PREFECT_API_URL: prefect_server()}), get_client(sync_client=True) as client:
        flow_id = client.create_flow(swept_flow)

        def running(name: str, folder: Path) -> str:
            steps = [{"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}]
            deployment = client.create_deployment(flow_id, f"{folder.name}-{folder.parent.name}", pull_steps=steps)
            run = client.create_flow_run_from_deployment(deployment, name=name, state=Running())
            return str(run.id)

        ids = {name: running(name, swept.root) for name in ("dead here", "alive here", "of another host")}
        ids["of another project"] = running("of another project", Path(f"{swept.root}-2"))
        for name in ("dead here", "alive here"):
            runs.lock_of(swept.root, ids[name]).write_text("pid 4194305", encoding="utf-8")

        def states() -> dict[str, str]:
            return {name: str(client.read_flow_run(UUID(run_id)).state_name) for name, run_id in ids.items()}

        def closed(dry_run: bool = False) -> list[str]:
            return [deed["what"] for deed in module.close_flow_runs(swept.root, dry_run)]

        with file_lock(runs.lock_of(swept.root, ids["alive here"]), 5, "a run"):
            assert closed() == []  # all have just shown a sign of life
            monkeypatch.setattr(module, "DEAD_HERE_S", 0.0)
            assert closed(dry_run=True) == ["Prefect run dead here"]
            assert set(states().values()) == {"Running"}
            assert closed() == ["Prefect run dead here"]
            assert states() == {**dict.fromkeys(ids, "Running"), "dead here": "Crashed"}
            monkeypatch.setattr(module, "SILENT_S", 0.0)
            assert closed() == ["Prefect run of another host"]
            assert states() == {"dead here": "Crashed", "alive here": "Running", "of another host": "Crashed", "of another project": "Running"}


def test_a_server_that_is_away_stops_nothing_else(swept: Project) -> None:
    done = swept.python("-m", "flows.sweep", "--dry-run", env={"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_CLIENT_MAX_RETRIES": "0"})
    assert "the Prefect server does not answer" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("sweep: ")
