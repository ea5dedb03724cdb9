"""Likely wrong labels: the estimate on made-up noise, who answers for whom, what a killed run costs, and the way to people."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_trees import from_folder, pictures, write_tree

from bench.yard import Source
from tasks.augment import augment
from tasks.core.artifacts import SPLITS, DatasetRef, ImageCache, LabelIssues, TrainingSet, ValidationReport
from tasks.core.config import AugmentConfig, PrepareConfig, TrainConfig, ValidateConfig
from tasks.core.errors import BadInput
from tasks.images.cache import open_split
from tasks.images.label_issues import confident_joint, find
from tasks.ingest import ingest
from tasks.prepare import prepare
from tasks.sources.review import likely_wrong, review
from tasks.training import folds
from tasks.training.label_issues import label_issues
from tasks.validate import validate

LOOSE = ValidateConfig(min_images_per_class=1, min_decodable_share=0.5, suite="")
PREPARE = PrepareConfig(image_size=12, val_share=0.2, test_share=0.2)
PLAIN = AugmentConfig(translate_px=0, rotate_degrees=0.0)
CHEAP = TrainConfig(width=4, epochs=8, batch_size=16, lr=0.1, threads=1)


def prepared(root: Path) -> tuple[ValidationReport, ImageCache, TrainingSet]:
    """Everything that the search reads, from the class folders in ``root``/source."""
    ref = ingest(from_folder(root / "source"), root)
    report = validate(ref, LOOSE, PREPARE, root)
    cache = prepare(ref, report, PREPARE, root)
    return report, cache, augment(cache, PLAIN, root)


@given(st.integers(2, 5), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_the_joint_keeps_the_count_of_every_label_and_what_is_found_is_in_order(classes: int, images: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    labels, probabilities = generator.integers(0, classes, images), generator.dirichlet(np.ones(classes), images)
    joint = confident_joint(labels, probabilities)
    assert joint.sum(axis=1) == pytest.approx(np.bincount(labels, minlength=classes))
    found = find(labels, probabilities)
    assert (np.diff(found.margin) >= 0).all()
    assert (found.margin < 0).all()
    assert (found.suggested != labels[found.places]).all()
    assert len(set(found.places.tolist())) == len(found.places)
    assert 0 <= found.noise <= 1


def test_flipped_labels_among_sure_answers_are_found_and_counted() -> None:
    generator = np.random.default_rng(3)
    truth = generator.integers(0, 4, 2000)
    probabilities = np.full((2000, 4), 0.05)
    probabilities[np.arange(2000), truth] = 0.85
    probabilities = probabilities * generator.uniform(0.9, 1.1, probabilities.shape)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    labels = truth.copy()
    flipped = generator.choice(2000, 100, replace=False)
    labels[flipped] = (truth[flipped] + generator.integers(1, 4, 100)) % 4
    found = find(labels, probabilities)
    assert set(found.places.tolist()) <= set(flipped.tolist())
    assert len(found.places) >= 90
    assert (found.suggested == truth[found.places]).all()
    assert found.noise == pytest.approx(0.05, abs=0.01)
    none = find(truth, probabilities)
    assert len(none.places) == 0
    assert none.noise == 0


def test_a_class_without_images_or_sure_answers_is_no_trouble() -> None:
    labels = np.array([0, 0, 1, 1])
    probabilities = np.full((4, 3), 1 / 3)
    assert confident_joint(labels, probabilities).tolist() == [[2, 0, 0], [0, 2, 0], [0, 0, 0]]
    assert len(find(labels, probabilities).places) == 0


def answer_by_label(calls: list[int]) -> Callable[..., np.ndarray]:
    """Instead of a training: sure of each image's label. Remembers how many images it was asked about."""

    def fold(training_set: Any, cache: ImageCache, config: Any, parts: dict[str, list[Any]], root: Path, weights: Any) -> np.ndarray:
        root.mkdir()
        calls.append(len(parts["test"]))
        assert not {one.sha256 for one in parts["test"]} & {one.sha256 for split in ("train", "val") for one in parts[split]}
        return np.eye(len(cache.classes), dtype=np.float32)[[one.label_index for one in parts["test"]]]

    return fold


