"""model.onnx: the same answers as torch on pixels, any batch size, no trace of this machine, equal bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from tasks.core.errors import BadInput
from tasks.training import export
from tasks.training.models import build_model
from tasks.training.predict import predict

SIZE = 16
PIXELS = np.random.default_rng(0).integers(0, 256, (11, SIZE, SIZE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def served() -> export.Served:
    """A network whose norms have seen data, so that folding them is a real change."""
    torch.manual_seed(0)
    network = build_model("small_resnet", 4, 8, SIZE)
    for _ in range(3):
        network(torch.randn(8, 3, SIZE, SIZE))
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return export.Served(network, (100.0, 110.0, 120.0), (60.0, 61.0, 62.0)).eval()


@pytest.fixture(scope="module")
def path(served: export.Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    path.write_bytes(export.to_onnx(served, SIZE))
    return path


def test_parity_at_every_batch_size(served: export.Served, path: Path) -> None:
    with torch.inference_mode():
        expected = served(torch.from_numpy(PIXELS)).numpy()
    assert expected.std() > 0.01, "a constant answer would prove nothing"
    for batch_size in (1, 2, 4, 11, 100):
        np.testing.assert_allclose(predict(path, PIXELS, batch_size), expected, atol=1e-5)
    assert export.check_export(path, served, PIXELS) < 1e-5


def test_interface_of_the_file(path: Path) -> None:
    """uint8 NHWC "image" in, float32 "probabilities" out, that sum to one; the batch is free, the image is not."""
    session = onnxruntime.InferenceSession(str(path))
    (image,), (probabilities,) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.type, image.shape) == ("image", "tensor(uint8)", ["N", SIZE, SIZE, 3])
    assert (probabilities.name, probabilities.type, probabilities.shape) == ("probabilities", "tensor(float)", ["N", 4])
    np.testing.assert_allclose(predict(path, PIXELS, 4).sum(1), 1.0, atol=1e-6)
    onnx.checker.check_model(onnx.load(path), full_check=True)


def test_equal_weights_give_equal_bytes_without_paths(served: export.Served, path: Path) -> None:
    data = path.read_bytes()
    assert export.to_onnx(served, SIZE) == data
    assert str(Path(export.__file__).parents[2]).encode() not in data
    assert b".py" not in data


def test_a_file_of_other_weights_is_a_mismatch(served: export.Served, tmp_path: Path) -> None:
    other = export.Served(build_model("small_resnet", 4, 8, SIZE), (0.0, 0.0, 0.0), (255.0, 255.0, 255.0))
    path = tmp_path / "model.onnx"
    path.write_bytes(export.to_onnx(other, SIZE))
    with pytest.raises(BadInput) as caught:
        export.check_export(path, served, PIXELS)
    assert caught.value.code == "export_mismatch"
    assert "0.0001" in str(caught.value)


def test_a_graph_that_froze_its_batch_is_found(tmp_path: Path) -> None:
    class Frozen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(2, -1)[:, :4]  # the example's batch of 2, written into the graph

    served = export.Served(Frozen(), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    path = tmp_path / "model.onnx"
    path.write_bytes(export.to_onnx(served, SIZE))

    class Free(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :4]

    with pytest.raises(BadInput) as caught:
        export.check_export(path, export.Served(Free(), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)), PIXELS)
    assert caught.value.code == "export_mismatch"


def test_no_images_no_answers(path: Path) -> None:
    assert predict(path, PIXELS[:0], 4).shape == (0, 4)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_torchvision_models_export(name: str) -> None:
    torch.manual_seed(0)
    served = export.Served(build_model(name, 3, 8, 32), (100.0, 110.0, 120.0), (60.0, 61.0, 62.0)).eval()
    model = onnx.load_from_string(export.to_onnx(served, 32))
    assert model.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 3
