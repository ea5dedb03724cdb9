"""Decode every image and hold the data version against a Great Expectations suite.

    python -m tasks.validate      in a project's root; reads data/, writes artifacts/validation

A bad image is set aside by name and reason (quarantine/reasons.parquet) and the run goes on, while the share of bad ones is within
params.yaml. So is the copy of another image: whatever judges a model must not be what taught it. A suite that fails stops the
run, after its report is written.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.core import errors
from tasks.core.artifacts import SPLITS, CheckResult, DatasetRef, SetAside, Split, ValidationReport, file_digests, lineage
from tasks.core.config import DriftConfig, PrepareConfig, ValidateConfig, load_params, read_yaml
from tasks.core.errors import BadInput
from tasks.core.files import STATE, write_atomic
from tasks.core.process import die_with_parent, quiet_environment

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    from tasks.images.drift import Drift
    from tasks.images.expectations import Expectation
    from tasks.images.likeness import Likeness
    from tasks.images.table import Bounds, ImageRecord

REASONS = "quarantine/reasons.parquet"
SAMPLES = 6
DATA_DOCS = STATE / "data_docs"
ELSEWHERE = ("ExpectQuery", "ExpectTableRowCountToEqualOther")
"""Expectations that compare with a query or another table, which there is none of."""
INTERNAL = {"batch_id", "row_condition", "condition_parser"}


@dataclass(frozen=True)
class Check:
    """One expectation on one frame: its name on the report, what must hold in words, and what a user is told when it does not."""

    name: str
    frame: str
    expectation: str
    arguments: dict[str, Any]
    bound: str
    knob: str = "the data"
    code: str = "validation_failed"
    severity: Literal["fail", "warn"] = "fail"
    unmeasured: str = ""
    """Why there is nothing to judge; such a check is not run, and holds."""


@dataclass(frozen=True)
class Copies:
    """What ``find_copies`` found: how many images leak into another split, and pairs of images for the page, those set aside first,
    each with its code (``near`` for near copies within one split, which stay)."""

    leaked: int = 0
    pairs: tuple[tuple[int, int, str], ...] = ()


def validate(ref: DatasetRef, config: ValidateConfig, prepare: PrepareConfig, out: Path) -> ValidationReport:
    """Write artifacts/validation below ``out``, report.json last, and return the report if the suite held.

    ``prepare`` says how images are decoded and which split each will be in. The suite file lies below the root of ``ref``. The image
    table is held in memory, images are not. Raises BadInput ``suite_invalid`` before any image is read, and
    ``validation_failed`` (or the code of the class that is at fault) naming the first check that failed, after
    the report was written with ``success`` false.
    """
    from threadpoolctl import threadpool_limits

    from tasks.images.decode import policy_of
    from tasks.images.frames import frames
    from tasks.images.shards import iter_rows
    from tasks.images.table import Bounds, image_table, inspect_all, quarantine_table
    from tasks.images.validation_page import odd_ones, pictured, render_page

    expected = own_suite(ref, config)
    bounds = Bounds(policy_of(prepare.decode), config.min_side_px, config.max_side_px)
    records: list[ImageRecord] = []
    likenesses: list[Likeness | None] = []
    thumbnails: dict[str, list[Any]] = {name: [] for name in ref.classes}
    with threadpool_limits(1, "blas"):  # over matrices this small its threads wait longer for each other than they work
        for record, thumbnail, likeness in inspect_all(iter_rows(ref), bounds, SAMPLES):
            records.append(record)
            likenesses.append(likeness)
            if thumbnail is not None:
                thumbnails.setdefault(record.label, []).append(thumbnail)
    copies = find_copies(ref, records, likenesses, config, prepare)
    checks = suite(ref, config)
    table = image_table(records)
    tables = frames(ref, records, table, copies.leaked)
    checks += drift_checks(drift_of_last_batch(ref, records), config.drift, tables)
    checks += own_checks(expected, tables, _splits(ref, records, prepare) or [record.split for record in records])
    results = run_suite(checks, tables, out / DATA_DOCS if config.data_docs else None)
    quarantined = tuple(SetAside(name=record.path, code=record.code) for record in records if record.code)
    report = ValidationReport(
        made_from=lineage(ref),
        success=all(result.passed or result.severity == "warn" for result in results),
        images=len(records),
        sound=len(records) - len(quarantined),
        checks=tuple(results),
        quarantined=quarantined,
    )
    folder = (out / ValidationReport.PATH).parent
    for stale in (out / ValidationReport.PATH, *folder.rglob(".*.part")):  # the former report, and what a crash left
        stale.unlink(missing_ok=True)
    _write_parquet(folder / "images.parquet", table)
    _write_parquet(folder / REASONS, quarantine_table(ref.set_aside, records))
    odd = odd_ones(records)
    small = small_pictures(ref, records, pictured(copies.pairs, odd), bounds)
    write_atomic(folder / "report.html", render_page(ref, report, records, thumbnails, copies.pairs, odd, small).encode())
    report = report.model_copy(update={"files": file_digests(folder, "images.parquet", REASONS, "report.html")}).save(out)
    for check, result in zip(checks, results, strict=True):
        if not result.passed and result.severity == "fail":
            raise _failure(check, result)
    return report


def find_copies(
    ref: DatasetRef, records: list[ImageRecord], likenesses: Sequence[Likeness | None], config: ValidateConfig, prepare: PrepareConfig
) -> Copies:
    """Set copies of other images aside in ``records`` (their ``code`` and ``reason``), leaks only where ``validate.leakage`` says so.

    Data whose splits cannot be told are left as they are: the suite or prepare refuses them.
    """
    from tasks.images.likeness import exact_copies, leaks, near_copies

    sound = [index for index, likeness in enumerate(likenesses) if likeness is not None]
    splits = _splits(ref, [records[index] for index in sound], prepare)
    if splits is None:
        return Copies()
    alike = [likeness for likeness in likenesses if likeness is not None]
    exact = exact_copies(alike, [records[index].path for index in sound], [records[index].label for index in sound], splits)
    gone = {copy.place for copy in exact}
    pairs = near_copies(alike, config.near_duplicate_bits)
    pairs = pairs[[one not in gone and other not in gone for one, other in pairs.tolist()]] if len(pairs) else pairs
    near = leaks(pairs, splits)
    leaked = [copy for copy in (*exact, *near) if copy.code.startswith("leak")]
    for copy in (*exact, *near):
        if copy.code.startswith("leak") and config.leakage == "fail":
            continue
        index, other = sound[copy.place], records[sound[copy.of]]
        what = {"conflicting_label": "its pixels stand under another label too", "leak_near": "it is a near copy"}.get(copy.code, "it has the pixels")
        reason = f"{what}: {other.path}" if copy.code == "conflicting_label" else f"{what} of {other.path}"
        records[index] = records[index]._replace(code=copy.code, reason=f"{reason} ({splits[copy.of]})")
    shown = [(copy.place, copy.of, copy.code) for copy in (*exact, *near)]
    shown += [(one, other, "near") for one, other in pairs.tolist() if splits[one] == splits[other]]
    return Copies(len(leaked), tuple((sound[one], sound[other], code) for one, other, code in shown))


def small_pictures(ref: DatasetRef, records: list[ImageRecord], places: Iterable[int], bounds: Bounds) -> dict[int, np.ndarray]:
    """Small pictures (uint8 [H, W, 3]) of the sound images and copies at ``places`` in ``records``, by place."""
    from tasks.images.shards import find_rows
    from tasks.images.table import inspect_all

    wanted = {records[place].sha256: place for place in places}
    found: dict[int, np.ndarray] = {}
    for record, picture, _ in inspect_all(find_rows(ref, wanted).values(), bounds):
        assert picture is not None, "it decoded before"
        found[wanted[record.sha256]] = picture
    return found


def _splits(ref: DatasetRef, records: Iterable[ImageRecord], prepare: PrepareConfig) -> list[Split] | None:
    """The split that each image will be in, None where one has none."""
    from tasks.images.splits import Member, splitter

    try:
        assign = splitter(ref, prepare)
        return [assign.split_of(Member(record.sha256, record.group, record.split)) for record in records]
    except BadInput:
        return None


def suite(ref: DatasetRef, config: ValidateConfig) -> list[Check]:
    """The checks in the order in which a user should hear of them: is there data, are there classes, is each image right."""
    share, values = config.min_decodable_share, "ExpectColumnValues"
    limit, sides = "validate.min_decodable_share", "validate.min_side_px or max_side_px"
    side = {"min_value": config.min_side_px, "max_value": config.max_side_px, "mostly": share}
    within = f"{config.min_side_px} to {config.max_side_px} px for a share of at least {share:g}"
    least, enough = {"min_value": config.min_classes}, {"column": "images", "min_value": config.min_images_per_class}
    ratio, whole_share = {"column": "class_ratio", "max_value": config.max_class_ratio}, {"column": "sound_share", "min_value": share}
    decodes = {"column": "decodes", "value_set": [True], "mostly": share}
    each_split = f"all, with at least one for each of {', '.join(SPLITS)}"
    return [
        Check("images", "images", "ExpectTableRowCountToBeBetween", {"min_value": 1}, "at least 1", "ingest.location"),
        Check("columns", "images", "ExpectTableColumnsToMatchSet", {"column_set": _columns(), "exact_match": True}, "the columns of images.parquet"),
        Check(
            "classes", "classes", "ExpectTableRowCountToBeBetween", least, f"at least {config.min_classes}", "validate.min_classes", "too_few_classes"
        ),
        _per_class("a sound image", f"{values}ToBeBetween", {"column": "images", "min_value": 1}, "all", "images for the class", "empty_class"),
        _per_class("an image for train", f"{values}ToBeInSet", _true("in_train"), "all", "the source's splits", "class_not_in_train"),
        _per_class("an image for each split", f"{values}ToBeInSet", _true("split"), each_split, "more images of the class", "class_too_small"),
        _per_class("enough images", f"{values}ToBeBetween", enough, f"all, with at least {enough['min_value']}", "validate.min_images_per_class"),
        Check(
            "largest class over smallest", "whole", "ExpectColumnMaxToBeBetween", ratio, f"at most {ratio['max_value']:g}", "validate.max_class_ratio"
        ),
        Check("paths given", "images", f"{values}ToNotBeNull", {"column": "path"}, "all"),
        Check("labels given", "images", f"{values}ToNotBeNull", {"column": "label"}, "all"),
        Check("labels known", "images", f"{values}ToBeInSet", {"column": "label", "value_set": list(ref.classes)}, "all, as in dataset.json"),
        Check("splits known", "images", f"{values}ToBeInSet", {"column": "split", "value_set": list(SPLITS)}, f"all of {', '.join(SPLITS)}"),
        Check("sha256 well-formed", "images", f"{values}ToMatchRegex", {"column": "sha256", "regex": "^[0-9a-f]{64}$"}, "all"),
        Check("sha256 unique", "images", f"{values}ToBeUnique", {"column": "sha256"}, "all"),
        Check("images that decode", "images", f"{values}ToBeInSet", decodes, f"a share of at least {share:g}", limit),
        Check("formats taken", "images", f"{values}ToBeInSet", {"column": "format", "value_set": _formats()}, f"all of {', '.join(_formats())}"),
        Check("width", "images", f"{values}ToBeBetween", {"column": "width", **side}, within, sides),
        Check("height", "images", f"{values}ToBeBetween", {"column": "height", **side}, within, sides),
        Check(
            "copies of images in another split",
            "whole",
            "ExpectColumnMaxToBeBetween",
            {"column": "leaks", "max_value": 0 if config.leakage == "fail" else None, "min_value": 0},
            "0" if config.leakage == "fail" else "any number, set aside",
            "validate.leakage: set_aside, or the source's splits",
        ),
        Check("sound share, files set aside included", "whole", "ExpectColumnMinToBeBetween", whole_share, f"at least {share:g}", limit),
    ]


def _per_class(what: str, expectation: str, arguments: dict[str, Any], bound: str, knob: str, code: str = "validation_failed") -> Check:
    return Check(f"classes with {what}", "classes", expectation, arguments, bound, knob, code)


def _true(column: str) -> dict[str, Any]:
    return {"column": column, "value_set": [True]}


def _columns() -> list[str]:
    from tasks.images.table import SCHEMA

    return list(SCHEMA.names)


def _formats() -> list[str]:
    from tasks.images.decode import FORMATS

    return list(FORMATS)


def drift_of_last_batch(ref: DatasetRef, records: Sequence[ImageRecord]) -> dict[str, Drift]:
    """The drift of the sound images of the last batch against those of all batches before it, by measure; {} where a side has none."""
    import numpy as np

    from tasks.images.drift import drift_of_labels, drift_of_values
    from tasks.images.shards import standings

    batch = [Path(shard.file).name.split("-")[0] for shard in ref.shards]
    last = tuple(shard for shard, number in zip(ref.shards, batch, strict=True) if number == max(batch))
    part = ref.model_copy(update={"shards": last})
    new = set(standings(part)) if len(last) < len(batch) else set()
    sound = [record for record in records if not record.code]
    sides = [record for record in sound if record.sha256 not in new], [record for record in sound if record.sha256 in new]
    if not all(sides):
        return {}
    light, size = ([np.array([one(record) for record in side], np.float64) for side in sides] for one in (_brightness, _pixels))
    labels = ([record.label for record in side] for side in sides)
    return {"classes": drift_of_labels(*labels), "brightness": drift_of_values(*light), "size": drift_of_values(*size)}


def _brightness(record: ImageRecord) -> float:
    assert record.brightness is not None, "a sound image has it"
    return record.brightness


def _pixels(record: ImageRecord) -> float:
    return float((record.width or 0) * (record.height or 0))


def drift_checks(found: Mapping[str, Drift], config: DriftConfig, tables: dict[str, pd.DataFrame]) -> list[Check]:
    """A check for each measure of drift; its index becomes the column psi_MEASURE of the frame ``whole``."""
    from tasks.images.drift import CHANCE, MEASURES

    bound = f"a PSI of at most {config.max_psi:g}"
    checks = []
    for measure in MEASURES:
        drift = found.get(measure)
        tables["whole"][f"psi_{measure}"] = drift.psi if drift else None
        why = "no batch before it" if drift is None else "too few to tell" if drift.chance > CHANCE * config.max_psi else ""
        arguments = {"column": f"psi_{measure}", "max_value": config.max_psi}
        knob = "validate.drift, or look at the batch"
        checks.append(
            Check(_drift_name(measure), "whole", "ExpectColumnMaxToBeBetween", arguments, bound, knob, severity=config.severity, unmeasured=why)
        )
    return checks


def _drift_name(measure: str) -> str:
    return f"{measure} of the last batch as before"


def own_suite(ref: DatasetRef, config: ValidateConfig) -> list[Expectation]:
    """The expectations of the project's own file, each one built once by Great Expectations to see that it takes the arguments.

    Raises BadInput ``suite_invalid``.
    """
    if not config.suite:
        return []
    import great_expectations.expectations as gxe
    from great_expectations.expectations.expectation import Expectation as Base

    from tasks.images.drift import MEASURES
    from tasks.images.expectations import read_suite
    from tasks.images.frames import COLUMNS

    named = [name for name in dir(gxe) if name.startswith("Expect") and not name.startswith(ELSEWHERE)]
    known = {name: sorted(set(getattr(gxe, name).__fields__) - set(Base.__fields__) - INTERNAL) for name in named}
    path = ref.root / config.suite
    expected = read_suite(path, known, COLUMNS, ref.classes, [*(check.name for check in suite(ref, config)), *map(_drift_name, MEASURES)])
    for entry in expected:
        try:
            getattr(gxe, entry.expect)(**entry.arguments)
        except ValueError as error:  # pydantic's among them
            told = " ".join(str(error).split("\n", 1)[-1].split())
            what = f"{config.suite}: {entry.name!r}: {entry.expect} does not take its arguments"
            raise BadInput("suite_invalid", what, value=_said(entry.arguments), constraint=told[:300]) from None
    return expected


def own_checks(expected: Iterable[Expectation], tables: dict[str, pd.DataFrame], splits: Sequence[str | None]) -> list[Check]:
    """The checks of ``expected``; the rows that they are about become frames of their own in ``tables``.

    ``splits`` is the split that each image will be in, in the order of the table.
    """
    from tasks.images.frames import rows_of

    checks: list[Check] = []
    named: dict[tuple[str, str | None, str | None], str] = {}
    for entry in expected:
        rows = (entry.frame, entry.of_class, entry.split)
        if rows not in named:
            named[rows] = f"own-{len(named) + 1}"
            tables[named[rows]] = rows_of(tables, *rows, splits)
        bound = _said({key: value for key, value in entry.arguments.items() if key != "column"}) or "as expected"
        own = Check(entry.name, named[rows], entry.expect, entry.arguments, bound, "the data, or validate.suite", severity=entry.severity)
        checks.append(own)
    return checks


def _said(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ').removesuffix(' value')} {value}" for key, value in arguments.items())[:200]


def run_suite(checks: list[Check], tables: dict[str, pd.DataFrame], data_docs: Path | None) -> list[CheckResult]:
    """Run the checks as one Great Expectations suite and checkpoint for each frame; the results in the order of ``checks``.

    With ``data_docs``, also build Data Docs in that folder (they hold times and load scripts from the network).
    """
    import great_expectations as gx
    import great_expectations.expectations as gxe

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    if data_docs:
        context.add_data_docs_site("trainyard", _site(data_docs))
    source = context.data_sources.add_pandas("trainyard")
    found: dict[str, Any] = {}
    for frame, table in tables.items():
        expectations = [
            getattr(gxe, check.expectation)(**check.arguments, meta={"check": check.name})
            for check in checks
            if check.frame == frame and not check.unmeasured
        ]
        batch = source.add_dataframe_asset(frame).add_batch_definition_whole_dataframe("all")
        definition = context.validation_definitions.add(
            gx.ValidationDefinition(name=frame, data=batch, suite=context.suites.add(gx.ExpectationSuite(name=frame, expectations=expectations)))
        )
        checkpoint = context.checkpoints.add(
            gx.Checkpoint(
                name=frame,
                validation_definitions=[definition],
                actions=[],
                result_format={"result_format": "COMPLETE", "unexpected_index_column_names": ["path"]},
            )
        )
        outcome = checkpoint.run(batch_parameters={"dataframe": table})
        for run in outcome.run_results.values():
            found |= {result.expectation_config.meta["check"]: result for result in run.results}
    if data_docs:
        context.build_data_docs(site_names=["trainyard"])
    return [_result(check, found.get(check.name)) for check in checks]


def _site(folder: Path) -> dict[str, Any]:
    store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder.resolve())}
    return {"class_name": "SiteBuilder", "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"}, "store_backend": store}


def _result(check: Check, result: Any) -> CheckResult:
    """A Great Expectations result as ours. An expectation that raised, or has no result, has failed."""
    told = partial(CheckResult, name=check.name, bound=check.bound, severity=check.severity)
    if check.unmeasured:
        return told(value=check.unmeasured, passed=True)
    if result is None:
        return told(value=None, passed=False, detail="not evaluated")
    raised = _exception(result.exception_info)
    if raised:
        return told(value=None, passed=False, detail=raised)
    content = result.result
    value = _observed(content["observed_value"]) if "observed_value" in content else _held(content, check)
    failing = [str(entry["path"]) for entry in content.get("unexpected_index_list") or []]
    shown = "; ".join(sorted(failing)[:5]) + (f" and {len(failing) - 5} more" if len(failing) > 5 else "")
    return told(value=value, passed=bool(result.success), detail=shown)


def _observed(value: Any) -> float | int | str:
    """What an expectation on a whole column or table saw, as a number where it is one; of a list its length."""
    if isinstance(value, list):
        return len(value)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "none given"
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return _rounded_down(float(value)) if isinstance(value, numbers.Real) and not isinstance(value, bool) else str(value)[:200]


def _held(content: dict[str, Any], check: Check) -> float | int | str:
    """How many of the values held, or which share where the bound is one. Missing values are not judged."""
    judged = content.get("element_count", 0) - (content.get("missing_count") or 0)
    held = judged - content.get("unexpected_count", 0)
    if not judged:
        return "none given"
    return _rounded_down(held / judged) if "mostly" in check.arguments else int(held)


def _rounded_down(value: float) -> float:
    """To six places, down, so that a share that fails never shows as 1."""
    return math.floor(value * 1_000_000) / 1_000_000


def _exception(info: dict[str, Any]) -> str:
    """What an expectation raised, or "": the record is flat, or holds one record for each metric."""
    for record in (info, *(entry for entry in info.values() if isinstance(entry, dict))):
        if record.get("raised_exception"):
            return str(record.get("exception_message") or "it raised").splitlines()[0]
    return ""


def _failure(check: Check, result: CheckResult) -> BadInput:
    what = f"check {check.name!r} failed" + (f": {result.detail}" if result.detail else "")
    return BadInput(check.code, f"{what} (see artifacts/validation/report.html)", value=result.value, constraint=check.bound, knob=check.knob)


def _write_parquet(path: Path, table: pa.Table) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="none", write_statistics=False)
    write_atomic(path, sink.getvalue().to_pybytes())


def _counted(items: Iterable[SetAside]) -> str:
    return ", ".join(f"{count} {code}" for code, count in sorted(Counter(item.code for item in items).items()))


def require_dep(suite: str, pipeline: Path = Path("dvc.yaml")) -> None:
    """Raise BadInput ``suite_invalid`` where dvc.yaml does not name the suite's file: DVC would not see that it was edited."""
    if not suite or not pipeline.is_file():
        return
    deps = read_yaml(pipeline)["stages"]["validate"]["deps"]
    if not any(suite == dep or suite.startswith(f"{dep}/") for dep in deps if isinstance(dep, str)):
        raise BadInput(
            "suite_invalid",
            "the suite is no dep of stage validate in dvc.yaml, so DVC would miss its edits",
            value=suite,
            constraint=f"one of {', '.join(map(str, deps))}",
            knob="its line below stages.validate.deps of dvc.yaml, or validate.suite",
        )


def summary(report: ValidationReport) -> str:
    """A report that let the run go on, in one line."""
    warned = [check.name for check in report.checks if not check.passed]
    held = f"{len(report.checks) - len(warned)} checks held" + (f", {len(warned)} warned ({'; '.join(warned)})" if warned else "")
    aside = f", {len(report.quarantined)} in quarantine ({_counted(report.quarantined)})" if report.quarantined else ""
    return f"{held}, {report.sound:,} of {report.images:,} images sound{aside}; see {report.path('report.html')}"


def main() -> None:
    """Validate the data version of this project."""
    die_with_parent()
    quiet_environment()
    params, root = load_params(), Path()
    require_dep(params.validate_.suite)
    if params.validate_.data_docs:
        print(f"validate: Data Docs in {DATA_DOCS / 'index.html'}")
    print(f"validate: {summary(validate(DatasetRef.load(root), params.validate_, params.prepare, root))}")


if __name__ == "__main__":
    sys.exit(errors.run(main))
