"""A whole judged project in a folder, made by hand in milliseconds: shards, artifacts, a tiny ONNX model and its true predictions.

Used by the tests of package, service, page and deploy. No torch, no training: the model is a softmax over mean colours.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from tasks.backends import serving
from tasks.core.artifacts import (
    BentoRef,
    ChampionRef,
    CheckResult,
    ClassScore,
    DatasetRef,
    DecodeSpec,
    EvaluationReport,
    GateDecision,
    ImageCache,
    ModelVersion,
    Shard,
    TrainedModel,
    TrainingSet,
    ValidationReport,
    file_digests,
    lineage,
)
from tasks.core.files import sha256_file
from tasks.core.process import spare_port
from tasks.deploy import install
from tasks.images.decode import load_pixels

REPO = Path(__file__).resolve().parents[1]
CLASSES = ("blue", "green", "red")
COLOURS = {"blue": (20, 30, 220), "green": (30, 200, 40), "red": (220, 30, 20)}
SIZE = 8
DECODE = DecodeSpec(image_size=SIZE, resize="stretch", max_pixels=50_000_000, max_bytes=52_428_800, background=(255, 255, 255))


class Picture(NamedTuple):
    """An image file of the tiny data set."""

    data: bytes
    label: str
    sha256: str
    split: str


@dataclass(frozen=True)
class Project:
    """The artifacts of a tiny project, as the stages would have left them below ``root``."""

    root: Path
    pictures: tuple[Picture, ...]
    dataset: DatasetRef
    model: TrainedModel
    report: EvaluationReport
    decision: GateDecision


def picture(label: str, number: int) -> bytes:
    """A 12 x 10 PNG of about the label's colour; ``number`` varies it."""
    noise = np.random.default_rng([number, CLASSES.index(label)]).integers(-20, 21, (10, 12, 3))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(np.array(COLOURS[label]) + noise, 0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write_onnx(path: Path, sharpness: float = 8.0) -> None:
    """uint8 [N, S, S, 3] "image" -> float32 [N, 3] "probabilities": softmax of ``sharpness`` times the mean channels."""
    weights = np.zeros((3, 3), np.float32)
    weights[2, 0] = weights[1, 1] = weights[0, 2] = sharpness
    nodes = [
        helper.make_node("Cast", ["image"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["float", "top"], ["scaled"]),
        helper.make_node("ReduceMean", ["scaled", "axes"], ["means"], keepdims=0),
        helper.make_node("MatMul", ["means", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    constants = [
        numpy_helper.from_array(np.array(255.0, np.float32), "top"),
        numpy_helper.from_array(np.array([1, 2], np.int64), "axes"),
        numpy_helper.from_array(weights, "weights"),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", SIZE, SIZE, 3])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", 3])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString(deterministic=True))


def predict(model: Path, files: list[bytes]) -> np.ndarray:
    """What the model truly says of these files: float32 [N, 3]."""
    pixels = np.stack([load_pixels(data, DECODE) for data in files])
    answer: np.ndarray = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, {"image": pixels})[0]
    return answer


def make_project(root: Path, *, sharpness: float = 8.0, champion: ChampionRef | None = None, approved: bool = True) -> Project:
    """Write the project; another ``sharpness`` is another model on the same data."""
    from hashlib import sha256

    pictures = tuple(
        Picture(data, label, sha256(data).hexdigest(), "test" if number < 8 else "train")
        for label in CLASSES
        for number in range(10)
        for data in (picture(label, number),)
    )
    dataset = _write_data(root, pictures)
    validation = ValidationReport(success=True, images=30, sound=30, checks=(), quarantined=(), made_from=lineage(dataset)).save(root)
    counts = {"train": 6, "val": 0, "test": 24}
    made_from = lineage(dataset, validation)
    cache = ImageCache(classes=CLASSES, counts=counts, decode=DECODE, shards={}, test_digest="0" * 64, made_from=made_from).save(root)
    trainset = TrainingSet(mean=(1.0, 1.0, 1.0), std=(1.0, 1.0, 1.0), class_weights=(1.0,) * 3, ops=(), made_from=lineage(cache)).save(root)
    folder = (root / TrainedModel.PATH).parent
    folder.mkdir(parents=True, exist_ok=True)
    write_onnx(folder / "model.onnx", sharpness)
    model = TrainedModel(
        architecture="tiny",
        classes=CLASSES,
        decode=DECODE,
        parameters=9,
        best_epoch=1,
        val_accuracy=1.0,
        val_loss=0.1,
        made_from=lineage(trainset),
        files=file_digests(folder, "model.onnx"),
    ).save(root)
    report = _write_report(root, model, [image for image in pictures if image.split == "test"])
    check = CheckResult(name="accuracy", value=report.accuracy, bound=">= 0.9", passed=approved)
    decision = GateDecision(
        approved=approved,
        reason="first model: all floors held" if approved else "accuracy below its floor",
        model_digest=model.digest,
        champion=champion,
        checks=(check,),
        made_from=lineage(model, report),
    ).save(root)
    return Project(root, pictures, dataset, model, report, decision)


def _write_data(root: Path, pictures: tuple[Picture, ...]) -> DatasetRef:
    shard = root / "data" / "shards" / "000001-00000.parquet"
    shard.parent.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Any] = {
        "image": pa.array(
            [{"bytes": image.data, "path": f"{image.label}/{index}.png"} for index, image in enumerate(pictures)],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        ),
        "label": [image.label for image in pictures],
        "sha256": [image.sha256 for image in pictures],
        "split": [image.split for image in pictures],
        "group": pa.nulls(len(pictures), pa.string()),
    }
    pq.write_table(pa.table(columns), shard, compression="none")
    return DatasetRef(
        classes=CLASSES,
        counts=dict.fromkeys(CLASSES, 10),
        splits={"train": 6, "test": 24},
        shards=(Shard(file="shards/000001-00000.parquet", sha256=sha256_file(shard), rows=len(pictures), source="tiny"),),
        files={"shards/000001-00000.parquet": sha256_file(shard)},
    ).save(root)


def _write_report(root: Path, model: TrainedModel, test: list[Picture]) -> EvaluationReport:
    folder = (root / EvaluationReport.PATH).parent
    probabilities = predict(model.path("model.onnx"), [image.data for image in test])
    predicted = [CLASSES[index] for index in probabilities.argmax(1)]
    write_predictions(folder / "predictions.parquet", test, probabilities)
    correct = sum(guess == image.label for guess, image in zip(predicted, test, strict=True))
    return EvaluationReport(
        classes=CLASSES,
        test_digest="0" * 64,
        images=len(test),
        correct=correct,
        accuracy=correct / len(test),
        accuracy_low=0.862,
        accuracy_high=1.0,
        confidence=0.95,
        macro_f1=1.0,
        calibration_error=0.05,
        per_class={name: ClassScore(precision=1.0, recall=1.0, f1=1.0, support=8) for name in CLASSES},
        confusion=((8, 0, 0), (0, 8, 0), (0, 0, 8)),
        made_from=lineage(model),
        files=file_digests(folder, "predictions.parquet"),
    ).save(root)


def write_predictions(path: Path, test: list[Picture], probabilities: np.ndarray) -> None:
    """predictions.parquet in evaluate's format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "sha256": [image.sha256 for image in test],
            "label": [image.label for image in test],
            "predicted": [CLASSES[index] for index in probabilities.argmax(1)],
            "probabilities": pa.array(list(probabilities.astype(np.float32)), pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, path, compression="none")


def register(project: Project, version: str = "1") -> ModelVersion:
    """What register would have written."""
    return ModelVersion(name="classifier", version=version, model_digest=project.model.digest).save(project.root)


@dataclass(frozen=True)
class Running:
    """A served Bento."""

    url: str
    tag: str
    root: Path


@contextmanager
def serve_bento(bento: BentoRef, root: Path) -> Iterator[Running]:
    """Serve the archive on a free port until the block ends, with the code that deploy uses."""
    folder = install(bento, root)
    server = serving.launch(root, folder, bento.tag, "127.0.0.1", spare_port())
    try:
        serving.wait_ready(root, server, 90.0, lambda: serving.served_tag(server.url) == bento.tag)
        yield Running(server.url, bento.tag, root)
    finally:
        serving.sweep(root, keep=None)
