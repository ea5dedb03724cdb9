"""expectations.yaml under attack: what a user may misspell, what a warning stops (nothing), whom `where` leaves, who sees it."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ruamel.yaml import YAML
from source_trees import from_folder, pictures, write_tree

from tasks.core.artifacts import CheckResult, DatasetRef, ValidationReport
from tasks.core.config import PrepareConfig, ValidateConfig, load_params
from tasks.core.errors import BadInput
from tasks.ingest import ingest
from tasks.validate import require_dep, validate

ROOT = Path(__file__).parents[1]
LOOSE = ValidateConfig(min_images_per_class=1, suite="expectations.yaml")
BRIGHT = {"name": "bright enough", "on": "images", "expect": "ExpectColumnValuesToBeBetween", "column": "brightness", "min_value": 20}


def flat(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (10, 10), (level,) * 3).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def ref(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    """Eight noisy cats, seven noisy dogs and one dog at night."""
    root = tmp_path_factory.mktemp("data")
    return ingest(from_folder(write_tree(root / "source", {**pictures(cat=8, dog=7), "dog/night.png": flat(2)})), root)


def written(ref: DatasetRef, suite: Any) -> Path:
    path = ref.root / "expectations.yaml"
    with path.open("w", encoding="utf-8") as handle:
        YAML(typ="safe", pure=True).dump(suite, handle)
    return path


def run(ref: DatasetRef, out: Path, *entries: dict[str, Any]) -> ValidationReport:
    written(ref, {"expectations": list(entries)})
    return validate(ref, LOOSE, PrepareConfig(), out)


def found(report: ValidationReport, name: str) -> CheckResult:
    return next(check for check in report.checks if check.name == name)


def test_an_expectation_that_fails_stops_the_run_and_names_itself(ref: DatasetRef, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        run(ref, tmp_path, BRIGHT)
    assert caught.value.code == "validation_failed"
    for told in ("bright enough", "dog/night.png", "min 20", "validate.suite"):
        assert told in str(caught.value)
    assert not ValidationReport.load(tmp_path).verify().success


def test_a_warning_stops_nothing_and_shows_in_report_and_page(ref: DatasetRef, tmp_path: Path) -> None:
    report = run(ref, tmp_path, {**BRIGHT, "severity": "warn"})
    check = found(report, "bright enough")
    assert (report.success, check.passed, check.severity, check.value) == (True, False, "warn", 15)
    assert ValidationReport.load(tmp_path).verify() == report
    html = report.path("report.html").read_text(encoding="utf-8")
    assert "1 check warns: bright enough" in html
    assert ">warned</span>" in html
    assert "23 of 24 checks held" in html


def test_rows_are_left_by_class_and_by_the_split_that_prepare_draws(ref: DatasetRef, tmp_path: Path) -> None:
    report = run(
        ref,
        tmp_path,
        {**BRIGHT, "where": {"class": "cat"}},
        {"name": "cats", "on": "images", "expect": "expect_table_row_count_to_be_between", "min_value": 1, "where": {"class": "cat"}},
        *({"name": split, "on": "images", "expect": "ExpectTableRowCountToBeBetween", "min_value": 0, "where": {"split": split}}
          for split in ("train", "val", "test")),
        {"on": "classes", "expect": "ExpectColumnMaxToBeBetween", "column": "images", "max_value": 8},
        {"name": "a class's light", "on": "classes", "expect": "ExpectColumnValuesToBeBetween", "column": "brightness", "min_value": 50},
        {"name": "enough", "on": "whole", "expect": "ExpectColumnMinToBeBetween", "column": "images", "min_value": 16},
    )  # fmt: skip
    assert report.success
    assert (found(report, "bright enough").value, found(report, "cats").value) == (8, 8)
    assert sum(int(str(found(report, split).value)) for split in ("train", "val", "test")) == 16
    assert found(report, "images: max to be between").value == 8
    assert found(report, "a class's light").value == 2
    assert found(report, "enough").value == 16


@pytest.mark.parametrize(("change", "told"), [
    ({"expect": "ExpectColumnValuesToBeBetwen"}, ["ExpectColumnValuesToBeBetween"]),
    ({"expect": 7}, ["got 7"]),
    ({"column": "brightnes"}, ["got brightnes", "must be brightness"]),
    ({"min_vale": 3}, ["got min_vale", "must be min_value"]),
    ({"severty": "warn"}, ["must be severity"]),
    ({"severity": "warning"}, ["must be warn"]),
    ({"on": "image"}, ["must be images"]),
    ({"where": {"class": "kat"}}, ["must be cat"]),
    ({"where": {"split": "training"}}, ["must be train"]),
    ({"where": {"label": "cat"}}, ["one of class, split"]),
    ({"where": 3}, ["a mapping of class and split"]),
    ({"on": "whole", "column": "leaks", "where": {"class": "cat"}}, ["where on whole"]),
    ({"name": "images"}, ["another check has its name"]),
    ({"name": "two\nlines"}, ["text of one line"]),
    ({"min_value": "dark"}, ["min dark", "not a valid float"]),
    ({"mostly": 3}, ["less than or equal to 1"]),
    ({"min_value": None}, ["cannot both be None"]),
])  # fmt: skip
def test_what_is_misspelt_is_refused_with_the_nearest_name_before_any_image_is_read(
    ref: DatasetRef, change: dict[str, Any], told: list[str], tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as caught:
        run(ref, tmp_path, {**BRIGHT, **change})
    assert caught.value.code == "suite_invalid"
    for part in told:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize(("text", "told"), [
    ("expectations: [", "YAML"),
    ("expectations: []\nexpectations: []", "twice"),
    ("- a", "is no suite"),
    ("expectation: []", "is no suite"),
    ("expectations: 3", "is no suite"),
    ("expectations: [3]", "not a mapping"),
    ("expectations: [{on: images}]", "a missing key"),
    ("expectations: [&a {on: images}, *a]", "alias"),
    ("", "is no suite"),
])  # fmt: skip
def test_a_file_that_is_no_suite_is_refused_in_one_line(ref: DatasetRef, text: str, told: str, tmp_path: Path) -> None:
    (ref.root / "expectations.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        validate(ref, LOOSE, PrepareConfig(), tmp_path)
    assert caught.value.code == "suite_invalid"
    assert told in str(caught.value)


def test_no_file_is_refused_and_no_suite_is_none(ref: DatasetRef, tmp_path: Path) -> None:
    (ref.root / "expectations.yaml").unlink(missing_ok=True)
    with pytest.raises(BadInput, match="no such file"):
        validate(ref, LOOSE, PrepareConfig(), tmp_path)
    assert validate(ref, LOOSE.model_copy(update={"suite": ""}), PrepareConfig(), tmp_path).success


@pytest.mark.parametrize("path", ["/etc/passwd", "../expectations.yaml"])
def test_a_suite_outside_the_project_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="a path inside the project"):
        ValidateConfig(suite=path)


def test_the_shipped_suite_is_that_of_every_preset_and_a_dep_of_the_stage(tmp_path: Path) -> None:
    for preset in (ROOT / "params.yaml", *(ROOT / "presets").glob("*.yaml")):
        require_dep(load_params(preset).validate_.suite, ROOT / "dvc.yaml")
    with pytest.raises(BadInput, match=r"no dep of stage validate.*expectations\.yaml"):
        require_dep("mine.yaml", ROOT / "dvc.yaml")
    require_dep("", ROOT / "dvc.yaml")


def test_the_severity_of_older_artifacts_is_not_written_so_that_their_digests_hold() -> None:
    assert "severity" not in CheckResult(name="a", value=1, bound="1", passed=True).model_dump(mode="json")
    warned = CheckResult(name="a", value=1, bound="1", passed=False, severity="warn")
    assert CheckResult.model_validate(warned.model_dump(mode="json")) == warned


def test_the_command_says_who_warned(tmp_path: Path) -> None:
    ingest(from_folder(write_tree(tmp_path / "source", {**pictures(cat=12, dog=11), "dog/night.png": flat(1)})), tmp_path)
    shutil.copy(ROOT / "presets" / "digits.yaml", tmp_path / "params.yaml")
    shutil.copy(ROOT / "expectations.yaml", tmp_path)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tasks.validate import main; main()"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    names = "hardly any image is all black; hardly any image is one flat colour; hardly any image is without an edge"
    assert done.stdout.startswith(f"validate: 23 checks held, 3 warned ({names}), 24 of 24 images sound; see ")
