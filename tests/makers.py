"""Small real artifacts made by hand, for tests that need one without running the stages before it."""

from __future__ import annotations

from pathlib import Path

from tasks.core.artifacts import CheckResult, ClassScore, DecodeSpec, EvaluationReport, GateDecision, TrainedModel, file_digests, lineage
from tasks.core.files import write_atomic


def tiny_model(root: Path) -> TrainedModel:
    """A TrainedModel of two classes whose model.onnx is four bytes."""
    folder = root / "artifacts" / "model"
    write_atomic(folder / "model.onnx", b"onnx")
    return TrainedModel(
        files=file_digests(folder, "model.onnx"),
        architecture="tiny",
        classes=("a", "b"),
        decode=DecodeSpec(image_size=8, resize="stretch", max_pixels=100, max_bytes=100, background=(0, 0, 0)),
        parameters=1,
        best_epoch=1,
        val_accuracy=1.0,
        val_loss=0.0,
    ).save(root)


def tiny_report(correct: int, images: int = 100) -> EvaluationReport:
    """An unsaved EvaluationReport of two classes with ``correct`` right answers; every other score is 0.98."""
    score = ClassScore(precision=0.98, recall=0.98, f1=0.98, support=images // 2)
    return EvaluationReport(
        classes=("a", "b"),
        test_digest="t",
        images=images,
        correct=correct,
        accuracy=correct / images,
        accuracy_low=0.9,
        accuracy_high=0.99,
        confidence=0.95,
        macro_f1=0.98,
        calibration_error=0.01,
        per_class={"a": score, "b": score},
        confusion=((49, 1), (1, 49)),
    )


def save_report(root: Path, model: TrainedModel, correct: int = 98) -> EvaluationReport:
    """``tiny_report`` of ``model``, saved."""
    return tiny_report(correct).model_copy(update={"made_from": lineage(model)}).save(root)


def save_decision(root: Path, model: TrainedModel, report: EvaluationReport, approved: bool = True) -> GateDecision:
    """A decision with the one check that ``require_approval`` reads, saved."""
    check = CheckResult(name="accuracy", value=report.accuracy, bound=">= 0.9", passed=approved)
    return GateDecision(
        made_from=lineage(model, report), approved=approved, reason="why", model_digest=model.digest, champion=None, checks=(check,)
    ).save(root)
