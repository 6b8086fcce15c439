"""Convolutions by others: the columns of a stride as channels, and the products of all taps with their sums."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from minidl.kernels import conv
from minidl.kernels.conv.problem import FORWARD, TRANSPOSED
from minidl.kernels.conv.rewrites.columns import Columns
from minidl.kernels.conv.rewrites.taps import Taps
from minidl.runtime import launch
from minidl.testing.memory import GuardedAllocations
from tests.kernels import test_conv, transposed
from tests.kernels.transposed import LAYOUTS, laid

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@st.composite
def ways_back(draw, dividing):
    """(N, C, M, size, kernel, stride, padding, ends): of the row, where `dividing`, what the stride divides."""
    pair = st.tuples(*[st.integers(1, 4)] * 2)
    stride, size = draw(pair), draw(st.tuples(*[st.integers(1, 7)] * 2))
    kernel, padding = draw(st.tuples(*[st.integers(1, 6)] * 2)), draw(st.tuples(*[st.integers(0, 3)] * 2))
    ends = tuple(draw(st.integers(0, s - 1)) for s in stride)
    if dividing:
        s = stride[1]
        kernel, padding, ends = (
            (kernel[0], s * draw(st.integers(1, 3))), (padding[0], s * draw(st.integers(0, 1))), (ends[0], 0)
        )  # fmt: skip
        assume(s > 1)
    for n, k, s, p, e in zip(size, kernel, stride, padding, ends, strict=True):
        assume((n - 1) * s - 2 * p + k + e > 0)
    N, C, M = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 16, 21])), draw(st.sampled_from([1, 3, 8]))
    return N, C, M, size, kernel, stride, padding, ends


@DTYPES
@given(shape=ways_back(dividing=True), seed=st.integers(0, 9))
def test_columns_of_a_stride_are_channels(dtype, shape, seed):
    transposed.Problem("columns", *shape, seed=seed, dtype=dtype).check()


@DTYPES
@given(shape=ways_back(dividing=False), seed=st.integers(0, 9))
def test_sums_of_taps_on_the_way_back(dtype, shape, seed):
    assume(shape[4] != (1, 1))
    transposed.Problem("taps", *shape, seed=seed, dtype=dtype).check()


@pytest.mark.parametrize("form", ["columns", "taps"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_in_any_order(form, layout):
    p = transposed.Problem(form, 2, 24, 8, (3, 5), (4, 6), (3, 2), (1, 2), (0, 0))
    p.w = laid(p.w, layout)
    p.check()


@DTYPES
@pytest.mark.parametrize(
    ("stride", "dilation", "padding"),
    [((1, 1), (1, 3), (0, 2)), ((2, 3), (2, 3), (0, 1)), ((2, 1), (4, 2), (3, 5)), ((3, 2), (6, 2), (5, 0))],
)
def test_sums_of_taps_where_a_stride_divides_the_dilation(stride, dilation, padding, dtype):
    p = test_conv.Problem((2, 19, 3, (14, 13), (3, 2), stride, padding, dilation, 1), dtype=dtype)
    assert {"forward", "epilogue", "preactivation"} <= set(p.check("taps"))


@pytest.mark.parametrize("form", ["columns", "taps"])
def test_weights_that_begin_anywhere(form):
    """In memory that no 16 bytes divide, of rows that they divide."""
    p = transposed.Problem(form, 2, 24, 8, (3, 5), (4, 6), (3, 2), (1, 2), (0, 0), dtype=torch.float16)
    rows = p.w.permute(0, 2, 3, 1)
    memory = torch.zeros(rows.numel() + 1, dtype=rows.dtype, device=rows.device)
    memory[1:].view(rows.shape).copy_(rows)
    p.w = memory[1:].view(rows.shape).permute(0, 3, 1, 2)
    p.check()


def test_nothing_is_written_beside_the_results():
    with GuardedAllocations() as guards:
        transposed.Problem("columns", 2, 21, 3, (3, 5), (4, 6), (3, 2), (1, 2), (0, 0)).check()
        transposed.Problem("taps", 2, 21, 3, (3, 5), (4, 5), (3, 2), (1, 2), (1, 1)).check()
        test_conv.Problem((2, 21, 7, (9, 8), (3, 2), (1, 1), (1, 2), (1, 2), 1)).check("taps")
    guards.check()


def test_what_is_not_finite_is_in_no_output_that_does_not_read_it():
    """A pixel's products of taps that no output asks for are left where they are."""
    p = transposed.Problem("taps", 1, 16, 2, (5, 5), (3, 3), (2, 2), (1, 1), (0, 0))
    p.x[0, 3, 2, 2] = float("inf")
    y, _ = conv.transposed(p.x, p.w, p.geometry, form="taps")
    reached = ~y.isfinite()[0, 0]
    assert reached.nonzero().min() >= 3
    assert reached.nonzero().max() <= 5


def test_what_columns_are_joined():
    def joined(**change):
        p = transposed.Problem("columns", 2, 24, 8, (3, 5), (4, 6), (3, 2), (1, 2), (0, 0)).described("sm_90")
        others = Columns().others(p._replace(geometry=p.geometry._replace(w=p.geometry.w._replace(**change))))
        return others and others[0]

    made = joined()
    assert (made.M, made.geometry.w.stride, made.geometry.w.kernel, made.written[1]) == (16, 1, 3, 5)
    for change in ({"stride": 1}, {"dilation": 2}, {"kernel": 5}, {"padding": 1}, {"size": 11}):
        assert not joined(**change)


def test_what_taps_are_apart():
    def apart(direction=FORWARD, stride=1, dilation=1, **more):
        shape = 2, 24, 8, (9, 9), (3, 3), (stride,) * 2, (1, 1), (dilation,) * 2, 1
        p = test_conv.Problem(shape, dtype=torch.float16).described(direction)
        others = Taps().others(p._replace(**{"target": "sm_90", **more}))
        return others and others[0]

    assert apart().M == 72
    assert apart().result == torch.float32
    assert apart(stride=2, dilation=4).written == (4, 4)
    assert apart(TRANSPOSED, stride=2)
    assert not apart(stride=2)
    assert not apart(TRANSPOSED, stride=2, dilation=2)
    assert not apart(pool="max")
    assert not apart(dtype=torch.float32)
    assert not apart(target="interpreted")
    assert not apart(N=10000, M=700)


@pytest.mark.parametrize("tile", launch.tiles("conv_taps", launch.target(), torch.float16), ids=str)
def test_every_tile_of_sums_of_taps(tile):
    """Sums that fill no program, and some of several."""
    with launch.force(conv_taps=tile):
        transposed.Problem("taps", 2, 21, 3, (3, 5), (4, 5), (3, 2), (1, 2), (1, 1)).check()
        assert test_conv.Problem((9, 21, 7, (19, 18), (3, 2), (1, 1), (1, 2), (1, 2), 1)).check("taps")


def test_one_launch_makes_the_sums():
    p = test_conv.Problem((2, 24, 4, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1), 1), dtype=torch.float16)
    names = []
    with launch.watch(lambda kernel, grid, args, meta, go: (names.append(kernel.__name__), go())):
        assert p.check("taps", lambda name: name == "forward")
    assert names[-1] == "conv_tap_sum_kernel"
