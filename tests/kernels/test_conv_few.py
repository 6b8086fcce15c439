"""The form for few output channels: exact on whole numbers at any shape and tile, its window and groups, refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from minidl.kernels import conv
from minidl.kernels.conv import few_outputs, plan
from minidl.kernels.conv.geometry import NOWHERE, Axis, Geometry
from minidl.runtime import launch
from tests.kernels.transposed import LAYOUTS, Problem, laid, whole


@st.composite
def shapes(draw):
    """Odd images, kernels smaller than the stride and larger than the image."""
    pair = st.tuples(st.integers(1, 3), st.integers(1, 4))
    kernel, stride = (draw(st.integers(1, 6)), draw(st.integers(1, 6))), draw(pair)
    ends = tuple(draw(st.integers(0, s - 1)) for s in stride)
    size, padding = draw(st.tuples(*[st.integers(1, 9)] * 2)), draw(st.tuples(*[st.integers(0, 4)] * 2))
    for n, k, s, p, e in zip(size, kernel, stride, padding, ends, strict=True):
        assume((n - 1) * s - 2 * p + k - 1 + e >= 0)
    N, C = draw(st.integers(1, 5)), draw(st.sampled_from([16, 32, 48]))
    return N, C, draw(st.integers(1, 4)), size, kernel, stride, padding, ends


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@given(shape=shapes(), seed=st.integers(0, 9))
def test_the_same_integers_as_torch(dtype, shape, seed):
    Problem("few", *shape, seed=seed, dtype=dtype).check()


GENERATORS = {
    "5x5 to 3 channels": (9, 64, 3, (8, 16), (5, 5), (2, 2), (2, 2), (1, 1)),
    "4x4 to 1 channel": (5, 64, 1, (14, 14), (4, 4), (2, 2), (1, 1), (0, 0)),
    "stride 1": (3, 32, 3, (9, 12), (3, 3), (1, 1), (1, 1), (0, 0)),
    "stride 4": (2, 16, 4, (4, 6), (7, 8), (4, 4), (3, 2), (2, 0)),
}


def tiles():
    """Every tile of every table, once per size."""
    seen = set()
    for name in launch.table("conv_few") if launch.INTERPRETED else [launch.target()]:
        for dtype in (torch.float32, torch.float16):
            for tile in launch.tiles("conv_few", name, dtype):
                key = (*tile.sizes.items(), None if launch.INTERPRETED else dtype)
                if key not in seen:
                    seen.add(key)
                    yield pytest.param(dtype, tile, id=f"{dtype}-{tile}".replace(" ", ",").replace("torch.", ""))


@pytest.mark.parametrize("shape", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize(("dtype", "tile"), list(tiles()))
def test_every_tile(dtype, tile, shape):
    with launch.force(conv_few=tile):
        Problem("few", *shape, dtype=dtype).check()


@pytest.mark.parametrize("size", [(20, 24), (24, 5), (3, 40)])
def test_several_boxes_each_way(size, fresh_plans, monkeypatch):
    monkeypatch.setattr(few_outputs, "LARGEST", 16)
    with launch.force(conv_few=launch.Tile({"BLOCK_N": 16, "BLOCK_K": 16}, 4, 2)):
        Problem("few", 2, 16, 3, size, (3, 3), (1, 1), (1, 1), (0, 0)).check()


@pytest.mark.parametrize("target", ["sm_90", "interpreted"])
@pytest.mark.parametrize("shape", GENERATORS.values(), ids=GENERATORS)
def test_it_is_taken_for_few_outputs(shape, target):
    dtype = torch.float32 if target == "interpreted" else torch.float16
    assert plan.plan(Problem(None, *shape, dtype=dtype).described(target)._replace(N=1000)).name == "few"


@pytest.mark.parametrize("shape", GENERATORS.values(), ids=GENERATORS)
def test_without_being_asked_for(shape):
    p = Problem(None, *shape)
    assert torch.equal(conv.transposed(p.x, p.w, p.geometry)[0].double(), p.y)
    assert torch.equal(conv.grad_input(p.x, p.w, p.geometry).double(), p.y)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_in_any_strides(layout):
    p = Problem("few", *GENERATORS["5x5 to 3 channels"])
    assert torch.equal(conv.transposed(p.x, laid(p.w, layout), p.geometry, form="few")[0].double(), p.y)


def test_rounded_once():
    """float16 results are those of float64 within one rounding; tanh in the epilogue."""
    p = Problem("few", *GENERATORS["5x5 to 3 channels"], dtype=torch.float16)
    scale = torch.full((3,), 0.01, device=p.x.device)
    got, _ = conv.transposed(p.x, p.w, p.geometry, scale, "tanh", scale=scale, form="few")
    exact = (p.y * scale.double()[0] + scale.double()[0]).tanh()
    assert ((got.double() - exact).abs() <= 2.0**-11 * exact.abs() + 2.0**-18).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_groups(bad):
    p = Problem("few", 3, 16, 2, (8, 8), (4, 4), (2, 2), (1, 1), (0, 0))
    before, _ = conv.transposed(p.x, p.w, p.geometry, form="few")
    p.x[1, 3, 0, 0] = bad
    after, _ = conv.transposed(p.x, p.w, p.geometry, form="few")
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    # Groups have 4 x 2 cells of 2 x 2 outputs at most, and a window of one pixel more at each side.
    assert torch.equal(after[1, :, 10:], before[1, :, 10:])
    assert torch.equal(after[1, :, :, 10:], before[1, :, :, 10:])
    reached = F.conv_transpose2d(p.x.double(), p.w.double(), None, 2, 1)
    assert torch.equal(after.isfinite() & reached.isfinite(), after.isfinite())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_below_a_window_that_are_not_finite_do_not_reach_its_group(bad):
    """The window of a group is its rows of cells and one at each side."""
    p = Problem("few", 1, 16, 2, (8, 8), (4, 4), (2, 2), (1, 1), (0, 0))
    rows, _ = few_outputs.group((8, 8), (3, 3), (8, 8), few_outputs.LARGEST // (2 * 2 * 2))
    p.x[:, :, rows + 1 :] = bad
    y, _ = conv.transposed(p.x, p.w, p.geometry, form="few")
    assert torch.equal(y[:, :, : 2 * rows].double(), p.y[:, :, : 2 * rows])


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 8), st.integers(1, 12))
def test_the_window_is_what_the_walks_read(kernel, stride, padding, size):
    """No phase reads beyond it; with a stride of outputs or more, phases read its first and its last pixel."""
    phases = [w for w in Axis(size + stride, kernel, 1, stride, padding, 1).backward() if w.in_start != NOWHERE]
    low, reach = few_outputs.window(Axis(size + stride, kernel, 1, stride, padding, 1))
    assert min(w.in_start for w in phases) == low
    assert max(w.in_start + len(w.taps) for w in phases) == low + reach


@pytest.mark.parametrize("most", [1, 2, 4, 5, 8, 16])
@pytest.mark.parametrize("size", [(32, 32), (14, 14), (7, 7), (6, 1), (1, 64)])
def test_groups(size, most):
    """Powers of two that divide the image, and none reads fewer inputs per cell."""

    def read(group):
        return math.prod((g + 2) / g for g in group)

    found = few_outputs.group(size, (3, 3), size, most)
    able = [(a, b) for a in (1, 2, 4, 8, 16) for b in (1, 2, 4, 8, 16) if a * b <= most]
    able = [group for group in able if all(n % g == 0 for n, g in zip(size, group, strict=True))]
    assert found in able
    assert read(found) == min(map(read, able))


def test_refusals():
    """Many outputs, channels that fill no block, dilation, groups; and no way forward."""
    geometry = Geometry.of((9, 9), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    for C, M, at in (
        (32, 5, geometry),
        (20, 3, geometry),
        (32, 3, Geometry.of((9, 9), (3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2))),
        (32, 3, Geometry(geometry.h, geometry.w, 2)),
    ):
        with pytest.raises(conv.UnableError, match="the few form does not support this shape"):
            conv.transposed(whole(2, C, 9, 9), whole(C, M, 3, 3), at, form="few")
    with pytest.raises(conv.UnableError, match="the few form does not support this shape"):
        conv.forward(whole(2, 3, 9, 9), whole(16, 3, 3, 3), geometry, form="few")


def test_runs_are_bitwise_equal():
    p = Problem("few", *GENERATORS["4x4 to 1 channel"])
    x = torch.randn_like(p.x)
    first, second = (conv.transposed(x, p.w, p.geometry, form="few")[0] for _ in range(2))
    assert torch.equal(first, second)