def test_every_image_is_asked_about_once_groups_stay_together_and_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path / "source", pictures(cat=40, dog=40))
    _, cache, training_set = prepared(tmp_path)
    calls: list[int] = []
    real = answer_by_label(calls)

    def killed(*arguments: Any) -> np.ndarray:
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    names = {split: open_split(cache, split).sha256 for split in SPLITS}
    members = [name for split in SPLITS for name in names[split]]
    groups = {name: f"plant {index // 4}" for index, name in enumerate(members)}
    assert len({folds.fold_number(groups[name], name, 3) for name in members[:4]}) == 1
    monkeypatch.setattr(folds, "_fold", killed)
    with pytest.raises(KeyboardInterrupt):
        folds.out_of_fold(training_set, cache, CHEAP, None, groups, 3, tmp_path / "work")
    monkeypatch.setattr(folds, "_fold", real)
    answers = folds.out_of_fold(training_set, cache, CHEAP, None, groups, 3, tmp_path / "work")
    assert len(calls) == 3, "two folds were done"
    assert sum(calls) == len(members) == len(answers.labels)
    assert answers.sha256 == members
    assert [answers.splits.count(split) for split in SPLITS] == [len(names[split]) for split in SPLITS]
    assert (answers.probabilities.argmax(axis=1) == answers.labels).all()
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["lock"]


def test_what_cannot_be_folded_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path / "source", pictures(cat=12, dog=12))
    report, cache, training_set = prepared(tmp_path)
    for count, code in ((1, "unknown_option"), (200, "class_too_small")):
        with pytest.raises(BadInput) as caught:
            label_issues(report, cache, training_set, CHEAP, count, tmp_path)
        assert caught.value.code == code
        assert not LabelIssues.exists(tmp_path)


@pytest.mark.slow
def test_wrong_labels_of_a_real_training_come_first_and_go_to_people(tmp_path: Path) -> None:
    """Pictures that no colour-blind eye confuses, six of them in another class's folder."""
    Source(tmp_path / "source", seed=1).grow(40)
    files = sorted((tmp_path / "source").rglob("*.png"))
    wrong = {files[index]: other for index, other in ((3, "green"), (11, "red"), (45, "red"), (60, "blue"), (85, "green"), (111, "blue"))}
    for path, other in wrong.items():
        assert path.parent.name != other
        path.rename(tmp_path / "source" / other / path.name)
    report, cache, training_set = prepared(tmp_path)
    found = label_issues(report, cache, training_set, CHEAP, 2, tmp_path)
    assert LabelIssues.load(tmp_path).verify() == found
    rows = pq.read_table(found.path("issues.parquet")).to_pylist()
    named = {Path(row["path"]).name: (row["label"], row["suggested"]) for row in rows}
    expected = {path.name: (other, path.parent.name) for path, other in wrong.items()}
    assert len(named.keys() & expected.keys()) >= 4, named
    assert next(iter(named)) in expected
    assert all(named[name] == expected[name] for name in named.keys() & expected.keys())
    assert found.issues == len(rows) <= 9
    assert found.noise == pytest.approx(6 / 120, abs=0.03)
    page = found.path("report.html").read_text(encoding="utf-8")
    assert page.count("<figure") == len(rows)
    assert "http" not in page.split("</style>")[1]
    tasks = review(DatasetRef.load(tmp_path), likely_wrong(found, 3), found.digest[:12])
    assert [Path(task["data"]["name"]).name for task in tasks] == list(named)[:3]
    assert [task["predictions"][0]["result"][0]["value"]["choices"] for task in tasks] == [[row["suggested"]] for row in rows[:3]]
    json.dumps(tasks)
