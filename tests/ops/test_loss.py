"""Losses in the graph: a gradient that waits, walked twice, and what gets none."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import minidl
from minidl import from_torch, no_grad, ops
from minidl.kernels import cross_entropy as kernels
from minidl.runtime import launch
from tests.launches import replace_run


def leaf(*shape, device):
    return from_torch(torch.randn(*shape, dtype=torch.float64, device=device), requires_grad=True)


def classes(rows, count, device):
    return from_torch(torch.randint(count, (rows,), device=device))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_second_walk_adds_the_same_gradient(reduction, device):
    x, target = leaf(6, 5, device=device), classes(6, 5, device)
    value = ops.cross_entropy(x, target, reduction=reduction)
    dy = from_torch(torch.rand(value.shape, dtype=torch.float64, device=device) + 0.5)
    value.backward(dy, retain_graph=True)
    once = x.grad.data.clone()
    value.backward(dy)
    torch.testing.assert_close(x.grad.data, 2 * once)
    reference = x.data.clone().requires_grad_()
    F.cross_entropy(reference, target.data, reduction=reduction).backward(dy.data)
    torch.testing.assert_close(once, reference.grad)


def test_no_gradient_is_computed_when_none_is_wanted(device, monkeypatch):
    x, target = leaf(6, 5, device=device), classes(6, 5, device)
    wanted = []
    parts = kernels.cross_entropy_parts

    def spy(*args):
        wanted.append(args[-1])
        return parts(*args)

    monkeypatch.setattr(kernels, "cross_entropy_parts", spy)
    ops.cross_entropy(x, target)
    with no_grad():
        ops.cross_entropy(x, target)
    ops.cross_entropy(x.detach(), target)
    assert wanted == [True, False, False]


def test_the_first_gradient_is_not_copied(device):
    x, target = leaf(6, 5, device=device), classes(6, 5, device)
    made = []
    value = ops.cross_entropy(x, target)
    made.append(value._node.context.gradient[0].data_ptr())
    value.backward()
    assert x.grad.data.data_ptr() == made[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("reduction", "rows"), [("mean", 6), ("sum", 6), ("none", 1)])
def test_without_a_gradient_it_is_that_of_one(reduction, rows, dtype, device):
    """Bit for bit, at first and again; what the first walk gave away is not changed by the second."""
    target = classes(rows, 5, device)
    x = from_torch(torch.randn(rows, 5, device=device).to(dtype), requires_grad=True)
    y = from_torch(x.data.clone(), requires_grad=True)
    value, same = (ops.cross_entropy(z, target, reduction=reduction) for z in (x, y))
    value.backward(retain_graph=True)
    same.backward(from_torch(torch.ones_like(same.data)), retain_graph=True)
    assert torch.equal(x.grad.data, y.grad.data)
    first, kept = x.grad, x.grad.data.clone()
    value.backward(retain_graph=True)
    same.backward(from_torch(torch.ones_like(same.data)), retain_graph=True)
    assert torch.equal(x.grad.data, y.grad.data)
    assert torch.equal(first.data, kept)
    first.zero_()
    x.grad = None
    value.backward()
    assert torch.equal(x.grad.data, kept)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, t: ops.cross_entropy(x, t) * 2.0,
        lambda x, t: ops.cross_entropy(x, t) + ops.cross_entropy(x * 3.0, t),
        lambda x, t: (lambda value: value + value)(ops.cross_entropy(ops.exp(x), t)),
        lambda x, t: ops.cross_entropy(x + ops.exp(x), t),
    ],
    ids=["scaled", "sum of two", "twice", "logits used twice"],
)
def test_losses_of_shared_parts_without_a_gradient(loss, device):
    x, target = leaf(6, 5, device=device), classes(6, 5, device)
    y = from_torch(x.data.clone(), requires_grad=True)
    loss(x, target).backward()
    value = loss(y, target)
    value.backward(from_torch(torch.ones_like(value.data)))
    assert torch.equal(x.grad.data, y.grad.data)


def test_a_gradient_of_one_is_neither_made_nor_multiplied(device, monkeypatch):
    x, target = leaf(6, 5, device=device), classes(6, 5, device)
    names, run = [], launch.run

    def spy(kernel, *args, **meta):
        names.append(kernel.__name__)
        run(kernel, *args, **meta)

    def refuse(*args, **kwargs):
        raise AssertionError

    value = ops.cross_entropy(x, target)
    replace_run(monkeypatch, spy)
    monkeypatch.setattr(torch, "ones_like", refuse)
    value.backward()
    assert names == []
    (ops.cross_entropy(x, target) * 2.0).backward(from_torch(torch.ones((), dtype=torch.float64, device=device)))
    assert "scale_kernel" in names


def test_what_gets_no_gradient_is_refused(device):
    x, p = leaf(6, 5, device=device), leaf(6, 5, device=device)
    with pytest.raises(ValueError, match=r"weight requires a gradient, but .* none for it; pass weight.detach\(\)"):
        ops.cross_entropy(x, p, leaf(5, device=device))
    with pytest.raises(ValueError, match="pos_weight requires a gradient"):
        ops.binary_cross_entropy_with_logits(x, p, pos_weight=leaf(5, device=device))


@pytest.mark.parametrize(
    ("name", "how"), [("smooth_l1_loss", {"beta": 0.5}), ("huber_loss", {"delta": 0.5}), ("huber_loss", {})]
)  # fmt: skip
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_difference_of_nan_has_a_gradient_of_nan(name, how, reduction, device):
    """And at the bounds, and beyond them, the first and the second are torch's as well."""
    nan, inf = math.nan, math.inf
    values = [nan, 0.0, 0.5, -0.5, 0.2, 1.0, 3.0, -3.0, inf, 1.0]
    targets = [0.0] * 9 + [nan]
    found = []
    for module, functions, where in ((minidl, ops, device), (torch, F, "cpu")):
        x, t = (module.tensor(v, device=where, requires_grad=True) for v in (values, targets))
        loss = getattr(functions, name)(x, t, reduction=reduction, **how).sum()
        first = module.autograd.grad(loss, [x, t], create_graph=True)
        (first[0] * first[0] + first[0] * 3).sum().backward()
        found.append([part.detach().tolist() for part in (*first, x.grad, t.grad)])
        plain = module.tensor(values, device=where, requires_grad=True)
        getattr(functions, name)(plain, t.detach(), reduction=reduction, **how).sum().backward()
        found[-1].append(plain.grad.tolist())
    for ours, expected in zip(*found, strict=True):
        assert math.isnan(expected[0])
        assert ours == pytest.approx(expected, nan_ok=True)
    assert [math.isnan(slope) for slope in found[0][-1]] == [True] + [False] * 8 + [True]


