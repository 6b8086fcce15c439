"""What is kept for the gradient, and what is not computed."""

import pytest
import torch

from minidl import ops
from minidl.tensors import Tensor


@pytest.mark.parametrize(
    ("act", "kept"), [("relu", "output"), ("sigmoid", "output"), ("gelu", "input"), ("silu", "input")]
)
def test_the_output_is_kept_where_the_derivative_follows_from_it(act, kept, device):
    x = Tensor(torch.ones(2, 4, device=device), requires_grad=True)
    y = ops.bias_act(x, Tensor(torch.ones(4, device=device)), act)
    saved = y._node.context.saved[0]
    assert saved.data_ptr() == (y if kept == "output" else x).data.data_ptr()


def test_the_gradient_of_a_bias_alone(device):
    b = Tensor(torch.zeros(4, device=device), requires_grad=True)
    ops.bias_act(Tensor(torch.ones(3, 4, device=device)), b).sum().backward()
    assert b.grad.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "sigmoid", "tanh", "gelu", "silu", "relu6"])
def test_nan_stays(name, device):
    x = Tensor(torch.tensor([torch.nan, 1.0], device=device))
    assert getattr(ops, name)(x).data.isnan().tolist() == [True, False]
