"""Comparisons with bounds: what they refuse, what they say, and bounds from the records."""

import math

import pytest
import torch

from minidl import ops
from minidl.tensors import Tensor, default_device, ones
from minidl.testing import assert_within, error_bound
from minidl.testing.specs.make import SeededMake


class TestComparing:
    def test_the_message(self):
        exact = torch.ones(2, 3, dtype=torch.float64)
        actual = exact.float()
        actual[1, 2] += 3e-6
        actual[0, 1] += 1e-6
        with pytest.raises(AssertionError) as caught:
            assert_within(actual, exact, torch.full((2, 3), 5e-7), what="sum", repeat="again")
        assert str(caught.value).splitlines() == [
            "sum: 2 of 6 elements of float32 [2, 3] are outside their bound",
            "  worst at [1, 2]: got 1.0000029802322388, expected 1.0",
            "  error 2.98e-06, bound 5e-07, error/bound 5.96, 25 ulp",
            "  repeat: again",
        ]

    def test_returns_the_largest_share_of_the_bound(self):
        assert assert_within(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]).double(), 1.0) == 0.5
        assert assert_within(torch.zeros(0), torch.zeros(0).double(), 0.0) == 0.0

    def test_equal_is_inside_a_bound_of_zero(self):
        assert assert_within(torch.tensor([1.0]), torch.tensor([1.0]).double(), 0.0) == 0.0

    @pytest.mark.parametrize(
        ("actual", "exact", "bound"),
        [
            (1.0, math.nan, 1.0),
            (math.nan, 1.0, 1.0),
            (math.inf, 1.0, 1.0),
            (math.inf, -math.inf, 1.0),
            (1.0, math.inf, 1.0),
            (math.nan, math.inf, 1.0),
            (-math.inf, 4e38, 1.0),
            (1.0, 2.0, 0.5),
        ],
    )
    def test_refuses(self, actual, exact, bound):
        with pytest.raises(AssertionError, match="outside"):
            assert_within(torch.tensor([actual]), torch.tensor([exact], dtype=torch.float64), bound)

    @pytest.mark.parametrize(
        ("actual", "exact", "bound"),
        [
            (math.nan, math.nan, 0.0),
            (math.inf, math.inf, 0.0),
            (math.inf, 4e38, 1.0),
            (math.inf, 3.4028e38, 1e35),
            (7.0, 1.0, math.inf),
            (math.nan, 1.0, 1e39),
        ],
    )
    def test_accepts(self, actual, exact, bound):
        assert_within(torch.tensor([actual]), torch.tensor([exact], dtype=torch.float64), bound)

    def test_a_bound_that_says_nothing_by_mistake(self):
        for bound in (math.nan, -1.0):
            with pytest.raises(AssertionError, match="the bound is NaN or negative"):
                assert_within(torch.ones(1), torch.ones(1).double(), bound)

    def test_integers_are_equal_or_not(self):
        assert_within(torch.tensor([3]), torch.tensor([3]), 5.0)
        with pytest.raises(AssertionError, match="1 of 1 elements of int64"):
            assert_within(torch.tensor([3]), torch.tensor([4]), 5.0)

    def test_shapes(self):
        with pytest.raises(AssertionError, match=r"shape \[1\], expected \[2\]"):
            assert_within(torch.ones(1), torch.ones(2).double(), 1.0)

    def test_the_reference_in_float64_is_off_as_well(self):
        assert assert_within(torch.tensor([1.0]).double(), torch.tensor([1.5]).double(), 0.3) == pytest.approx(
            0.8333333
        )


class TestErrorBound:
    def test_of_an_operation(self):
        a, b = SeededMake(0).tensor(5, 7), SeededMake(1).tensor(7, 3)
        bound = error_bound(ops.matmul, Tensor(a), Tensor(b))
        assert bound.shape == (5, 3)
        assert bound.dtype == torch.float64
        error = (a.to(default_device()) @ b.to(default_device())).cpu().double() - (a.double() @ b.double())
        assert (error.abs() <= bound).all()
        assert bound.max() < 1e-4
        assert torch.equal(error_bound("matmul", a, b), bound)

    def test_unknown(self):
        with pytest.raises(LookupError, match=r"nothing has no spec; operations with one: .*matmul"):
            error_bound("nothing", ones(1))

    def test_without_a_floating_argument(self):
        with pytest.raises(TypeError, match="no argument of transposed is a floating tensor"):
            error_bound(ops.transposed, Tensor(torch.ones(2, dtype=torch.int64)))


def test_the_bound_of_a_function_of_ones_own():
    """A sum of products: n products and sums, each term by its magnitude, then the rounding of the result."""
    x, w = torch.randn(3, 20), torch.randn(20)
    terms = (x.double() * w.double()).abs().sum(1)
    exact = x.double() @ w.double()
    bound = error_bound(lambda x, w: x @ w, (x, w), reference=torch.mv, depth=20)
    gamma, u = 20 * 2.0**-24 / (1 - 20 * 2.0**-24), 2.0**-24
    error = gamma * (exact.abs() + 2 * terms)  # by x and by w
    assert torch.allclose(bound, error + u * (exact.abs() + error) + 2.0**-126, rtol=1e-12, atol=0)
    assert_within(x @ w, exact, bound)
    with pytest.raises(AssertionError):
        assert_within((x @ w).half().float(), exact, bound)
    with pytest.raises(TypeError, match="a reference needs depth="):
        error_bound(torch.mv, (x, w), reference=torch.mv)
    with pytest.raises(LookupError, match="pass reference= and depth= to error_bound"):
        error_bound(torch.mv, x, w)
