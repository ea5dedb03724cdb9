"""Networks by name, and starting weights from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tasks.core.errors import BadInput
from tasks.training.models import build_model, check_model, start_from


@pytest.mark.parametrize("size", [4, 8, 16, 28, 33, 64, 128])
def test_small_resnet_takes_any_size(size: int) -> None:
    model = build_model("small_resnet", 5, 4, size)
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 5)
    check_model("small_resnet", 5, 4, size)


def test_small_resnet_grows_with_the_image() -> None:
    """One stage at 4 px, up to four at 32 and more; the stem halves larger images."""
    counts = [sum(p.numel() for p in build_model("small_resnet", 10, 16, size).parameters()) for size in (4, 8, 16, 32, 64)]
    assert counts == sorted(counts)
    assert len(set(counts[:4])) == 4


@pytest.mark.parametrize(("name", "size"), [("resnet18", 32), ("mobilenet_v3_small", 64), ("vit_b_16", 32), ("googlenet", 64)])
def test_torchvision_models_get_a_head_for_our_classes(name: str, size: int) -> None:
    """On the meta device, so no memory; vit must be told the image size, googlenet must not answer with tuples."""
    check_model(name, 7, 32, size)
    with torch.device("meta"):
        assert build_model(name, 7, 32, size).train()(torch.empty(2, 3, size, size)).shape == (2, 7)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(BadInput) as caught:
        check_model("resnet19", 3, 8, 32)
    assert caught.value.code == "unknown_model"
    assert "resnet18" in str(caught.value)
    assert "train.model" in str(caught.value)


def test_a_model_too_deep_for_the_image_is_refused_before_any_training() -> None:
    with pytest.raises(BadInput) as caught:
        check_model("alexnet", 3, 8, 16)
    assert caught.value.code == "unknown_model"
    assert "16 x 16" in str(caught.value)


def start(model: nn.Module, path: Path) -> list[str]:
    said: list[str] = []
    start_from(model, path, said.append)
    return said


def test_starting_weights_are_loaded_and_a_foreign_head_is_left_out(tmp_path: Path) -> None:
    """Under attack: silently keeping random weights, or failing where only the number of classes differs."""
    source = build_model("small_resnet", 10, 4, 16)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    same, other = build_model("small_resnet", 10, 4, 16), build_model("small_resnet", 3, 4, 16)
    head = other.state_dict()["head.weight"].clone()
    assert "head" not in start(same, tmp_path / "w.safetensors")[0]
    (line,) = start(other, tmp_path / "w.safetensors")
    assert "not its head (head.bias, head.weight)" in line
    for name, value in source.state_dict().items():
        assert torch.equal(same.state_dict()[name], value)
        assert name.startswith("head.") or torch.equal(other.state_dict()[name], value)
    assert torch.equal(other.state_dict()["head.weight"], head)


@pytest.mark.parametrize(("width", "size", "clue"), [(8, 16, "has another shape for"), (4, 32, "does not know"), (4, 8, "lacks a value for")])
def test_weights_of_another_network_are_refused(tmp_path: Path, width: int, size: int, clue: str) -> None:
    """The file is of ``width`` and ``size``, or the model is: each way one key says it."""
    donor, taker = build_model("small_resnet", 3, width, size), build_model("small_resnet", 3, 4, 16)
    save_file(donor.state_dict(), tmp_path / "w.safetensors")
    before = {name: value.clone() for name, value in taker.state_dict().items()}
    with pytest.raises(BadInput) as caught:
        start(taker, tmp_path / "w.safetensors")
    assert caught.value.code == "params_invalid"
    assert clue in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in taker.state_dict().items())


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    """A pickle is never opened."""
    path = tmp_path / "w.safetensors"
    torch.save({"head.weight": torch.zeros(1)}, path)
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "text.safetensors").write_text("no tensors here, but words")
    for name, code in (("w", "unsafe_model_file"), ("empty", "checkpoint_corrupt"), ("text", "unreadable"), ("absent", "unreadable")):
        with pytest.raises(BadInput) as caught:
            start(build_model("small_resnet", 3, 4, 8), tmp_path / f"{name}.safetensors")
        assert caught.value.code == code
