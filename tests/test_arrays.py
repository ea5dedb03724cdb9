"""Arrays under attack: every format gives the same pixels back, bytes that never move, and no pickle runs anything."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tasks.core.artifacts import SetAside
from tasks.core.errors import BadInput
from tasks.sources import Item, Limits, open_source

COLOUR = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
GREY = COLOUR[..., 0]
LABELS = [0, 1, 2, 0, 1, 2]
PLANES = COLOUR.transpose(0, 3, 1, 2).reshape(6, -1)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def read(path: Path, limits: Limits = Limits(), **options: Any) -> list[Item | SetAside]:  # noqa: B008
    return list(open_source("arrays", str(path), path.parent, limits, options).items)


def same(found: list[Item | SetAside], truth: np.ndarray) -> None:
    items = [item for item in found if isinstance(item, Item)]
    assert [item.label for item in items] == [str(label) for label in LABELS]
    np.testing.assert_array_equal(np.stack([np.asarray(Image.open(io.BytesIO(item.data))) for item in items]), truth)


def refusal(path: Path, **options: Any) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_npz_and_npy_give_their_pixels(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=COLOUR, y=np.array(LABELS))
    same(read(tmp_path / "x.npz"), COLOUR)
    np.save(tmp_path / "x.npy", GREY)
    np.save(tmp_path / "y.npy", np.array(LABELS)[:, np.newaxis])
    same(read(tmp_path / "x.npy", labels="y.npy"), GREY)
    np.savez(tmp_path / "x.npz", x=COLOUR, other=COLOUR, y=np.array(LABELS))
    assert refusal(tmp_path / "x.npz").code == "missing_column"
    same(read(tmp_path / "x.npz", images="other"), COLOUR)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_gives_its_pixels_with_the_labels_beside_it(pack: Any, tmp_path: Path) -> None:
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(pack(idx(GREY)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(pack(idx(np.array(LABELS))))
    found = read(tmp_path / "t10k-images-idx3-ubyte", split="test")
    same(found, GREY)
    assert {item.split for item in found if isinstance(item, Item)} == {"test"}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("field", ["labels", "fine_labels"])
def test_cifars_python_batches_give_their_pixels(field: str, protocol: int, tmp_path: Path) -> None:
    batch = {b"data": PLANES, field.encode(): LABELS, b"filenames": [b"a.png"] * 6, b"batch_label": b"1"}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol))
    same(read(tmp_path / "data_batch_1"), COLOUR)


@pytest.mark.parametrize("coarse", [0, 1])
def test_cifars_binary_batches_give_their_pixels(coarse: int, tmp_path: Path) -> None:
    rows = [bytes([9] * coarse + [label]) + pixels.tobytes() for label, pixels in zip(LABELS, PLANES, strict=True)]
    (tmp_path / "b.bin").write_bytes(b"".join(rows))
    same(read(tmp_path / "b.bin"), COLOUR)


def test_labels_without_a_name_are_set_aside(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=GREY, y=np.array([0, 1, -1, 2, 0, 1]))
    found = read(tmp_path / "x.npz", class_names=["cat", "dog"])
    assert [item.label if isinstance(item, Item) else item.code for item in found] == ["cat", "dog", "missing_label", "bad_row", "cat", "dog"]


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch owned",)


def test_nothing_of_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch").write_bytes(pickle.dumps({b"data": PLANES, b"labels": Evil()}))
    assert "system" in str(refusal(tmp_path / "batch"))
    np.save(tmp_path / "y.npy", np.array([Evil()] * 6, dtype=object), allow_pickle=True)
    np.save(tmp_path / "x.npy", GREY)
    assert refusal(tmp_path / "x.npy", labels="y.npy").code == "manifest_corrupt"
    np.savez(tmp_path / "x.npz", x=GREY, y=np.array([Evil()] * 6, dtype=object), allow_pickle=True)
    assert refusal(tmp_path / "x.npz").code == "manifest_corrupt"
    assert not (tmp_path / "owned").exists()


def test_what_is_no_images_or_too_large_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=GREY.astype(float), y=np.array(LABELS))
    assert "float64" in str(refusal(tmp_path / "x.npz"))
    np.savez(tmp_path / "x.npz", x=GREY, y=np.array(LABELS[:5]))
    assert refusal(tmp_path / "x.npz").code == "manifest_corrupt"
    with pytest.raises(BadInput) as caught:
        read(tmp_path / "x.npz", Limits(max_unpacked_bytes=1000))
    assert caught.value.code == "too_large"
    (tmp_path / "x-images-idx3-ubyte").write_bytes(idx(GREY))
    assert refusal(tmp_path / "x-images-idx3-ubyte").code == "missing_column"


@pytest.mark.timeout(60)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    draw = random.Random(4)
    np.savez(tmp_path / "x.npz", x=GREY, y=np.array(LABELS))
    small = pickle.dumps({b"data": PLANES[:1], b"labels": [3]}, 2)
    goods = [(tmp_path / "x.npz").read_bytes(), small, idx(GREY)]
    (tmp_path / "labels").write_bytes(idx(np.array(LABELS)))
    refused = 0
    for index in range(600):
        data = bytearray(goods[index % 3])
        for _ in range(3):
            at = draw.randrange(min(len(data), 300)) if draw.random() < 0.7 else draw.randrange(len(data))
            if draw.random() < 0.7:
                data[at] ^= 1 << draw.randrange(8)
            else:
                del data[at : at + draw.randint(1, 30)]
        (tmp_path / "x").write_bytes(data)
        try:
            read(tmp_path / "x", labels="labels" if index % 3 == 2 else "")
        except BadInput:
            refused += 1
    assert refused > 100


def test_the_bytes_are_the_same_on_every_machine(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3), y=np.array([0, 1]))
    digest = hashlib.sha256(b"".join(item.data for item in read(tmp_path / "x.npz") if isinstance(item, Item))).hexdigest()
    assert digest == "dc7232f91088931f073fce12d36cdf52ce53791b768e23b5a0779cfbd56ae435"
