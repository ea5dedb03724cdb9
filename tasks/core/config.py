"""The numbers that change a result: one frozen class per section of params.yaml, checked before anything runs."""

from __future__ import annotations

import difflib
import io
import ipaddress
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError
from ruamel.yaml.error import YAMLError

from tasks.core.errors import BadInput
from tasks.core.files import write_atomic

PARAMS = Path("params.yaml")
MAX_PARAMS_BYTES = 1_000_000

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


class Section(BaseModel):
    """Base of every section: frozen, keyword-only, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


S = TypeVar("S", bound=Section)


class IngestConfig(Section):
    """Where images come from and how data/ grows."""

    source: str = Field("digits", description="kind of the source: digits, folder, archive, table, parquet ... (docs/sources.md), or a plug-in's")
    location: str = Field("", description="path or URL that the source reads; empty for digits")
    options: dict[str, Any] = Field({}, description="what else the source is told, by name (docs/sources.md); paths are relative to the project")
    secrets: dict[Variable, str] = Field(
        {}, description="environment variables that the source reads, each with the Prefect Secret block that holds it where it is not set"
    )
    shard_mb: float = Field(128.0, gt=0.0, le=4096.0, description="largest shard in MB (10^6 bytes of images)")
    push: bool = Field(True, description="push the new data version to the default DVC remote, where one is set")
    max_file_bytes: int = Field(67_108_864, ge=1, description="largest file that is stored, in bytes; larger ones are set aside")
    max_unpacked_bytes: int = Field(10_737_418_240, ge=1, description="largest archive, unpacked, in bytes")
    max_unpacked_ratio: float = Field(200.0, ge=1.0, description="largest unpacked size of an archive over its packed size, from 10 MiB")


class DriftConfig(Section):
    """How far the last batch of images may be from those before it."""

    max_psi: float = Field(0.25, gt=0.0, description="largest population stability index of class shares, brightness and size (docs/validation.md)")
    severity: Literal["fail", "warn"] = Field("warn", description="warn goes on, fail stops the run")


class ValidateConfig(Section):
    """Bounds of the validation suite."""

    min_side_px: int = Field(8, ge=1, description="smallest width and height in pixels")
    max_side_px: int = Field(10_000, ge=1, description="largest width and height in pixels")
    min_decodable_share: Share = Field(0.99, description="smallest share of images that decode")
    min_classes: int = Field(2, ge=2, description="fewest classes")
    min_images_per_class: int = Field(10, ge=1, description="fewest sound images in a class")
    max_class_ratio: float = Field(100.0, ge=1.0, description="largest class over smallest class, in images")
    leakage: Literal["set_aside", "fail"] = Field("set_aside", description="what to do with copies of an image that stand in two splits")
    near_duplicate_bits: int = Field(6, ge=0, le=7, description="bits of 64 in which the gradient hashes of near copies may differ")
    drift: DriftConfig = Field(DriftConfig(), description="how far the last batch of images may be from those before it")
    suite: str = Field("", description="file of further expectations (docs/validation.md), relative to the project; empty for none")
    data_docs: bool = Field(False, description="also build Great Expectations' Data Docs (they load scripts from the network)")

    @field_validator("suite")
    @classmethod
    def _inside(cls, suite: str) -> str:
        if suite and (PurePosixPath(suite).is_absolute() or ".." in PurePosixPath(suite).parts):
            raise ValueError("a path inside the project")
        return suite

    @model_validator(mode="after")
    def _sides(self) -> ValidateConfig:
        if self.max_side_px < self.min_side_px:
            raise ValueError(f"max_side_px {self.max_side_px} must be at least min_side_px {self.min_side_px}")
        return self


class DecodeConfig(Section):
    """How bytes become pixels, in training and in the service alike."""

    max_pixels: int = Field(50_000_000, ge=1, description="largest width x height, checked before decoding")
    max_bytes: int = Field(52_428_800, ge=1, description="largest encoded image in bytes")
    background: tuple[int, int, int] = Field((255, 255, 255), description="RGB colour behind transparent pixels")

    @model_validator(mode="after")
    def _colour(self) -> DecodeConfig:
        if any(not 0 <= channel <= 255 for channel in self.background):
            raise ValueError(f"background {list(self.background)} must hold three numbers from 0 to 255")
        return self


class PrepareConfig(Section):
    """Splits and the image cache."""

    image_size: int = Field(16, ge=4, le=1024, description="side of the square cached image in pixels")
    resize: Literal["stretch", "crop", "letterbox"] = Field(
        "stretch", description="how an image becomes square: stretch, short side then centre crop, or letterbox"
    )
    decode: DecodeConfig = DecodeConfig()
    val_share: Share = Field(0.15, description="share of groups in the validation split, where the source gives none")
    test_share: Share = Field(0.20, description="share of groups in the test split, where the source gives none")
    seed: int = Field(0, ge=0, description="seed of the sticky split")
    cache: Literal["auto", "pixels", "encoded"] = Field(
        "auto", description="what is kept of an image: its pixels, packed, or its bytes, decoded each time they are read; auto: by size"
    )
    pixels_mb: float = Field(16_000.0, ge=0.0, description="auto: most MB (10^6 bytes) of pixels; above it images stay encoded, if they are smaller")
    reuse_mb: float = Field(4096.0, ge=0.0, description="most MB (10^6 bytes) of former caches kept to copy from; 0 decodes all anew")

    @model_validator(mode="after")
    def _shares(self) -> PrepareConfig:
        if self.val_share <= 0 or self.test_share <= 0 or self.val_share + self.test_share >= 1:
            raise ValueError(f"val_share {self.val_share} and test_share {self.test_share} must each be above 0 and sum to less than 1")
        return self


class AugmentConfig(Section):
    """The augmentation policy of the training split, applied as batch tensor ops on the training device."""

    flip: bool = Field(False, description="mirror left-right with probability 1/2")
    translate_px: int = Field(1, ge=0, description="largest shift in pixels, each axis, edges reflected")
    rotate_degrees: float = Field(0.0, ge=0.0, le=180.0, description="largest rotation in degrees, either way")
    min_crop_area: float = Field(1.0, gt=0.0, le=1.0, description="smallest area share of a random resized crop; 1 is off")
    brightness: Share = Field(0.0, description="largest relative change of brightness")
    contrast: Share = Field(0.0, description="largest relative change of contrast")
    cutout_px: int = Field(0, ge=0, description="side of the square that is blanked, in pixels; 0 is off")
    class_weights: Literal["none", "balanced"] = Field("none", description="loss weights: none, or inverse class frequency")
    preview_images: int = Field(8, ge=1, le=64, description="training images shown in preview.png")


class TrainConfig(Section):
    """Model, optimisation and processes."""

    model: str = Field("small_resnet", description="small_resnet, or a torchvision classification model by name")
    width: int = Field(32, ge=4, le=1024, description="channels of small_resnet's first stage")
    weights: str = Field("", description="path of a safetensors file to start from; empty starts at random")
    epochs: int = Field(10, ge=1, le=10_000, description="passes over the training split")
    batch_size: int = Field(64, ge=1, description="images per step over all ranks together")
    optimizer: Literal["sgd", "adamw"] = Field("sgd", description="sgd (Nesterov momentum) or adamw")
    lr: float = Field(0.1, gt=0.0, description="peak learning rate")
    momentum: float = Field(0.9, ge=0.0, lt=1.0, description="momentum of sgd; beta1 of adamw")
    weight_decay: float = Field(5e-4, ge=0.0, description="weight decay, not applied to biases and norms")
    schedule: Literal["cosine", "one_cycle"] = Field("one_cycle", description="learning-rate schedule, by step")
    warmup_share: Share = Field(0.2, description="share of all steps in which the rate rises linearly (cosine) or to its peak")
    label_smoothing: float = Field(0.1, ge=0.0, lt=1.0, description="label smoothing of the cross-entropy")
    clip_norm: float = Field(0.0, ge=0.0, description="largest gradient norm; 0 is off")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 autocast where the device has it")
    processes: int = Field(1, ge=1, le=1024, description="ranks, each a process")
    threads: int = Field(0, ge=0, description="CPU threads per rank; 0 shares the cores among the ranks")
    max_restarts: int = Field(3, ge=0, description="restarts of dead ranks before the stage fails")
    seed: int = Field(0, ge=0, description="seed of initial weights, sample order and augmentation")

    @model_validator(mode="after")
    def _ranks(self) -> TrainConfig:
        if self.batch_size < self.processes:
            raise ValueError(f"batch_size {self.batch_size} must be at least processes {self.processes}")
        return self


class EvaluateConfig(Section):
    """How the test split is scored."""

    batch_size: int = Field(256, ge=1, description="images per inference batch")
    confidence: float = Field(0.95, gt=0.5, lt=1.0, description="level of the accuracy's Wilson interval")
    calibration_bins: int = Field(15, ge=2, le=100, description="equal-width bins of the expected calibration error")


class GateConfig(Section):
    """The rules that a candidate must pass."""

    min_accuracy: Share = Field(0.97, description="smallest test accuracy")
    min_class_recall: Share = Field(0.90, description="smallest recall of any class on test")
    min_macro_f1: Share = Field(0.96, description="smallest macro-averaged F1 on test")
    max_calibration_error: Share = Field(0.20, description="largest expected calibration error")
    min_test_images: int = Field(100, ge=1, description="fewest test images that a verdict may rest on")
    margin: Share = Field(0.005, description="largest loss of accuracy against the champion on the same test images")


class RegisterConfig(Section):
    """Where the run and the model version are recorded."""

    experiment: Name = Field("trainyard", description="MLflow experiment")
    model_name: Name = Field("classifier", description="MLflow registered model")


class PackageConfig(Section):
    """The Bento and its service."""

    name: Name = Field("classifier", description="Bento name")
    workers: int = Field(1, ge=1, le=64, description="service processes")
    threads: int = Field(2, ge=1, le=256, description="requests answered at once in each process")
    max_request_bytes: int = Field(16_777_216, ge=1024, description="largest request body in bytes (413 above)")
    max_batch: int = Field(64, ge=1, le=1024, description="most images in one classify_batch request (413 above)")
    max_concurrency: int = Field(64, ge=1, le=4096, description="most requests at once in each process, waiting ones included (429 above)")
    timeout_s: float = Field(30.0, gt=0.0, description="longest time for one request in seconds")


class DeployConfig(Section):
    """Where the service listens and what it must answer before it takes over."""

    host: str = Field("127.0.0.1", description="address to bind: 127.0.0.1 for this machine only, 0.0.0.0 for all")
    port: int = Field(3000, ge=1, le=65_535, description="public port")
    ready_timeout_s: float = Field(60.0, gt=0.0, description="longest wait for the new service to be ready in seconds")
    smoke_images: int = Field(20, ge=1, description="held-out raw image files sent to the new service")
    max_probability_difference: float = Field(
        1e-3, gt=0.0, lt=1.0, description="largest difference of any probability between service and evaluation"
    )

    @field_validator("host")
    @classmethod
    def _address(cls, host: str) -> str:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError("an IP address such as 127.0.0.1 or 0.0.0.0") from None
        return host


class RunConfig(Section):
    """What a run on a worker leaves behind, and for how long. No stage depends on it."""

    publish: Literal["none", "branch", "main"] = Field(
        "main", description="none: git learns nothing of a run; branch: its own branch; main: data.dvc and dvc.lock of `branch` move too"
    )
    branch: str = Field("main", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}$", description="the main line: runs start from its head")
    git_remote: str = Field(
        "origin", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}$", description="git remote that branches are pushed to, where it is set"
    )
    author: str = Field(
        "Trainyard <trainyard@localhost>", pattern=r"^[^<>\n]*[^<>\s] <[^<>\s]+>$", description="author and committer of the runs' commits"
    )
    keep_runs: int = Field(30, ge=1, description="runs whose branches and folders are kept at least")
    keep_days: int = Field(30, ge=1, description="days for which a run's branch and folder are kept at least")


class Params(Section):
    """The whole of params.yaml."""

    ingest: IngestConfig
    validate_: ValidateConfig = Field(alias="validate")
    prepare: PrepareConfig
    augment: AugmentConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    gate: GateConfig
    register_: RegisterConfig = Field(alias="register")
    package: PackageConfig
    deploy: DeployConfig
    run: RunConfig

    @model_validator(mode="after")
    def _across(self) -> Params:
        for name in ("translate_px", "cutout_px"):
            value = getattr(self.augment, name)
            if value >= self.prepare.image_size:
                raise ValueError(f"augment.{name} {value} must be below prepare.image_size {self.prepare.image_size}")
        return self


def load_params(path: Path = PARAMS) -> Params:
    """Read and check a params file (YAML 1.2, safe loader).

    Raises BadInput ``params_missing`` or ``params_invalid`` naming the key, its value and the constraint.
    """
    return check_params(read_yaml(path), path)


def check_params(tree: Any, path: Path = PARAMS) -> Params:
    """``tree`` (nested dicts as read from YAML) as Params; raises BadInput ``params_invalid``."""
    if not isinstance(tree, dict):
        raise BadInput("params_invalid", f"{path} is no mapping of sections", constraint="one section per stage")
    try:
        return Params.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, path) from None


def read_yaml(path: Path) -> Any:
    """The plain values of a YAML 1.2 file; raises BadInput ``params_missing``, ``params_invalid``, ``unsafe_yaml`` or ``too_large``."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadInput(
            "params_missing", f"no {path} here", value=Path.cwd(), constraint="the project's root", knob="cp presets/digits.yaml params.yaml"
        ) from None
    if len(data) > MAX_PARAMS_BYTES:
        raise BadInput("too_large", f"{path} is too large", value=f"{len(data)} bytes", constraint=f"at most {MAX_PARAMS_BYTES}")
    reader = YAML(typ="safe", pure=True)
    try:
        return reader.load(io.BytesIO(_without_aliases(data, path)))
    except DuplicateKeyError as error:
        mark = error.problem_mark
        raise BadInput(
            "params_invalid",
            f"{path} line {mark.line + 1 if mark else '?'}: a key stands twice",
            value=_first_line(error.problem),
            constraint="each key once",
        ) from None
    except (YAMLError, ConstructorError, UnicodeDecodeError) as error:
        raise BadInput("params_invalid", f"{path} is not YAML 1.2", value=_first_line(str(error))) from None


