"""The validation suite under attack: each check made to fail, bad images within and beyond the limit, hostile names on the page."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image
from source_trees import contents, from_folder, pictures, png, write_tree

from tasks.core.artifacts import DatasetRef, ValidationReport
from tasks.core.config import PrepareConfig, ValidateConfig
from tasks.core.errors import BadInput
from tasks.images.table import SCHEMA
from tasks.ingest import ingest
from tasks.validate import Check, run_suite, validate

ROOT = Path(__file__).parents[1]
PREPARE = PrepareConfig()


def loose(**changes: Any) -> ValidateConfig:
    return ValidateConfig(**{"min_images_per_class": 1, "min_decodable_share": 0.5, **changes})


def data(root: Path, files: dict[str, bytes]) -> DatasetRef:
    return ingest(from_folder(write_tree(root / "source", files)), root)


def refused(ref: DatasetRef, config: ValidateConfig, root: Path) -> tuple[BadInput, ValidationReport]:
    """The error, and the report that was written before it."""
    with pytest.raises(BadInput) as caught:
        validate(ref, config, PREPARE, root)
    assert "\n" not in str(caught.value)
    report = ValidationReport.load(root).verify()
    assert not report.success
    return caught.value, report


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> tuple[DatasetRef, ValidationReport]:
    root = tmp_path_factory.mktemp("passed")
    files = {**pictures(cat=6, dog=6), "cat/broken.png": png(500)[:100], "dog/small.png": png(501, side=4), "dog/text.jpg": b"<html>"}
    ref = data(root, {**files, "cat/empty.png": b""})
    return ref, validate(ref, loose(), PREPARE, root)


def test_bad_images_within_the_limit_are_quarantined_by_name_and_reason(passed: tuple[DatasetRef, ValidationReport]) -> None:
    ref, report = passed
    assert report.success
    assert (report.images, report.sound) == (15, 12)
    expected = {"cat/broken.png": "image_truncated", "dog/small.png": "image_too_small", "dog/text.jpg": "not_an_image"}
    assert {item.name: item.code for item in report.quarantined} == expected
    quarantine = pq.read_table(report.path("quarantine/reasons.parquet"))
    assert quarantine.schema.names == ["stage", "path", "label", "sha256", "code", "reason"]
    rows = quarantine.to_pylist()
    assert {row["path"]: row["code"] for row in rows if row["stage"] == "validate"} == expected
    assert all(row["reason"] and row["sha256"] for row in rows if row["stage"] == "validate")
    assert [(row["path"], row["code"], row["sha256"]) for row in rows if row["stage"] == "ingest"] == [("cat/empty.png", "empty_file", None)]
    report.require_made_from(ref)
    assert report.verify() == ValidationReport.load(report.root)


def test_the_image_table_says_what_each_file_is(passed: tuple[DatasetRef, ValidationReport]) -> None:
    table = pq.read_table(passed[1].path("images.parquet"))
    assert table.schema.equals(SCHEMA)
    rows = {row["path"]: row for row in table.to_pylist()}
    sound, small, text = rows["cat/0000.png"], rows["dog/small.png"], rows["dog/text.jpg"]
    assert (sound["width"], sound["height"], sound["mode"], sound["format"], sound["decodes"], sound["reason"]) == (10, 10, "RGB", "PNG", True, "")
    assert (small["decodes"], "4 x 4" in small["reason"]) == (True, True)
    assert (text["width"], text["format"], text["decodes"], text["bytes"]) == (None, None, False, 6)


def test_equal_data_give_equal_bytes(passed: tuple[DatasetRef, ValidationReport], tmp_path: Path) -> None:
    validate(passed[0], loose(), PREPARE, tmp_path)
    assert contents(tmp_path / "artifacts" / "validation") == contents(passed[1].folder)


def test_bad_images_beyond_the_limit_stop_the_run_after_the_report(tmp_path: Path) -> None:
    files = {**pictures(cat=6, dog=6), **{f"cat/bad{index}.png": b"x" * (index + 1) for index in range(4)}}
    error, report = refused(data(tmp_path, files), loose(min_decodable_share=0.9), tmp_path)
    assert error.code == "validation_failed"
    for told in ("images that decode", "0.75", "0.9", "validate.min_decodable_share", "cat/bad0.png"):
        assert told in str(error)
    assert len(report.quarantined) == 4


def test_bad_files_that_ingest_set_aside_count_and_harmless_ones_do_not(tmp_path: Path) -> None:
    """A download of empty files must not pass because ingest never stored them."""
    files = {**pictures(cat=5, dog=5), **{f"cat/empty{index}.jpg": b"" for index in range(2)}, **{f"dog/{index}.txt": b"x" for index in range(9)}}
    ref = data(tmp_path, files)
    error, _ = refused(ref, loose(min_decodable_share=0.9), tmp_path)
    assert "0.833333" in str(error)
    assert validate(ref, loose(min_decodable_share=0.8), PREPARE, tmp_path).success


@pytest.mark.parametrize(("files", "changes", "code", "told"), [
    (pictures(cat=5, dog=5), {"min_classes": 3}, "too_few_classes", ["got 2", "at least 3", "validate.min_classes"]),
    (pictures(cat=5, dog=5), {"min_images_per_class": 6}, "validation_failed", ["cat", "5 sound", "validate.min_images_per_class"]),
    (pictures(cat=15, dog=3), {"max_class_ratio": 4.0}, "validation_failed", ["got 5", "at most 4", "validate.max_class_ratio"]),
    (pictures(cat=5, bird=2), {}, "class_too_small", ["bird", "2 sound", "train, val, test"]),
    ({**pictures(cat=5, dog=5), "bird/1.png": b"x", "bird/2.png": b"y"}, {}, "empty_class", ["bird"]),
    ({f"train/{name}": png for name, png in pictures(cat=5, dog=5).items()} | {"test/bird/1.png": png(901)}, {}, "class_not_in_train", ["bird"]),
    (pictures(cat=5, dog=5), {"min_side_px": 11}, "empty_class", ["cat"]),
    ({**pictures(cat=9), **pictures(dog=5, side=40)}, {"max_side_px": 39, "min_decodable_share": 0.1}, "empty_class", ["dog"]),
    ({**pictures(cat=9, dog=5), **pictures(first=1, dog=5, side=5)}, {"min_decodable_share": 0.9}, "validation_failed", ["width", "min_side_px"]),
])  # fmt: skip
def test_each_rule_stops_the_run_and_names_value_bound_and_knob(
    files: dict[str, bytes], changes: dict[str, Any], code: str, told: list[str], tmp_path: Path
) -> None:
    error, _ = refused(data(tmp_path, files), loose(**changes), tmp_path)
    assert error.code == code
    for part in told:
        assert part in str(error)


def test_an_empty_version_fails_although_no_value_is_wrong(tmp_path: Path) -> None:
    """Great Expectations passes every value check on an empty frame."""
    error, report = refused(DatasetRef(classes=(), counts={}, splits={}, shards=()).save(tmp_path), loose(), tmp_path)
    assert "check 'images' failed" in str(error)
    assert report.images == 0


def test_a_label_that_dataset_json_does_not_know_is_found(tmp_path: Path) -> None:
    ref = data(tmp_path, pictures(cat=4, dog=4))
    error, _ = refused(ref.model_copy(update={"classes": ("cat", "dot")}), loose(), tmp_path)
    assert error.code == "empty_class"
    report = ValidationReport.load(tmp_path)
    assert {check.name for check in report.checks if not check.passed} >= {"labels known"}


def test_an_expectation_that_raises_has_failed(tmp_path: Path) -> None:
    """A missing column raises inside Great Expectations, in a record of another shape; it must not read as a pass."""
    import pandas as pd

    checks = [
        Check("there", "images", "ExpectColumnValuesToNotBeNull", {"column": "path"}, "all"),
        Check("not there", "images", "ExpectColumnValuesToNotBeNull", {"column": "nowhere"}, "all"),
    ]
    there, missing = run_suite(checks, {"images": pd.DataFrame({"path": ["a", "b"]})}, None)
    assert (there.passed, there.value) == (True, 2)
    assert (missing.passed, missing.value) == (False, None)
    assert "nowhere" in missing.detail


def test_a_failing_run_takes_the_place_of_an_earlier_pass(tmp_path: Path) -> None:
    ref = data(tmp_path, pictures(cat=4, dog=4))
    assert validate(ref, loose(), PREPARE, tmp_path).success
    refused(ref, loose(min_classes=5), tmp_path)


class Page(HTMLParser):
    """Tags, addresses and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = "<script>alert(1)</script>{{7*7}}&lt;'\""


