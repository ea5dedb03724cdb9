"""data.dvc under attack: equal data, lost caches, remotes that are away, a lock that somebody holds, folders that are no repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from source_trees import contents, write_tree

from tasks.backends import dvc_repo
from tasks.core.errors import BadInput, Transient

FILES = {"dataset.json": b"{}\n", "shards/000001-00000.parquet": b"one"}


def dvc(root: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture(scope="module")
def empty_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("empty") / "project"
    root.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    dvc(root, "init", "-q")
    return root


@pytest.fixture
def root(empty_repository: Path, tmp_path: Path) -> Path:
    """A git and DVC repository with a data/ that is not tracked yet."""
    project = shutil.copytree(empty_repository, tmp_path / "project", symlinks=True)
    write_tree(project / "data", FILES)
    return project


def test_equal_data_give_an_equal_pointer_and_growth_moves_it(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    version, done = dvc_repo.track_data(root, push=True)
    pointer = (root / "data.dvc").read_bytes()
    assert (len(version), done) == (32, "moved")
    assert version in pointer.decode()
    assert dvc_repo.track_data(root, push=True) == (version, "unchanged")
    write_tree(root / "data", {"shards/000002-00000.parquet": b"two"})
    grown, done = dvc_repo.track_data(root, push=True)
    assert (grown != version, done) == (True, "moved")
    (root / "data" / "shards" / "000002-00000.parquet").unlink()
    assert dvc_repo.track_data(root, push=True) == (version, "moved")
    assert (root / "data.dvc").read_bytes() == pointer
    assert capfd.readouterr() == ("", "")


def test_a_lost_data_folder_comes_back_from_the_cache(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    version, _ = dvc_repo.track_data(root, push=True)
    assert dvc_repo.restore_data(root) == ""
    shutil.rmtree(root / "data")
    assert dvc_repo.restore_data(root) == f"data.dvc {version[:8]} restored from the cache"
    assert contents(root / "data") == FILES
    assert capfd.readouterr() == ("", "")


def test_left_overs_without_their_index_are_no_version(root: Path) -> None:
    dvc_repo.track_data(root, push=True)
    (root / "data" / "dataset.json").unlink()
    write_tree(root / "data", {"shards/.000009.x.part": b"half"})
    assert "restored" in dvc_repo.restore_data(root)
    assert contents(root / "data") == FILES


def test_a_clone_gets_the_data_from_whichever_remote_has_them(root: Path, tmp_path: Path) -> None:
    dvc(root, "remote", "add", "-d", "away", str(tmp_path / "nothing" / "there"))
    dvc(root, "remote", "add", "shelf", str(tmp_path / "shelf"))
    version, _ = dvc_repo.track_data(root, push=False)
    dvc(root, "push", "-q", "-r", "shelf", "data.dvc")
    shutil.rmtree(root / "data")
    shutil.rmtree(root / ".dvc" / "cache")
    assert dvc_repo.restore_data(root) == f"data.dvc {version[:8]} restored from remote shelf"
    assert contents(root / "data") == FILES


def test_a_version_that_is_nowhere_is_said_and_nothing_half_restored_stays(root: Path) -> None:
    version, _ = dvc_repo.track_data(root, push=True)
    pointer = (root / "data.dvc").read_bytes()
    shutil.rmtree(root / "data")
    lost = next(path for path in (root / ".dvc" / "cache").rglob("*") if path.is_file() and path.read_bytes() == b"one")
    lost.unlink()
    assert f"data.dvc {version[:8]} is in no cache or remote" in dvc_repo.restore_data(root)
    assert not (root / "data").exists()
    assert (root / "data.dvc").read_bytes() == pointer


def test_a_version_is_pushed_to_the_default_remote_unless_told_otherwise(root: Path, tmp_path: Path) -> None:
    dvc(root, "remote", "add", "-d", "shelf", str(tmp_path / "shelf"))
    assert dvc_repo.track_data(root, push=False)[1] == "moved"
    assert not (tmp_path / "shelf").exists()
    assert dvc_repo.track_data(root, push=True)[1] == "unchanged, pushed to shelf"
    assert sorted(contents(tmp_path / "shelf").values())[-1] == b"{}\n"


def test_user_data_never_go_into_the_remote_that_ships_with_the_repository(root: Path) -> None:
    dvc(root, "remote", "add", "-d", "embedded", str(root / ".dvc" / "embedded"))
    assert dvc_repo.track_data(root, push=True)[1] == "moved"
    assert not (root / ".dvc" / "embedded").exists()


def test_a_remote_that_cannot_be_written_can_be_tried_again_and_the_version_is_not_lost(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    dvc(root, "remote", "add", "-d", "shelf", str(tmp_path / "file" / "below"))
    with pytest.raises(Transient) as caught:
        dvc_repo.track_data(root, push=True)
    assert caught.value.code == "remote_unavailable"
    for told in ("shelf", "ingest.push", "moved"):
        assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    dvc(root, "remote", "modify", "shelf", "url", str(tmp_path / "shelf"))
    assert dvc_repo.track_data(root, push=True)[1] == "unchanged, pushed to shelf"


HOLDER = """
import sys, time
from dvc.repo import Repo
with Repo() as repo, repo.lock:
    print("held", flush=True)
    time.sleep(float(sys.argv[1]))
