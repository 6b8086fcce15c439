"""What is special to `conv2d`: the form that is asked for, pools and scales."""

import pytest
import torch

from minidl import no_grad, ops
from minidl.tensors import Tensor, default_device


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device())


def test_fourier_transforms_on_request():
    x, w = Tensor(numbers(2, 8, 20, 21), True), Tensor(numbers(8, 8, 5, 5, seed=1), True)
    y = ops.conv2d(x, w, padding=2, act="relu", form="fft")
    exact = torch.nn.functional.conv2d(x.data.double(), w.data.double(), padding=2).relu()
    assert (y.data.double() - exact).norm() <= 2.0**-17 * exact.norm()
    dy = numbers(*y.shape, seed=2)
    y.backward(Tensor(dy))
    a, b = x.data.double().requires_grad_(), w.data.double().requires_grad_()
    torch.nn.functional.conv2d(a, b, padding=2).relu().backward(dy.double())
    # Values within the error of relu's corner may fall on its other side.
    assert (x.grad.data.double() - a.grad).norm() <= 2.0**-12 * a.grad.norm()
    assert (w.grad.data.double() - b.grad).norm() <= 2.0**-12 * b.grad.norm()


def test_a_form_that_cannot_take_the_shape():
    x, w = Tensor(numbers(2, 8, 9, 9)), Tensor(numbers(8, 8, 3, 3))
    with pytest.raises(ValueError, match="the fft form does not support this shape; use one of: pixel"):
        ops.conv2d(x, w, stride=2, form="fft")
    with pytest.raises(ValueError, match="unknown form 'winograd'; known: pixel, box, batch, pair, split, banded, fft"):
        ops.conv2d(x, w, form="winograd")
    with pytest.raises(ValueError, match=r"unknown form \['fft'\]; known"):
        ops.conv2d(x, w, form=["fft"])


def test_what_a_pool_and_a_scale_need():
    x, w = Tensor(numbers(2, 3, 3, 3)), Tensor(numbers(4, 3, 2, 3), True)
    with pytest.raises(ValueError, match="needs two rows and columns, got 2 x 1"):
        ops.conv2d(x, w, pool="max")
    with pytest.raises(ValueError, match="pool is 'min'"):
        ops.conv2d(x, w, pool="min")
    with pytest.raises(ValueError, match="a scale is for inference"):
        ops.conv2d(x, w, scale=Tensor(numbers(4)))
    with no_grad(), pytest.raises(ValueError, match=r"scale has shape \[3\], expected \[4\]"):
        ops.conv2d(x, w, scale=Tensor(numbers(3)))


@pytest.mark.parametrize("groups", [1.0, True])
def test_a_refused_number_of_groups_leaves_nothing_behind(groups):
    # 1, 1.0 and True are one key of a cache.
    x, w = Tensor(numbers(2, 0, 5, 7)), Tensor(numbers(3, 0, 2, 2))
    with pytest.raises(ValueError, match=r"groups is .*, expected a whole number"):
        ops.conv2d(x, w, groups=groups)
    assert torch.equal(ops.conv2d(x, w).data, torch.zeros(2, 3, 4, 6, device=default_device()))


@pytest.mark.parametrize("pool", ["max", "avg"])
def test_a_form_that_cannot_pool_is_pooled_afterwards(pool):
    x, w = Tensor(numbers(2, 8, 21, 20)), Tensor(numbers(8, 8, 5, 5, seed=1), True)
    recorded = ops.conv2d(x, w, padding=2, act="relu", pool=pool, form="fft")
    assert recorded.requires_grad
    with no_grad():
        y = ops.conv2d(x, w, padding=2, act="relu", pool=pool, form="fft")
    assert y.shape == (2, 8, 10, 10)
    assert torch.equal(y.data, recorded.data)
    with no_grad(), pytest.raises(ValueError, match="the fft form does not support this shape"):
        ops.conv2d(x, w, stride=2, pool=pool, form="fft")
