"""The typed artifacts that stages hand to one another: canonical JSON beside the files that it vouches for.

Every artifact carries its own digest, the digests of its files, and those of the artifacts it was made from, so any
file walks back to data.dvc. No time, host, run id or absolute path stands in one, since a DVC out must be
reproducible. The marker JSON is written last: without it the artifact does not exist.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from tasks.core.errors import BadInput, Rejected
from tasks.core.files import canonical_json, digest_of, sha256_file, write_atomic

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


class Artifact(BaseModel):
    """Base of all artifacts. ``load`` checks the digest, ``verify`` the files too, ``save`` writes the marker last."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    PATH: ClassVar[str] = ""
    STAGE: ClassVar[str] = ""

    format: Literal[1] = 1
    made_from: dict[str, str] = Field(default_factory=dict, description="artifact name -> digest")
    files: dict[str, str] = Field(default_factory=dict, description="path beside the marker -> sha256 of its bytes")
    digest: str = Field("", description="sha256 over all other fields; set by save")
    _root: Path = PrivateAttr(default=Path())

    @property
    def root(self) -> Path:
        """Project root that this artifact was loaded from or saved to."""
        return self._root

    @property
    def folder(self) -> Path:
        """Folder of the marker and its files."""
        return (self._root / self.PATH).parent

    def path(self, name: str) -> Path:
        """Absolute or root-relative path of one of ``files``."""
        assert name in self.files, f"{type(self).__name__} has no file {name!r}"
        return self.folder / name

    @classmethod
    def remedy(cls, force: bool = False) -> str:
        """The command that makes it (again): effects are no stages of DVC."""
        if cls.STAGE in ("ingest", "register", "deploy"):
            return "make run" if cls.STAGE == "deploy" else f"python -m tasks.{cls.STAGE}"
        return f"dvc repro {'--force ' if force else ''}{cls.STAGE}"

    def content(self) -> dict[str, Any]:
        """Everything but the digest, as plain JSON values."""
        return self.model_dump(mode="json", exclude={"digest"})

    def save(self, root: Path) -> Self:
        """Hash nothing but this record, write the marker atomically and return the saved copy with its digest."""
        saved = self.model_copy(update={"digest": digest_of(self.content())})
        saved._root = root
        write_atomic(root / self.PATH, canonical_json(saved.model_dump(mode="json")))
        return saved

    @classmethod
    def exists(cls, root: Path) -> bool:
        """Whether the marker is there (not whether it is sound)."""
        return (root / cls.PATH).is_file()

    @classmethod
    def load(cls, root: Path) -> Self:
        """Read the marker below the project's ``root`` and check its digest.

        Raises BadInput ``artifact_missing``, ``artifact_format`` or ``artifact_edited``.
        """
        return cls.load_file(root / cls.PATH, root)

    @classmethod
    def load_file(cls, path: Path, root: Path | None = None) -> Self:
        """Like ``load``, from a marker that lies elsewhere (a champion's copy)."""
        name = cls.__name__
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise BadInput("artifact_missing", f"{name} is not there", value=path, constraint=f"written by {cls.STAGE}", knob=cls.remedy()) from None
        try:
            artifact = cls.model_validate(json.loads(raw))
        except (ValueError, ValidationError):
            raise BadInput("artifact_format", f"{path} is no {name} of this version", constraint="format 1", knob=cls.remedy(force=True)) from None
        actual = digest_of(artifact.content())
        if artifact.digest != actual:
            raise BadInput(
                "artifact_edited",
                f"{path} was changed after it was written",
                value=f"digest {artifact.digest[:12]}",
                constraint=actual[:12],
                knob=cls.remedy(force=True),
            )
        artifact._root = root if root is not None else path.parent
        return artifact

    def verify(self) -> Self:
        """Hash every file of the artifact; raises BadInput ``artifact_missing`` or ``artifact_edited``."""
        for name, expected in sorted(self.files.items()):
            path = self.folder / name
            if not path.is_file():
                raise BadInput("artifact_missing", f"{type(self).__name__}: a file is gone", value=path, knob=self.remedy(force=True))
            actual = sha256_file(path)
            if actual != expected:
                raise BadInput(
                    "artifact_edited",
                    f"{path} was changed after it was written",
                    value=f"sha256 {actual[:12]}",
                    constraint=expected[:12],
                    knob=self.remedy(force=True),
                )
        return self

    def require_made_from(self, *parents: Artifact) -> Self:
        """Raise BadInput ``artifact_foreign`` unless this artifact was made from exactly these ``parents``."""
        for parent in parents:
            name = type(parent).__name__
            found = self.made_from.get(name, "nothing")
            if found != parent.digest:
                raise BadInput(
                    "artifact_foreign",
                    f"{type(self).__name__} was made from another {name}",
                    value=found[:12],
                    constraint=parent.digest[:12],
                    knob=self.remedy(),
                )
        return self


