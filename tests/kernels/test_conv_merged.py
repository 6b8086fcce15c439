"""The form that takes two columns of a transposed convolution at once: exact on whole numbers, its choice, refusals."""

import random

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from minidl.kernels import conv
from minidl.kernels.conv import merged, plan
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.runtime import launch
from tests.kernels.transposed import LAYOUTS, Problem, laid, whole

GENERATORS = {
    "5x5": (130, 64, 16, (4, 6), (5, 5), (2, 2), (2, 2), (1, 1)),
    "4x4": (5, 32, 8, (7, 7), (4, 4), (2, 2), (1, 1), (0, 0)),
    "3x6, rows without stride": (3, 96, 5, (6, 5), (3, 6), (1, 2), (0, 2), (0, 0)),
    "one tap in every other column": (3, 32, 1, (3, 4), (2, 1), (2, 2), (0, 0), (1, 1)),
    "more outputs than a tile": (2, 32, 136, (3, 2), (5, 7), (3, 2), (1, 3), (2, 1)),
}


@st.composite
def shapes(draw):
    """Kernels smaller than the stride and larger than the image; an even number of columns."""
    kernel, stride = (draw(st.integers(1, 6)), draw(st.integers(1, 7))), (draw(st.integers(1, 3)), 2)
    padding = draw(st.tuples(*[st.integers(0, 4)] * 2))
    size = draw(st.tuples(*[st.integers(1, 7)] * 2))
    # As many columns as make their number even.
    ends = draw(st.integers(0, stride[0] - 1)), kernel[1] % 2
    for n, k, s, p, e in zip(size, kernel, stride, padding, ends, strict=True):
        assume((n - 1) * s - 2 * p + k + e > 0)
    N, C, M = draw(st.integers(1, 5)), draw(st.sampled_from([32, 64, 96])), draw(st.sampled_from([1, 3, 4, 8, 24]))
    return N, C, M, size, kernel, stride, padding, ends


@given(shape=shapes(), seed=st.integers(0, 9), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_the_same_integers_as_torch(shape, seed, dtype):
    Problem("merge", *shape, seed=seed, dtype=dtype).check()


@pytest.mark.parametrize("shape", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_tile(dtype, shape):
    # The interpreter has no bfloat16, and one tile of each family for all dtypes.
    if launch.INTERPRETED and dtype != [torch.float32, torch.float16][list(GENERATORS.values()).index(shape) % 2]:
        pytest.skip("with another dtype")
    target = "interpreted" if launch.INTERPRETED else launch.target()
    for family in ("conv_back", "conv_batch_narrow"):
        for tile in launch.tiles(family, target, dtype):
            with launch.force(**{family: tile}):
                Problem("merge", *shape, dtype=dtype).check()


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(20))
def test_a_hundred_drawn_shapes(block):
    """Five each: images in runs and parts of runs, more than one tile of channels; twice the same."""
    draw = random.Random(block)
    for seed in range(5):
        kernel = draw.randint(1, 6), draw.randint(1, 7)
        stride, padding = (draw.randint(1, 3), 2), (draw.randint(0, kernel[0] // 2), draw.randint(0, kernel[1] // 2))
        shape = (
            draw.choice([1, 64, 130, 257]), draw.choice([32, 64, 128]), draw.choice([1, 8, 24, 64, 96]),
            (draw.randint(4, 9), draw.randint(4, 9)), kernel, stride, padding, (0, kernel[1] % 2),
        )  # fmt: skip
        p = Problem("merge", *shape, seed=seed, dtype=draw.choice([torch.float32, torch.float16]))
        p.check()
        first, second = (conv.transposed(p.x, p.w, p.geometry, form="merge")[0] for _ in range(2))
        assert torch.equal(first, second)


def test_where_it_is_taken():
    """Compiled, for many images of few channels whose window has few zeros; not where products cut their operands."""

    def takes(*shape, dtype=torch.float16, precision="tf32x3", target="sm_90"):
        p = Problem(None, *shape, dtype=dtype)
        return plan.plan(p.described(target, precision)).name == "merge"

    five, four = ((4, 4), (5, 5), (2, 2), (2, 2), (1, 1)), ((4, 4), (4, 4), (2, 2), (1, 1), (0, 0))
    assert takes(64, 32, 64, *five)
    assert takes(64, 32, 64, *five, dtype=torch.float32, precision="tf32")
    assert not takes(64, 32, 64, *five, dtype=torch.float32)
    assert not takes(64, 32, 65, *five)
    assert not takes(64, 32, 64, *four)
    assert not takes(64, 32, 64, *five, target="interpreted")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_window(bad):
    p = Problem("merge", 3, 32, 8, (8, 8), (5, 5), (2, 2), (2, 2), (1, 1))
    before, _ = conv.transposed(p.x, p.w, p.geometry, form="merge")
    p.x[1, 3, 0, 0] = bad
    after, _ = conv.transposed(p.x, p.w, p.geometry, form="merge")
    assert torch.equal(after[::2], before[::2])
    assert torch.equal(after[1, :, 3:], before[1, :, 3:])
    assert torch.equal(after[1, :, :, 4:], before[1, :, :, 4:])
    assert not after[1, :, 0, 0].isfinite().any()


@given(st.integers(1, 9), st.integers(0, 8), st.integers(1, 12))
def test_the_window_is_what_both_columns_read(kernel, padding, size):
    v = Axis(2 * size, kernel, size, 2, padding, 1)
    pairs = merged.pairs_of(v)
    (phase,) = pairs.backward()
    read = [w.in_start + j for w in v.backward() if w.in_step for j in range(len(w.taps))]
    assert (phase.count, phase.in_start, phase.in_start + len(phase.taps)) == (size, min(read), max(read) + 1)


@pytest.mark.parametrize(
    "shape",
    [
        (2, 32, 8, (4, 4), (3, 3), (2, 1), (1, 1), (0, 0)),
        (2, 32, 8, (4, 4), (3, 3), (2, 2), (1, 1), (1, 0)),
        (2, 16, 8, (4, 4), (3, 4), (2, 2), (1, 1), (1, 0)),
    ],
    ids=["no stride along the row", "an odd number of columns", "channels that fill no block"],
)
def test_refusals(shape):
    p = Problem("merge", *shape)
    with pytest.raises(conv.UnableError, match="the merge form does not support this shape"):
        p.check()


def test_no_groups_and_no_way_forward():
    geometry = Geometry.of((9, 8), (3, 4), (2, 2), ((1, 1), (1, 1)), (1, 1))
    with pytest.raises(conv.UnableError, match="the merge form does not support this shape"):
        conv.transposed(whole(2, 64, 5, 4), whole(64, 8, 3, 4), Geometry(geometry.h, geometry.w, 2), form="merge")
    with pytest.raises(conv.UnableError, match="the merge form does not support this shape"):
        conv.forward(whole(2, 32, 9, 8), whole(16, 32, 3, 4), geometry, form="merge")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_in_any_strides(layout, dtype):
    p = Problem("merge", *GENERATORS["4x4"], dtype=dtype)
    assert torch.equal(conv.transposed(p.x, laid(p.w, layout), p.geometry, form="merge")[0].double(), p.y)
