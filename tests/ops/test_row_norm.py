"""What is special to norms of rows: deviations whose squares are 0."""

import math

import torch

from minidl import ops
from minidl.tensors import Tensor, default_device


def test_a_variance_that_underflows_without_eps_makes_infinities_and_no_nan():
    """Three numbers in a tile of four: what the fourth would add is 0 times infinity."""
    x = Tensor(1e-25 * torch.tensor([[[1.0, 1.0, -2.0]]]).to(default_device()))
    weight = Tensor(torch.ones(1).to(default_device()), True)
    y = ops.group_norm(x, 1, weight, None, eps=0.0)
    y.backward(Tensor(torch.tensor([[[1.0, 1.0, -1.0]]]).to(default_device())))
    assert y.tolist() == [[[math.inf, math.inf, -math.inf]]]
    assert weight.grad.item() == math.inf
