"""Artifacts under attack: edits, truncation, foreign parents, forged verdicts; and files under attack by crashes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from makers import save_decision, save_report, tiny_model

from tasks.core import files
from tasks.core.artifacts import Artifact, GateDecision, TrainedModel, require_approval
from tasks.core.errors import BadInput, Rejected, TrainyardError, Transient
from tasks.core.files import canonical_json, digest_of, file_lock, publish_dir, write_atomic

ROOT = Path(__file__).parents[1]

HOLD_A_LOCK = """
import time
from pathlib import Path
from tasks.core.files import file_lock
with file_lock(Path({path!r}), 1, "x"):
    print("held", flush=True)
    time.sleep(60)
"""


def refusal(root: Path) -> TrainyardError:
    with pytest.raises(TrainyardError) as caught:
        require_approval(root)
    return caught.value


def edit(path: Path, **changes: object) -> None:
    """Change fields of an artifact, leaving its digest as it was."""
    tree = json.loads(path.read_bytes())
    path.write_bytes(canonical_json({**tree, **changes}))


def forge(path: Path, kind: type[Artifact], **changes: object) -> None:
    """Change fields of an artifact and give it the digest that fits: what somebody who knows the format would do."""
    tree = {**json.loads(path.read_bytes()), **changes}
    tree.pop("digest")
    path.write_bytes(canonical_json({**tree, "digest": digest_of(tree)}))
    kind.load_file(path)


def test_saving_twice_gives_equal_bytes_without_time_host_or_path(tmp_path: Path) -> None:
    first, second = tiny_model(tmp_path / "one"), tiny_model(tmp_path / "two")
    assert first.digest == second.digest
    one, two = (tmp_path / name / TrainedModel.PATH for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert str(tmp_path) not in one.read_text()


def test_every_single_edited_field_is_noticed(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    path = tmp_path / TrainedModel.PATH
    whole = path.read_bytes()
    for field, value in [("classes", ["a", "c"]), ("best_epoch", 2), ("files", {}), ("made_from", {"X": "y"})]:
        edit(path, **{field: value})
        with pytest.raises(BadInput) as caught:
            TrainedModel.load(tmp_path)
        assert caught.value.code == "artifact_edited", field
        path.write_bytes(whole)


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"format": 2}', b"\xff"])
def test_a_marker_that_is_no_marker_is_refused(tmp_path: Path, broken: bytes) -> None:
    tiny_model(tmp_path)
    (tmp_path / TrainedModel.PATH).write_bytes(broken)
    with pytest.raises(BadInput) as caught:
        TrainedModel.load(tmp_path)
    assert caught.value.code == "artifact_format"


def test_verify_finds_a_flipped_byte_and_a_missing_file(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    model.verify()
    model.path("model.onnx").write_bytes(b"onnY")
    with pytest.raises(BadInput) as caught:
        model.verify()
    assert caught.value.code == "artifact_edited"
    model.path("model.onnx").unlink()
    with pytest.raises(BadInput) as caught:
        model.verify()
    assert caught.value.code == "artifact_missing"


def test_an_approved_model_passes(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    save_decision(tmp_path, model, save_report(tmp_path, model))
    assert require_approval(tmp_path).approved


def test_no_decision_stops_every_later_stage(tmp_path: Path) -> None:
    save_report(tmp_path, tiny_model(tmp_path))
    assert refusal(tmp_path).code == "no_verdict"


def test_a_rejection_stops_every_later_stage(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    save_decision(tmp_path, model, save_report(tmp_path, model), approved=False)
    error = refusal(tmp_path)
    assert isinstance(error, Rejected)
    assert error.exit_code == 3


def test_an_edited_verdict_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    save_decision(tmp_path, model, save_report(tmp_path, model), approved=False)
    edit(tmp_path / GateDecision.PATH, approved=True)
    assert refusal(tmp_path).code == "artifact_edited"


def test_a_forged_verdict_with_a_fitting_digest_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    save_decision(tmp_path, model, save_report(tmp_path, model), approved=False)
    forge(tmp_path / GateDecision.PATH, GateDecision, approved=True)
    assert refusal(tmp_path).code == "artifact_edited"


def test_a_verdict_whose_accuracy_is_not_the_evaluations_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    report = save_report(tmp_path, model)
    save_decision(tmp_path, model, report)
    forge(tmp_path / GateDecision.PATH, GateDecision, checks=[{"name": "accuracy", "value": 1.0, "bound": "x", "passed": True, "detail": ""}])
    assert refusal(tmp_path).code == "artifact_edited"


def test_a_verdict_on_another_model_or_evaluation_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    save_decision(tmp_path, model, save_report(tmp_path, model))
    save_report(tmp_path, model, correct=99)
    assert refusal(tmp_path).code == "artifact_foreign"


@pytest.mark.parametrize("exchanges", [True, False], ids=["by exchange", "by two renames"])
def test_publish_dir_shows_the_old_folder_until_the_new_one_is_whole(exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    target = tmp_path / "cache"
    with publish_dir(target) as work:
        (work / "a").write_text("old")
    with pytest.raises(RuntimeError), publish_dir(target) as work:
        (work / "a").write_text("half")
        raise RuntimeError("crash")
    assert (target / "a").read_text() == "old"
    with publish_dir(target) as work:
        (work / "b").write_text("new")
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_write_atomic_leaves_no_part_behind_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_canonical_json_refuses_nan_and_sorts() -> None:
    assert canonical_json({"b": 1, "a": "é"}) == '{\n  "a": "é",\n  "b": 1\n}\n'.encode()
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": float("nan")})


def test_a_held_lock_is_waited_for_and_freed_by_the_death_of_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    code = HOLD_A_LOCK.format(path=str(lock))
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(Transient) as caught, file_lock(lock, 0.3, "the pipeline"):
        pass
    assert f"pid {holder.pid}" in str(caught.value)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    start = time.monotonic()
    with file_lock(lock, 5, "the pipeline"):
        assert time.monotonic() - start < 5
