"""params.yaml under attack: typos, repeated keys, wrong types and ranges, hostile YAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tasks.core.config import Params, apply_overrides, load_params
from tasks.core.errors import BadInput

ROOT = Path(__file__).parents[1]
DIGITS = (ROOT / "presets" / "digits.yaml").read_text(encoding="utf-8")


def write(folder: Path, text: str) -> Path:
    path = folder / "params.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def with_line(key: str, line: str) -> str:
    """The digits preset with the first line of ``key`` (its indent included) replaced by ``line``."""
    text, count = re.subn(rf"^{key}:.*$", line, DIGITS, count=1, flags=re.MULTILINE)
    assert count == 1, key
    return text


def refused(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        load_params(path)
    assert caught.value.code in ("params_invalid", "too_large", "unsafe_yaml", "params_missing")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("preset", sorted((ROOT / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_is_a_whole_params_file_with_every_key_written_out(preset: Path) -> None:
    params = load_params(preset)
    written = preset.read_text(encoding="utf-8")
    for section, fields in params.model_dump(by_alias=True).items():
        for key in fields:
            assert f"\n  {key}:" in written, f"{preset.name} leaves {section}.{key} to its default"


def test_the_shipped_params_are_the_digits_preset() -> None:
    assert (ROOT / "params.yaml").read_text(encoding="utf-8") == DIGITS


def test_exponents_are_numbers_as_dvc_reads_them(tmp_path: Path) -> None:
    params = load_params(write(tmp_path, with_line("  lr", "  lr: 1e-3")))
    assert params.train.lr == 0.001


def test_yaml_1_1_words_stay_text(tmp_path: Path) -> None:
    params = load_params(write(tmp_path, with_line("  source", "  source: no")))
    assert params.ingest.source == "no"


@pytest.mark.parametrize(
    ("key", "line", "told"),
    [
        ("  epochs", "  epoch: 10", "train.epochs"),
        ("  min_accuracy", "  min_acuracy: 0.97", "gate.min_accuracy"),
        ("    max_pixels", "    max_pixel: 50000000", "prepare.decode.max_pixels"),
        ("gate", "gates:", "gate"),
        ("  lr", "  lr: fast", "train.lr"),
        ("  lr", "  lr: -1", "greater than 0"),
        ("  val_share", "  val_share: 0.9", "sum to less than 1"),
        ("  translate_px", "  translate_px: 16", "below prepare.image_size 16"),
        ("  processes", "  processes: 128", "batch_size 64 must be at least processes 128"),
        ("  optimizer", "  optimizer: sdg", "'sgd' or 'adamw'"),
        ("  epochs", "  epochs: 10\n  epochs: 11", "stands twice"),
    ],
)
def test_a_mistake_is_refused_with_the_right_name_or_bound(tmp_path: Path, key: str, line: str, told: str) -> None:
    assert told in refused(write(tmp_path, with_line(key, line)))


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    assert "cp presets/digits.yaml params.yaml" in refused(tmp_path / "params.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1, 2]\nb: *a\n",
        "train: !!python/object/apply:os.system ['true']\n",
        "- a\n- b\n",
        "train: [unclosed\n",
        "",
        "\x00",
        "x: " + "y" * 1_000_001,
    ],
    ids=["alias", "python tag", "list", "syntax", "empty", "nul", "huge"],
)
def test_hostile_yaml_is_one_clear_line(tmp_path: Path, text: str) -> None:
    refused(write(tmp_path, text))


def test_overrides_keep_comments_and_say_whether_they_changed_anything(tmp_path: Path) -> None:
    path = write(tmp_path, DIGITS)
    assert apply_overrides({"train": {"epochs": 3}, "prepare": {"decode": {"max_pixels": 10}}}, path)
    params = load_params(path)
    assert (params.train.epochs, params.prepare.decode.max_pixels) == (3, 10)
    assert path.read_text(encoding="utf-8").startswith("# Trainyard's params")
    assert not apply_overrides({"train": {"epochs": 3}}, path)


@pytest.mark.parametrize("overrides", [{"train": {"epoch": 3}}, {"trian": {"epochs": 3}}, {"train": 3}])
def test_a_wrong_override_changes_nothing(tmp_path: Path, overrides: dict[str, Any]) -> None:
    path = write(tmp_path, DIGITS)
    with pytest.raises(BadInput):
        apply_overrides(overrides, path)
    assert path.read_text(encoding="utf-8") == DIGITS


def test_every_field_says_what_it_is() -> None:
    for section, field in Params.model_fields.items():
        for name, inner in field.annotation.model_fields.items():  # type: ignore[union-attr]
            assert inner.description or name == "decode", f"{section}.{name} has no description"
