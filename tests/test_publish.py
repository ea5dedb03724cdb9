"""What a run leaves in git, under attack: lost races, a person at work in the same folder, crashes, remotes that move or are away."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_repository import Repository, git, make_version

from flows import publish as publishing
from flows.git import blobs, try_git
from flows.publish import Outcome, Published, publish, push_pending
from flows.sweep import sweep_project
from flows.workspace import workspace
from flows.worktree import folder_of, remove
from tasks.core.config import RunConfig, load_params
from tasks.core.errors import BadInput
from tasks.core.runs import PENDING

MINE = "Trainyard <trainyard@localhost>"


def run(
    home: Repository,
    run_id: str,
    data: dict[str, str],
    model: str,
    outcome: Outcome = "approved",
    overrides: dict[str, Any] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    **config: Any,
) -> Published:
    """A run on a worker that ingests ``data``, trains ``model`` and publishes; ``meanwhile`` happens before it does."""
    with workspace(overrides, run_id=run_id, config=RunConfig(**config), say=home.say) as work:
        make_version(work.root, work.home / ".dvc" / "cache", data, model)
        meanwhile()
        return publish(work, outcome, f"run of {model}")


def pair(home: Repository, commit: str) -> dict[str, str]:
    return blobs(home.root, commit, publishing.PAIR)


def clean(home: Repository) -> bool:
    return git(home.root, "status", "--porcelain") == ""


def test_a_run_moves_the_main_line_by_a_merge_and_the_folder_follows_with_its_data(home: Repository) -> None:
    start = git(home.root, "rev-parse", "main")
    done = run(home, "r1", {"a": "first", "b": "second"}, "1")
    assert done.main_moved
    assert done.branch == "trainyard/runs/r1"
    assert git(home.root, "log", "-1", "--format=%P", "main").split() == [start, done.commit]
    assert git(home.root, "rev-parse", done.branch) == done.commit
    assert set(git(home.root, "log", "-2", "--format=%an <%ae>, %cn <%ce>", "main", "--not", start).splitlines()) == {f"{MINE}, {MINE}"}
    assert "accuracy" in git(home.root, "show", f"{done.branch}:metrics.json")
    assert "metrics.json" not in git(home.root, "ls-tree", "--name-only", "main").split()
    assert clean(home)
    assert (home.root / "data" / "shards" / "b").read_text() == "second"
    assert (home.root / "artifacts" / "model.txt").read_text() == "1"
    assert not folder_of(home.root, "r1").exists()
    assert "r1" not in git(home.root, "worktree", "list")


def test_a_run_that_changed_nothing_leaves_nothing(home: Repository) -> None:
    start = git(home.root, "rev-parse", "main")
    done = run(home, "r1", {"a": "first"}, "0")
    assert done == Published("", start, False, f"nothing changed since main {start[:8]}")
    assert git(home.root, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert not folder_of(home.root, "r1").exists()


@pytest.mark.parametrize("how", ["none", "branch"])
def test_publishing_less_than_the_main_line(home: Repository, how: str) -> None:
    start = git(home.root, "rev-parse", "main")
    done = run(home, "r1", {"a": "first"}, "1", publish=how)
    assert not done.main_moved
    assert git(home.root, "rev-parse", "main") == start
    assert (git(home.root, "branch", "--list", "trainyard/*") != "") is (how == "branch")
    assert not folder_of(home.root, "r1").exists()


def test_publishing_the_same_run_twice_makes_no_second_commit(home: Repository) -> None:
    with workspace(run_id="r1", say=home.say) as work:
        make_version(work.root, work.home / ".dvc" / "cache", {"a": "first"}, "1")
        first = publish(work, "approved", "once")
        refs = git(home.root, "for-each-ref")
        second = publish(work, "approved", "again")
    assert (second.branch, second.commit, second.main_moved) == (first.branch, first.commit, True)
    assert git(home.root, "for-each-ref") == refs
    with workspace(run_id="r1", say=home.say) as work:  # Prefect starts it again after its worktree went
        assert (work.root / "artifacts" / "model.txt").read_text() == "1"
        assert publish(work, "approved", "again").commit == first.commit
    assert git(home.root, "for-each-ref") == refs


def test_a_failed_run_leaves_a_branch_and_its_worktree_and_moves_nothing(home: Repository) -> None:
    start = git(home.root, "rev-parse", "main")
    with pytest.raises(RuntimeError), workspace(run_id="r1", say=home.say) as work:
        make_version(work.root, work.home / ".dvc" / "cache", {"a": "first", "b": "second"}, "1")
        raise RuntimeError("no memory left")
    assert git(home.root, "rev-parse", "main") == start
    assert "no memory left" in git(home.root, "log", "-1", "--format=%B", "trainyard/runs/r1")
    assert folder_of(home.root, "r1").is_dir()
    with workspace(run_id="r1", say=home.say) as work:
        assert (work.root / "artifacts" / "model.txt").read_text() == "1"
        make_version(work.root, work.home / ".dvc" / "cache", {"a": "first", "b": "second"}, "2")
        assert publish(work, "approved", "then it went well").main_moved
    assert git(home.root, "log", "--format=%s", f"{start}..trainyard/runs/r1").splitlines() == ["then it went well", "run r1: failed"]


def test_a_failed_run_whose_worktree_was_swept_comes_back_from_its_branch_and_knows_what_it_was_made_from(home: Repository) -> None:
    with pytest.raises(RuntimeError), workspace(run_id="r1", say=home.say) as work:
        make_version(work.root, work.home / ".dvc" / "cache", {"a": "first"}, "1")
        raise RuntimeError("no memory left")
    remove(home.root, "r1")
    assert run(home, "r2", {"a": "first", "b": "second"}, "2").main_moved
    with workspace(run_id="r1", say=home.say) as again:
        assert (again.root / "artifacts" / "model.txt").read_text() == "1"
        assert again.base == work.base
        assert "superseded" in publish(again, "approved", "late").why


def test_a_cancelled_run_leaves_a_branch(home: Repository) -> None:
    with pytest.raises(KeyboardInterrupt), workspace(run_id="r1", say=home.say) as work:
        make_version(work.root, work.home / ".dvc" / "cache", {"a": "first"}, "1")
        raise KeyboardInterrupt
    assert "cancelled" in git(home.root, "log", "-1", "--format=%s", "trainyard/runs/r1")


def test_approved_overrides_enter_the_main_line_and_rejected_ones_do_not(home: Repository) -> None:
    start = git(home.root, "rev-parse", "main")
    rejected = run(home, "r1", {"a": "first"}, "1", "rejected", {"train": {"epochs": 3}})
    assert not rejected.main_moved
    assert git(home.root, "rev-parse", "main") == start
    assert "epochs: 3" in git(home.root, "show", f"{rejected.branch}:params.yaml")
    assert run(home, "r2", {"a": "first"}, "2", "rejected").main_moved  # tomorrow night need not judge it again
    assert run(home, "r3", {"a": "first"}, "3", "approved", {"train": {"epochs": 4}}).main_moved
    assert load_params(home.root / "params.yaml").train.epochs == 4
    assert clean(home)


def test_overrides_are_merged_into_params_that_a_person_edited_meanwhile(home: Repository) -> None:
    def edit(old: str, new: str) -> Callable[[], object]:
        path = home.root / "params.yaml"
        return lambda: (path.write_text(path.read_text().replace(old, new)), home.commit("params.yaml"))

    run(home, "r1", {"a": "first"}, "1", "approved", {"train": {"epochs": 4}}, edit("margin: 0.005", "margin: 0.01"))
    params = load_params(home.root / "params.yaml")
    assert (params.train.epochs, params.gate.margin) == (4, 0.01)
    done = run(home, "r2", {"a": "first"}, "2", "approved", {"train": {"epochs": 5}}, edit("epochs: 4", "epochs: 6"))
    assert "params.yaml was edited meanwhile" in done.why
    assert load_params(home.root / "params.yaml").train.epochs == 6
    assert pair(home, "main") == pair(home, done.commit)


def test_code_that_a_person_commits_meanwhile_stays(home: Repository) -> None:
    def commit() -> None:
        (home.root / "make.py").write_text("print('better')\n")
        home.commit("make.py")

    done = run(home, "r1", {"a": "first"}, "1", meanwhile=commit)
    assert done.main_moved
    assert "better" in git(home.root, "show", "main:make.py")
    assert pair(home, "main") == pair(home, done.commit)
    assert clean(home)


def test_a_run_on_older_data_is_superseded_and_a_later_release_on_the_same_or_more_data_is_not(home: Repository) -> None:
    done: list[Published] = []
    first = run(home, "r1", {"a": "first"}, "1", meanwhile=lambda: done.append(run(home, "r2", {"a": "first", "b": "second"}, "2")))
    assert done[0].main_moved
    assert not first.main_moved
    assert "superseded" in first.why
    assert pair(home, "main") == pair(home, done[0].commit)
    grown = {"a": "first", "b": "second", "c": "third"}
    third = run(home, "r3", grown, "3", meanwhile=lambda: done.append(run(home, "r4", {"a": "first", "b": "second"}, "4")))
    assert third.main_moved
    assert pair(home, "main") == pair(home, third.commit)
    assert not run(home, "r5", grown, "5", "rejected", meanwhile=lambda: done.append(run(home, "r6", grown, "6"))).main_moved


RACER = """
import sys, time; from pathlib import Path
sys.path[:0] = {paths!r}
from tiny_repository import make_version
from flows.publish import publish
from flows.workspace import workspace
number, data = sys.argv[1], dict(shard.split("=") for shard in sys.argv[2:])
with workspace(run_id="r" + number) as work:
    make_version(work.root, work.home / ".dvc" / "cache", data, number)
    Path("started" + number).touch()
    deadline = time.monotonic() + 120
    while len(list(Path().glob("started*"))) < 8:
        assert time.monotonic() < deadline, "another racer never started"
        time.sleep(0.02)
    print("moved", publish(work, "approved", "run " + number).main_moved)
