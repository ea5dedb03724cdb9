"""The folder of a run: isolated from edits and from other runs, whole from the cache, there again after a crash, gone when published."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_trees import pictures, write_tree
from tiny_repository import Repository, git, make_version

from flows.publish import publish
from flows.workspace import workspace
from flows.worktree import READY, SHARED, folder_of, remove
from tasks.backends import serving
from tasks.core.artifacts import Endpoint
from tasks.core.config import RunConfig, load_params
from tasks.core.errors import BadInput, Transient
from tasks.core.files import home_of
from tasks.ingest import ingest


def dvc(root: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_a_run_id_it_is_the_projects_folder_and_nothing_is_published(home: Repository) -> None:
    with workspace({"train": {"epochs": 3}}) as work:
        assert work.root == work.home == home.root
        assert load_params().train.epochs == 3
        assert publish(work, "approved", "x").branch == ""
    assert git(home.root, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert load_params().train.epochs == 3


def test_a_worktree_is_made_from_the_commit_and_not_from_edits(home: Repository) -> None:
    (home.root / "make.py").write_text("half an edit")
    (home.root / "params.yaml").write_text((home.root / "params.yaml").read_text().replace("epochs: 8", "epochs: 9"))
    with workspace({"train": {"lr": 0.5}}, run_id="r1", say=home.say) as work:
        assert work.root == home.root / ".trainyard" / "worktrees" / "r1"
        assert "half" not in (work.root / "make.py").read_text()
        params = load_params(work.root / "params.yaml")
        assert (params.train.epochs, params.train.lr) == (8, 0.5)
        assert work.base == git(home.root, "rev-parse", "main")
    assert "lr: 0.5" not in (home.root / "params.yaml").read_text()


def test_data_and_artifacts_are_linked_from_the_cache_and_nothing_is_stale(home: Repository) -> None:
    shutil.rmtree(home.root / "artifacts")
    with workspace(run_id="r1", say=home.say) as work:
        assert (work.root / "data" / "shards" / "a").read_text() == "first"
        assert (work.root / "artifacts" / "model.txt").read_text() == "0"
        assert 'type = "reflink,hardlink,symlink,copy"' in (work.root / ".dvc" / "config.local").read_text()
        assert json.loads(dvc(work.root, "status", "--json").splitlines()[-1]) == {}
        assert not [path for path in (home.root / ".dvc" / "tmp").glob("*") if path.name != "btime"]


def test_what_is_in_no_cache_is_stale_and_part_of_a_data_version_is_none(home: Repository) -> None:
    cache = home.root / ".dvc" / "cache" / "files" / "md5"
    [shard] = [path for path in cache.rglob("*") if path.is_file() and path.read_text() == "first"]
    [model] = [path for path in cache.rglob("*") if path.is_file() and path.read_text() == "0"]
    shard.unlink()
    model.unlink()
    with workspace(run_id="r1", say=home.say) as work:
        assert not (work.root / "data").exists()
        assert not (work.root / "artifacts" / "model.txt").exists()
        assert (work.root / "artifacts" / "evaluation" / "metrics.json").is_file()


def test_what_the_cache_lost_comes_from_the_remote_whose_relative_path_is_homes(home: Repository) -> None:
    with (home.root / ".dvc" / "config").open("a") as config:
        config.write("    remote = store\n['remote \"store\"']\n    url = ../../store\n")
    home.commit(".dvc/config")
    dvc(home.root, "push", "-q")
    shutil.rmtree(home.root / ".dvc" / "cache")
    with workspace(run_id="r1", say=home.say) as work:
        assert (work.root / "artifacts" / "model.txt").read_text() == "0"


def test_shared_state_is_homes_and_goes_with_no_worktree(home: Repository) -> None:
    with workspace(run_id="r1", say=home.say) as work:
        for name in SHARED:
            (work.root / ".trainyard" / name / "mark").write_text("kept")
        assert home_of(work.root) == home.root == home_of(home.root)
        assert serving._folder(work.root) == serving._folder(home.root)
        (work.root / ".trainyard" / "locks").mkdir()
        Endpoint(url="u", tag="t", model_digest="d", model_version="1", smoke_images=1, max_probability_difference=0.1).save(work.root)
        publish(work, "approved", "x")
    assert not folder_of(home.root, "r1").exists()
    assert all((home.root / ".trainyard" / name / "mark").read_text() == "kept" for name in SHARED)
    assert Endpoint.load(home.root).tag == "t"


def test_a_source_beside_the_project_is_found_from_a_worktree(home: Repository) -> None:
    write_tree(home.root / "pictures", pictures(cat=3, horse=3))
    config = load_params().ingest.model_copy(update={"source": "folder", "location": "pictures"})
    with workspace(run_id="r1", say=home.say) as work:
        shutil.rmtree(work.root / "data")
        assert ingest(config, work.root).classes == ("cat", "horse")


def test_the_same_run_goes_on_where_a_kill_left_it(home: Repository) -> None:
    code = (
        "import os; from flows.workspace import workspace\n"
        "with workspace({'train': {'epochs': 3}}, run_id='r1') as work:\n"
        "    (work.root / 'artifacts' / 'model.txt').unlink(); (work.root / 'artifacts' / 'model.txt').write_text('half')\n"
        '    (work.root / \'.dvc\' / \'tmp\' / \'rwlock\').write_text(\'{"write": {"x": {"pid": %d, "cmd": "dvc repro"}}}\' % os.getpid())\n'
        "    (work.root / 'dvc.lock').write_text('schema: \\'2.0\\'\\nstages:\\n  model: [')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    with workspace({"train": {"epochs": 3}}, run_id="r1", say=home.say) as work:
        assert (work.root / "artifacts" / "model.txt").read_text() == "half"
        assert load_params(work.root / "params.yaml").train.epochs == 3
        assert "stages" in (work.root / "dvc.lock").read_text()
        dvc(work.root, "commit", "--force")
    said = "\n".join(home.said)
    for told in ("goes on in", "recovered the DVC lock", "dvc.lock was cut short"):
        assert told in said


def test_a_worktree_that_was_half_made_is_made_anew(home: Repository) -> None:
    with workspace(run_id="r1", say=home.say) as work:
        pass
    (work.root / READY).unlink()
    (work.root / "make.py").write_text("half")
    with workspace(run_id="r1", say=home.say):
        assert "half" not in (work.root / "make.py").read_text()
    shutil.rmtree(work.root)
    with workspace(run_id="r1", say=home.say):
        assert (work.root / "make.py").is_file()
    remove(home.root, "r1")
    assert git(home.root, "worktree", "list").count("\n") == 0


def test_a_run_that_lives_is_not_entered_twice(home: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_LOCK_TIMEOUT_S", "0.2")
    with workspace(run_id="r1", say=home.say), pytest.raises(Transient) as caught, workspace(run_id="r1", say=home.say):
        pass
    assert caught.value.code == "lock_busy"


@pytest.mark.parametrize("attack", ["no commit", "no such branch", "bad override", "bad run section"])
def test_what_cannot_be_is_refused_and_leaves_nothing(home: Repository, attack: str) -> None:
    overrides = {"train": {"epochz": 1}} if attack == "bad override" else {"run": {"publish": "all"}} if attack == "bad run section" else {}
    if attack == "no commit":
        shutil.rmtree(home.root / ".git")
        git(home.root, "init", "-q", "-b", "main")
    config = RunConfig(branch="nowhere") if attack == "no such branch" else None
    with pytest.raises(BadInput) as caught, workspace(overrides, run_id="r1", config=config, say=home.say):
        pass
    assert caught.value.code == ("params_invalid" if attack.startswith("bad") else "branch_missing")
    assert not folder_of(home.root, "r1").exists()
    assert "r1" not in git(home.root, "worktree", "list")


def test_a_detached_head_is_no_hindrance_and_stays(home: Repository) -> None:
    start = git(home.root, "rev-parse", "HEAD")
    git(home.root, "checkout", "-q", "--detach")
    with workspace(run_id="r1", say=home.say) as work:
        make_version(work.root, home.root / ".dvc" / "cache", {"a": "first"}, "1")
        assert publish(work, "approved", "x").main_moved
    assert git(home.root, "rev-parse", "HEAD") == start
    assert git(home.root, "status", "--porcelain") == ""


def test_hooks_of_dvc_install_do_nothing_in_a_run(home: Repository) -> None:
    for name in ("post-checkout", "pre-push", "reference-transaction"):
        hook = home.root / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {home.root}/hooked-{name}\n")
        hook.chmod(0o755)
    with workspace(run_id="r1", say=home.say) as work:
        make_version(work.root, home.root / ".dvc" / "cache", {"a": "first"}, "1")
        publish(work, "approved", "x")
    assert not list(home.root.glob("hooked-*"))


def test_every_published_version_comes_back_by_git_checkout_and_dvc_checkout_alone(home: Repository) -> None:
    versions = {"r1": {"a": "first", "b": "second"}, "r2": {"a": "first", "b": "second", "c": "third"}}
    for run_id, data in versions.items():
        with workspace(run_id=run_id, say=home.say) as work:
            make_version(work.root, home.root / ".dvc" / "cache", data, run_id)
            publish(work, "approved", "x")
    for run_id, data in versions.items():
        git(home.root, "checkout", "-q", f"trainyard/runs/{run_id}")
        dvc(home.root, "checkout", "-q")
        assert {path.name: path.read_text() for path in (home.root / "data" / "shards").iterdir()} == data
        assert (home.root / "artifacts" / "model.txt").read_text() == run_id
        assert dvc(home.root, "status", "-q") == ""
