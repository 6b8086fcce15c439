"""Drawn inputs: what kinds and layouts are, and that a case can be made again."""

import math

import pytest
import torch
from hypothesis import find, settings
from hypothesis import strategies as st

from minidl.testing.specs.make import KINDS, LAYOUTS, SPECIAL, SeededMake, fits, lay_out, values
from tests.strategies import DrawnMake, Replay


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_finite_and_stay_between_their_limits(kind, dtype):
    for limits in ({}, {"low": -0.5, "high": 0.25}, {"low": 1.0}, {"high": -1.0}):
        made = values(kind, (7, 9), dtype, torch.Generator().manual_seed(0), **limits)
        assert made.dtype == dtype
        assert made.isfinite().all()
        assert (made >= limits.get("low", -math.inf)).all()
        assert (made <= limits.get("high", math.inf)).all()
        assert made.ne(0).any()


def test_what_kinds_are():
    def make(kind, dtype=torch.float32):
        return values(kind, (1000,), dtype, torch.Generator().manual_seed(0)).double()

    assert set(make("integers").tolist()) == {-3, -2, -1, 0, 1, 2, 3}
    assert make("constant").unique().numel() == 1
    assert (make("cancelling")[::2] > 0).all()
    assert (make("cancelling")[1::2] < 0).all()
    assert (make("positive") > 0).all()
    assert make("mixed").abs().max() > 2**15 * make("mixed").abs().min()
    assert (make("tiny").abs() < 2.0**-126).any()
    assert make("huge").abs().max() > 1e30
    special = make(SPECIAL)
    assert special.isnan().any()
    assert (special == math.inf).any()
    assert (special == -math.inf).any()
    assert not values(SPECIAL, (99,), torch.float32, torch.Generator(), low=0.0, high=1.0).isinf().any()


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown kind 'odd'"):
        values("odd", (1,), torch.float32, torch.Generator())
    with pytest.raises(ValueError, match="unknown kind 'odd'"):
        values("odd", (1,), torch.float32, torch.Generator(), low=0.0)
    with pytest.raises(ValueError, match="unknown layout 'odd'"):
        lay_out(torch.ones(1), "odd")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 4), (1, 1)], ids=str)
def test_layouts_keep_the_values(layout, shape):
    if layout == "expanded" or not fits(layout, len(shape)):
        return
    x = torch.randn(shape)
    y = lay_out(x, layout)
    assert torch.equal(x, y)
    assert lay_out(torch.ones(shape, dtype=torch.int32), layout).sum() == x.numel()


def test_what_layouts_are():
    x = torch.randn(4, 6)
    assert lay_out(x, "transposed").stride() == (1, 4)
    assert lay_out(x, "padded").stride() == (9, 1)
    assert lay_out(x, "step").stride() == (12, 2)
    assert lay_out(x, "offset").data_ptr() % 16 == 4
    padded = lay_out(x, "padded")
    assert padded.as_strided((4, 3), (9, 1), 6).isnan().all()
    assert 0 in SeededMake(0, layouts=("expanded",)).tensor(4, 6).stride()


def test_a_drawn_case_can_be_made_again():
    drawn = SeededMake(5, torch.float16, kinds=KINDS, layouts=LAYOUTS)
    shape = drawn.shape(1, 4, smallest=1)
    first = drawn.tensor(*shape)
    assert drawn.integers(9, low=2, high=4).unique().tolist() == [2, 3, 4]
    again = Replay(drawn.decisions, torch.float16, kinds=KINDS, layouts=LAYOUTS)
    assert again.shape(1, 4, smallest=1) == shape
    second = again.tensor(*shape)
    assert (second.stride(), second.dtype) == (first.stride(), torch.float16)
    assert torch.equal(first, second)


def test_the_same_seed_the_same_values():
    assert torch.equal(SeededMake(1).tensor(9), SeededMake(1).tensor(9))
    assert not torch.equal(SeededMake(1).tensor(9), SeededMake(2).tensor(9))


def test_sizes():
    make = SeededMake(0)
    seen = {make.size(1, 40) for _ in range(500)}
    assert {1, 2, 7, 16, 17, 31, 37} <= seen
    assert min(seen) >= 1
    assert max(seen) <= 40
    assert SeededMake(0).size(70, 72) in (70, 71, 72)


def test_hypothesis_shrinks_to_the_simplest_case():
    found = find(
        st.composite(lambda draw: (m := DrawnMake(draw, torch.float32, KINDS, LAYOUTS), m.tensor(m.size(), 4)))(),
        lambda pair: pair[1].numel() > 0,
        settings=settings(max_examples=2000),
    )
    # Hypothesis is free to stop one short of the smallest.
    assert found[1].shape in ((2, 4), (5, 4))
    assert max(found[0].decisions) <= 1


def test_decisions_that_do_not_fit():
    with pytest.raises(ValueError, match=r"decision 0 of \[7\] is not an integer in \[0, 2\]"):
        Replay([7]).integer(0, 2)
    with pytest.raises(ValueError, match=r"decision 0 of \[\]"):
        Replay([]).size()
