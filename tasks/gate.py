"""Judge the candidate against absolute floors and against the champion on the same test images.

Run: python -m tasks.gate           (stage `gate` of dvc.yaml)
     python -m tasks.gate --stale   says whether the champion changed since the decision that lies there
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.backends import model_registry
from tasks.core import errors
from tasks.core.artifacts import ChampionRef, CheckResult, DatasetRef, EvaluationReport, GateDecision, ImageCache, TrainedModel, lineage
from tasks.core.config import GateConfig, load_params
from tasks.core.errors import BadInput
from tasks.core.process import die_with_parent, quiet_environment

if TYPE_CHECKING:
    import numpy as np


def decide(candidate: EvaluationReport, champion: ChampionRef | None, rules: GateConfig) -> tuple[bool, str, tuple[CheckResult, ...]]:
    """The verdict on ``candidate``: (approved, reason, checks). Pure: no file, clock or registry is read.

    Approved only if every check holds; a value that is not a finite number fails its check. A first model (``champion``
    None) passes by the absolute floors alone, which is stated as a check of its own. Against a champion the accuracies on
    the same images may differ by at most ``rules.margin`` to the candidate's disadvantage.
    """
    weakest = min(candidate.per_class, key=lambda name: (candidate.per_class[name].recall, name), default="")
    recall = candidate.per_class[weakest].recall if weakest else math.nan
    checks = [
        _at_least("test_images", candidate.images, rules.min_test_images),
        _at_least("accuracy", candidate.accuracy, rules.min_accuracy, f"{candidate.correct} of {candidate.images} right"),
        _at_least("macro_f1", candidate.macro_f1, rules.min_macro_f1),
        _at_least("class_recall", recall, rules.min_class_recall, f"weakest class: {weakest or 'none'}"),
        _at_most("calibration_error", candidate.calibration_error, rules.max_calibration_error),
    ]
    if champion is None:
        checks.append(CheckResult(name="champion", value="none", bound="absolute floors alone", passed=True, detail="no other model is in service"))
    else:
        same = champion.images == candidate.images
        checks.append(
            CheckResult(name="champion_images", value=champion.images, bound=f"== {candidate.images}", passed=same, detail="the same test images")
        )
        loss = champion.correct / champion.images - candidate.accuracy if champion.images else math.nan
        scored = "scored again" if champion.rescored else "from its report"
        checks.append(_at_most("loss_against_champion", loss, rules.margin, f"version {champion.version}, {champion.correct} right, {scored}"))
    failed = [check for check in checks if not check.passed]
    if failed:
        return False, "; ".join(f"{check.name} {_shown(check.value)}, must be {check.bound}" for check in failed), tuple(checks)
    against = (
        "no other model is in service: all absolute floors hold"
        if champion is None
        else f"no worse than version {champion.version} by more than {rules.margin:g}"
    )
    return True, against, tuple(checks)


def gate(
    model: TrainedModel,
    report: EvaluationReport,
    champion: ChampionRef | None,
    config: GateConfig,
    out: Path,
) -> GateDecision:
    """Write the decision on ``report`` below ``out``. Raises BadInput ``artifact_foreign`` if it is not this model's."""
    (out / GateDecision.PATH).unlink(missing_ok=True)
    report.require_made_from(model)
    approved, reason, checks = decide(report, champion, config)
    decision = GateDecision(
        made_from=lineage(model, report), approved=approved, reason=reason, model_digest=model.digest, champion=champion, checks=checks
    )
    return decision.save(out)


def judge_champion(
    found: model_registry.Champion | None,
    model: TrainedModel,
    report: EvaluationReport,
    cache: ImageCache,
    data: Callable[[], DatasetRef],
) -> ChampionRef | None:
    """The champion's right answers on the candidate's test images.

    None if there is no champion, or if it is this very model (then the verdict rests on the floors, as when it was new).
    Its own report is used if it saw the same test images with the same labels, else its model.onnx is run on them.
    """
    if found is None or found.model_digest == model.digest:
        return None
    theirs = EvaluationReport.load_file(found.folder / "report.json", found.folder)
    if theirs.made_from.get("TrainedModel") != found.model_digest:
        raise BadInput("artifact_foreign", "the champion's report is another model's", value=found.version, knob="MLFLOW_TRACKING_URI")
    if theirs.test_digest == report.test_digest:
        return ChampionRef(version=found.version, model_digest=found.model_digest, correct=theirs.correct, images=theirs.images, rescored=False)
    champion_model = TrainedModel.load_file(found.folder / "model.json", found.folder)
    correct, images = _score_again(champion_model, found.folder / "model.onnx", cache, data)
    return ChampionRef(version=found.version, model_digest=found.model_digest, correct=correct, images=images, rescored=True)


