"""The evaluation: every test image once, numbers that follow from predictions.parquet, deterministic files, no torch."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from training_data import SIZE, make_data

from tasks.core.artifacts import EvaluationReport, ImageCache, TrainedModel, file_digests, lineage
from tasks.core.config import EvaluateConfig
from tasks.core.errors import BadInput
from tasks.evaluate import evaluate
from tasks.images.cache import open_split
from tasks.training import export, plots
from tasks.training.metrics import CalibrationBins, ClassScores, class_scores
from tasks.training.models import build_model

CLASSES = ("a,b", 'quo"te', "rosé")
CONFIG = EvaluateConfig(batch_size=4)


def make_model(root: Path) -> tuple[TrainedModel, ImageCache]:
    """A cache of 9 test images and a model of random weights, exported for real."""
    training_set, cache = make_data(root, classes=CLASSES)
    torch.manual_seed(1)
    served = export.Served(build_model("small_resnet", 3, 4, SIZE), training_set.mean, training_set.std)
    folder = root / "artifacts/model"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(export.to_onnx(served, SIZE))
    model = TrainedModel(
        made_from=lineage(training_set, cache),
        files=file_digests(folder, "model.onnx"),
        architecture="small_resnet",
        classes=cache.classes,
        decode=cache.decode,
        parameters=1,
        best_epoch=1,
        val_accuracy=0.5,
        val_loss=1.0,
    ).save(root)
    return model, cache


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluate")
    evaluate(*make_model(root), CONFIG, root)
    return root


def test_report_follows_from_the_predictions(root: Path) -> None:
    report = EvaluationReport.load(root).verify()
    table = pq.read_table(report.path("predictions.parquet")).to_pydict()
    view = open_split(ImageCache.load(root), "test")
    assert table["sha256"] == view.sha256, "each test image once, in order"
    assert table["label"] == [CLASSES[label] for label in view.labels]
    probabilities = np.array(table["probabilities"], np.float32)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-6)
    assert table["predicted"] == [CLASSES[index] for index in probabilities.argmax(1)]
    correct = sum(map(str.__eq__, table["label"], table["predicted"]))
    assert (report.correct, report.images, report.accuracy) == (correct, 9, correct / 9)
    assert report.accuracy_low <= report.accuracy <= report.accuracy_high
    assert sum(map(sum, report.confusion)) == 9
    assert [score.support for score in report.per_class.values()] == [3, 3, 3]
    for name, score in report.per_class.items():
        right = sum(label == predicted == name for label, predicted in zip(table["label"], table["predicted"], strict=True))
        assert score.recall == pytest.approx(right / 3)
    assert report.macro_f1 == pytest.approx(np.mean([score.f1 for score in report.per_class.values()]))
    assert report.test_digest == ImageCache.load(root).test_digest


def test_files_for_dvc(root: Path) -> None:
    """metrics.json is flat, confusion.csv holds one row for each image and survives names with commas and quotes."""
    report = EvaluationReport.load(root)
    flat = json.loads((root / "artifacts/evaluation/metrics.json").read_text())
    assert flat == {name: getattr(report, name) for name in flat}
    assert set(flat) == {"accuracy", "accuracy_low", "accuracy_high", "macro_f1", "calibration_error", "images"}
    with (root / "artifacts/evaluation/confusion.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    table = pq.read_table(report.path("predictions.parquet")).to_pydict()
    assert [(row["actual"], row["predicted"]) for row in rows] == list(zip(table["label"], table["predicted"], strict=True))


def test_again_gives_the_same_bytes(root: Path) -> None:
    before = {path.name: path.read_bytes() for path in (root / "artifacts/evaluation").iterdir()}
    evaluate(TrainedModel.load(root), ImageCache.load(root), CONFIG, root)
    assert {path.name: path.read_bytes() for path in (root / "artifacts/evaluation").iterdir()} == before


def test_batch_size_changes_no_answer(root: Path, tmp_path: Path) -> None:
    other = evaluate(TrainedModel.load(root), ImageCache.load(root), EvaluateConfig(batch_size=256), tmp_path)
    assert other.confusion == EvaluationReport.load(root).confusion


def test_foreign_or_edited_inputs_are_refused_and_leave_no_report(tmp_path: Path) -> None:
    """A model of another cache, an edited ONNX file: no number may come of them, and the old report is no answer."""
    model, cache = make_model(tmp_path)
    evaluate(model, cache, CONFIG, tmp_path)
    with pytest.raises(BadInput) as caught:
        evaluate(model, cache.model_copy(update={"digest": "f" * 64}), CONFIG, tmp_path)
    assert caught.value.code == "artifact_foreign"
    onnx = model.path("model.onnx")
    onnx.write_bytes(onnx.read_bytes() + b"\0")
    with pytest.raises(BadInput) as caught:
        evaluate(model, cache, CONFIG, tmp_path)
    assert caught.value.code == "artifact_edited"
    onnx.unlink()
    with pytest.raises(BadInput) as caught:
        evaluate(model, cache, CONFIG, tmp_path)
    assert caught.value.code == "artifact_missing"


def test_evaluate_loads_no_torch(root: Path, tmp_path: Path) -> None:
    """What is judged is what will be served: the ONNX file by ONNX Runtime, in a process that could not cheat."""
    code = (
        "import sys, pathlib; from tasks.evaluate import evaluate; from tasks.core.artifacts import *; from tasks.core.config import EvaluateConfig\n"
        f"root = pathlib.Path({str(root)!r})\n"
        f"evaluate(TrainedModel.load(root), ImageCache.load(root), EvaluateConfig(), pathlib.Path({str(tmp_path)!r}))\n"
        "print(sorted({'torch', 'mlflow', 'sklearn', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("classes", [("a", "b"), tuple(f"class {i}" for i in range(130)), ("$x^2$", "<b>\n\x1b[31m", "桜", "n" * 300)])
def test_plots_draw_any_names(classes: tuple[str, ...], recwarn: pytest.WarningsRecorder) -> None:
    """Formulas, control characters, glyphs that the font lacks, long names, many classes; no warning, whole PNG files."""
    confusion = np.eye(len(classes), dtype=np.int64) * 3
    confusion[0, 1] = 1
    for data in (plots.confusion_png(confusion, classes), plots.classes_png(class_scores(confusion), classes)):
        assert data.startswith(b"\x89PNG")
        assert b"Software" not in data
        assert b"IEND" in data[-12:]
    assert not recwarn.list


def test_plots_of_nothing() -> None:
    """Empty bins, and classes that were never right nor named."""
    zeros = np.zeros(3)
    bins = CalibrationBins(np.linspace(0, 1, 4), zeros.astype(np.int64), zeros, zeros)
    assert plots.calibration_png(bins, 0.0).startswith(b"\x89PNG")
    assert plots.classes_png(ClassScores(zeros, zeros, zeros, zeros.astype(np.int64)), ("a", "b", "c")).startswith(b"\x89PNG")
