"""Attacks the augmentation: ops against plain numpy, draws as a pure function, exact statistics, and the stage's artifact."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_cache import DECODE

from tasks.augment import augment, channel_statistics, class_weights, describe, resolve, spread
from tasks.core.artifacts import SPLITS, ImageCache, Split, TrainingSet
from tasks.core.config import AugmentConfig
from tasks.core.errors import BadInput
from tasks.images import augment_ops
from tasks.images.cache import CacheWriter, Entry
from tasks.images.preview import preview_png

SIZE = 16
OPS: dict[str, dict[str, Any]] = {
    "random_resized_crop": {"op": "random_resized_crop", "min_area": 0.3, "max_ratio": 4 / 3},
    "rotate": {"op": "rotate", "max_degrees": 30.0},
    "flip": {"op": "flip", "probability": 0.5},
    "translate": {"op": "translate", "max_px": 3},
    "brightness": {"op": "brightness", "max_change": 0.5},
    "contrast": {"op": "contrast", "max_change": 0.5},
    "cutout": {"op": "cutout", "side_px": 5, "fill": [1.0, 2.0, 3.0]},
}
ALL = list(OPS.values())


def batch(count: int = 12, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3, size, size))
    return torch.from_numpy(pixels.astype(np.float32))


def drawn(ops: list[dict[str, Any]], count: int = 12, **where: int) -> dict[str, torch.Tensor]:
    return augment_ops.draw(ops, **{"seed": 0, "epoch": 0, "step": 0, "batch": count, "size": SIZE, **where})


def with_values(name: str, values: list[Any], images: torch.Tensor) -> torch.Tensor:
    return augment_ops.apply(images, [OPS[name]], {f"0.{name}": torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else None)})


def test_flip_is_an_exact_mirror_of_the_chosen_rows_alone() -> None:
    images = batch(4)
    flipped = with_values("flip", [True, False, False, True], images)
    assert torch.equal(flipped[0], images[0].flip(-1))
    assert torch.equal(flipped[1:3], images[1:3])
    assert torch.equal(flipped[3], images[3].flip(-1))


def test_translate_equals_numpys_reflect_padding() -> None:
    images = batch(49)
    shifts = [[dx, dy] for dx in range(-3, 4) for dy in range(-3, 4)]
    moved = with_values("translate", shifts, images)
    for image, (dx, dy), result in zip(images.numpy(), shifts, moved.numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (3, 3), (3, 3)), mode="reflect")
        assert np.array_equal(result, padded[:, 3 - dy : 3 - dy + SIZE, 3 - dx : 3 - dx + SIZE])
    spot = torch.zeros(1, 3, SIZE, SIZE)
    spot[0, :, 5, 5] = 255
    assert with_values("translate", [[2, 1]], spot)[0, 0, 6, 7] == 255, "positive moves the content right and down"


@pytest.mark.parametrize("size", [5, 16, 33])
def test_rotation_by_nothing_and_a_full_crop_change_nothing(size: int) -> None:
    images = batch(3, size)
    assert torch.allclose(with_values("rotate", [0.0] * 3, images), images, atol=2e-3)
    full = augment_ops.apply(images, [OPS["random_resized_crop"]], {"0.random_resized_crop": torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 3)})
    assert torch.allclose(full, images, atol=2e-3)


def test_rotation_by_quarter_turns_is_exact_and_counter_clockwise() -> None:
    images = batch(3)
    turned = with_values("rotate", [90.0, 180.0, -90.0], images)
    for result, image, turns in zip(turned, images, (1, 2, 3), strict=True):
        assert torch.allclose(result, torch.rot90(image, turns, (1, 2)), atol=5e-3)


def test_a_crop_of_whole_pixels_doubles_a_quarter_as_pillow_does() -> None:
    images = batch(1)
    cropped = augment_ops.apply(images, [OPS["random_resized_crop"]], {"0.random_resized_crop": torch.tensor([[0.25, 0.5, 0.5, 0.5]])})
    channel = Image.fromarray(images[0, 0].numpy()).crop((4, 8, 12, 16)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    inner = slice(1, -1)  # at the crop's edge Pillow repeats the last pixel, we look at the pixel beside it
    assert np.allclose(cropped[0, 0, inner, inner], np.asarray(channel)[inner, inner], atol=1e-2)


def test_crop_then_rotate_is_one_sampling_of_both() -> None:
    ramp = torch.arange(SIZE, dtype=torch.float32).view(1, 1, 1, SIZE).expand(1, 3, SIZE, SIZE) * 10
    ops = [OPS["random_resized_crop"], OPS["rotate"]]
    values = {"0.random_resized_crop": torch.tensor([[0.25, 0.25, 0.5, 0.5]]), "1.rotate": torch.tensor([90.0])}
    together = augment_ops.apply(ramp, ops, values)
    cropped = augment_ops.apply(ramp, ops[:1], {"0.random_resized_crop": values["0.random_resized_crop"]})
    assert torch.allclose(together, torch.rot90(cropped, 1, (2, 3)), atol=1e-2)


def test_brightness_and_contrast_equal_their_formulas_and_stay_in_range() -> None:
    images = batch(3)
    factors = [0.5, 1.0, 1.5]
    bright = with_values("brightness", factors, images).numpy()
    contrast = with_values("contrast", factors, images).numpy()
    for image, factor, one, other in zip(images.numpy(), factors, bright, contrast, strict=True):
        grey = np.dot((0.299, 0.587, 0.114), image.mean((1, 2)))
        assert np.allclose(one, np.clip(image * factor, 0, 255), atol=1e-3)
        assert np.allclose(other, np.clip(grey + (image - grey) * factor, 0, 255), atol=1e-2)


@pytest.mark.parametrize(("column", "row"), [(0, 0), (8, 8), (15, 3)])
def test_cutout_blanks_a_square_cut_at_the_edges_with_the_fill(column: int, row: int) -> None:
    images = batch(1)
    cut = with_values("cutout", [[column, row]], images)
    square = (slice(max(0, row - 2), row + 3), slice(max(0, column - 2), column + 3))
    for channel, fill in enumerate((1.0, 2.0, 3.0)):
        assert (cut[0, channel][square] == fill).all()
    kept = torch.ones(SIZE, SIZE, dtype=torch.bool)
    kept[square] = False
    assert torch.equal(cut[0][:, kept], images[0][:, kept])


def test_no_op_returns_the_very_input() -> None:
    images = batch(2)
    assert augment_ops.apply(images, [], drawn([])) is images


@pytest.mark.parametrize("name", [*OPS, "all"])
def test_an_op_keeps_range_shape_type_and_its_input(name: str) -> None:
    ops = ALL if name == "all" else [OPS[name]]
    images = batch(64)
    before = images.clone()
    result = augment_ops.apply(images, ops, drawn(ops, 64))
    assert torch.equal(images, before), "apply must not write into its input"
    assert result.shape == images.shape
    assert result.dtype == torch.float32
    assert result.device == images.device
    assert float(result.min()) >= 0
    assert float(result.max()) <= 255
    assert not torch.equal(result, images)
    single = augment_ops.apply(images[:1], ops, augment_ops.take(drawn(ops, 64), slice(0, 1)))
    assert torch.allclose(single, result[:1], atol=1e-3), "an image's result must not depend on its batch"
    assert augment_ops.apply(images.double(), ops, drawn(ops, 64)).dtype == torch.float64
    strided = images.to(memory_format=torch.channels_last)
    assert torch.allclose(augment_ops.apply(strided, ops, drawn(ops, 64)), result, atol=1e-3)


def test_draw_is_a_pure_function_that_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = drawn(ALL, seed=3, epoch=2, step=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again = drawn(ALL, seed=3, epoch=2, step=7)
    assert all(torch.equal(first[key], again[key]) for key in first)
    for other in ((4, 2, 7), (3, 3, 7), (3, 2, 8), (3, 27, 0)):
        changed = drawn(ALL, **dict(zip(("seed", "epoch", "step"), other, strict=True)))
        assert not any(torch.equal(first[key], changed[key]) for key in first), other


def test_draws_are_those_of_every_past_release() -> None:
    """Pinned by value: a resumed run must see the batches that the killed one would have seen."""
    values = drawn([OPS["translate"], OPS["rotate"]], 4, seed=1, epoch=2, step=3)
    assert values["0.translate"].tolist() == [[-1, 0], [1, 2], [1, -2], [-1, -3]]
    assert values["1.rotate"].tolist() == pytest.approx([20.378183424324536, 20.854469998808014, 28.586531286897518, -6.720336379569332], rel=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_the_rows_of_all_ranks_together_are_one_ranks(world: int) -> None:
    images = batch(13)
    whole = augment_ops.apply(images, ALL, drawn(ALL, 13))
    bounds = [13 * rank // world for rank in range(world + 1)]
    parts = [
        augment_ops.apply(images[start:stop], ALL, augment_ops.take(drawn(ALL, 13), slice(start, stop))) for start, stop in itertools.pairwise(bounds)
    ]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-3)
    chosen = torch.tensor([7, 2])
    assert torch.equal(augment_ops.take(drawn(ALL, 13), chosen)["3.translate"], drawn(ALL, 13)["3.translate"][chosen])


def test_draws_fill_their_ranges() -> None:
    many = drawn(ALL, 4000)
    left, top, width, height = many["0.random_resized_crop"].unbind(1)
    assert bool((left >= 0).all() and (top >= 0).all() and (left + width <= 1 + 1e-9).all() and (top + height <= 1 + 1e-9).all())
    area, ratio = width * height, width / height
    assert 0.3 - 1e-9 <= float(area.min()) < 0.33
    assert float(area.max()) <= 1
    assert float(ratio.min()) >= 0.75 - 1e-9
    assert float(ratio.max()) <= 4 / 3 + 1e-9
    degrees = many["1.rotate"]
    assert -30 <= float(degrees.min()) < -29
    assert 29 < float(degrees.max()) <= 30
    assert 0.47 < float(many["2.flip"].double().mean()) < 0.53
    assert set(many["3.translate"].unique().tolist()) == set(range(-3, 4))
    assert set(many["6.cutout"].unique().tolist()) == set(range(SIZE))


def test_an_unknown_op_is_a_coded_error() -> None:
    with pytest.raises(BadInput) as caught:
        drawn([{"op": "blur"}])
    assert caught.value.code == "artifact_format"


def test_statistics_are_exact_and_deviations_never_vanish() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 7, 7, 3), dtype=np.uint8)
    pixels[..., 2] = 200
    mean, std = channel_statistics(pixels)
    assert mean == pytest.approx(pixels.mean((0, 1, 2)), rel=1e-12)
    assert std[:2] == pytest.approx(pixels.std((0, 1, 2))[:2], rel=1e-12)
    assert std[2] == 1.0, "a constant channel must not divide by nothing"
    bright = np.full((10, 4, 4, 3), 255, np.uint8)
    assert channel_statistics(bright) == ((255.0,) * 3, (1.0,) * 3)


def test_statistics_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (50, 5, 5, 3), dtype=np.uint8)
    whole = channel_statistics(pixels)
    monkeypatch.setattr("tasks.augment.CHUNK_BYTES", 200)
    assert channel_statistics(pixels) == whole


def test_class_weights_are_inverse_frequencies_of_mean_one() -> None:
    weights = class_weights([10, 20, 40])
    assert sum(weights) == pytest.approx(3)
    assert weights[0] / weights[2] == pytest.approx(4)


def test_the_policy_names_every_number_and_leaves_out_what_is_off() -> None:
    assert resolve(AugmentConfig(translate_px=0), (1, 2, 3), SIZE) == []
    config = AugmentConfig(flip=True, translate_px=2, rotate_degrees=15, min_crop_area=0.5, brightness=0.1, contrast=0.2, cutout_px=4)
    ops = resolve(config, (1.0, 2.0, 3.0), SIZE)
    assert [op["op"] for op in ops] == list(OPS)
    assert ops[-1] == {"op": "cutout", "side_px": 4, "fill": [1.0, 2.0, 3.0]}
    assert len(describe(ops)) == len(ops)
    augment_ops.draw(ops, seed=0, epoch=0, step=0, batch=2, size=SIZE)
    with pytest.raises(BadInput, match="translate_px") as caught:
        resolve(AugmentConfig(translate_px=SIZE), (0, 0, 0), SIZE)
    assert caught.value.code == "params_invalid"


def test_preview_samples_come_from_as_many_classes_as_there_are() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    assert spread(labels, 3, 3) == [0, 3, 5]
    assert spread(labels, 3, 7) == [0, 1, 2, 3, 4, 5, 6]
    assert spread(labels, 3, 64) == list(range(8))
    assert spread(labels, 3, 2) == [0, 3]


def make_cache(root: Path, other_test_pixels: bool = False) -> ImageCache:
    """Train: 6 images of class a (dark), 2 of b; val and test hold other pixels and counts."""
    folder = root / "artifacts" / "cache"
    folder.mkdir(parents=True)
    labels: dict[Split, list[int]] = {"train": [0, 0, 0, 0, 0, 0, 1, 1], "val": [0, 1], "test": [1, 1, 1, 0]}
    entries: dict[Split, list[Entry]] = {
        split: [Entry(f"{split}{row}", f"{row}.png", label) for row, label in enumerate(labels[split])] for split in SPLITS
    }
    rng = np.random.default_rng(0)
    with CacheWriter(folder, SIZE, entries) as writer:
        for split in SPLITS:
            for entry in entries[split]:
                pixels = rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
                writer.put(entry.sha256, 255 - pixels if other_test_pixels and split != "train" else pixels)
        writer.write_tables()
    decode = DECODE.model_copy(update={"image_size": SIZE})
    counts = {split: len(labels[split]) for split in SPLITS}
    return ImageCache(classes=("a", "b"), counts=counts, decode=decode, test_digest="", files=writer.files(), shards=writer.sizes()).save(root)


CONFIG = AugmentConfig(flip=True, translate_px=1, rotate_degrees=10, class_weights="balanced", preview_images=5)


def test_the_artifact_holds_what_training_needs_and_is_reproducible(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    policy = augment(cache, CONFIG, tmp_path)
    assert policy.verify().require_made_from(cache) is policy
    assert policy.class_weights == pytest.approx((0.5, 1.5))
    assert [op["op"] for op in policy.ops] == ["rotate", "flip", "translate"]
    first = {path.name: path.read_bytes() for path in policy.folder.iterdir()}
    assert sorted(first) == ["policy.json", "preview.png"]
    augment(cache, CONFIG, tmp_path)
    assert {path.name: path.read_bytes() for path in policy.folder.iterdir()} == first


def test_nothing_of_val_or_test_gets_into_the_policy(tmp_path: Path) -> None:
    """Attack: leaking statistics. Other val and test pixels must give the same numbers and the same preview."""
    first = augment(make_cache(tmp_path / "a"), CONFIG, tmp_path / "a")
    other = augment(make_cache(tmp_path / "b", other_test_pixels=True), CONFIG, tmp_path / "b")
    assert other.made_from != first.made_from
    assert other.model_dump(exclude={"made_from", "digest"}) == first.model_dump(exclude={"made_from", "digest"})


def test_an_edited_cache_is_refused_and_the_old_policy_stays(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    before = augment(cache, CONFIG, tmp_path)
    path = cache.path("000001-00000.u8")
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(BadInput) as caught:
        augment(cache, CONFIG, tmp_path)
    assert caught.value.code == "artifact_edited"
    assert TrainingSet.load(tmp_path).verify().digest == before.digest


@pytest.mark.parametrize(("count", "draws", "size"), [(1, 0, 8), (5, 6, 16), (64, 6, 32), (3, 2, 300)])
def test_the_preview_is_a_picture_that_shows_each_sample_pixel_by_pixel(count: int, draws: int, size: int) -> None:
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    after = [rng.integers(0, 256, samples.shape, dtype=np.uint8) for _ in range(draws)]
    names = ["a class with a very long name that cannot fit", "forged\nline", "日本語", *["x"] * count][:count]
    data = preview_png(samples, after, names, ["rotate"] * 30)
    sheet = np.asarray(Image.open(io.BytesIO(data)))
    assert sheet.shape[2] == 3
    assert max(sheet.shape) < 5000
    if size <= 32:
        scale = round(112 / size)
        grown = samples[0].repeat(scale, 0).repeat(scale, 1)
        windows = np.lib.stride_tricks.sliding_window_view(sheet[..., 0], grown.shape[:2], axis=(0, 1))
        corners = (windows[:, :, 0, 0] == grown[0, 0, 0]) & (windows[:, :, -1, -1] == grown[-1, -1, 0])
        assert any(np.array_equal(windows[y, x], grown[..., 0]) for y, x in np.argwhere(corners)), "the sample is not shown unblurred"