def lineage(*parents: Artifact) -> dict[str, str]:
    """The ``made_from`` of an artifact that is made from ``parents``."""
    return {type(parent).__name__: parent.digest for parent in parents}


def file_digests(folder: Path, *names: str) -> dict[str, str]:
    """The ``files`` of an artifact: name -> sha256 for each of ``names`` in ``folder``."""
    return {name: sha256_file(folder / name) for name in names}


class Shard(BaseModel):
    """One immutable Parquet file of data/."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: str = Field(description="path below data/, such as shards/000001-00000.parquet")
    sha256: str
    rows: int
    source: str = Field(description="name of the source it came from")


class SetAside(BaseModel):
    """An item that was not used, by name and reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    code: str


class DatasetRef(Artifact):
    """The data version. Files: data/dataset.json, data/shards/*.parquet, data/labels/*.parquet.

    Digest: over dataset.json's content, which holds each shard's sha256. Writer: ingest. Readers: validate, prepare, gate, deploy.
    """

    PATH: ClassVar[str] = "data/dataset.json"
    STAGE: ClassVar[str] = "ingest"

    classes: tuple[str, ...] = Field(description="class names, sorted by code point: index = position")
    counts: dict[str, int] = Field(description="class -> images, label layers applied")
    splits: dict[str, int] = Field(description="split given by the source -> images; empty where it gives none")
    shards: tuple[Shard, ...] = Field(description="in order; a batch adds shards and rewrites none")
    layers: tuple[Shard, ...] = Field((), description="label layers in order: sha256, label (null removes), split")
    set_aside: tuple[SetAside, ...] = Field((), description="items of the source that were not stored, by name and code")
    ignored: int = Field(0, description="hidden and junk files that were passed over")


class CheckResult(BaseModel):
    """One check of a validation suite or a gate: what was measured, its bound, and whether it held.

    ``severity`` is written only where it is "warn" (a failure is shown and stops nothing), so that older digests hold.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    value: float | int | str | None
    bound: str
    passed: bool
    detail: str = ""
    severity: Literal["fail", "warn"] = Field("fail", exclude_if=lambda severity: severity == "fail")


class ValidationReport(Artifact):
    """Verdict on a data version. Files: report.json, images.parquet (the image table), quarantine/reasons.parquet, report.html.

    Digest: over report.json. Writer: validate, before it fails. Reader: prepare, which refuses without ``success``.
    images.parquet columns: path string, label string, split string?, group string?, sha256 string, width int32,
    height int32 (as stored), mode string, format string, bytes int64, decodes bool, reason string ("" where the image is sound:
    it decodes, its sides are within bounds, and it is no copy that was set aside), phash string? (64-bit gradient hash in
    hex), brightness, contrast, sharpness, entropy, aspect double? (tasks/images/statistics.py). reasons.parquet columns: stage, path,
    label, sha256, code, reason.
    """

    PATH: ClassVar[str] = "artifacts/validation/report.json"
    STAGE: ClassVar[str] = "validate"

    success: bool
    images: int
    sound: int
    checks: tuple[CheckResult, ...]
    quarantined: tuple[SetAside, ...]


class DecodeSpec(BaseModel):
    """Everything that decides how a file's bytes become the model's input pixels."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    image_size: int
    resize: Literal["stretch", "crop", "letterbox"]
    max_pixels: int
    max_bytes: int
    background: tuple[int, int, int]


