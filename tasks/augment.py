"""Resolve the augmentation policy: channel statistics and class weights of the training split, exact ops, and a preview.

python -m tasks.augment      in a project's root; reads artifacts/cache, writes artifacts/training_set
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core import errors
from tasks.core.artifacts import ImageCache, TrainingSet, file_digests, lineage
from tasks.core.config import AugmentConfig, load_params
from tasks.core.errors import BadInput
from tasks.core.files import canonical_json, digest_of, publish_dir, write_atomic
from tasks.core.process import die_with_parent, quiet_environment

if TYPE_CHECKING:
    import numpy as np

    from tasks.images.pixels import Pixels

CHUNK_BYTES = 16_000_000
MAX_RATIO = 4 / 3
"""Aspect ratios of random resized crops, 3/4 to 4/3, as in torchvision."""
DRAWS = 6
"""Augmented copies of each sample in the preview."""


def augment(cache: ImageCache, config: AugmentConfig, out: Path) -> TrainingSet:
    """Write artifacts/training_set below ``out``: preview.png, then policy.json; all of it or nothing.

    Looks at the training split alone. Raises BadInput ``artifact_missing``, ``artifact_edited``, ``class_not_in_train`` or
    ``params_invalid`` (an op larger than the cached image).
    """
    import numpy as np

    from tasks.images.cache import open_split

    cache.verify()
    view = open_split(cache, "train")
    counts = np.bincount(view.labels, minlength=len(cache.classes)).tolist()
    if 0 in counts:
        name = cache.classes[counts.index(0)]
        raise BadInput("class_not_in_train", "a class has no training image", value=name, constraint="at least 1", knob="dvc repro prepare")
    mean, std = channel_statistics(view.pixels)
    ops = resolve(config, mean, cache.decode.image_size)
    with publish_dir((out / TrainingSet.PATH).parent) as folder:
        chosen = spread(view.labels, len(cache.classes), config.preview_images)
        names = [cache.classes[view.labels[row]] for row in chosen]
        write_atomic(folder / "preview.png", _preview(view.pixels[np.array(chosen)], names, ops))
        trainset = TrainingSet(
            made_from=lineage(cache),
            files=file_digests(folder, "preview.png"),
            mean=mean,
            std=std,
            class_weights=class_weights(counts) if config.class_weights == "balanced" else (1.0,) * len(counts),
            ops=tuple(ops),
        )
        trainset = trainset.model_copy(update={"digest": digest_of(trainset.content())})
        write_atomic(folder / Path(TrainingSet.PATH).name, canonical_json(trainset.model_dump(mode="json")))
    return TrainingSet.load(out)


def channel_statistics(pixels: np.ndarray | Pixels) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and standard deviation of each channel of uint8 [N, S, S, 3], on the 0-255 scale; a deviation is at least 1.

    Sums are exact integers and chunks are read in turn: memory is flat, and every machine gets the same numbers.
    """
    import numpy as np

    total, squares = [0, 0, 0], [0, 0, 0]
    step = max(1, CHUNK_BYTES // max(1, pixels[:1].nbytes))
    for start in range(0, len(pixels), step):
        chunk = np.asarray(pixels[start : start + step]).reshape(-1, 3)
        for channel in range(3):
            levels = np.bincount(chunk[:, channel], minlength=256).tolist()
            total[channel] += sum(level * count for level, count in enumerate(levels))
            squares[channel] += sum(level * level * count for level, count in enumerate(levels))
    n = pixels.size // 3
    mean = [total[channel] / n for channel in range(3)]
    std = [max(1.0, math.sqrt((n * squares[channel] - total[channel] ** 2) / n**2)) for channel in range(3)]
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])


def class_weights(counts: Sequence[int]) -> tuple[float, ...]:
    """Inverse class frequencies, scaled so that their mean is 1."""
    inverse = [1 / count for count in counts]
    return tuple(weight * len(counts) / math.fsum(inverse) for weight in inverse)


