"""Attacks the cache of encoded images: the same pixels, order and weights as with packed ones, chosen by size, and damage found and named."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from source_trees import from_folder, pictures, write_tree
from test_label_issues import CHEAP, LOOSE, PLAIN, PREPARE
from test_prepare import CONFIG, images, project
from train_job import result_of, run_job
from training_data import make_data, small_config

from tasks.augment import augment
from tasks.core.artifacts import SPLITS, ImageCache
from tasks.core.config import PrepareConfig
from tasks.core.errors import BadInput
from tasks.images.cache import SplitView, entries_of, open_split
from tasks.images.pixels import EncodedPixels
from tasks.ingest import ingest
from tasks.prepare import form_of, prepare
from tasks.training import folds
from tasks.training.distributed import Ranks
from tasks.training.loader import Loader
from tasks.validate import validate

ENCODED = CONFIG.model_copy(update={"cache": "encoded"})


def both(root: Path, config: PrepareConfig = CONFIG, **kind: Any) -> tuple[ImageCache, ImageCache]:
    """The caches of the same images: of pixels, and of the images still encoded."""
    rows = images(90, **kind)
    packed = prepare(*project(root / "packed", rows), config, root / "packed")
    encoded = prepare(*project(root / "encoded", rows), config.model_copy(update={"cache": "encoded"}), root / "encoded")
    return packed, encoded


def encoded_pixels(view: SplitView) -> EncodedPixels:
    assert isinstance(view.pixels, EncodedPixels)
    return view.pixels


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("kind", "resize"), [("PNG", "stretch"), ("JPEG", "crop"), ("WEBP", "letterbox")])
def test_any_rows_give_what_an_array_of_the_pixels_gives(kind: str, resize: str, threads: int, tmp_path: Path) -> None:
    packed, encoded = both(tmp_path, CONFIG.model_copy(update={"resize": resize}), kind=kind)
    assert (packed.form, encoded.form) == ("pixels", "encoded")
    assert packed.test_digest == encoded.test_digest
    assert packed.digest != encoded.digest
    for split in SPLITS:
        expected, view = open_split(packed, split), open_split(encoded, split, threads)
        pixels, count = encoded_pixels(view), packed.counts[split]
        assert (pixels.shape, len(pixels), pixels.size, pixels.nbytes) == (expected.pixels.shape, count, expected.pixels.size, expected.pixels.size)
        assert (view.sha256, view.paths, view.labels.tolist()) == (expected.sha256, expected.paths, expected.labels.tolist())
        order = np.random.default_rng(1).permutation(count)
        for rows in (0, -1, np.int64(2), slice(None), slice(3, 1), slice(1, count, 3), order, order[:0], order[:9], np.array([4, 4, 0])):
            assert np.array_equal(pixels[rows], expected.pixels[rows])
            assert pixels[rows].dtype == np.uint8
        with pytest.raises(IndexError):
            pixels[count]


def test_the_bytes_are_kept_as_they_came_and_nothing_else(tmp_path: Path) -> None:
    rows = {row.sha256: row for row in images(60)}
    cache = prepare(*project(tmp_path, list(rows.values())), ENCODED, tmp_path).verify()
    names = {path.name for path in cache.folder.iterdir()}
    assert names == {"index.json", "000001-00000.images", *(f"{split}.parquet" for split in SPLITS)}
    assert cache.path("000001-00000.images").read_bytes() == b"".join(rows[name].data for name in sorted(rows))
    for split in SPLITS:
        view = open_split(cache, split)
        assert [encoded_pixels(view).encoded(row) for row in range(len(view.labels))] == [rows[name].data for name in view.sha256]
        assert [one.bytes for one in entries_of(cache, split)] == [len(rows[name].data) for name in view.sha256]


def test_the_same_images_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    rows = images(60)
    first = prepare(*project(tmp_path / "a", rows), ENCODED, tmp_path / "a")
    assert prepare(*project(tmp_path / "b", rows[::-1]), ENCODED, tmp_path / "b").files == first.files


@pytest.mark.parametrize(
    ("count", "mean_bytes", "pixels_mb", "form"),
    [
        (100, 5_000, 0.1, "encoded"),
        (100, 5_000, 1.2288, "pixels"),  # 100 x 64 x 64 x 3 bytes, not above the limit
        (100, 5_000, 1.2287, "encoded"),
        (100, 12_288, 0.1, "pixels"),  # it would take the same room and have to be decoded
        (0, 0, 0.0, "pixels"),
    ],
)
def test_by_size_where_nothing_is_said(count: int, mean_bytes: int, pixels_mb: float, form: str) -> None:
    config = PrepareConfig(image_size=64, pixels_mb=pixels_mb)
    assert form_of(config, [mean_bytes] * count) == form
    for asked in ("pixels", "encoded"):
        assert form_of(config.model_copy(update={"cache": asked}), [mean_bytes] * count) == asked


@pytest.mark.parametrize("processes", [1, 2])
def test_training_on_either_gives_the_same_bits(processes: int, tmp_path: Path) -> None:
    found = []
    for form in ("pixels", "encoded"):
        make_data(tmp_path / form, form=form, ops=({"op": "translate", "max_px": 1},))
        done = run_job(tmp_path / form, small_config(processes=processes, batch_size=8))
        assert done.returncode == 0, done.stderr
        found.append(result_of(tmp_path / form))
    assert found[0].epoch == 3
    assert found[0].best_weights.keys() == found[1].best_weights.keys()
    assert all(torch.equal(found[0].best_weights[name], found[1].best_weights[name]) for name in found[0].best_weights)


def test_what_the_whole_way_needs_of_a_cache_holds_for_encoded_ones(tmp_path: Path) -> None:
    """Channel statistics and preview, and the folds of the search for wrong labels, are those of packed pixels."""
    said = {}
    for form in ("pixels", "encoded"):
        root = tmp_path / form
        write_tree(root / "source", pictures(cat=30, dog=30))
        config = PREPARE.model_copy(update={"cache": form})
        ref = ingest(from_folder(root / "source"), root)
        cache = prepare(ref, validate(ref, LOOSE, config, root), config, root)
        assert cache.form == form
        training_set = augment(cache, PLAIN, root)
        cheap = CHEAP.model_copy(update={"epochs": 1})
        answers = folds.out_of_fold(training_set, cache, cheap, None, {}, 2, root / "work", lambda _: None)
        said[form] = (training_set.mean, training_set.std, training_set.files, answers.sha256, answers.probabilities.tobytes())
    assert said["pixels"] == said["encoded"]


def loader(cache: ImageCache, root: Path) -> Loader:
    training_set = augment(cache, PLAIN, root)
    return Loader(open_split(cache, "train", 2), training_set, batch_size=8, seed=0, ranks=Ranks(0, 1, torch.device("cpu")))


def test_an_epoch_that_is_broken_off_leaves_no_thread_of_its_own(tmp_path: Path) -> None:
    _, encoded = both(tmp_path)
    batches = loader(encoded, tmp_path / "encoded").augmented(0)
    next(batches)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def test_an_image_that_no_longer_decodes_is_named_where_it_is_read(tmp_path: Path) -> None:
    """Attack: bytes changed after verify(), as by a failing disk in the middle of a training."""
    _, encoded = both(tmp_path)
    batches = loader(encoded, tmp_path / "encoded")
    view = open_split(encoded, "train")
    path, start = encoded.path("000001-00000.images"), int(encoded_pixels(view).layout.start[5])
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(8))
    with pytest.raises(BadInput, match=view.paths[5]) as caught:
        list(batches.augmented(0))
    assert caught.value.code == "not_an_image"
    assert "dvc repro --force validate" in str(caught.value)
    with pytest.raises(BadInput, match="000001-00000.images") as caught:
        encoded.verify()
    assert caught.value.code == "artifact_edited"


@pytest.mark.parametrize("attack", ["cut", "longer", "lengths", "no lengths"])
def test_files_that_do_not_fit_are_refused(attack: str, tmp_path: Path) -> None:
    cache = prepare(*project(tmp_path, images(60)), ENCODED, tmp_path)
    path, table = cache.path("000001-00000.images"), cache.path("test.parquet")
    old = pq.read_table(table)
    if attack == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif attack == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    elif attack == "lengths":
        pq.write_table(old.set_column(6, "bytes", pa.array([path.stat().st_size] * old.num_rows, pa.int64())), table)
    else:
        pq.write_table(old.drop_columns(["bytes"]), table)
    with pytest.raises(BadInput) as caught:
        open_split(cache, "test")
    assert caught.value.code == "artifact_edited"


def test_a_report_of_other_bytes_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    rows = images(60)
    ref, report = project(tmp_path, [row._replace(data=row.data + b"x") for row in rows])
    told = project(tmp_path / "other", rows)[1]
    (tmp_path / "artifacts" / "validation" / "images.parquet").write_bytes(told.path("images.parquet").read_bytes())
    with pytest.raises(BadInput, match="another one than was validated") as caught:
        prepare(ref, report.model_copy(update={"files": told.files}), ENCODED, tmp_path)
    assert caught.value.code == "artifact_foreign"
    assert not (tmp_path / "artifacts" / "cache").exists()
