"""Spectral normalisation: the greatest singular value, the gradient through it, and when the direction moves."""

import pytest
import torch

from minidl import nn, no_grad, ops, random
from minidl.tensor import Tensor, default_device


def conv():
    random.manual_seed(3)
    return nn.SpectralConv2d(3, 6, 4, stride=2, padding=1, act=("leaky_relu", 0.2))


def linear():
    random.manual_seed(3)
    return nn.SpectralLinear(20, 5)


def pictures(*shape):
    return Tensor(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(default_device()))


def matrix(layer):
    return layer.weight.data.double().cpu().reshape(layer.weight.shape[0], -1)


@pytest.mark.parametrize("make", [conv, linear])
def test_the_greatest_singular_value_becomes_one(make):
    layer = make()
    layer.reset_direction(100)
    weight = layer.normalised().data.double().cpu().reshape(layer.weight.shape[0], -1)
    assert torch.linalg.matrix_norm(weight, 2).item() == pytest.approx(1.0, abs=1e-5)
    expected = matrix(layer) / torch.linalg.matrix_norm(matrix(layer), 2)
    assert torch.allclose(weight, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("make", "shape"), [(conv, (2, 3, 8, 8)), (linear, (4, 20))])
def test_the_result_is_the_layers_with_the_normalised_weight(make, shape):
    layer, x = make(), pictures(*shape)
    plain = nn.Conv2d(3, 6, 4, stride=2, padding=1, act=("leaky_relu", 0.2)) if make is conv else nn.Linear(20, 5)
    with no_grad():
        plain.load_state_dict({"weight": layer.normalised(), "bias": layer.bias})
        assert torch.equal(layer(x).data, plain(x).data)
    assert set(layer.state_dict()) == {"weight", "bias", "weight_v"}


def test_the_gradient_goes_through_sigma():
    """Against torch's autograd in float64 with v held fixed, as in the paper."""
    layer = linear()
    v = layer.weight_v.data.double().cpu()
    weight = layer.weight.data.double().cpu().requires_grad_()
    factor = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    ((weight / (weight @ v).norm()) * factor.double()).sum().backward()
    ops.sum(layer.normalised() * Tensor(factor.to(default_device()))).backward()
    assert torch.allclose(layer.weight.grad.data.double().cpu(), weight.grad, rtol=1e-4, atol=1e-5)


def test_the_direction_moves_where_the_gradient_is_recorded_only():
    layer = linear()
    layer.weight.data.copy_(pictures(5, 20).data)

    def moved(use):
        before = layer.weight_v.data.clone()
        use()
        return not torch.equal(before, layer.weight_v.data)

    assert moved(layer.normalised)
    with no_grad():
        assert not moved(layer.normalised)
    layer.weight.requires_grad_(False)
    assert not moved(layer.normalised)
    layer.weight.requires_grad_(True)
    layer.eval()
    assert not moved(layer.normalised)


def test_a_direction_that_moved_before_backward_does_no_harm():
    layer, x = linear(), pictures(4, 20)
    y = ops.sum(layer(x)) + ops.sum(layer(x))
    y.backward()
    assert layer.weight.grad.data.isfinite().all()
