"""Layers for images against torch's: arguments, names, running statistics, training."""

import pytest
import torch

from minidl import nn
from minidl.tensors import Tensor, default_device


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pair(name, *args, **named):
    """A batch norm of ours in float64, and torch's with the same state."""
    ours = getattr(nn, name)(*args, **named, dtype=torch.float64)
    theirs = getattr(torch.nn, name)(*args, **{k: v for k, v in named.items() if k != "act"}, dtype=torch.float64)
    state = {k: v.clone() for k, v in theirs.state_dict().items()}
    for seed, key in enumerate(("weight", "bias")):
        if key in state:
            state[key] = numbers(*state[key].shape, seed=seed + 20)
    theirs.load_state_dict(state)
    ours.load_state_dict(state)
    return ours, theirs


def same_state(ours, theirs):
    expected = theirs.state_dict()
    assert list(ours.state_dict()) == list(expected)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape"), [("BatchNorm1d", (6, 5)), ("BatchNorm1d", (4, 5, 7)), ("BatchNorm2d", (4, 5, 6, 3))]
)
@pytest.mark.parametrize("momentum", [0.1, 0.9, None])
@pytest.mark.parametrize("affine", [True, False])
def test_five_steps_are_torchs(name, shape, momentum, affine):
    ours, theirs = pair(name, 5, momentum=momentum, affine=affine, eps=1e-3)
    for step in range(5):
        x, dy = numbers(*shape, seed=step) * (step + 1) + step, numbers(*shape, seed=step + 10)
        a = Tensor(x.to(default_device()), requires_grad=True)
        b = x.clone().requires_grad_()
        y, expected = ours(a), theirs(b)
        y.backward(Tensor(dy.to(default_device())))
        expected.backward(dy)
        torch.testing.assert_close(y.data.cpu(), expected.detach(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(a.grad.data.cpu(), b.grad, rtol=1e-10, atol=1e-10)
    same_state(ours, theirs)
    assert ours.num_batches_tracked.item() == 5
    x = numbers(*shape, seed=30)
    torch.testing.assert_close(ours.eval()(Tensor(x.to(default_device()))).data.cpu(), theirs.eval()(x).detach())
    same_state(ours, theirs)


def test_means_over_all_batches_go_on_from_a_state():
    ours, theirs = pair("BatchNorm2d", 3, momentum=None)
    for layer in (theirs, ours):
        state = {k: v.clone() for k, v in layer.state_dict().items()}
        state["num_batches_tracked"] += 7
        layer.load_state_dict(state)
    x = numbers(4, 3, 5, 5)
    ours(Tensor(x.to(default_device())))
    theirs(x)
    same_state(ours, theirs)


def test_without_running_statistics_the_batchs_are_used():
    ours, theirs = pair("BatchNorm1d", 3, track_running_stats=False)
    x = numbers(6, 3)
    for mode in (True, False):
        got = ours.train(mode)(Tensor(x.to(default_device()))).data.cpu()
        torch.testing.assert_close(got, theirs.train(mode)(x).detach())
    same_state(ours, theirs)


@pytest.mark.parametrize("act", ["relu", ("leaky_relu", 0.2), "tanh"])
def test_the_activation_is_fused(act):
    ours, theirs = pair("BatchNorm2d", 3, act=act)
    x = numbers(4, 3, 5, 5)
    z = theirs(x).detach()
    expected = torch.nn.functional.leaky_relu(z, 0.2) if isinstance(act, tuple) else getattr(torch, act)(z)
    torch.testing.assert_close(ours(Tensor(x.to(default_device()))).data.cpu(), expected)
    assert f"act={act!r}" in repr(ours)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"BatchNorm2d: input has shape \[2, 3\], expected \[N, C, H, W\]"):
        nn.BatchNorm2d(3)(Tensor(torch.zeros(2, 3)))
    with pytest.raises(ValueError, match=r"BatchNorm1d: input has shape \[2, 3, 1, 1\], expected \[N, C\] or"):
        nn.BatchNorm1d(3)(Tensor(torch.zeros(2, 3, 1, 1)))
    with pytest.raises(ValueError, match=r"input has 4 channels \(shape \[2, 4\]\), expected num_features, 3"):
        nn.BatchNorm1d(3)(Tensor(torch.zeros(2, 4)))


@pytest.mark.parametrize(
    ("name", "args", "named"),
    [
        ("MaxPool2d", (2,), {}),
        ("MaxPool2d", (3, 2, 1), {"ceil_mode": True}),
        ("MaxPool2d", ((2, 3), 1), {"dilation": 2}),
        ("AvgPool2d", (3, 2), {"padding": 1, "count_include_pad": False}),
        ("AvgPool2d", (2,), {"divisor_override": 3, "ceil_mode": True}),
        ("AdaptiveAvgPool2d", (1,), {}),
        ("AdaptiveAvgPool2d", ((3, None),), {}),
    ],
)
def test_pooling_is_torchs(name, args, named):
    x = numbers(2, 3, 9, 8)
    ours, theirs = getattr(nn, name)(*args, **named), getattr(torch.nn, name)(*args, **named)
    torch.testing.assert_close(ours(Tensor(x.to(default_device()))).data.cpu(), theirs(x))
    assert repr(ours).startswith(f"{name}(")


def test_pooled_and_flattened():
    model = nn.Sequential(nn.BatchNorm2d(4, act="relu"), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = Tensor(numbers(2, 4, 6, 6, dtype=torch.float32).to(default_device()), requires_grad=True)
    y = model(x)
    assert y.shape == (2, 4)
    y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_features": -1}, "num_features is -1, expected 0 or more"),
        ({"num_features": 4, "momentum": 1.5}, "momentum is 1.5, expected a number from 0 to 1 or None"),
        ({"num_features": 4, "momentum": float("nan")}, "momentum is nan, expected"),
    ],
)
def test_bad_settings_of_a_batch_norm_are_told_when_it_is_made(given, message):
    with pytest.raises(ValueError, match=message):
        nn.BatchNorm2d(**given)
