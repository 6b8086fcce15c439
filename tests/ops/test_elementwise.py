"""Numbers beside tensors, and powers that are computed as something else."""

import operator

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
