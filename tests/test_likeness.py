"""Copies: equal pixels and near ones, found among strangers, told by the side that judges, and set aside or refused by params."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from source_trees import from_folder, write_tree

from tasks.core.artifacts import DatasetRef, Split, ValidationReport
from tasks.core.config import PrepareConfig, ValidateConfig
from tasks.core.errors import BadInput
from tasks.images import likeness as module
from tasks.images.likeness import (
    MOST_BITS,
    Likeness,
    exact_copies,
    leaks,
    likeness,
    likenesses,
    luma_of,
    near_copies,
    near_pairs,
    shrunk,
    triangle,
)
from tasks.images.shards import iter_rows
from tasks.images.splits import Member, splitter
from tasks.ingest import ingest
from tasks.validate import validate


def picture(seed: int, side: int = 64) -> np.ndarray:
    """A smooth random picture, as photographs are: uint8 [side, side, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return np.array(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))


def encoded(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(data: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def brute(hashes: np.ndarray, bits: int) -> list[list[int]]:
    return [[i, j] for i in range(len(hashes)) for j in range(i + 1, len(hashes)) if int(hashes[i] ^ hashes[j]).bit_count() <= bits]


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6), st.lists(st.lists(st.integers(0, 63), max_size=9), max_size=40), st.integers(0, 7)
)
def test_the_index_finds_exactly_the_pairs_that_comparing_all_finds(centres: list[int], flips: list[list[int]], bits: int) -> None:
    found = list(centres)
    for index, places in enumerate(flips):
        value = centres[index % len(centres)]
        for place in places:
            value ^= 1 << place
        found.append(value)
    hashes = np.array(found, np.uint64)
    assert near_pairs(hashes, bits).tolist() == brute(hashes, bits)


def test_many_equal_hashes_are_compared_in_steps_and_a_distance_that_the_bands_cannot_find_is_refused() -> None:
    hashes = np.zeros(300, np.uint64)
    assert len(near_pairs(hashes, 0)) == 300 * 299 // 2
    with pytest.raises(ValueError, match="must be 0 to 7"):
        near_pairs(hashes, MOST_BITS + 1)


@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_shrinking_is_exact_and_what_pillow_does_but_for_one_level(images: int, high: int, wide: int, seed: int) -> None:
    """Against whole numbers of any size, and against Pillow, which rounds after each of its two passes."""
    lumas = np.random.default_rng(seed).integers(0, 256, (images, high, wide), np.uint8)
    lumas[0] = np.where(lumas[0] > 127, 255, 0)
    for height, width in ((8, 9), (16, 16)):
        down, across = (triangle(taken, size).astype(np.int64) for taken, size in ((high, height), (wide, width)))
        exact = [(down.T @ luma.astype(np.int64) @ across + (1 << 43)) >> 44 for luma in lumas]
        found = shrunk(lumas, height, width)
        assert found.tolist() == np.stack(exact).tolist()
        pillow = [np.asarray(Image.fromarray(luma).resize((width, height), Image.Resampling.BILINEAR), np.int16) for luma in lumas]
        assert np.abs(np.stack(pillow) - found).max() <= 1


def test_a_stack_is_as_alike_as_its_images_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = np.stack([picture(seed, 40) for seed in range(5)])
    alone = [likeness(pixels) for pixels in stack]
    assert likenesses(stack, luma_of(stack)) == alone
    assert len({found.pixels for found in alone}) == 5
    monkeypatch.setattr(module, "STEP_PIXELS", 100)
    assert likenesses(stack, luma_of(stack)) == alone


@pytest.mark.parametrize("seed", range(5))
def test_a_picture_in_another_size_quality_and_tint_is_a_near_copy_and_strangers_are_not(seed: int) -> None:
    original = picture(seed, 96)
    smaller = np.array(Image.fromarray(original).resize((50, 70), Image.Resampling.LANCZOS))
    jpeg = decoded(encoded(smaller, "JPEG", quality=60))
    tinted = np.clip(original * np.array([0.8, 0.9, 1.1]) + 12, 0, 255).astype(np.uint8)
    strangers = [picture(100 + other, 96) for other in range(40)]
    found = [likeness(pixels) for pixels in (original, smaller, jpeg, tinted, *strangers)]
    assert near_copies(found, 6).tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]


def test_images_with_too_little_in_them_have_no_hash_but_their_pixels_count() -> None:
    flat, small = np.full((40, 40, 3), 77, np.uint8), picture(1, 15)
    assert [likeness(pixels).hash for pixels in (flat, small)] == [None, None]
    assert likeness(picture(1, 16)).hash is not None
    assert near_copies([likeness(flat), likeness(flat)], 6).tolist() == []
    assert likeness(flat).pixels == likeness(flat.copy()).pixels
    assert likeness(flat).pixels != likeness(np.full((20, 80, 3), 77, np.uint8)).pixels  # the shape is part of it


def copies(*images: tuple[bytes, str, str, Split]) -> list[tuple[str, str, str]]:
    pixels, names, labels, splits = (list(column) for column in zip(*images, strict=True))
    return [(names[copy.place], copy.code, names[copy.of]) for copy in exact_copies([Likeness(p, None, b"") for p in pixels], names, labels, splits)]


