"""Numbers beside tensors, and powers that are computed as something else."""

import math
import operator

import numpy as np
import pytest
import torch

from minidl import ops
from minidl.tensors import Tensor

VALUES = [-2.0, -0.5, 0.25, 1.0, 3.0]  # exact in every dtype, as are the numbers


def tensor(device, values=VALUES):
    return Tensor(torch.tensor(values, device=device), requires_grad=True)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum"])
@pytest.mark.parametrize("number", [2, -0.5, 0.25])
@pytest.mark.parametrize("left", [True, False])
def test_a_number_on_either_side(name, number, left, device):
    x, expected = tensor(device), torch.tensor(VALUES, requires_grad=True)
    other = torch.tensor(float(number))
    y = getattr(ops, name)(*((number, x) if left else (x, number)))
    z = getattr(torch, name)(*((other, expected) if left else (expected, other)))
    y.backward(Tensor(torch.ones(5, device=device)))
    z.backward(torch.ones(5))
    torch.testing.assert_close(y.data.cpu(), z.detach())
    torch.testing.assert_close(x.grad.data.cpu(), expected.grad)


@pytest.mark.parametrize("exponent", [2, 0.5, -1, 3, 0, -2.0, 1.5])
@pytest.mark.parametrize("values", [[0.25, 1.0, 3.0], [0.0, 4.0], [-2.0, -0.5, 9.0]])
def test_powers_by_a_number(exponent, values, device):
    x, expected = tensor(device, values), torch.tensor(values, requires_grad=True)
    y, z = x**exponent, expected**exponent
    y.backward(Tensor(torch.ones(len(values), device=device)))
    z.backward(torch.ones(len(values)))
    torch.testing.assert_close(y.data.cpu(), z.detach(), equal_nan=True)
    torch.testing.assert_close(x.grad.data.cpu(), expected.grad, equal_nan=True)


@pytest.mark.parametrize("base", [2, 0, 0.5])
def test_powers_of_a_number(base, device):
    x, expected = tensor(device), torch.tensor(VALUES, requires_grad=True)
    y, z = base**x, torch.pow(float(base), expected)
    y.backward(Tensor(torch.ones(5, device=device)))
    z.backward(torch.ones(5))
    torch.testing.assert_close(y.data.cpu(), z.detach())
    torch.testing.assert_close(x.grad.data.cpu(), expected.grad, equal_nan=True)


def test_a_comparison_has_no_gradient_and_counts(device):
    x = tensor(device)
    chosen = x > 0
    assert chosen.dtype == torch.bool
    assert not chosen.requires_grad
    assert ops.sum(chosen).item() == 3


def test_predictions_equal_to_labels(device):
    logits = Tensor(torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.0, 3.0]], device=device))
    labels = Tensor(torch.tensor([1, 0, 0], device=device))
    assert (ops.argmax(logits, 1) == labels).tolist() == [True, True, False]


def test_where_passes_no_gradient_to_a_number(device):
    x = tensor(device)
    ops.where(x > 0, x, 0).sum().backward()
    assert x.grad.tolist() == [0, 0, 1, 1, 1]


def test_truth_values_beside_numbers(device):
    x = torch.tensor([True, False], device=device)
    for number in (-300, -1, 0, 1, 2, 3, 300):
        for compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
            assert compare(Tensor(x), number).tolist() == compare(x, number).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integers_beside_numbers_that_they_do_not_have(dtype, device):
    """torch takes the number around the range of narrow types: 256 is 0 to uint8."""
    x = torch.tensor([0, 1, 100], dtype=dtype, device=device)
    for number in (-(2**40), -129, -1, 0, 127, 255, 256, 2**40):
        for compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
            assert compare(Tensor(x), number).tolist() == compare(x.long(), number).tolist()
            assert compare(number, Tensor(x)).tolist() == compare(number, x.long()).tolist()