def _score_again(champion: TrainedModel, onnx: Path, cache: ImageCache, data: Callable[[], DatasetRef]) -> tuple[int, int]:
    """(right answers, images) of another model's ONNX file on this cache's test split, compared by class name."""
    from tasks.core.files import sha256_file
    from tasks.images.cache import open_split
    from tasks.training.predict import predict

    if sha256_file(onnx) != champion.files["model.onnx"]:
        raise BadInput("artifact_edited", "the champion's model.onnx is not the one it was registered with", value=onnx, knob="MLFLOW_TRACKING_URI")
    view = open_split(cache, "test")
    batch = 256
    correct = 0
    for start in range(0, len(view.labels), batch):
        rows = slice(start, start + batch)
        truth = [cache.classes[label] for label in view.labels[rows]]
        if champion.decode == cache.decode:
            pixels = view.pixels[rows]
        else:
            pixels, kept = _decode_for(champion, view.sha256[rows], data())
            truth = [truth[row] for row in kept]  # what the champion cannot read it gets wrong
        if len(pixels):
            guesses = predict(onnx, pixels, batch).argmax(axis=1)
            correct += sum(champion.classes[guess] == name for guess, name in zip(guesses, truth, strict=True))
    return correct, len(view.labels)


def _decode_for(champion: TrainedModel, wanted: list[str], data: DatasetRef) -> tuple[np.ndarray, list[int]]:
    """The images ``wanted`` (by sha256), decoded as the champion was trained: uint8 [M, S, S, 3], and their M positions.

    An image beyond the champion's own limits is left out. Raises BadInput ``artifact_foreign`` where the data lack one.
    """
    import numpy as np

    from tasks.images.decode import BadImage, load_pixels
    from tasks.images.shards import find_rows

    found = find_rows(data, wanted)
    pixels, kept = [], []
    for position, sha256 in enumerate(wanted):
        if sha256 not in found:
            raise BadInput("artifact_foreign", "the data lack an image of the test split", value=sha256[:12], knob="dvc repro validate prepare")
        try:
            pixels.append(load_pixels(found[sha256].data, champion.decode))
        except BadImage:
            continue
        kept.append(position)
    size = champion.decode.image_size
    return np.stack(pixels) if pixels else np.empty((0, size, size, 3), np.uint8), kept


def is_stale(decision: GateDecision, found: model_registry.Champion | None) -> bool:
    """Whether ``decision`` compared with another champion than ``found``, the one now in service.

    A candidate that became the champion itself keeps its verdict.
    """
    if found is not None and found.model_digest == decision.model_digest:
        return False
    compared = None if decision.champion is None else decision.champion.version
    return compared != (None if found is None else found.version)


def _at_least(name: str, value: float, bound: float, detail: str = "") -> CheckResult:
    return CheckResult(name=name, value=_finite(value), bound=f">= {bound:g}", passed=math.isfinite(value) and value >= bound, detail=detail)


def _at_most(name: str, value: float, bound: float, detail: str = "") -> CheckResult:
    # 1e-12 forgives the rounding of a difference of two accuracies, never a whole image.
    return CheckResult(name=name, value=_finite(value), bound=f"<= {bound:g}", passed=math.isfinite(value) and value <= bound + 1e-12, detail=detail)


def _finite(value: float) -> float | int | str:
    return value if math.isfinite(value) else str(value)


def _shown(value: float | int | str | None) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Look the champion up, judge the candidate, say the verdict."""
    params, root = load_params(), Path()
    found = model_registry.champion(root, params.register_.model_name)
    if sys.argv[1:] == ["--stale"]:
        return print("stale" if is_stale(GateDecision.load(root), found) else "fresh")
    model, report = TrainedModel.load(root), EvaluationReport.load(root)
    champion = judge_champion(found, model, report, ImageCache.load(root), lambda: DatasetRef.load(root))
    decision = gate(model, report, champion, params.gate, root)
    print(f"gate: {'approved' if decision.approved else 'rejected'}: {decision.reason}")


if __name__ == "__main__":
    die_with_parent()
    quiet_environment()
    sys.exit(errors.run(main))