def _without_aliases(data: bytes, path: Path) -> bytes:
    """``data``, or BadInput: aliases can expand a small file to gigabytes, and tags other than YAML's own name code."""
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

    sizes: dict[str, int] = {}
    open_anchors: list[tuple[str | None, int]] = []
    values, alias = 0, ""
    try:
        for event in YAML(typ="safe", pure=True).parse(io.BytesIO(data)):
            tag = str(getattr(event, "tag", None) or "")
            if (tag and not tag.startswith("tag:yaml.org,2002:")) or "python" in tag:
                raise BadInput("unsafe_yaml", f"{path} uses a YAML tag", value=tag, constraint="plain values")
            if isinstance(event, CollectionEndEvent):
                anchor, start = open_anchors.pop()
                if anchor:
                    sizes[anchor] = values - start
            elif isinstance(event, AliasEvent):
                values, alias = values + sizes.get(event.anchor, 1), event.anchor
            else:
                values += 1
            if isinstance(event, CollectionStartEvent):
                open_anchors.append((event.anchor, values - 1))
    except (YAMLError, UnicodeDecodeError) as error:
        raise BadInput("params_invalid", f"{path} is not YAML 1.2", value=_first_line(str(error))) from None
    if alias and values > MAX_PARAMS_BYTES:
        raise BadInput("too_large", f"{path} is too large", value=f"{values} values by its aliases", constraint="written out")
    if alias:
        raise BadInput("params_invalid", f"{path} uses a YAML alias", value=f"*{alias}", constraint="written out")
    return data


