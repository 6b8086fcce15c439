"""Gated activations and rotary positions: launches, operands in any order; values and bounds are in their specs."""

import pytest
import torch

from minidl import ops
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from tests.launches import replace_run
from tests.ops.test_against_torch import numbers

GATES = {"swiglu": torch.nn.functional.silu, "geglu": torch.nn.functional.gelu}


@pytest.fixture
def launches(monkeypatch):
    names, run = [], launch.run

    def noted(kernel, *args, **options):
        names.append(kernel.fn.__name__)
        return run(kernel, *args, **options)

    replace_run(monkeypatch, noted)
    return names


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("rows", [1, 5])
def test_launches(name, rows, launches):
    x = Tensor(numbers(rows, 3, 8).to(default_device()), requires_grad=True)
    y = getattr(ops, name)(x)
    assert len(launches) == 1
    y.backward(Tensor(torch.ones_like(y.data)))
    assert len(launches) == 3


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[0, 0], lambda x: x.transpose(0, 2), lambda x: x[:, ::2]])
def test_views(name, view):
    x = numbers(8, 6, 8).requires_grad_()
    ours = Tensor(x.detach().to(default_device()), requires_grad=True)
    a, b = view(x).chunk(2, -1)
    expected, y = GATES[name](a) * b, getattr(ops, name)(view(ours))
    dy = numbers(*reversed(expected.shape)).permute(*reversed(range(expected.dim())))  # another memory order
    expected.backward(dy)
    y.backward(Tensor(dy.to(default_device())))
    torch.testing.assert_close(y.data.cpu(), expected.detach())
    torch.testing.assert_close(ours.grad.data.cpu(), x.grad)


def test_of_what_is_no_approximation():
    with pytest.raises(ValueError, match='geglu: approximate is \'erf\', expected "none" or "tanh"'):
        ops.geglu(Tensor(numbers(2, 4).to(default_device())), "erf")


def angles(T, D):
    """Cosines and sines of position times 10000^(-2 i / D)."""
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    return [Tensor(part.to(default_device())) for part in (angle.cos(), angle.sin())]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_keep_products_of_equal_distances(interleaved, launches):
    x, y = (Tensor(numbers(1, 8).to(default_device()).expand(6, 8)) for _ in "xy")
    q, k = (ops.rotary(part, *angles(6, 8), interleaved) for part in (x, y))
    assert len(launches) == 2
    scores = (q @ k.T).data.cpu()
    torch.testing.assert_close(scores[2, 0], scores[5, 3])
    torch.testing.assert_close(scores.diagonal(), (x.data * y.data).sum(1).cpu())


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_is_the_inverse_rotation(interleaved, launches):
    x = Tensor(numbers(2, 8, 3, 5).to(default_device()), requires_grad=True)
    cos, sin = angles(3, 8)
    y = ops.rotary(x.permute(0, 3, 2, 1), cos, sin, interleaved)
    launches.clear()
    y.backward(Tensor(y.data))
    assert len(launches) == 1
    torch.testing.assert_close(x.grad.data, x.data)


def test_half_precision_with_angles_of_float32():
    x = Tensor(numbers(3, 8).to(default_device(), torch.float16))
    cos, sin = (part.to(torch.float32) for part in angles(3, 8))
    y = ops.rotary(x, cos, sin)
    assert y.dtype == torch.float16
    exact = ops.rotary(x.to(torch.float64), cos.to(torch.float64), sin.to(torch.float64))
    torch.testing.assert_close(y.data, exact.data.to(torch.float16), rtol=1e-3, atol=1e-6)