def resolve(config: AugmentConfig, mean: Sequence[float], size: int) -> list[dict[str, Any]]:
    """The ops of tasks.images.augment_ops, in their order, with every number that they need; what is off is left out.

    Raises BadInput ``params_invalid`` for an op that is larger than an image of ``size`` pixels.
    """
    for key in ("translate_px", "cutout_px"):
        value = getattr(config, key)
        if value >= size:
            raise BadInput("params_invalid", f"augment.{key} is too large", value=value, constraint=f"below {size}", knob=f"augment.{key}")
    ops: list[dict[str, Any]] = []
    if config.min_crop_area < 1:
        ops.append({"op": "random_resized_crop", "min_area": config.min_crop_area, "max_ratio": MAX_RATIO})
    if config.rotate_degrees:
        ops.append({"op": "rotate", "max_degrees": config.rotate_degrees})
    if config.flip:
        ops.append({"op": "flip", "probability": 0.5})
    if config.translate_px:
        ops.append({"op": "translate", "max_px": config.translate_px})
    if config.brightness:
        ops.append({"op": "brightness", "max_change": config.brightness})
    if config.contrast:
        ops.append({"op": "contrast", "max_change": config.contrast})
    if config.cutout_px:
        ops.append({"op": "cutout", "side_px": config.cutout_px, "fill": list(mean)})
    return ops


def spread(labels: np.ndarray, classes: int, wanted: int) -> list[int]:
    """Up to ``wanted`` rows, as many classes as possible, each class in turn, grouped by class."""
    import numpy as np

    rows = [np.flatnonzero(labels == index).tolist() for index in range(classes)]
    chosen: list[int] = []
    for turn in range(max(len(each) for each in rows)):
        chosen += [each[turn] for each in rows if turn < len(each)][: wanted - len(chosen)]
        if len(chosen) >= wanted:
            break
    return sorted(chosen, key=lambda row: (labels[row], row))


def describe(ops: Sequence[dict[str, Any]]) -> list[str]:
    """One phrase for each op, for people."""
    phrases = {
        "random_resized_crop": "crop to {min_area:.0%} or more of the area",
        "rotate": "rotate up to {max_degrees:g} degrees",
        "flip": "mirror left-right with probability {probability:g}",
        "translate": "shift up to {max_px} px",
        "brightness": "brightness up to {max_change:.0%}",
        "contrast": "contrast up to {max_change:.0%}",
        "cutout": "blank a square of {side_px} px",
    }
    return [phrases[op["op"]].format(**op) for op in ops]


def _preview(samples: np.ndarray, names: Sequence[str], ops: Sequence[dict[str, Any]]) -> bytes:
    """preview.png. Drawn in float64, so that rounding to bytes comes out the same on every processor."""
    import numpy as np

    from tasks.images.preview import preview_png

    after: list[np.ndarray] = []
    if ops:
        import torch

        from tasks.images import augment_ops

        images = torch.from_numpy(np.array(samples)).permute(0, 3, 1, 2).double()
        for epoch in range(DRAWS):
            drawn = augment_ops.draw(ops, seed=0, epoch=epoch, step=0, batch=len(samples), size=samples.shape[1])
            pixels = augment_ops.apply(images, ops, drawn).round().clamp(0, 255).byte()
            after.append(pixels.permute(0, 2, 3, 1).contiguous().numpy())
    return preview_png(samples, after, names, describe(ops))


def main() -> None:
    die_with_parent()
    quiet_environment()
    root = Path()
    trainset = augment(ImageCache.load(root), load_params().augment, root)
    ops = "; ".join(describe(trainset.ops)) or "no augmentation"
    mean, std = ([round(value, 1) for value in values] for values in (trainset.mean, trainset.std))
    print(f"augment: {ops}; mean {mean}, std {std}; see {trainset.path('preview.png')}")


if __name__ == "__main__":
    sys.exit(errors.run(main))