def _first_line(text: str | None) -> str:
    return " ".join((text or "unreadable").split())[:200]


def _explain(error: ValidationError, path: Path) -> BadInput:
    """The first problem of a pydantic error, in our words."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return BadInput("params_invalid", f"{path}: unknown key", value=where, constraint=_nearest(problem["loc"]), knob=f"the right name in {path}")
    if problem["type"] == "missing":
        return BadInput("params_invalid", f"{path}: missing section", value=where, constraint="there", knob=f"{where} in {path}")
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    value = problem["input"] if isinstance(problem["input"], str | int | float | bool | list | tuple) else None
    return BadInput(
        "params_invalid", f"{path}: {where or 'sections'}", value=value, constraint=message, knob=f"{where or 'the named keys'} in {path}"
    )


def check_options(model: type[S], given: dict[str, Any], where: str) -> S:
    """``given`` as the options of a source; raises BadInput ``params_invalid`` with the nearest right name, or the constraint.

    ``where`` is the section that they stand in, as in ``ingest.options``.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join([where, *(str(part) for part in problem["loc"])])
        if problem["type"] == "extra_forbidden":
            raise BadInput("params_invalid", "unknown option", value=key, constraint=_nearest(problem["loc"], model), knob=where) from None
        if problem["type"] == "missing":
            raise BadInput("params_invalid", "a missing option", value=key, constraint="there", knob=key) from None
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise BadInput("params_invalid", key, value=_shown(problem["input"]), constraint=message, knob=key) from None


