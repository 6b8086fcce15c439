"""The image networks: sizes, shapes, and the same numbers as torch from the same weights."""

import pytest
import torch

from minidl import models, no_grad, random
from minidl.models import cnn
from minidl.tensors import Tensor, default_device


@pytest.mark.parametrize("size", [(8, 8), (28, 28), (64, 64), (224, 224), (1024, 1024)])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_small_network_is_small(size, channels):
    assert models.SmallCNN(channels, size, 10).num_parameters() < 500_000


def test_the_course_network_has_its_size():
    model = models.ECE408()
    shapes = [list(parameter.shape) for parameter in model.parameters()]
    assert shapes == [[32, 1, 5, 5], [32], [64, 32, 5, 5], [64], [128, 1024], [128], [10, 128], [10]]


@pytest.mark.parametrize(
    ("side", "stages", "stride"),
    [(1, 1, 1), (7, 1, 1), (8, 2, 1), (16, 3, 1), (63, 3, 1), (64, 3, 2), (128, 3, 4), (1024, 3, 16)],
)
def test_stages_follow_the_shorter_side(side, stages, stride):
    assert cnn.stages((side, side + 5)) == stages
    assert cnn.first_stride((side + 5, side)) == stride


@pytest.mark.parametrize(("size", "channels"), [((1, 1), 1), ((3, 5), 3), ((8, 8), 1), ((17, 9), 3), ((65, 70), 1)])
def test_pictures_of_any_size_give_logits(size, channels):
    model = models.SmallCNN(channels, size, 4).eval()
    with no_grad():
        y = model(Tensor(torch.zeros(2, channels, *size, device=default_device())))
    assert y.shape == (2, 4)


def test_batch_norms_stay_in_float32():
    model = models.SmallCNN(1, (8, 8), 10, dtype=torch.float16)
    for name, tensor in model.state_dict().items():
        if "num_batches" in name:
            continue
        layer = name.split(".")
        norm = layer[0] == "features" and isinstance(model.features[int(layer[1])], cnn.nn.BatchNorm2d)
        assert tensor.dtype == (torch.float32 if norm else torch.float16), name


def torch_small(channels, size, classes):
    layers, inputs, stride = [], channels, cnn.first_stride(size)
    for stage in range(cnn.stages(size)):
        if stage:
            layers.append(torch.nn.MaxPool2d(2))
        for _ in range(2):
            width = 32 << stage
            kernel = 2 * stride + 1
            layers.append(torch.nn.Conv2d(inputs, width, kernel, stride, padding=stride, bias=False))
            layers.append(torch.nn.BatchNorm2d(width))
            inputs, stride = width, 1
    return layers, torch.nn.Linear(inputs, classes)


@pytest.mark.parametrize(("size", "channels"), [((8, 8), 1), ((9, 12), 3)])
def test_the_same_weights_give_what_torch_gives(size, channels):
    random.manual_seed(0)
    model = models.SmallCNN(channels, size, 5)
    layers, last = torch_small(channels, size, 5)
    state = {name: tensor.cpu().double() for name, tensor in model.state_dict().items()}
    for i, layer in enumerate(layers):
        part = f"features.{i}."
        layer.load_state_dict({k.removeprefix(part): v for k, v in state.items() if k.startswith(part)})
        layer.double()
    last.load_state_dict({k.removeprefix("classifier."): v for k, v in state.items() if k.startswith("classifier.")})
    last.double()
    x = torch.randn(6, channels, *size, generator=torch.Generator().manual_seed(1))
    for training in (True, False):
        model.train(training)
        h = x.double()
        for layer in layers:
            layer.train(training)
            h = layer(h)
            if isinstance(layer, torch.nn.BatchNorm2d):
                h = torch.relu(h)
        expected = last(h.mean((2, 3)))
        with no_grad():
            y = model(Tensor(x.to(default_device())))
        # Five layers of float32 sums of at most 576 terms, each normalised to deviation 1.
        assert torch.allclose(y.data.cpu().double(), expected.detach(), rtol=1e-4, atol=1e-4)
