"""Data sets of torchvision by name: true files of MNIST, folders, and what is no classification."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_trees import pictures, write_tree

from tasks.core.artifacts import SetAside
from tasks.core.config import DecodeConfig
from tasks.core.errors import BadInput
from tasks.images.decode import decode, policy_of
from tasks.sources import Item, open_source


def read(name: str, project: Path, /, **options: Any) -> list[Item | SetAside]:
    return list(open_source("torchvision", name, project, options=options).items)


def items(name: str, project: Path, /, **options: Any) -> list[Item]:
    return [item for item in read(name, project, **options) if isinstance(item, Item)]


def mnist(folder: Path, counts: dict[str, int]) -> dict[str, np.ndarray]:
    """The files of MNIST, with so many noisy images of 28 x 28 in each part; the images."""
    folder.mkdir(parents=True)
    made = {}
    for part, count in counts.items():
        made[part] = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + made[part].tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + bytes(number % 10 for number in range(count)))
    return made


def test_mnist_with_both_its_parts_pixel_by_pixel(tmp_path: Path) -> None:
    made = mnist(tmp_path / "here" / "MNIST" / "raw", {"train": 20, "t10k": 10})
    found = items("MNIST", tmp_path, root="here")
    assert [item.split for item in found] == ["train"] * 20 + ["test"] * 10
    assert [item.label for item in found[:3]] == ["0 - zero", "1 - one", "2 - two"]
    pixels = [decode(item.data, policy_of(DecodeConfig()))[..., 0] for item in found]
    assert np.array_equal(np.stack(pixels[:20]), made["train"])
    assert np.array_equal(np.stack(pixels[20:]), made["t10k"])
    assert len({item.name for item in found}) == 30
    only = items("MNIST", tmp_path, root="here", arguments={"train": False}, part="val")
    assert [item.split for item in only] == ["val"] * 10
    assert [item.data for item in only] == [item.data for item in found[20:]]


def test_folders_and_drawn_pictures(tmp_path: Path) -> None:
    write_tree(tmp_path / "photos", {**pictures(cat=2, dog=3)})
    assert [item.label for item in items("ImageFolder", tmp_path, root="photos")] == ["cat", "cat", "dog", "dog", "dog"]
    (tmp_path / "photos" / "cat" / "0000.png").write_bytes(b"no picture")
    (aside,) = (item for item in read("ImageFolder", tmp_path, root="photos") if isinstance(item, SetAside))
    assert aside.code == "image_corrupt"
    drawn = items("FakeData", tmp_path, arguments={"size": 6, "num_classes": 2, "image_size": [3, 8, 8]})
    assert len(drawn) == 6
    assert {item.label for item in drawn} <= {"0", "1"}


@pytest.mark.parametrize(
    ("name", "options", "code", "said"),
    [
        ("CIFAR1O", {}, "source_unavailable", "CIFAR10"),
        ("os", {}, "source_unavailable", "no such data set"),
        ("MNIST", {}, "source_unavailable", "ingest.options.root"),
        ("MNIST", {"root": "."}, "source_unavailable", "Dataset not found"),
        ("CIFAR10", {"root": "."}, "source_unavailable", "download: true"),
        ("FakeData", {"arguments": {"sise": 4}}, "params_invalid", "sise"),
        ("FakeData", {"part": "holdout"}, "unknown_split", "holdout"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_line(name: str, options: dict[str, Any], code: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        read(name, tmp_path, **options)
    assert caught.value.code == code
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_targets_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    write_tree(tmp_path / "photos", pictures(cat=2, dog=1))
    with pytest.raises(BadInput, match="is no classification"):
        read("FakeData", tmp_path, arguments={"size": 2, "image_size": [3, 8, 8], "target_transform": str})