def test_the_page_stands_alone_and_escapes_every_name(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "\u2215")
    files = {f"{label}/{number}{name}.png": png(seed) for seed, (label, number) in enumerate((label, n) for label in (name, "dog") for n in range(4))}
    bad = {f"dog/\u202e{name}\n.png": b"broken", f"dog/{name}.txt": b"text"}
    ref = data(tmp_path, {**files, **bad})
    report = validate(ref, loose(), PREPARE, tmp_path)
    html = report.path("report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "link", "iframe", "object", "form", "base"} & set(page.tags)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert len(page.addresses) == 8 + 6 * 6  # samples, and the ends of all measures but aspect
    assert not re.search(r"https?:|url\(|@import|javascript:", html)
    assert page.text.count(name) >= 4
    assert "\\u202e" in page.text
    assert "\u202e" not in html
    assert "49" not in page.text.split("Quarantine")[1]


def test_the_page_shows_verdict_checks_counts_samples_and_reasons(passed: tuple[DatasetRef, ValidationReport]) -> None:
    html = passed[1].path("report.html").read_text(encoding="utf-8")
    text = Page(html).text
    for told in ("The data passed its validation", *(check.name for check in passed[1].checks), "dog/small.png", "4 x 4 pixels", "PNG, RGB"):
        assert told in text
    import base64

    pictures_shown = [base64.b64decode(address.split(",")[1]) for address in Page(html).addresses]
    assert len(pictures_shown) == 12 + 6 * 6
    with Image.open(io.BytesIO(pictures_shown[0])) as image:
        assert image.size == (10, 10)


def test_large_photographs_become_small_samples(tmp_path: Path) -> None:
    files = {f"{label}/{index}.png": png(10 * index + len(label), side=90) for label in ("cat", "birds") for index in range(3)}
    report = validate(data(tmp_path, files), loose(), PREPARE, tmp_path)
    assert report.path("report.html").stat().st_size < 500_000  # 48 pictures of noise, 7 kB each


def test_data_docs_are_built_outside_the_artifacts_when_asked_for(tmp_path: Path) -> None:
    report = validate(data(tmp_path, pictures(cat=4, dog=4)), loose(data_docs=True), PREPARE, tmp_path)
    assert (tmp_path / ".trainyard" / "data_docs" / "index.html").is_file()
    assert {path.name for path in report.folder.iterdir()} == {"images.parquet", "quarantine", "report.html", "report.json"}


def test_the_command_says_one_line_passed_or_failed_and_phones_nobody(tmp_path: Path) -> None:
    data(tmp_path, {**pictures(cat=12, dog=12), "cat/broken.png": b"x"})
    shutil.copy(ROOT / "presets" / "digits.yaml", tmp_path / "params.yaml")
    shutil.copy(ROOT / "expectations.yaml", tmp_path)
    code = """if True:
        import sys; sys.path.insert(0, sys.argv.pop())
        sys.addaudithook(lambda event, args: event in ("socket.connect", "socket.getaddrinfo") and sys.exit(f"{event} {args}"))
        from pathlib import Path
        from tasks.core import errors
        from tasks.validate import main
        failed = errors.run(main)
        path = Path("params.yaml")
        path.write_text(path.read_text().replace("min_decodable_share: 0.99", "min_decodable_share: 0.9"))
        print(failed, errors.run(main))
    """
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], cwd=tmp_path, capture_output=True, text=True, check=False)
    [refusal] = done.stderr.strip().splitlines()
    assert refusal.startswith("error[validation_failed]: check 'images that decode' failed: cat/broken.png")
    report = "1 in quarantine (1 not_an_image); see artifacts/validation/report.html"
    assert done.stdout.splitlines() == [f"validate: 26 checks held, 24 of 25 images sound, {report}", "2 0"]
