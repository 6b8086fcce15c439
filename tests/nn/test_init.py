"""Initial values have the spread that their formulas promise."""

import math

import pytest
import torch

from minidl import nn, no_grad
from minidl.nn import init
from minidl.tensors import Tensor, default_device

SHAPE = (200, 300)


def empty():
    return Tensor(torch.empty(SHAPE, device=default_device()))


@pytest.mark.parametrize(
    ("fill", "std"),
    [
        (lambda t: nn.init.kaiming_normal_(t, nonlinearity="relu", seed=1), math.sqrt(2 / 300)),
        (lambda t: nn.init.kaiming_uniform_(t, nonlinearity="relu", seed=1), math.sqrt(2 / 300)),
        (lambda t: nn.init.kaiming_normal_(t, mode="fan_out", nonlinearity="linear", seed=1), math.sqrt(1 / 200)),
        (lambda t: nn.init.xavier_normal_(t, seed=1), math.sqrt(2 / 500)),
        (lambda t: nn.init.xavier_uniform_(t, gain=2.0, seed=1), 2 * math.sqrt(2 / 500)),
    ],
)
def test_spread(fill, std):
    values = fill(empty()).data.double()
    # 60,000 values: the deviation of an estimated deviation is 0.3 percent; five of those.
    assert abs(values.std().item() / std - 1) < 0.015
    assert abs(values.mean().item()) < 5 * std / math.sqrt(values.numel())


def test_a_seed_repeats_and_the_default_moves_on():
    a, b = nn.init.normal_(empty(), seed=5).data, nn.init.normal_(empty(), seed=5).data
    assert torch.equal(a, b)
    assert not torch.equal(nn.init.normal_(empty()).data, nn.init.normal_(empty()).data)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.init.kaiming_normal_(Tensor(torch.empty(3))), "at least two dimensions"),
        (lambda: nn.init.kaiming_normal_(empty(), mode="fan"), "unknown mode 'fan'"),
        (lambda: nn.init.calculate_gain("gelu"), "unknown nonlinearity 'gelu'"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_filling_a_saved_tensor_is_an_in_place_change(device):
    w = Tensor(torch.ones(3, device=device), True)
    loss = (w * w).sum()
    with no_grad():
        init.normal_(w, 100.0, 0.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
