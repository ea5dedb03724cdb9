"""The gate under attack: worse models, missing numbers, another champion, other test images, its own re-runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from makers import tiny_model, tiny_report

from tasks.backends.model_registry import Champion
from tasks.core.artifacts import ChampionRef, ClassScore, EvaluationReport, GateDecision, TrainedModel, lineage
from tasks.core.config import GateConfig
from tasks.core.errors import BadInput
from tasks.gate import decide, gate, is_stale

RULES = GateConfig(min_accuracy=0.9, min_class_recall=0.8, min_macro_f1=0.85, max_calibration_error=0.1, min_test_images=50, margin=0.01)


def champion(correct: int, images: int = 100) -> ChampionRef:
    return ChampionRef(version="7", model_digest="c" * 64, correct=correct, images=images, rescored=False)


def failed(report: EvaluationReport, against: ChampionRef | None = None, rules: GateConfig = RULES) -> list[str]:
    approved, reason, checks = decide(report, against, rules)
    names = [check.name for check in checks if not check.passed]
    assert approved == (not names)
    assert all(name in reason for name in names)
    return names


def test_a_first_model_passes_by_the_absolute_floors_alone() -> None:
    assert failed(tiny_report(correct=95)) == []
    assert failed(tiny_report(correct=89)) == ["accuracy"]


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"macro_f1": 0.84}, "macro_f1"),
        ({"calibration_error": 0.11}, "calibration_error"),
        ({"images": 49, "correct": 49}, "test_images"),
        ({"per_class": {"a": ClassScore(precision=1, recall=0.79, f1=0.9, support=50)}}, "class_recall"),
        ({"per_class": {}}, "class_recall"),
        ({"accuracy": math.nan}, "accuracy"),
        ({"calibration_error": math.inf}, "calibration_error"),
        ({"macro_f1": math.nan}, "macro_f1"),
    ],
)
def test_each_floor_rejects_alone(changes: dict[str, object], check: str) -> None:
    assert check in failed(tiny_report(correct=95).model_copy(update=changes))


@pytest.mark.parametrize(("correct", "lost"), [(96, []), (95, []), (94, []), (93, ["loss_against_champion"]), (90, ["loss_against_champion"])])
def test_no_worse_than_the_champion_beyond_the_margin(correct: int, lost: list[str]) -> None:
    """Champion 95 of 100, margin one image: 94 passes at the bound, 93 does not."""
    assert failed(tiny_report(correct=correct), champion(95)) == lost


def test_a_champion_scored_on_other_images_is_no_basis_for_a_verdict() -> None:
    assert "champion_images" in failed(tiny_report(correct=95), champion(80, images=90))
    assert failed(tiny_report(correct=95), champion(0, images=0)) == ["champion_images", "loss_against_champion"]


def test_decide_is_pure() -> None:
    report = tiny_report(correct=95)
    assert decide(report, champion(95), RULES) == decide(report, champion(95), RULES)


def test_the_decision_is_written_and_names_every_check(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    report = tiny_report(correct=80).model_copy(update={"made_from": lineage(model)}).save(tmp_path)
    decision = gate(model, report, champion(95), RULES, tmp_path)
    assert GateDecision.load(tmp_path) == decision
    assert not decision.approved
    assert {check.name for check in decision.checks} == {
        "test_images",
        "accuracy",
        "macro_f1",
        "class_recall",
        "calibration_error",
        "champion_images",
        "loss_against_champion",
    }
    assert all(check.bound for check in decision.checks)


def test_a_report_of_another_model_leaves_no_decision_behind(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    report = tiny_report(correct=99).model_copy(update={"made_from": lineage(model)}).save(tmp_path)
    gate(model, report, None, RULES, tmp_path)
    other = model.model_copy(update={"digest": "f" * 64})
    with pytest.raises(BadInput) as caught:
        gate(other, report, None, RULES, tmp_path)
    assert caught.value.code == "artifact_foreign"
    assert not GateDecision.exists(tmp_path)


def test_a_verdict_is_stale_only_when_another_model_became_champion(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    report = tiny_report(correct=95).model_copy(update={"made_from": lineage(model)}).save(tmp_path)
    first = gate(model, report, None, RULES, tmp_path)
    against = gate(model, report, champion(95), RULES, tmp_path)
    itself, seventh, other = Champion("1", model.digest, tmp_path), Champion("7", "c" * 64, tmp_path), Champion("9", "d" * 64, tmp_path)
    assert [is_stale(first, found) for found in (None, itself, seventh)] == [False, False, True]
    assert [is_stale(against, found) for found in (seventh, itself, other, None)] == [False, False, True, True]
    assert TrainedModel.load(tmp_path).digest == model.digest
