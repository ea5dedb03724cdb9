"""Score the exported model on the test split, each image once, with ONNX Runtime: what is judged is what will be served.

python -m tasks.evaluate     in a project's root; reads artifacts/cache and artifacts/model, writes artifacts/evaluation
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core import errors
from tasks.core.artifacts import ClassScore, EvaluationReport, ImageCache, TrainedModel, file_digests, lineage
from tasks.core.config import EvaluateConfig, load_params
from tasks.core.errors import BadInput
from tasks.core.files import canonical_json, write_atomic
from tasks.core.process import die_with_parent, quiet_environment

if TYPE_CHECKING:
    import numpy as np

    from tasks.images.cache import SplitView

DATA = ("predictions.parquet", "metrics.json", "confusion.csv")
PLOTS = ("confusion.png", "calibration.png", "classes.png")


def evaluate(model: TrainedModel, cache: ImageCache, config: EvaluateConfig, out: Path) -> EvaluationReport:
    """Score ``model`` on the test split of ``cache`` and write artifacts/evaluation below ``out``, report.json last.

    Raises BadInput ``artifact_foreign`` (the model was trained from another cache), ``artifact_edited`` or
    ``artifact_missing``.
    """
    import numpy as np

    from tasks.images.cache import open_split
    from tasks.training import metrics, plots
    from tasks.training.predict import predict

    model.require_made_from(cache).verify()
    cache.verify()
    if model.classes != cache.classes or model.decode != cache.decode:
        raise BadInput("artifact_foreign", "the model and the cache disagree on classes or pixels", knob="dvc repro train")
    (out / EvaluationReport.PATH).unlink(missing_ok=True)
    view = open_split(cache, "test")
    probabilities = predict(model.path("model.onnx"), view.pixels, config.batch_size)
    if not np.isfinite(probabilities).all():
        raise BadInput("export_mismatch", "the model answers with numbers that are no probabilities", knob="dvc repro --force train")
    predicted = probabilities.argmax(1)
    confusion = metrics.confusion_matrix(view.labels, predicted, len(model.classes))
    scores = metrics.class_scores(confusion)
    bins = metrics.calibration_bins(view.labels, probabilities, config.calibration_bins)
    correct, images = int(np.trace(confusion)), len(view.labels)
    low, high = metrics.wilson_interval(correct, images, config.confidence)
    flat = {
        "accuracy": correct / images,
        "accuracy_low": low,
        "accuracy_high": high,
        "macro_f1": metrics.macro_f1(scores),
        "calibration_error": metrics.expected_calibration_error(bins),
        "images": images,
    }
    folder = (out / EvaluationReport.PATH).parent
    write_atomic(folder / DATA[0], _predictions(view, probabilities, model.classes))
    write_atomic(folder / DATA[1], canonical_json(flat))
    write_atomic(folder / DATA[2], _confusion_csv(view.labels, predicted, model.classes))
    write_atomic(folder / PLOTS[0], plots.confusion_png(confusion, model.classes))
    write_atomic(folder / PLOTS[1], plots.calibration_png(bins, flat["calibration_error"]))
    write_atomic(folder / PLOTS[2], plots.classes_png(scores, model.classes))
    return EvaluationReport(
        made_from=lineage(model, cache),
        files=file_digests(folder, *DATA, *PLOTS),
        classes=model.classes,
        test_digest=cache.test_digest,
        correct=correct,
        confidence=config.confidence,
        per_class={
            name: ClassScore(precision=float(p), recall=float(r), f1=float(f), support=int(n))
            for name, p, r, f, n in zip(model.classes, *scores, strict=True)
        },
        confusion=tuple(tuple(int(count) for count in row) for row in confusion),
        **flat,
    ).save(out)


def _predictions(view: SplitView, probabilities: np.ndarray, classes: Sequence[str]) -> bytes:
    """predictions.parquet: sha256, label, predicted, probabilities list<float32>; one row for each image in the cache's order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = pa.array(list(classes), pa.string())
    columns = {
        "sha256": pa.array(list(view.sha256), pa.string()),
        "label": names.take(pa.array(view.labels)),
        "predicted": names.take(pa.array(probabilities.argmax(1))),
        "probabilities": pa.FixedSizeListArray.from_arrays(pa.array(probabilities.ravel()), len(classes)).cast(pa.list_(pa.float32())),
    }
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="none")
    return buffer.getvalue()


def _confusion_csv(labels: np.ndarray, predicted: np.ndarray, classes: Sequence[str]) -> bytes:
    """confusion.csv for DVC's confusion template: actual, predicted; one row for each image."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("actual", "predicted"))
    writer.writerows((classes[label], classes[answer]) for label, answer in zip(labels, predicted, strict=True))
    return text.getvalue().encode()


def main() -> None:
    die_with_parent()
    quiet_environment()
    root = Path()
    config = load_params().evaluate
    report = evaluate(TrainedModel.load(root), ImageCache.load(root), config, root)
    print(
        f"evaluate: {report.correct} of {report.images} test images right, accuracy {100 * report.accuracy:.2f} % "
        f"({100 * config.confidence:g} % interval {100 * report.accuracy_low:.2f} to {100 * report.accuracy_high:.2f}), macro-F1 "
        f"{report.macro_f1:.4f}, calibration error {report.calibration_error:.4f}, written to {report.folder}"
    )


if __name__ == "__main__":
    sys.exit(errors.run(main))
