"""Gated activations: launches, operands in any order, ranks; values and bounds are in their specs."""

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
