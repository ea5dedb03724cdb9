"""Record the pipeline run in MLflow and, where the gate approved, make a model version with the alias `challenger`.

Run: python -m tasks.register              after the gate approved (the flow does)
     python -m tasks.register --rejected   records the run of a rejected model, without a version
"""

from __future__ import annotations

import csv
import platform
import re
import subprocess
import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from tasks.backends import model_registry
from tasks.core import errors
from tasks.core.artifacts import (
    DatasetRef,
    EvaluationReport,
    GateDecision,
    ImageCache,
    ModelVersion,
    TrainedModel,
    TrainingSet,
    ValidationReport,
    lineage,
    require_approval,
)
from tasks.core.config import PARAMS, Params, RegisterConfig, load_params
from tasks.core.errors import BadInput, Rejected
from tasks.core.files import STATE
from tasks.core.process import die_with_parent, quiet_environment

PROJECT_FILES = (PARAMS.name, "dvc.yaml", "dvc.lock", "data.dvc", "requirements.lock")
"""Read at once, since DVC rewrites dvc.lock in place when it ends another stage."""

RECORDED = (":!data.dvc", ":!dvc.lock", f":!{PARAMS.name}")
"""What a run itself moves, and MLflow keeps whole: an edit of these leaves no doubt about the code."""

_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_.\- ]")
"""What MLflow does not take in a metric's name."""


def register(
    model: TrainedModel,
    report: EvaluationReport,
    decision: GateDecision,
    record: model_registry.RunRecord,
    config: RegisterConfig,
    out: Path,
) -> ModelVersion:
    """Make (or find) the version of ``model`` and write artifacts/registry/version.json below ``out``.

    Raises Rejected ``rejected`` without an approving decision, BadInput ``artifact_foreign`` if it is another model's,
    Transient ``registry_unavailable`` where MLflow does not answer.
    """
    decision.require_made_from(model, report)
    if not decision.approved:
        raise Rejected("rejected", "the gate rejected this model", value=decision.reason, knob="better data or params")
    model.verify()
    version, _created = model_registry.register(
        out,
        experiment=config.experiment,
        model_name=config.model_name,
        model_digest=model.digest,
        description=describe(model, report, decision),
        record=record,
    )
    return ModelVersion(made_from=lineage(model, report, decision), name=config.model_name, version=version, model_digest=model.digest).save(out)


def describe(model: TrainedModel, report: EvaluationReport, decision: GateDecision) -> str:
    """One paragraph that a person reads in the registry."""
    low, high = report.accuracy_low, report.accuracy_high
    return (
        f"{model.architecture}, {len(model.classes)} classes, {model.parameters:,} parameters. Test accuracy {report.accuracy:.4f} "
        f"({report.confidence:.0%} interval {low:.4f} to {high:.4f}) on {report.images:,} images. "
        f"Gate: {'approved' if decision.approved else 'rejected'}, {decision.reason}."
    )