CacheForm = Literal["pixels", "encoded"]


class ImageCache(Artifact):
    """Pixels by data shard and tables by split. Files: one for each shard of data/ (000001-00000.u8: uint8 N x S x S x 3, C order, of its
    sound images by ascending sha256), {split}.parquet (row, sha256, path, label_index, and the shard, start and bytes of each image),
    index.json. Where ``form`` is "encoded", .images instead of .u8: the images' own bytes; readers decode them to the same pixels.

    Digest: over index.json. Writer: prepare. Readers: augment, train, evaluate, gate.
    ``test_digest`` is the digest of the sorted (sha256, label) pairs of the test split: equal digests mean that two
    evaluations saw the same images with the same truth, whatever the image size.
    """

    PATH: ClassVar[str] = "artifacts/cache/index.json"
    STAGE: ClassVar[str] = "prepare"

    classes: tuple[str, ...]
    counts: dict[str, int] = Field(description="split -> images")
    decode: DecodeSpec
    form: CacheForm = "pixels"
    shards: dict[str, int] = Field(description="shard of data/ -> bytes of its file")
    test_digest: str


class TrainingSet(Artifact):
    """The resolved augmentation and the channel statistics of the training split. Files: policy.json, preview.png.

    Digest: over policy.json. Writer: augment. Reader: train.
    ``ops`` is the ordered list of batch ops with their exact parameters, such as {"op": "translate", "max_px": 2}.
    """

    PATH: ClassVar[str] = "artifacts/training_set/policy.json"
    STAGE: ClassVar[str] = "augment"

    mean: tuple[float, float, float] = Field(description="channel means of train, uint8 scale 0-255")
    std: tuple[float, float, float] = Field(description="channel standard deviations of train, uint8 scale, at least 1")
    class_weights: tuple[float, ...] = Field(description="loss weight of each class, mean 1")
    ops: tuple[dict[str, Any], ...]


class LabelIssues(Artifact):
    """Labels that are likely wrong (tasks/images/label_issues.py). Files: issues.parquet, report.html, report.json.

    Digest: over report.json. Writer: tasks.training.label_issues, when people ask for it. Readers: people, tasks.sources.review.
    issues.parquet columns, the likeliest first: sha256, path, split, label, suggested string; probability_label,
    probability_suggested, margin double.
    """

    PATH: ClassVar[str] = "artifacts/label_issues/report.json"
    STAGE: ClassVar[str] = "tasks.training.label_issues"

    folds: int = Field(description="models, each asked about the images that it was not trained on")
    images: int
    issues: int
    accuracy: float = Field(description="share of images whose label is the out-of-fold models' first answer")
    noise: float = Field(description="estimated share of wrong labels")
    pairs: tuple[tuple[str, str, int], ...] = Field(description="label, suggested class, images; the most first")

    @classmethod
    def remedy(cls, force: bool = False) -> str:
        """The command that makes it (again)."""
        return f"python -m {cls.STAGE}"


class TrainedModel(Artifact):
    """The candidate. Files: weights.safetensors, model.onnx, history.csv (epoch, lr, train_loss, val_loss, val_accuracy,
    images_per_s is not in it: a DVC out must be reproducible), model.json.

    Digest: over model.json. Writer: train. Readers: evaluate, gate, register, package.
    model.onnx: input "image" uint8 [N, S, S, 3]; output "probabilities" float32 [N, C].
    """

    PATH: ClassVar[str] = "artifacts/model/model.json"
    STAGE: ClassVar[str] = "train"

    architecture: str
    classes: tuple[str, ...]
    decode: DecodeSpec
    parameters: int = Field(description="number of trainable numbers")
    best_epoch: int = Field(description="epoch (from 1) whose weights these are, chosen on val")
    val_accuracy: float
    val_loss: float