"""


def test_a_worktree_that_is_half_made_by_somebody_else_is_waited_for(home: Repository) -> None:
    """git reads every worktree's entry, and gives up on one that another git is just writing."""
    entry = home.root / ".git" / "worktrees" / "ghost"
    entry.mkdir(parents=True)
    for name, text in (("gitdir", f"{home.root}/elsewhere/.git\n"), ("HEAD", f"{git(home.root, 'rev-parse', 'main')}\n"), ("commondir", "")):
        (entry / name).write_text(text)
    assert b"failed to read" in subprocess.run(["git", "worktree", "list"], cwd=home.root, capture_output=True).stderr
    timer = threading.Timer(0.5, (entry / "commondir").write_text, ["../..\n"])
    timer.start()
    done = try_git(home.root, "worktree", "list")
    timer.join()
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("same", [True, False], ids=["same data", "each its own data"])
def test_eight_at_once(home: Repository, same: bool) -> None:
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    git(home.root, "update-index", "--refresh")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER.format(paths=paths), str(number), "a=first", f"b={'more' if same else number}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(8)
    ]
    told = [racer.communicate(timeout=300)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 8, "\n".join(told)
    moved = ["moved True" in said for said in told]
    assert sum(moved) == (8 if same else 1)
    runs = [f"trainyard/runs/r{number}" for number in range(8)]
    assert [git(home.root, "rev-parse", "--verify", branch) for branch in runs]
    lines = [pair(home, branch) for branch, did in zip(runs, moved, strict=True) if did]
    assert pair(home, "main") in lines
    assert git(home.root, "fsck", "--strict", "--no-dangling") == ""
    assert int(git(home.root, "rev-list", "--count", "--first-parent", "main")) == 1 + sum(moved)
    assert [entry for entry in git(home.root, "status", "--porcelain").splitlines() if "started" not in entry] == []
    assert (home.root / "artifacts" / "model.txt").read_text() in [str(number) for number in range(8) if moved[number]]


def test_a_persons_edits_survive_and_their_next_commit_undoes_nothing(home: Repository) -> None:
    (home.root / "params.yaml").write_text((home.root / "params.yaml").read_text().replace("epochs: 8", "epochs: 9"))
    (home.root / "make.py").write_text("staged\n")
    git(home.root, "add", "make.py")
    (home.root / "notes.txt").write_text("mine")
    done = run(home, "r1", {"a": "first", "b": "second"}, "1", "approved", {"train": {"epochs": 4}})
    assert done.main_moved
    assert load_params(home.root / "params.yaml").train.epochs == 9
    assert any("edits of yours stay in params.yaml" in line for line in home.said)
    assert git(home.root, "status", "--porcelain").splitlines() == ["M  make.py", " M params.yaml", "?? notes.txt"]
    assert (home.root / "data" / "shards" / "b").read_text() == "second"
    git(home.root, "commit", "-qm", "mine")
    assert pair(home, "main") == pair(home, done.commit)
    assert "epochs: 4" in git(home.root, "show", "main:params.yaml")


def test_a_person_who_goes_back_to_an_older_version_is_not_carried_forward(home: Repository) -> None:
    run(home, "r1", {"a": "first"}, "1")
    git(home.root, "checkout", "main~1", "--", "dvc.lock")
    old = (home.root / "dvc.lock").read_text()
    run(home, "r2", {"a": "first"}, "2")
    assert (home.root / "dvc.lock").read_text() == old
    assert any("its index could not be moved" in line for line in home.said)
    git(home.root, "reset", "-q", "--hard")
    run(home, "r3", {"a": "first"}, "3")
    assert clean(home)


def test_a_dvc_lock_that_make_run_left_untracked_stays(home: Repository) -> None:
    git(home.root, "rm", "-q", "--cached", "dvc.lock")
    git(home.root, "commit", "-qm", "no lock")
    own = (home.root / "dvc.lock").read_text()
    run(home, "r1", {"a": "first"}, "1")
    assert (home.root / "dvc.lock").read_text() == own
    assert any("edits of yours stay in dvc.lock" in line for line in home.said)


def test_a_crash_between_the_move_and_the_folder_is_made_good_by_the_next_run(home: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("power cut")

    steps = ["follow", "_move_main", "commit_run"]
    for number, step in enumerate(steps):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            patch.setattr(publishing, step, crash)
            run(home, f"r{number}", {"a": "first"}, f"1{number}")
        if step == "follow":
            assert not clean(home)
            assert run(home, "other", {"a": "first"}, "2").main_moved
            assert clean(home)
        else:
            with workspace(run_id=f"r{number}", say=home.say) as work:
                assert publish(work, "approved", "again").main_moved
            assert (home.root / "artifacts" / "model.txt").read_text() == f"1{number}"
    assert clean(home)


def test_a_busy_project_folder_keeps_its_files_and_follows_later(home: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (home.root / "dvc.lock").read_text()
    with workspace(say=home.say):
        first = run(home, "r1", {"a": "first"}, "1")
        assert (home.root / "dvc.lock").read_text() == before
        assert git(home.root, "diff", "--cached", "--name-only") == ""
    assert any("a run is at work there" in line for line in home.said)
    assert first.main_moved
    run(home, "r2", {"a": "first"}, "2")
    assert clean(home)
    assert (home.root / "artifacts" / "model.txt").read_text() == "2"


@pytest.fixture
def remote(home: Repository, tmp_path: Path) -> Path:
    """A bare git remote that holds the main line, and a DVC remote, both set in ``home``."""
    bare = tmp_path / "remote.git"
    git(home.root, "clone", "-q", "--bare", ".", str(bare))
    git(home.root, "remote", "add", "origin", str(bare))
    with (home.root / ".dvc" / "config").open("a") as config:
        config.write("    remote = store\n['remote \"store\"']\n    url = ../../store\n")
    home.commit(".dvc/config")
    git(home.root, "push", "-q", "origin", "main")
    return bare


def test_branch_main_and_data_are_pushed(home: Repository, remote: Path, tmp_path: Path) -> None:
    done = run(home, "r1", {"a": "first", "b": "second"}, "1")
    assert git(remote, "rev-parse", done.branch) == done.commit
    assert git(remote, "rev-parse", "main") == git(home.root, "rev-parse", "main")
    git(tmp_path, "clone", "-q", str(remote), "clone")
    subprocess.run([sys.executable, "-m", "dvc", "pull", "-q"], cwd=tmp_path / "clone", check=True)
    assert (tmp_path / "clone" / "data" / "shards" / "b").read_text() == "second"


def colleague(remote: Path, tmp_path: Path, change: Callable[[Path], object]) -> str:
    other = tmp_path / "colleague"
    git(tmp_path, "clone", "-q", str(remote), str(other))
    change(other)
    git(other, "commit", "-qam", "theirs")
    git(other, "push", "-q", "origin", "main")
    return git(other, "rev-parse", "HEAD")


def test_a_remote_that_went_on_is_merged_and_never_forced(home: Repository, remote: Path, tmp_path: Path) -> None:
    theirs = colleague(remote, tmp_path, lambda root: (root / "make.py").write_text("theirs\n"))
    done = run(home, "r1", {"a": "first"}, "1")
    main = git(remote, "rev-parse", "main")
    assert main == git(home.root, "rev-parse", "main")
    for commit in (theirs, done.commit):
        git(remote, "merge-base", "--is-ancestor", commit, main)
    assert (home.root / "make.py").read_text() == "theirs\n"
    assert pair(home, "main") == pair(home, done.commit)
    assert clean(home)


def test_where_both_moved_the_pair_one_whole_pair_wins(home: Repository, remote: Path, tmp_path: Path) -> None:
    cache = home.root / ".dvc" / "cache"
    theirs = colleague(remote, tmp_path, lambda root: make_version(root, cache, {"a": "first", "z": "theirs"}, "9"))
    run(home, "r1", {"a": "first", "b": "second"}, "1")
    assert git(remote, "rev-parse", "main") == git(home.root, "rev-parse", "main")
    assert pair(home, "main") == pair(home, theirs)


def test_a_conflict_in_other_files_is_left_to_people(home: Repository, remote: Path, tmp_path: Path) -> None:
    (home.root / "make.py").write_text("mine\n")
    home.commit("make.py")
    theirs = colleague(remote, tmp_path, lambda root: (root / "make.py").write_text("theirs\n"))
    assert run(home, "r1", {"a": "first"}, "1").main_moved
    assert git(remote, "rev-parse", "main") == theirs
    assert any("merge them by hand" in line for line in home.said)


def test_a_remote_that_is_away_fails_no_run_and_is_made_up_for(home: Repository, remote: Path) -> None:
    away = remote.rename(remote.with_name("away.git"))
    assert run(home, "r1", {"a": "first"}, "1").main_moved
    assert (folder_of(home.root, "r1") / PENDING).is_file()
    assert push_pending(home.root, RunConfig(), home.say) == ["r1"]
    assert any("did not take trainyard/runs/r1" in line for line in home.said)
    away.rename(remote)
    done = run(home, "r2", {"a": "first"}, "2")
    assert git(remote, "rev-parse", "trainyard/runs/r1")
    assert git(remote, "rev-parse", "main") == git(home.root, "rev-parse", "main")
    assert done.main_moved
    assert not folder_of(home.root, "r1").exists()
    assert push_pending(home.root, RunConfig(), home.say) == []


def test_the_sweep_pushes_what_is_pending(home: Repository, remote: Path) -> None:
    away = remote.rename(remote.with_name("away.git"))
    done = run(home, "r1", {"a": "first"}, "1")
    away.rename(remote)
    sweep_project(home.root, True, 0.0, home.say)
    assert (folder_of(home.root, "r1") / PENDING).is_file(), "a dry run changes nothing"
    sweep_project(home.root, False, 0.0, home.say)
    assert git(remote, "rev-parse", "trainyard/runs/r1") == done.commit
    assert not folder_of(home.root, "r1").exists()


def test_a_main_line_that_goes_missing_is_said(home: Repository) -> None:
    with pytest.raises(BadInput) as caught:
        run(
            home, "r1", {"a": "first"}, "1", meanwhile=lambda: (git(home.root, "checkout", "-q", "--detach"), git(home.root, "branch", "-qD", "main"))
        )
    assert caught.value.code == "branch_missing"