def test_which_of_equal_images_stays() -> None:
    assert copies((b"p", "b", "cat", "train"), (b"p", "a", "cat", "train"), (b"q", "c", "cat", "train")) == [("b", "duplicate", "a")]
    assert copies((b"p", "a", "cat", "train"), (b"p", "b", "cat", "test")) == [("a", "leak_exact", "b")]
    assert copies((b"p", "a", "cat", "val"), (b"p", "b", "cat", "train"), (b"p", "c", "cat", "val")) == [
        ("b", "leak_exact", "a"),
        ("c", "duplicate", "a"),
    ]
    assert copies((b"p", "a", "cat", "test"), (b"p", "b", "dog", "train"), (b"p", "c", "cat", "test")) == [
        ("a", "conflicting_label", "b"),
        ("b", "conflicting_label", "a"),
        ("c", "conflicting_label", "b"),
    ]


def test_of_near_copies_the_one_that_teaches_goes_once() -> None:
    pairs = np.array([[0, 1], [0, 2], [1, 2]])
    assert [tuple(copy) for copy in leaks(pairs, ["train", "val", "test"])] == [(0, "leak_near", 1), (1, "leak_near", 2)]
    assert leaks(pairs, ["val", "val", "val"]) == []


def source(root: Path, splits: bool) -> DatasetRef:
    """Ten pictures a class; in train a near copy of a test picture, and near copies of one another."""
    files: dict[str, bytes] = {}
    for number in range(20):
        label = ("cat", "dog")[number % 2]
        split = ("train/", "train/", "train/", "val/", "test/")[number % 5] if splits else ""
        files[f"{split}{label}/{number:02d}.png"] = encoded(picture(number))
    if splits:
        files["train/cat/leak.jpg"] = encoded(picture(4, 80), "JPEG", quality=70)  # picture 4 is test/cat/04
        files["train/cat/twin.jpg"] = encoded(picture(0, 80), "JPEG", quality=70)  # picture 0 is train/cat/00
        files["train/cat/same.bmp"] = encoded(picture(10), "BMP")  # the pixels of train/cat/10
    return ingest(from_folder(write_tree(root / "source", files)), root)


CONFIG = ValidateConfig(min_images_per_class=1, min_decodable_share=0.9)


def test_a_leak_goes_a_twin_in_the_same_split_stays_and_both_are_on_the_page(tmp_path: Path) -> None:
    report = validate(source(tmp_path, splits=True), CONFIG, PrepareConfig(), tmp_path)
    assert {item.name: item.code for item in report.quarantined} == {"train/cat/leak.jpg": "leak_near", "train/cat/same.bmp": "duplicate"}
    rows = {row["path"]: row for row in pq.read_table(report.path("images.parquet")).to_pylist()}
    assert rows["train/cat/leak.jpg"]["reason"] == "it is a near copy of test/cat/04.png (test)"
    assert rows["train/cat/same.bmp"]["reason"] == "it has the pixels of train/cat/10.png (train)"
    assert rows["train/cat/twin.jpg"]["reason"] == ""
    assert (int(rows["train/cat/twin.jpg"]["phash"], 16) ^ int(rows["train/cat/00.png"]["phash"], 16)).bit_count() <= 6
    page = report.path("report.html").read_text(encoding="utf-8")
    assert "3 pairs of images are one picture." in page
    section = page[page.index("<h2>Copies</h2>") : page.index("<h2>Quarantine</h2>")]
    assert section.count("data:image/png;base64,") == 6
    for words in ("<b>leak_near</b>", "<b>duplicate</b>", "<b>near</b>", "train/cat/twin.jpg"):
        assert words in section


def test_a_leak_fails_the_run_where_params_say_so(tmp_path: Path) -> None:
    ref = source(tmp_path, splits=True)
    with pytest.raises(BadInput, match="copies of images in another split") as caught:
        validate(ref, CONFIG.model_copy(update={"leakage": "fail"}), PrepareConfig(), tmp_path)
    assert "validate.leakage" in str(caught.value)
    report = ValidationReport.load(tmp_path)
    assert not report.success
    assert {item.code for item in report.quarantined} == {"duplicate"}


def test_splits_that_are_drawn_are_guarded_as_the_sources_own_are(tmp_path: Path) -> None:
    """A later batch brings a near copy of every picture: each copy that falls into another split than its original goes."""
    ref = source(tmp_path, splits=False)
    config = PrepareConfig(val_share=0.2, test_share=0.3)
    originals = [row.path for row in iter_rows(ref)]
    files = {f"{name[:-4]}-again.jpg": encoded(picture(int(name[4:6]), 90), "JPEG", quality=75) for name in originals}
    ref = ingest(from_folder(write_tree(tmp_path / "source", files)), tmp_path)
    assign = splitter(ref, config)
    split = {row.path: assign.split_of(Member(row.sha256, None, None)) for row in iter_rows(ref)}
    expected = set()
    for name in originals:
        again = f"{name[:-4]}-again.jpg"
        if split[name] != split[again]:
            expected.add(max((name, again), key=lambda one: ("test", "val", "train").index(split[one])))
    assert len(expected) > 3, "the drawn splits part some copies from their originals"
    report = validate(ref, ValidateConfig(min_images_per_class=1, min_decodable_share=0.5), config, tmp_path)
    assert {item.name for item in report.quarantined} == expected
    assert {item.code for item in report.quarantined} == {"leak_near"}
