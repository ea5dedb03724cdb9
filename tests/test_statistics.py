"""The statistics of an image: known pictures, sub-sampling, what has none; and the page that shows them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from source_trees import from_folder, pictures, png, write_tree

from tasks.core.config import PrepareConfig, ValidateConfig
from tasks.images.charts import histogram, strip
from tasks.images.likeness import luma_of
from tasks.images.statistics import MOST_PIXELS, Statistics, statistics
from tasks.images.validation_page import odd_ones
from tasks.ingest import ingest
from tasks.validate import validate

LOOSE = ValidateConfig(min_images_per_class=1, min_decodable_share=0.5)


def of(luma: np.ndarray) -> Statistics:
    return statistics(luma[None])[0]


def plain(luma: np.ndarray) -> tuple[float, float, float, float]:
    """The definitions, as slowly as they read."""
    levels = luma.astype(float)
    shares = np.bincount(luma.ravel(), minlength=256) / luma.size
    bits = -sum(share * np.log2(share) for share in shares if share)
    laplacian = [
        levels[y - 1, x] + levels[y + 1, x] + levels[y, x - 1] + levels[y, x + 1] - 4 * levels[y, x]
        for y in range(1, luma.shape[0] - 1)
        for x in range(1, luma.shape[1] - 1)
    ]
    return float(levels.mean()), float(levels.std()), float(np.var(laplacian)), float(bits)


@given(st.integers(3, 20), st.integers(3, 20), st.integers(0, 2**32 - 1), st.integers(1, 256))
def test_the_numbers_are_their_definitions(height: int, width: int, seed: int, levels: int) -> None:
    luma = np.random.default_rng(seed).integers(0, levels, (height, width), np.uint8)
    found = of(luma)
    assert found[:4] == pytest.approx(plain(luma), abs=6e-4)
    assert found.aspect == round(width / height, 4)


def test_known_pictures_have_known_numbers() -> None:
    black, white = (np.full((8, 16), level, np.uint8) for level in (0, 255))
    assert tuple(of(black)) == (0.0, 0.0, 0.0, 0.0, 2.0)
    assert tuple(of(white)) == (255.0, 0.0, 0.0, 0.0, 2.0)
    chessboard = (np.indices((8, 8)).sum(axis=0) % 2 * 255).astype(np.uint8)
    assert tuple(of(chessboard)) == (127.5, 127.5, 1020.0**2, 1.0, 1.0)
    assert of(np.zeros((2, 9), np.uint8)).sharpness is None
    assert of(np.arange(256, dtype=np.uint8).reshape(16, 16)).entropy == 8.0


def test_luma_weighs_colours_as_bt_601_does() -> None:
    colours = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8)
    assert luma_of(colours[None]).tolist() == [[[76, 150, 29]]]


def test_a_large_image_is_sampled_and_says_nearly_the_same_as_the_whole_of_it() -> None:
    coarse = np.random.default_rng(5).integers(0, 256, (60, 80), np.uint8)
    luma = np.array(Image.fromarray(coarse).resize((1200, 900), Image.Resampling.BICUBIC))
    assert luma.size > MOST_PIXELS
    found, exact = of(luma), plain(luma[::1, ::1])
    assert found[:4] == pytest.approx(exact, rel=0.05)
    assert of(luma) == of(luma.copy())


@pytest.mark.parametrize("shape", [(1, 1), (1, 400_000), (400_000, 1), (3, 100_000), (70_000, 3)])
def test_any_shape_has_numbers(shape: tuple[int, int]) -> None:
    assert of(np.random.default_rng(1).integers(0, 256, shape, np.uint8)).contrast >= 0


@given(st.integers(1, 6), st.integers(1, 24), st.integers(1, 24), st.integers(0, 2**32 - 1))
def test_images_measured_together_have_the_numbers_of_each_alone(images: int, height: int, width: int, seed: int) -> None:
    lumas = np.random.default_rng(seed).integers(0, 256, (images, height, width), np.uint8)
    assert statistics(lumas) == [of(luma) for luma in lumas]


def test_the_table_holds_numbers_for_sound_images_alone(tmp_path: Path) -> None:
    files = {**pictures(cat=5, dog=5), "cat/broken.png": b"x", "dog/small.png": png(7, side=4)}
    report = validate(ingest(from_folder(write_tree(tmp_path / "source", files)), tmp_path), LOOSE, PrepareConfig(), tmp_path)
    for row in pq.read_table(report.path("images.parquet")).to_pylist():
        numbers = [row[name] for name in ("brightness", "contrast", "sharpness", "entropy", "aspect")]
        if row["reason"]:
            assert numbers == [None] * 5
        else:
            with Image.open(io.BytesIO(files[row["path"]])) as image:
                luma = np.asarray(image.convert("RGB").convert("L"))
            assert numbers[:4] == pytest.approx(plain(luma), abs=6e-4)


def test_the_page_shows_the_odd_ones_and_not_what_all_share(tmp_path: Path) -> None:
    files = pictures(cat=8, dog=8)
    for name, level in (("cat/night.png", 2), ("dog/snow.png", 253)):
        buffer = io.BytesIO()
        Image.new("RGB", (10, 10), (level,) * 3).save(buffer, "PNG")
        files[name] = buffer.getvalue()
    report = validate(ingest(from_folder(write_tree(tmp_path / "source", files)), tmp_path), LOOSE, PrepareConfig(), tmp_path)
    html = report.path("report.html").read_text(encoding="utf-8")
    section = html.split("The odd ones")[1].split("</section>")[0]
    assert [part.split("</h3>")[0] for part in section.split("<h3>")[1:]] == [
        "darkest", "brightest", "least contrast", "blurriest", "sharpest, or noise", "least in them",
    ]  # fmt: skip
    firsts = [part.split('title="')[1].split('"')[0] for part in section.split("<h3>")[1:]]
    assert firsts[0] == "cat: cat/night.png"
    assert firsts[1] == "dog: dog/snow.png"
    assert "<svg" in html.split("Light, sharpness and shape")[1].split("</section>")[0]


def test_charts_hold_every_value_and_bear_equal_ones() -> None:
    chart = histogram([1.0, 2.0, 2.0, 50.0])
    assert (chart.low, chart.median, chart.high) == (1.0, 2.0, 50.0)
    assert sum(int(title.split(": ")[1]) for title in [part.split("</title>")[0] for part in chart.svg.split("<title>")[1:]]) == 4
    assert histogram([0.0, 0.0]).svg.count("<rect") == 1
    assert histogram([0.0, 1e6], log=True).svg.count("<rect") == 2
    assert strip([3.0], 3.0, 3.0).count("<rect") == 2
    assert odd_ones([]) == []