@pytest.mark.parametrize("limits", [(1, -1), (0.5, 0.25), (math.nan, 1), (0, math.nan), (math.nan, None), (2, 2)])
@pytest.mark.parametrize("in_place", [False, True])
def test_limits_in_any_order_are_torchs(limits, in_place, device):
    values = torch.tensor([-3.0, -1.0, 0.3, 1.0, 3.0, math.nan])
    x, expected = Tensor(values.to(device), True), values.clone().requires_grad_()
    for leaf in (x, expected):
        y = leaf * 2
        if leaf is expected and any(limit is not None and math.isnan(limit) for limit in limits):
            limits = (math.nan, math.nan)  # one limit of NaN alone is none to torch 2.11
        y = y.clamp_(*limits) if in_place else y.clamp(*limits)
        (y * y).sum().backward()
        if leaf is x:
            ours = y
    torch.testing.assert_close(ours.data.cpu(), y.detach(), equal_nan=True)
    torch.testing.assert_close(x.grad.data.cpu(), expected.grad, equal_nan=True)
    whole = torch.tensor([-3, 0, 3])
    assert Tensor(whole.to(device)).clamp(2, 1).tolist() == whole.clamp(2, 1).tolist() == [1, 1, 1]


KINDS = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64]


@pytest.mark.parametrize("name", ["add", "sub"])
@pytest.mark.parametrize("alpha", [2, 0, 0.5, 1.0, True, np.float32(0.5)])
@pytest.mark.parametrize("kind", KINDS)
def test_alpha_changes_no_dtype(name, alpha, kind, device):
    x = torch.tensor([3, 0], dtype=kind, device=device)
    others = [torch.tensor([1, 0], dtype=other, device=device) for other in KINDS] + [3, True]
    others = [x if getattr(y, "is_floating_point", bool)() and x.is_floating_point() else y for y in others]
    if name == "sub":  # minidl takes 0 and 1 of bools from numbers, torch does not
        others = [y for y in others if torch.bool not in (kind, getattr(y, "dtype", None)) and y is not True]
    made = 0
    for y in others:
        ours = Tensor(y) if isinstance(y, torch.Tensor) else y
        try:
            expected = getattr(torch, name)(x, y, alpha=alpha)
        except (RuntimeError, TypeError):
            with pytest.raises((TypeError, ValueError)):
                getattr(ops, name)(Tensor(x), ours, alpha=alpha)
            continue
        found = getattr(ops, name)(Tensor(x), ours, alpha=alpha)
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
        made += 1
    assert made or alpha is True or not kind.is_floating_point


def test_bools_are_chosen_as_bools(device):
    a, b = torch.tensor([True, False], device=device), torch.tensor([[False], [True]], device=device)
    for x, y in ((a, b), (a, True), (False, b)):
        ours = ops.where(Tensor(a), *(Tensor(z) if isinstance(z, torch.Tensor) else z for z in (x, y)))
        expected = torch.where(a, x, y)
        assert (ours.dtype, ours.tolist()) == (torch.bool, expected.tolist())
    assert (Tensor(a) + True).tolist() == (a + True).tolist()
    assert (Tensor(a) * True).tolist() == (a * True).tolist()


def test_where_of_a_condition_alone_are_the_places(device):
    for values in ([[1.0, 0.0], [math.nan, 2.0]], [[True, False]], [0, 3], 5, 0):
        x = torch.tensor(values, device=device)
        ours, expected = ops.where(Tensor(x)), torch.where(x)
        assert [part.tolist() for part in ours] == [part.tolist() for part in expected]
        assert isinstance(ours, tuple)
    with pytest.raises(TypeError, match="where: got one of input and other, expected both"):
        ops.where(Tensor(x > 0), 1.0)


def test_a_number_is_chosen_as_the_tensor_has_it(device):
    x = Tensor(torch.tensor([0.1], dtype=torch.float16, device=device), True)
    assert (x == 0.1).tolist() == (x >= 0.1).tolist() == [True]
    ops.clamp(x, 0.1).sum().backward()
    ops.maximum(x, 0.1).sum().backward()
    assert x.grad.tolist() == [1.5]


def test_a_minus_before_unsigned_numbers_wraps(device):
    assert ops.neg(Tensor(torch.tensor([1, 0, 255], dtype=torch.uint8, device=device))).tolist() == [255, 0, 1]


@pytest.mark.parametrize(("dtype", "number"), [(torch.uint8, 300), (torch.int32, 2**31), (torch.float32, 10**400)])
def test_numbers_outside_the_range_are_refused(dtype, number, device):
    with pytest.raises(ValueError, match="outside the range"):
        Tensor(torch.ones(2, dtype=dtype, device=device)) * number
