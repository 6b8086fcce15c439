"""check_grads: a wrong gradient is found and named, in either mode."""

import math
from functools import partial

import pytest
import torch

from minidl import nn, ops
from minidl.autograd import Function
from minidl.tensors import Tensor, default_device, ones
from minidl.testing import GradientError, check_grads
from minidl.testing.specs.make import SeededMake


class Cube(Function):
    """x^3 with a mistake in the gradient, on request."""

    @staticmethod
    def forward(ctx, x, factor, only):
        ctx.save(x)
        ctx.factor, ctx.only = factor, only
        return x * x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved
        dx = 3 * x * x * dy
        if ctx.only is None:
            return dx * ctx.factor, None, None
        dx.view(-1)[ctx.only] *= ctx.factor
        return dx, None, None


def cube(x, factor=1.0, only=None):
    return Cube.apply(x, factor, only)


def point(*shape, dtype=torch.float64, requires_grad=True):
    return Tensor(SeededMake(0, dtype, default_device()).tensor(*shape), requires_grad)


@pytest.mark.parametrize("mode", ["fast", "slow"])
def test_passes(mode):
    check_grads(cube, point(3, 4), mode=mode)
    check_grads(cube, point(), mode=mode)
    check_grads(cube, point(0, 3), mode=mode)
    check_grads(ops.mean, point(0, 3), mode=mode)


@pytest.mark.parametrize("mode", ["fast", "slow"])
@pytest.mark.parametrize("factor", [1.001, -1.0, 0.0, math.nan])
def test_a_wrong_factor(mode, factor):
    with pytest.raises(GradientError, match=r"the gradient of input 0 \(shape \[3, 4\]\) is wrong"):
        check_grads(partial(cube, factor=factor), point(3, 4), mode=mode)


def test_the_report_of_the_fast_mode_names_the_element():
    x = point(3, 4)
    with pytest.raises(GradientError, match=r"1 of 12 elements are off; worst at \[1, 3\]: numeric .*, analytic"):
        check_grads(partial(cube, factor=1.1, only=7), x)


def test_the_report_of_the_slow_mode_names_input_output_and_values():
    x = Tensor(torch.full((2, 2), 2.0, dtype=torch.float64, device=default_device()), True)
    with pytest.raises(GradientError) as caught:
        check_grads(partial(cube, factor=2.0, only=2), x, mode="slow")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("the gradient of input 0 (shape [2, 2]) is wrong in 1 of 16 places")
    assert "d output 0 [1, 0] / d input 0 [1, 0]: numeric 12" in lines[1]
    assert "analytic 24" in lines[1]


@pytest.mark.parametrize("mode", ["fast", "slow"])
def test_several_inputs_and_outputs(mode):
    def function(x, count, y, labels):
        assert count == 3
        assert labels.dtype == torch.int64
        return cube(y), labels, cube(x, factor=1.01)

    labels = Tensor(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(GradientError, match="the gradient of input 0"):
        check_grads(function, point(2), 3, point(3), labels, mode=mode)
    check_grads(function, point(2, requires_grad=False), 3, point(3), labels, mode=mode)


def test_float32_inputs_are_checked_in_float64():
    x = point(3, dtype=torch.float32)

    def function(x):
        assert x.dtype == torch.float64
        return cube(x)

    check_grads(function, x)
    assert x.dtype == torch.float32
    assert x.grad is None


def test_a_module():
    model = nn.Linear(3, 2)
    before = {name: p.data for name, p in model.named_parameters()}
    model.weight.grad = ones(2, 3)
    check_grads(model, point(4, 3, requires_grad=False))
    check_grads(model, point(4, 3), mode="slow")
    assert all(p.data is before[name] for name, p in model.named_parameters())
    assert model.weight.grad.tolist() == [[1.0] * 3] * 2


def test_a_wrong_module():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(ones(3))

        def forward(self, x):
            return cube(self.scale, factor=0.5)

    with pytest.raises(GradientError, match=r"the gradient of parameter 'scale' \(shape \[3\]\)"):
        check_grads(Wrong(), ones(1))


def test_a_wrong_module_is_restored():
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="on purpose"):
        check_grads(lambda x: (_ for _ in ()).throw(RuntimeError("on purpose")), point(2))
    with pytest.raises(ValueError, match=r"do not fit|expected input"):
        check_grads(model, point(4, 5))
    assert model.weight.dtype == torch.float32


def test_nothing_to_check():
    with pytest.raises(ValueError, match="no input and no parameter requires a gradient"):
        check_grads(cube, point(2, requires_grad=False))
    with pytest.raises(ValueError, match="no output depends on an input"):
        check_grads(lambda x: x.detach(), point(2))


def test_a_function_must_repeat_itself():
    count = iter(range(100))
    with pytest.raises(ValueError, match="two calls with the same inputs gave different results; seed what is random"):
        check_grads(lambda x: cube(Tensor(x.data + next(count), True)), point(2))


def test_a_function_must_return_tensors():
    with pytest.raises(TypeError, match="returned float, expected floating Tensors"):
        check_grads(lambda x: 1.0, point(2))


def test_unknown_mode():
    with pytest.raises(ValueError, match="unknown mode 'careful'; known: fast, slow"):
        check_grads(cube, point(2), mode="careful")