def gather(root: Path, params: Params) -> model_registry.RunRecord:
    """Everything that MLflow keeps of the pipeline's state below ``root``."""
    model, report, decision = TrainedModel.load(root), EvaluationReport.load(root), GateDecision.load(root)
    data = DatasetRef.load(root)
    return model_registry.RunRecord(
        params=dict(_flatten(params.model_dump(mode="json", by_alias=True))),
        metrics={
            "test_accuracy": report.accuracy,
            "test_accuracy_low": report.accuracy_low,
            "test_accuracy_high": report.accuracy_high,
            "test_macro_f1": report.macro_f1,
            "test_calibration_error": report.calibration_error,
            "best_epoch": model.best_epoch,
            **{f"test_recall/{index:03d}_{_NOT_IN_KEYS.sub('_', name)}": report.per_class[name].recall for index, name in enumerate(report.classes)},
        },
        history=_history(model.path("history.csv")),
        tags={
            "trainyard.verdict": "approved" if decision.approved else "rejected",
            "trainyard.reason": decision.reason,
            "trainyard.data_digest": data.digest,
            "trainyard.evaluation_digest": report.digest,
            "trainyard.decision_digest": decision.digest,
            "mlflow.source.git.commit": _git(root, "rev-parse", "HEAD") or "none",
            "trainyard.git_dirty": str(bool(_git(root, "status", "--porcelain", "--", ".", *RECORDED))).lower(),
            "trainyard.python": platform.python_version(),
            "trainyard.platform": platform.platform(),
            **{f"trainyard.{name}": installed(name) for name in ("torch", "torchvision", "onnxruntime", "bentoml", "dvc")},
        },
        dataset_name=params.ingest.source,
        dataset_digest=_data_md5(root) or data.digest,
        files=_files(root, model, report, decision),
        texts={f"project/{name}": (root / name).read_text(encoding="utf-8") for name in PROJECT_FILES if (root / name).is_file()},
        onnx=model.path("model.onnx"),
        requirements=[f"{name}=={installed(name)}" for name in ("onnx", "onnxruntime", "numpy")],
        system=_system(root, model),
    )


def _files(root: Path, model: TrainedModel, report: EvaluationReport, decision: GateDecision) -> dict[str, list[Path]]:
    """Artifact folder of the run -> files. The registry's readers need those of the first folder."""
    validation, cache, training_set = ValidationReport.load(root), ImageCache.load(root), TrainingSet.load(root)
    own = [root / item.PATH for item in (model, report, decision, cache, training_set)] + [root / DatasetRef.PATH]
    pictures = [name for name in report.files if name.endswith(".png")]
    groups = {
        model_registry.FOLDER: [*own, model.path("model.onnx"), model.path("weights.safetensors"), report.path("predictions.parquet")],
        "reports": [validation.path("report.html"), training_set.path("preview.png"), *(report.path(name) for name in pictures)],
        "validation": [root / ValidationReport.PATH],
    }
    return {folder: [path for path in paths if path.is_file()] for folder, paths in groups.items()}


def _flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in tree.items():
        pairs += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, str(value))]
    return pairs


def _history(path: Path) -> list[dict[str, float]]:
    with path.open(newline="", encoding="utf-8") as handle:
        return [{key: float(value) for key, value in row.items() if key != "epoch"} for row in csv.DictReader(handle)]


def _system(root: Path, model: TrainedModel) -> list[dict[str, float]]:
    """Samples of CPU and memory taken while this model trained; empty where another machine trained it."""
    path = root / STATE / "system" / f"{model.digest}.csv"
    return _history(path) if path.is_file() else []


def _data_md5(root: Path) -> str:
    """The DVC hash of data/ (32 hexadecimal digits), or "" where data.dvc is not there."""
    from ruamel.yaml import YAML

    path = root / "data.dvc"
    if not path.is_file():
        return ""
    outs = YAML(typ="safe", pure=True).load(path)["outs"]
    return str(outs[0].get("md5", "")).removesuffix(".dir")


def _git(root: Path, *arguments: str) -> str:
    """Output of a git command, "" where this is no repository or has no commit."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> None:
    """Record the run; with an approving decision also register the model."""
    params, root = load_params(), Path()
    if sys.argv[1:] == ["--rejected"]:
        digest = TrainedModel.load(root).digest
        new = model_registry.record_run(root, experiment=params.register_.experiment, model_digest=digest, record=gather(root, params))
        return print(f"register: the run of a rejected model was {'recorded' if new else 'recorded before'}; no version was made")
    if sys.argv[1:]:
        raise BadInput("unknown_option", "register", value=" ".join(sys.argv[1:]), constraint="nothing or --rejected")
    decision = require_approval(root)
    made = register(TrainedModel.load(root), EvaluationReport.load(root), decision, gather(root, params), params.register_, root)
    print(f"register: {made.name} version {made.version}, alias challenger")


if __name__ == "__main__":
    die_with_parent()
    quiet_environment()
    sys.exit(errors.run(main))
