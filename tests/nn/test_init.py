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


@pytest.mark.parametrize(("a", "b"), [(-2.0, 2.0), (-0.5, 3.0), (2.5, 6.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_truncated_normal_numbers(a, b, dtype):
    tensor = Tensor(torch.empty(SHAPE, dtype=dtype, device=default_device()))
    assert init.trunc_normal_(tensor, 1.0, 2.0, 1 + 2 * a, 1 + 2 * b, seed=4) is tensor
    values = (tensor.data.double().flatten().cpu() - 1) / 2
    assert a - 1e-3 <= values.min() <= values.max() <= b + 1e-3
    low, high = torch.special.ndtr(torch.tensor([a, b], dtype=torch.float64))
    # The distribution function of the values is uniform (Kolmogorov and Smirnov, at one of 10^6), but for rounding.
    uniform = ((torch.special.ndtr(values) - low) / (high - low)).sort().values
    steps = torch.arange(len(uniform)) / len(uniform)
    assert (uniform - steps).abs().max() < 2.7 / math.sqrt(len(uniform)) + 2 * torch.finfo(dtype).eps


def test_the_inverse_of_erf():
    x = torch.linspace(-1, 1, 4001, dtype=torch.float64)[1:-1]
    torch.testing.assert_close(
        init._inverse_erf(Tensor(x.to(default_device()))).data.cpu(), torch.erfinv(x), rtol=1e-12, atol=1e-15
    )


def test_a_truncated_interval_has_an_inside():
    with pytest.raises(ValueError, match=r"trunc_normal_: a is 2.0 and b is 2.0, expected a < b"):
        init.trunc_normal_(empty(), a=2.0)
