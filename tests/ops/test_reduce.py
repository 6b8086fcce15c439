"""Gradients where a reduction has no derivative, and how dimensions are named."""

import pytest
import torch

from minidl import ops
from minidl.tensors import Tensor


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_ties_share_the_gradient_as_in_torch(dim, device):
    values = torch.tensor([[2.0, 2.0, 1.0], [2.0, 0.0, 3.0]])
    x, expected = Tensor(values.to(device), requires_grad=True), values.clone().requires_grad_()
    ops.amax(x, dim).sum().backward()
    torch.amax(expected, dim=() if dim is None else dim).sum().backward()
    torch.testing.assert_close(x.grad.data.cpu(), expected.grad)


def test_the_norm_of_zeros_has_gradient_zero(device):
    x = Tensor(torch.zeros(3, device=device), requires_grad=True)
    ops.norm(x).backward()
    assert x.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dim", [(), [], None, (0, 1), (-1, -2)])
def test_no_dimensions_are_all_of_them(dim, device):
    assert ops.sum(Tensor(torch.ones(2, 3, device=device)), dim).item() == 6


def test_a_mean_of_nothing_has_an_empty_gradient(device):
    x = Tensor(torch.empty(0, 3, device=device), requires_grad=True)
    ops.mean(x, 0).sum().backward()
    assert x.grad.shape == (0, 3)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0,)])
def test_logsumexp_of_nothing(shape, device):
    for dim in range(len(shape)):
        x, expected = Tensor(torch.ones(shape, device=device), True), torch.ones(shape).requires_grad_()
        y, wanted = ops.logsumexp(x, dim, True), torch.logsumexp(expected, dim, True)
        assert (y.shape, y.tolist()) == (wanted.shape, wanted.tolist())
        y.sum().backward()
        assert x.grad.shape == shape


def test_the_first_none_of_a_number_have_gradient_zero(device):
    for values in (5.0, [5.0, 1.0]):
        x = Tensor(torch.tensor(values, device=device), True)
        x.topk(0)[0].sum().backward(create_graph=True)
        assert x.grad.tolist() == (x * 0).tolist()
        (x.topk(1)[0] * 3).sum().backward()
        assert x.grad.reshape(-1)[0].item() == 3


def test_errors_name_the_operation(device):
    x = Tensor(torch.ones(2, 3, device=device))
    for name in ("sum", "mean", "norm", "amax", "argmax"):
        with pytest.raises(IndexError, match=f"{name}: dim 2 is out of range for a tensor of 2 dimensions"):
            getattr(ops, name)(x, dim=2)