class ClassScore(BaseModel):
    """Scores of one class on test."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    precision: float
    recall: float
    f1: float
    support: int


class EvaluationReport(Artifact):
    """The candidate on test. Files: predictions.parquet, metrics.json, confusion.csv, confusion.png, calibration.png,
    classes.png, report.json.

    Digest: over report.json. Writer: evaluate. Readers: gate, register, deploy, reports.
    predictions.parquet columns: sha256 string, label string, predicted string, probabilities list<float32> in the order
    of ``classes``.
    """

    PATH: ClassVar[str] = "artifacts/evaluation/report.json"
    STAGE: ClassVar[str] = "evaluate"

    classes: tuple[str, ...]
    test_digest: str
    images: int
    correct: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    confidence: float
    macro_f1: float
    calibration_error: float
    per_class: dict[str, ClassScore]
    confusion: tuple[tuple[int, ...], ...] = Field(description="rows: true class, columns: predicted class")


class ChampionRef(BaseModel):
    """The model in service that a gate compared with."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: str = Field(description="MLflow model version")
    model_digest: str
    correct: int = Field(description="right answers on the candidate's test images")
    images: int
    rescored: bool = Field(description="whether it was scored again because its own report saw other test images")


class GateDecision(Artifact):
    """The verdict. File: decision.json. Digest: over it. Writer: gate. Readers: register, package, deploy, which call
    ``require_approval`` and fail closed."""

    PATH: ClassVar[str] = "artifacts/gate/decision.json"
    STAGE: ClassVar[str] = "gate"

    approved: bool
    reason: str
    model_digest: str
    champion: ChampionRef | None
    checks: tuple[CheckResult, ...]


class ModelVersion(Artifact):
    """A version in the MLflow registry. File: artifacts/registry/version.json. Writer: register. Reader: deploy.

    No DVC out: the version number depends on the registry's history.
    """

    PATH: ClassVar[str] = "artifacts/registry/version.json"
    STAGE: ClassVar[str] = "register"

    name: str
    version: str
    model_digest: str


class BentoRef(Artifact):
    """The packaged service. Files: bento.json, service.bento (an archive for ``bentoml import``).

    Digest: over bento.json. Writer: package. Reader: deploy.
    """

    PATH: ClassVar[str] = "artifacts/bento/bento.json"
    STAGE: ClassVar[str] = "package"

    tag: str = Field(description="name:version; the version is made of the model's and the service's digests")
    model_digest: str
    service_digest: str


class Endpoint(Artifact):
    """What is in service on this machine. File: .trainyard/serve/endpoint.json, one for all worktrees of a project.

    Writer: deploy. Readers: deploy --serve, rollback, people.
    """

    PATH: ClassVar[str] = ".trainyard/serve/endpoint.json"
    STAGE: ClassVar[str] = "deploy"

    url: str
    tag: str
    model_digest: str
    model_version: str
    smoke_images: int
    max_probability_difference: float


def require_approval(root: Path) -> GateDecision:
    """The decision below ``root``, if it approves exactly the model and evaluation that lie there; else raise.

    Checked: it exists, its digest holds, it was made from this model and this evaluation, its verdict follows from its
    own checks, and its accuracy is the evaluation's. Raises BadInput ``no_verdict``, ``artifact_edited``,
    ``artifact_foreign``, or Rejected ``rejected``.
    """
    if not GateDecision.exists(root):
        raise BadInput("no_verdict", "this model was not judged", value=root / GateDecision.PATH, constraint="written by gate", knob="dvc repro gate")
    decision = GateDecision.load(root)
    model = TrainedModel.load(root)
    report = EvaluationReport.load(root)
    report.require_made_from(model)
    decision.require_made_from(model, report)
    accuracy = [check.value for check in decision.checks if check.name == "accuracy"]
    consistent = (
        decision.model_digest == model.digest
        and decision.approved == (bool(decision.checks) and all(check.passed for check in decision.checks))
        and accuracy == [report.accuracy]
    )
    if not consistent:
        raise BadInput(
            "artifact_edited",
            f"{GateDecision.PATH} contradicts itself or the evaluation",
            constraint="the gate's own words",
            knob="dvc repro --force gate",
        )
    if not decision.approved:
        raise Rejected(
            "rejected", "the gate rejected this model", value=decision.reason, knob="better data or params; see artifacts/gate/decision.json"
        )
    return decision
