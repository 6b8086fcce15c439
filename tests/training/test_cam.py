"""Class activation maps: with the last layer's bias, the mean of a map is the output of its class."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from minidl import models, random
from minidl.autograd import no_grad
from minidl.data import Pictures
from minidl.tensors import Tensor, default_device
from minidl.training.report import plots
from minidl.training.tasks.images import cam
from minidl.training.tasks.images.networks import last_layer

MAKE = {
    "small": lambda: models.SmallCNN(3, (20, 24), 4),
    "resnet": lambda: models.ResNet(models.resnet.BasicBlock, (1, 1, 1, 1), 4, small=True),
    "mobilenet": lambda: models.mobilenet_v2(4, small=True),
    "densenet": lambda: models.DenseNet((1, 1, 1, 1), 4, growth=8, first=16, small=True),
}


@pytest.mark.parametrize("name", MAKE)
def test_the_mean_of_a_map_is_the_output_of_its_class(name, monkeypatch):
    monkeypatch.setattr(models.mobilenet, "STAGES", ((1, 16, 1, 1), (6, 24, 1, 2)))
    random.manual_seed(1)
    model = MAKE[name]().eval()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 20, 24, 3), dtype=np.uint8)
    pictures, classes = Pictures(pixels, (128.0,) * 3, (64.0,) * 3), np.array([2, 0, 3])
    found = cam.maps(model, pictures, classes)
    assert found.ndim == 3
    assert found[0].size > 1
    x = torch.from_numpy((pixels.astype(np.float32) - 128) / 64).permute(0, 3, 1, 2).to(default_device())
    with no_grad():
        logits = model(Tensor(x)).data.cpu().numpy()
    bias = last_layer(model)[1].bias.data.cpu().numpy()
    want = logits[np.arange(3), classes] - bias[classes]
    # Sums of at most 1280 terms in another order.
    assert np.allclose(found.mean((1, 2)), want, rtol=1e-4, atol=1e-4 * np.abs(logits).max())


def test_networks_without_a_mean_and_single_places_have_none():
    pictures = Pictures(np.zeros((1, 28, 28, 1), dtype=np.uint8), (0.0,), (1.0,))
    assert cam.maps(models.ECE408(), pictures, np.array([0])) is None
    tiny = Pictures(np.zeros((1, 2, 2, 1), dtype=np.uint8), (0.0,), (1.0,))
    assert cam.maps(models.SmallCNN(1, (2, 2), 3), tiny, np.array([0])) is not None
    one = Pictures(np.zeros((1, 1, 1, 1), dtype=np.uint8), (0.0,), (1.0,))
    assert cam.maps(models.SmallCNN(1, (1, 1), 3), one, np.array([0])) is None


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_maps_are_drawn_where_something_is_wrong(tmp_path):
    pixels, truth, sure = np.zeros((3, 8, 6, 3), dtype=np.uint8), np.array([0, 1, 1]), np.full(3, 0.9)
    asked = []

    def maps(chosen):
        asked.append(chosen.tolist())
        return np.random.default_rng(0).random((len(chosen), 4, 3), dtype=np.float32)

    plots.mistakes(tmp_path, pixels, truth, truth, sure, ["a", "b"], "t", maps)
    assert not (tmp_path / "activations.png").exists()
    plots.mistakes(tmp_path, pixels, truth, np.array([0, 0, 1]), sure, ["a", "b"], "t", maps)
    assert asked == [[1]]
    assert (tmp_path / "activations.png").read_bytes().startswith(b"\x89PNG")