"""


def holding(root: Path, seconds: float) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(seconds)], cwd=root, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_lock_that_another_dvc_holds_is_waited_for(root: Path) -> None:
    start = time.monotonic()
    child = holding(root, 5.0)
    assert dvc_repo.track_data(root, push=True)[1] == "moved"
    assert time.monotonic() - start > 4.0  # longer than the 3 s that DVC itself waits
    assert child.wait(timeout=10) == 0


def test_a_lock_that_stays_ends_as_something_to_try_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dvc_repo, "WAIT_S", 0.0)
    child = holding(root, 60.0)
    try:
        with pytest.raises(Transient) as caught:
            dvc_repo.track_data(root, push=True)
        assert caught.value.code == "lock_busy"
        assert not (root / "data.dvc").exists()
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("missing", [".git", ".dvc"])
def test_a_folder_that_is_no_repository_is_refused_before_anything_is_written(missing: str, root: Path) -> None:
    shutil.rmtree(root / missing)
    before = contents(root)
    for call in (lambda: dvc_repo.track_data(root, push=True), lambda: dvc_repo.restore_data(root)):
        with pytest.raises(BadInput, match="git init && dvc init") as caught:
            call()
        assert caught.value.code == "not_a_repository"
    assert contents(root) == before


def test_what_dvc_itself_refuses_is_passed_on_in_one_line(root: Path) -> None:
    subprocess.run(["git", "add", "-f", "data"], cwd=root, check=True)
    with pytest.raises(BadInput, match="tracked by SCM") as caught:
        dvc_repo.track_data(root, push=True)
    assert caught.value.code == "dvc_failed"
    assert "\n" not in str(caught.value)


def test_a_damaged_pointer_is_named(root: Path) -> None:
    (root / "data.dvc").write_bytes(b"outs: []\n")
    shutil.rmtree(root / "data")
    with pytest.raises(BadInput, match="data.dvc is no DVC file"):
        dvc_repo.restore_data(root)


def test_files_that_somebody_keeps_in_data_are_never_touched(root: Path) -> None:
    """A clone has no data/, so it looks like the place to put one's images: they must not give way to the committed version."""
    dvc_repo.track_data(root, push=False)
    shutil.rmtree(root / "data")
    write_tree(root / "data", {"mypets/cat/1.jpg": b"mine"})
    with pytest.raises(BadInput) as caught:
        dvc_repo.restore_data(root)
    assert caught.value.code == "data_foreign"
    assert "mypets" in str(caught.value)
    assert (root / "data" / "mypets" / "cat" / "1.jpg").read_bytes() == b"mine"


def test_a_version_that_came_by_git_pull_is_not_moved_back(root: Path, tmp_path: Path) -> None:
    dvc_repo.track_data(root, push=False)
    colleague = shutil.copytree(root, tmp_path / "colleague", symlinks=True)
    write_tree(colleague / "data", {"shards/000002-00000.parquet": b"two"})
    dvc_repo.track_data(colleague, push=False)
    shutil.copy(colleague / "data.dvc", root / "data.dvc")
    with pytest.raises(BadInput) as caught:
        dvc_repo.restore_data(root)
    assert caught.value.code == "data_behind"
    shutil.copytree(colleague / ".dvc" / "cache", root / ".dvc" / "cache", dirs_exist_ok=True)
    dvc(root, "checkout", "data.dvc")
    assert dvc_repo.restore_data(root) == ""
    assert (root / "data" / "shards" / "000002-00000.parquet").read_bytes() == b"two"


def test_an_ingest_that_was_killed_before_dvc_add_goes_on(root: Path) -> None:
    dvc_repo.track_data(root, push=False)
    write_tree(root / "data", {"shards/000002-00000.parquet": b"two"})
    assert dvc_repo.restore_data(root) == ""
    assert dvc_repo.track_data(root, push=False)[1] == "moved"