def test_older_names_of_reductions_are_torchs(device):
    x, p = leaf(3, device=device), leaf(3, device=device)
    for given in ((None, None, "sum"), (False, None), (None, True), (True, False), (False, False)):
        value = ops.mse_loss(x, p, *given)
        with warnings.catch_warnings(action="ignore"):
            expected = F.mse_loss(x.data, p.data, *given)
        assert value.shape == expected.shape
        torch.testing.assert_close(value.data, expected)


def test_logits_changed_in_place_before_a_second_walk(device):
    x = leaf(6, 5, device=device)
    z = x * 2
    value = ops.cross_entropy(z, classes(6, 5, device))
    value.backward(retain_graph=True)
    z.data.zero_()
    with pytest.raises(RuntimeError, match=r"CrossEntropy.*was changed in place"):
        value.backward()


class Fills(TorchDispatchMode):
    """What torch was asked for."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_backward_of_a_loss_fills_no_one(reduction, dtype, device):
    """The gradient that backward() begins with is known; bits are those of a one that is given."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    targets = from_torch(torch.tensor([0, 2, 1, 1, 0]).to(device))
    other = from_torch(torch.rand(5, 3, generator=torch.Generator().manual_seed(1)).to(device, dtype))
    losses = (
        lambda x: ops.mse_loss(x, other, reduction=reduction), lambda x: ops.nll_loss(x, targets, reduction=reduction),
        lambda x: ops.cross_entropy(x, targets, reduction=reduction),
        lambda x: ops.binary_cross_entropy_with_logits(x, other, reduction=reduction),
    )  # fmt: skip
    for loss in losses:
        made = [from_torch(x.clone(), requires_grad=True) for _ in range(2)]
        with Fills() as fills:
            loss(made[0]).backward()
        assert "aten.ones_like.default" not in fills.seen
        loss(made[1]).backward(from_torch(torch.ones((), dtype=dtype, device=device)))
        assert torch.equal(made[0].grad.data, made[1].grad.data)