def _shown(value: Any) -> str:
    """A refused value, cut, without the user and password of a URL."""
    return re.sub(r"//[^/@\s]*@", "//***@", repr(value))[:200]


def _nearest(loc: tuple[int | str, ...], section: Any = None) -> str:
    """The known key nearest to the unknown one at ``loc`` of ``section`` (Params where it is not given)."""
    section = section or Params
    for part in loc[:-1]:
        fields = {field.alias or name: field.annotation for name, field in section.model_fields.items()}
        section = fields.get(str(part), Section)
    known = [field.alias or name for name, field in section.model_fields.items()]
    close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.4)
    return f"{'.'.join([*map(str, loc[:-1]), close[0]])}" if close else f"one of {', '.join(known)}"


def apply_overrides(overrides: dict[str, Any], path: Path = PARAMS) -> bool:
    """Write ``overrides`` ({section: {key: value}}) into a params file, comments kept; True if it changed.

    The result is checked before it is written. Raises BadInput ``params_invalid``.
    """
    if not overrides:
        return False
    before = read_yaml(path)
    if not isinstance(before, dict):
        check_params(before, path)
    editor = YAML(typ="rt")
    editor.preserve_quotes = True
    editor.width = 4096
    tree = editor.load(path.read_text(encoding="utf-8"))
    _merge(tree, overrides, ())
    buffer = io.BytesIO()
    editor.dump(tree, buffer)
    plain = YAML(typ="safe", pure=True).load(buffer.getvalue())
    check_params(plain, path)
    if plain == before:
        return False
    write_atomic(path, buffer.getvalue())
    return True


def _merge(tree: Any, changes: dict[str, Any], where: tuple[str, ...]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value, (*where, key))
        else:
            tree[key] = value
