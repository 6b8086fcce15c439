"""NaN among the elements and the numbers of operations: values and gradients as torch's, compiled and interpreted."""

import math

import pytest
import torch
import torch.nn.functional as torch_functional

import minidl
from minidl import nn, optim
from minidl.nn import functional

NAN = math.nan
ROWS = {
    "one": [[1.0, NAN, 3.0, 3.0], [2.0, 2.0, -1.0, 0.0]],
    "two": [[NAN, 1.0, NAN, 3.0], [0.0, -2.0, 4.0, 2.0]],
    "none": [[0.0, 0.0, 3.0, 1.0], [1.0, -2.0, 0.5, 4.0]],
    "single": [[2.0], [NAN]],
    "alone": [[5.0]],
}

# Functions of torch or minidl, its functional and x, whose elements have NaN.
OF_ELEMENTS = {
    **{
        f"{name} {dim}": lambda m, f, x, name=name, dim=dim: getattr(x, name)(*dim)
        for name in ("amax", "amin", "sum", "mean")
        for dim in ((), (1,))
    },
    **{
        f"{name} {how}": lambda m, f, x, name=name, how=how: getattr(x, name)(**how)
        for name in ("std", "var")
        for how in ({}, {"dim": 1}, {"unbiased": False})
    },
    **{f"norm {p}": lambda m, f, x, p=p: x.norm(p) for p in (1, 2, 3, 0.5, -2, math.inf, -math.inf)},
    **{
        f"functional {name}": lambda m, f, x, name=name: getattr(f, name)(x)
        for name in (
            "relu", "relu6", "leaky_relu", "elu", "silu", "sigmoid", "tanh", "softplus", "hardtanh", "hardswish",
            "hardsigmoid", "mish", "normalize",
        )
    },
    "max": lambda m, f, x: x.max(), "min": lambda m, f, x: x.min(),
    "max along one": lambda m, f, x: x.max(1)[0], "min along one": lambda m, f, x: x.min(1)[0],
    "norm inf along one": lambda m, f, x: x.norm(math.inf, dim=1), "cumsum": lambda m, f, x: x.cumsum(1),
    "max_pool": lambda m, f, x: f.max_pool2d(x[None], (1, len(x[0]))), "softmax": lambda m, f, x: f.softmax(x, 1),
    "logsumexp": lambda m, f, x: x.logsumexp(1), "sort": lambda m, f, x: x.sort(1)[0],
    "where": lambda m, f, x: m.where(x > 1, x, x * 2), "sqrt": lambda m, f, x: x.sqrt(), "pow": lambda m, f, x: x**3,
    "abs": lambda m, f, x: x.abs(), "sign": lambda m, f, x: x.sign(),
}  # fmt: skip

# Of x without NaN, with NaN as a number.
OF_NUMBERS = {
    "add": lambda m, f, x: x + NAN, "minus": lambda m, f, x: NAN - x, "mul": lambda m, f, x: x * NAN,
    "div": lambda m, f, x: NAN / x, "pow": lambda m, f, x: x**NAN, "a power of it": lambda m, f, x: NAN**x,
    "alpha": lambda m, f, x: m.add(x, x, alpha=NAN), "fmod": lambda m, f, x: m.fmod(x, NAN),
    "remainder": lambda m, f, x: m.remainder(x, NAN), "between": lambda m, f, x: x.clamp(0.0, NAN),
    "above": lambda m, f, x: x.clamp(NAN, 1.0), "no lower": lambda m, f, x: m.clamp(x, min=x.detach() * NAN),
    "maximum": lambda m, f, x: m.maximum(x, x.detach() * NAN),
    "minimum": lambda m, f, x: m.minimum(x, x.detach() * NAN),
    "masked_fill": lambda m, f, x: x.masked_fill(x > 0, NAN), "where": lambda m, f, x: m.where(x > 0, x, NAN),
    "lerp": lambda m, f, x: m.lerp(x, x * 2, NAN), "pad": lambda m, f, x: f.pad(x, (1, 1), value=NAN),
    "in place": lambda m, f, x: (x * 1).mul_(NAN).add_(1.0), "clamp_": lambda m, f, x: (x * 1).clamp_(0.0, NAN),
    "hardtanh": lambda m, f, x: f.hardtanh(x, -1.0, NAN), "eps": lambda m, f, x: f.layer_norm(x, (4,), eps=NAN),
    "less": lambda m, f, x: x * (x < NAN), "unequal": lambda m, f, x: x * (x != NAN),
    "index_add": lambda m, f, x: m.index_add(
        x, 0, *(m.tensor(each, device=x.device) for each in ([0], [[1.0, 2.0, 3.0, 4.0]])), alpha=NAN
    ),
    "scatter": lambda m, f, x: x.scatter(1, m.tensor([[0], [1]], device=x.device), NAN),
}  # fmt: skip


def value_and_gradient(m, function, values, device):
    x = torch.tensor(values, device="cpu" if m is torch else device)
    x = x.requires_grad_() if m is torch else minidl.Tensor(x, True)
    y = function(m, torch_functional if m is torch else functional, x)
    y.sum().backward()
    return tuple(t if m is torch else t.data.cpu() for t in (y.detach(), x.grad))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("values", ROWS)
@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_elements(name, values, device):
    if name == "norm 0.5" and values == "none":
        pytest.skip("infinite at 0")
    (ours, expected) = (value_and_gradient(m, OF_ELEMENTS[name], ROWS[values], device) for m in (minidl, torch))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_numbers(name, device):
    (ours, expected) = (value_and_gradient(m, OF_NUMBERS[name], ROWS["none"], device) for m in (minidl, torch))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_one_limit(device):
    """torch 2.11 takes one limit of NaN alone for none; later ones for NaN."""
    x = minidl.Tensor(torch.tensor([-1.0, 2.0], device=device), True)
    for y in (x.clamp(NAN), x.clamp(max=NAN), (x * 1).clamp_(NAN), (x * 1).clamp_(max=NAN)):
        assert y.data.isnan().all()
        y.sum().backward()
    assert x.grad.tolist() == [0, 0]


def test_a_norm_of_nan_clips_to_nan():
    """One gradient of NaN makes all weights NaN where such steps are taken, as with torch's clip_grad_norm_."""
    weights = [nn.Parameter(minidl.ones(3)) for _ in range(2)]
    optimizer = optim.SGD(weights, lr=0.1, max_norm=1.0, skip_nonfinite=False)
    for weight, slope in zip(weights, (1.0, NAN), strict=True):
        weight.grad = minidl.full((3,), slope)
    optimizer.step()
    assert all(weight.data.isnan().all() for weight in weights)


def test_a_centred_variance_of_nan_stays():
    weight = nn.Parameter(minidl.ones(3))
    optimizer = optim.RMSprop([weight], lr=0.1, centered=True, skip_nonfinite=False)
    weight.grad = minidl.tensor([1.0, NAN, 1.0])
    optimizer.step()
    with minidl.no_grad():
        weight.fill_(1.0)
    weight.grad = minidl.ones(3)
    optimizer.step()
    assert weight.data.isnan().tolist() == [False, True, False]
