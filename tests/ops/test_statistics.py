"""Medians, quantiles, histograms and distinct elements beside torch's in float64: values, gradients, errors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minidl
from minidl import linalg, ops
from minidl.ops import statistics
from minidl.tensors import Tensor, default_device
from tests.ops.test_against_torch import both, numbers

LEVELS = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64)
CASES = {
    "median": lambda m, x: (m.median(x), *x.median(1), *m.median(x, -1, True), *x.sum().median(0), m.median(x[:0])),
    "median of equals": lambda m, x: m.median((x * 0 + 2) * x.detach().sign()),
    "quantile": lambda m, x: tuple(
        m.quantile(x, 0.3, dim, keep, interpolation=how)
        for dim in (None, 1, -1) for keep in (False, True)
        for how in ("linear", "lower", "higher", "midpoint", "nearest")
    ),
    "quantiles": lambda m, x: (x.quantile(x.detach()[0, 0].sigmoid(), 0), m.quantile(x, x.detach()[0, 0].sigmoid())),
    "quantiles of a scalar": lambda m, x: (m.quantile(x.sum(), 0.2, 0, True), x.sum().quantile(0.5)),
    "histc": lambda m, x: (m.histc(x), x.histc(7, -1, 1), m.histc(x * 0, 3), m.histc(x[:0], 4), m.histc(x, 3, 0, 1)),
    "bincount": lambda m, x: (
        m.bincount((x * 3).detach().long().abs().flatten(), x.detach().flatten(), minlength=20),
        m.bincount((x * 3).detach().long().abs().flatten()), m.bincount(x.detach()[0, 0, :0].int(), minlength=3),
    ),
    "unique": lambda m, x: (
        m.unique(x.round().detach()), *m.unique(x.round().detach(), True, True, True),
        *m.unique(x[:, :3, :1].sign().detach(), return_inverse=True, return_counts=True, dim=0),
        m.unique(x[:0].detach()), m.unique((x > 0).detach()), *m.unique((x.detach() * 2).long(), return_counts=True),
    ),
    "unique_consecutive": lambda m, x: (
        m.unique_consecutive(x.sign().detach()), *m.unique_consecutive(x.sign().detach(), True, True),
        *m.unique_consecutive(x[:, :3, :1].sign().detach(), return_inverse=True, return_counts=True, dim=0),
        m.unique_consecutive(x[:0].detach()), *(x.detach() * 2).long().unique_consecutive(return_counts=True),
        m.unique_consecutive(x.detach().sum()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name):
    both(CASES[name], numbers(4, 5, 6))


@pytest.mark.parametrize("name", ["median", "quantiles"])
def test_strided(name):
    both(lambda m, x: CASES[name](m, x[:, ::2].transpose(0, 2)), numbers(6, 11, 4))


def test_every_function_has_a_case():
    assert set(statistics.__all__) <= set(CASES) | {"quantile"}


SPECIAL = st.sampled_from([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -2.5, 1e308, 5e-324])


@given(values=st.lists(SPECIAL, min_size=1, max_size=7))
def test_special_values_as_torch(values):
    x = torch.tensor(values, dtype=torch.float64)
    ours = Tensor(x.to(default_device()))
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    for name in ("median",):
        torch.testing.assert_close(getattr(ops, name)(ours).data.cpu(), getattr(torch, name)(x), **exact)
        values_ = getattr(ops, name)(ours, 0).values.data.cpu()
        torch.testing.assert_close(values_, getattr(torch, name)(x, 0).values, **exact)
    for name in ("quantile",):
        for how in ("lower", "higher", "nearest"):
            got = getattr(ops, name)(ours, Tensor(LEVELS.to(default_device())), interpolation=how).data.cpu()
            torch.testing.assert_close(got, getattr(torch, name)(x, LEVELS, interpolation=how), **exact)
    torch.testing.assert_close(ops.histc(ours, 3, -3, 1).data.cpu(), torch.histc(x, 3, -3, 1), **exact)
    elements, inverse, counts = (t.data.cpu() for t in ops.unique(ours, return_inverse=True, return_counts=True))
    torch.testing.assert_close(elements, torch.unique(x), **exact)
    torch.testing.assert_close(elements[inverse], x, **exact)
    assert torch.equal(torch.bincount(inverse, minlength=len(elements)), counts)
    for got, expected in zip(
        ops.unique_consecutive(ours, True, True), torch.unique_consecutive(x, True, True), strict=True
    ):
        torch.testing.assert_close(got.data.cpu(), expected, **exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
def test_dtypes(dtype):
    x = torch.tensor([3, 1, 2, 3, 1], dtype=dtype)
    ours = Tensor(x.to(default_device()))
    assert ops.median(ours).tolist() == 2
    for result, expected in zip(ops.unique(ours, return_counts=True), ([1, 2, 3], [2, 1, 2]), strict=True):
        assert result.tolist() == expected
    assert ops.median(ours).dtype == ops.unique(ours).dtype == dtype
    if dtype.is_floating_point:
        assert ops.histc(ours, 2).tolist() == [2, 3]
        assert ops.histc(ours, 2).dtype == dtype
        weights = ops.bincount(Tensor(torch.tensor([0, 2, 0, 0, 2]).to(default_device())), ours)
        assert (weights.tolist(), weights.dtype == torch.float32) == ([8, 0, 2], dtype == torch.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: ops.median(x, 2), IndexError, "dim 2 is out of range"),
        (lambda x: ops.median(x[:, :0], 1), IndexError, "median: dimension 1 of .* has no elements"),
        (lambda x: ops.quantile(x, 1.5), ValueError, "quantile: q has a number outside of 0 to 1"),
        (lambda x: ops.quantile(x, math.nan), ValueError, "quantile: q has a number outside of 0 to 1"),
        (lambda x: ops.quantile(x, x), ValueError, r"quantile: q is torch.float64 \[2, 4\], expected a number or"),
        (lambda x: ops.quantile(x, x[0].float()), ValueError, "quantile: q is torch.float32 .* of torch.float64"),
        (lambda x: ops.quantile(x.half(), 0.5), TypeError, "quantile: input has dtype torch.float16, expected float32"),
        (lambda x: ops.quantile(x[:0], 0.5), ValueError, "quantile: input has shape .* expected elements"),
        (lambda x: ops.quantile(x, 0.5, interpolation="mean"), ValueError, "interpolation is 'mean', expected one of"),
        (lambda x: ops.histc(x.long()), TypeError, "histc: input has dtype torch.int64"),
        (lambda x: ops.histc(x, 0), ValueError, "histc: bins is 0, expected at least 1"),
        (lambda x: ops.histc(x, 2, 3, 1), ValueError, "histc: the range is 3.0 to 1.0, expected finite"),
        (lambda x: ops.histc(x / 0), ValueError, "histc: the range is .* expected finite"),
        (lambda x: ops.bincount(x[0]), TypeError, "bincount: input has dtype torch.float64, expected integers"),
        (lambda x: ops.bincount(x.long() - 9), ValueError, r"bincount: input has shape \[2, 4\], expected \[N\]"),
        (lambda x: ops.bincount(x[0].long() - 9), ValueError, "bincount: input has -.*, expected numbers from 0"),
        (lambda x: ops.bincount(x[0].long(), x), ValueError, r"bincount: .* and weights \[2, 4\], expected \[N\]"),
        (lambda x: ops.bincount(x[0].long(), minlength=-1), ValueError, "bincount: minlength is -1"),
        (lambda x: ops.unique(x, dim=2), IndexError, "unique: dim 2 is out of range"),
        (lambda x: ops.unique_consecutive(x, dim=2), IndexError, "unique_consecutive: dim 2 is out of range"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(Tensor(numbers(2, 4).to(default_device())))


NORMS = {
    "vector_norm": lambda m, x: tuple(m.linalg.vector_norm(x, p, dim) for p in (2, 1, 0, 3.5, math.inf, -math.inf)
                                      for dim in (None, 1, (0, 2))),
    "norms of matrices": lambda m, x: tuple(
        m.linalg.norm(x, p, dim, keep) for p in ("fro", 1, -1, math.inf, -math.inf)
        for dim in ((-2, -1), (2, 0)) for keep in (False, True)
    ),
    "norm": lambda m, x: (
        m.linalg.norm(x), m.linalg.norm(x, dim=1), m.linalg.norm(x, dim=(0, 1), keepdim=True), m.linalg.norm(x[0], 1),
        m.linalg.norm(x[0, 0], 3), m.linalg.norm(x, "fro", (0, 2)), m.linalg.norm(x, math.inf, 1),
        m.linalg.norm(x.detach().to(m.float32), dtype=m.float64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    both(NORMS[name], numbers(4, 5, 6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: linalg.norm(x, "nuc"), "linalg.norm: ord is 'nuc' .* expected 'fro'.*torch.linalg"),
        (lambda x: linalg.norm(x, 2), r"linalg.norm: ord is 2 of dimensions \[0, 1\], expected 'fro'"),
        (lambda x: linalg.norm(x[None], 2), r"linalg.norm: A has shape \[1, 2, 4\], expected a vector or a matrix"),
        (lambda x: linalg.norm(x, "fro", 1), r"linalg.norm: ord is 'fro' of dimensions \[1\]"),
        (lambda x: linalg.norm(x, 1, (0, 0)), "twice"),
    ],
)
def test_norms_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call(Tensor(numbers(2, 4).to(default_device())))


@pytest.mark.parametrize("shape", [(4, 4), (7, 3), (3, 7), (3, 3, 3), (0, 2)])
@pytest.mark.parametrize("wrap", [False, True])
def test_a_diagonal_is_filled_as_in_torch(shape, wrap):
    x = numbers(*shape)
    ours = Tensor(x.clone().to(default_device()))
    assert ours.fill_diagonal_(2.5, wrap) is ours
    assert torch.equal(ours.data.cpu(), x.fill_diagonal_(2.5, wrap))
    recorded = minidl.ones(3, 3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="fill_diagonal_"):
        recorded.fill_diagonal_(0)


def test_a_diagonal_has_equal_sizes():
    for shape in ((3,), (2, 3, 3)):
        with pytest.raises(ValueError, match=r"fill_diagonal_: x has shape .*, expected a matrix, or equal sizes"):
            minidl.ones(*shape).fill_diagonal_(1)


def test_rows_are_added_in_place():
    both(lambda m, x, y: (x * 1).index_add_(0, m.tensor([2, 0, 2]), y, alpha=0.5), numbers(3, 4), numbers(3, 4))


@pytest.mark.parametrize("dim", [None, 0])
def test_runs_have_the_element_they_begin_with(dim, device):
    x = torch.tensor([-0.0, 0.0, 1.0, 0.0, -0.0, float("nan"), float("nan")], device=device)
    y, inverse, counts = ops.unique_consecutive(Tensor(x), True, True, dim)
    expected = torch.unique_consecutive(x, True, True, dim)
    for mine, theirs in zip((y, inverse, counts), expected, strict=True):
        torch.testing.assert_close(mine.data, theirs, equal_nan=True)
    assert torch.equal(y.data[:3].signbit(), expected[0][:3].signbit())
