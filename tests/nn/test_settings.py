"""Settings of layers that are changed after the layer was made: read at every call where torch reads them."""

import warnings

import pytest
import torch

import minidl
from minidl import nn, optim
from minidl.tensors import Tensor, default_device

IMAGES, ROWS = (2, 6, 5, 7), (4, 6)
CONV = {"in_channels": 6, "out_channels": 6, "kernel_size": 3}
TRACKED = {"num_features": 6, "affine": True, "track_running_stats": True}
# Layer, its arguments, shape of x, what is changed.
CHANGES = [
    ("BatchNorm2d", {"num_features": 6}, IMAGES, {"track_running_stats": False}),
    ("BatchNorm1d", {"num_features": 6}, ROWS, {"track_running_stats": False}),
    ("BatchNorm2d", {"num_features": 6}, IMAGES, {"momentum": None}),
    ("BatchNorm2d", {"num_features": 6}, IMAGES, {"eps": 0.5, "momentum": 0.9}),
    (
        "BatchNorm2d",
        {"num_features": 6},
        IMAGES,
        {"running_mean": None, "running_var": None, "num_batches_tracked": None},
    ),
    ("BatchNorm2d", {"num_features": 6, "track_running_stats": False}, IMAGES, {"track_running_stats": True}),
    ("InstanceNorm2d", TRACKED, IMAGES, {"track_running_stats": False}),
    ("InstanceNorm2d", {"num_features": 6}, IMAGES, {"track_running_stats": True}),
    ("InstanceNorm1d", TRACKED, (2, 6, 9), {"momentum": None, "eps": 0.5}),
    ("LayerNorm", {"normalized_shape": 6}, ROWS, {"eps": 0.5, "bias": None}),
    ("GroupNorm", {"num_groups": 3, "num_channels": 6}, IMAGES, {"num_groups": 2}),
    ("Conv2d", CONV, IMAGES, {"stride": (2, 1), "padding": (1, 2)}),
    ("Conv2d", {**CONV, "padding": 1}, IMAGES, {"padding_mode": "reflect"}),
    ("Conv2d", {**CONV, "padding": 1, "padding_mode": "reflect"}, IMAGES, {"padding": 2}),
    ("Conv2d", {**CONV, "padding": "same", "padding_mode": "circular"}, IMAGES, {"bias": None}),
    ("Conv1d", {**CONV, "kernel_size": 4, "padding": "same"}, (2, 6, 9), {"padding_mode": "replicate"}),
    ("ConvTranspose2d", CONV, IMAGES, {"padding_mode": "reflect"}),
    ("ConvTranspose2d", CONV, IMAGES, {"output_padding": (1, 0), "stride": (2, 1)}),
    ("ReLU6", {}, ROWS, {"min_val": -0.5, "max_val": 0.5}),
    ("LeakyReLU", {}, ROWS, {"negative_slope": 0.5, "inplace": True}),
    ("GELU", {}, ROWS, {"approximate": "tanh"}),
    ("Dropout", {}, ROWS, {"p": 1.0}),
    ("MaxPool2d", {"kernel_size": 2}, IMAGES, {"stride": 1, "ceil_mode": True}),
    ("Softmax", {"dim": 1}, ROWS, {"dim": 0}),
]


def outcome(kit, layer, x):
    """Value, gradients and buffers, or that the call is refused."""
    x = Tensor(x.clone(), True) if kit is nn else x.clone().requires_grad_()
    try:
        with warnings.catch_warnings(action="ignore"):
            y = layer(x * 1.0)
        y.sum().backward()
    except (ValueError, RuntimeError):
        return None
    tensors = [y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]
    return [None if t is None else t.data.cpu().double() for t in tensors]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("name", "options", "shape", "changes"), CHANGES, ids=lambda v: str(v)[:40])
def test_a_change_counts_as_in_torch(name, options, shape, changes, training):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    layers = {kit: getattr(kit, name)(**options).double().train(training) for kit in (torch.nn, nn)}
    layers[nn].load_state_dict(layers[torch.nn].state_dict())
    found = []
    for kit, layer in layers.items():
        for setting, value in changes.items():
            setattr(layer, setting, value)
        found.append(outcome(kit, layer, x.to(default_device()) if kit is nn else x))
    expected, ours = found
    if expected is None:
        assert ours is None
        return
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_causal_convolution_takes_its_margin_from_its_mode():
    layer = nn.Conv1d(1, 1, 3, padding="causal", bias=False)
    layer.padding_mode = "replicate"
    nn.init.ones_(layer.weight)
    assert layer(minidl.tensor([[[1.0, 2.0, 4.0]]])).tolist() == [[[3.0, 4.0, 7.0]]]


def test_an_optimizer_reads_its_settings_at_every_step():
    weight = nn.Parameter(torch.zeros(2, device=default_device()))
    optimizer = optim.SGD([weight], lr=1.0)

    def step(value):
        weight.grad = Tensor(torch.full_like(weight.data, value))
        optimizer.step()
        return weight.tolist()

    optimizer.max_norm = 2.0**0.5
    assert step(3.0) == pytest.approx([-1, -1], rel=1e-5)
    optimizer.max_norm = None
    assert step(3.0) == pytest.approx([-4, -4], rel=1e-5)
    optimizer.skip_nonfinite = False
    assert str(step(float("nan"))) == "[nan, nan]"
    optimizer.max_norm = -1.0
    with pytest.raises(ValueError, match=r"max_norm is -1.0, expected a number above 0"):
        step(1.0)
