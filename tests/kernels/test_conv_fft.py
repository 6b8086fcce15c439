"""Convolution by FFT: within the bound that fft.py states, in the norm of each tile; every tile of its tables."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minidl.kernels import conv
from minidl.kernels.conv import fft, plan, spectra
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.problem import FORWARD, Problem, Tensors
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing.specs.bounds import UNIT, dot_unit, gamma


def normal(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(default_device())


def by_fft(x, w, geometry, points):
    """y [N, OH, OW, M] of x [N, H, W, C] and w [M, R, S, C], in tiles of points x points."""
    problem = Problem(
        FORWARD, geometry, x.shape[0], x.shape[3], w.shape[0], x.dtype, launch.precision(x.dtype), form=fft.NAME,
        target=launch.target(), processors=launch.processors(),
    )  # fmt: skip
    y = torch.empty(x.shape[0], *problem.written, w.shape[0], dtype=x.dtype, device=x.device)
    fft.run(fft.prepare(problem, points), Tensors(x, w, y))
    return y


def constant(points, products):
    """The error per sum of ||x_c|| ||w_c||_1, as fft.py has it."""
    u = dot_unit(torch.float32)
    step = gamma(points + 1, u)
    transform = (1 + math.sqrt(points) * step) ** 2 * (1 + u)
    largest = (1 + step) ** 2 * (1 + u) - 1
    return transform**2 * (1 + math.sqrt(2) * largest) * (1 + math.sqrt(10) * gamma(products + 4, u)) - 1


def share_of_bound(y, x, w, padding, cut):
    """The largest ||error|| / bound over tiles of y [N, M, OH, OW], y without epilogue.

    The norms of the input tiles, times the sums of the blocks of |w|, are a convolution of few points.
    """
    exact = F.conv2d(x.double(), w.double(), padding=padding)
    step, count = (cut.h.step, cut.w.step), (cut.h.tiles, cut.w.tiles)
    room = [s * (c.inputs - 1) + cut.points for s, c in zip(step, (cut.h, cut.w), strict=True)]
    padded = F.pad(x.double(), (padding[1], room[1], padding[0], room[0]))[:, :, : room[0], : room[1]]
    norms = (F.avg_pool2d(padded**2, cut.points, step) * cut.points**2).sqrt()
    taps = cut.h.taps, cut.w.taps
    blocks = cut.h.blocks * taps[0] - w.shape[2], cut.w.blocks * taps[1] - w.shape[3]
    sums = F.avg_pool2d(F.pad(w.double().abs(), (0, blocks[1], 0, blocks[0])), taps) * math.prod(taps)
    bound = constant(cut.points, w.shape[1] * cut.h.blocks * cut.w.blocks) * F.conv2d(norms, sums)
    error = (y.double() - exact).abs()
    # The rounding of the result to its type.
    error = (error - UNIT[y.dtype] * (exact.abs() + error) - 2.0**-25).clamp(min=0)
    rest = [s * c - n for s, c, n in zip(step, count, exact.shape[2:], strict=True)]
    of_tile = (F.avg_pool2d(F.pad(error**2, (0, rest[1], 0, rest[0])), step) * math.prod(step)).sqrt()
    return (of_tile / bound.clamp(min=1e-300)).max().item()


def check(N, C, M, size, kernel, padding, points=16, dtype=torch.float32, seed=0):
    x, w = normal(N, C, *size, seed=seed, dtype=dtype), normal(M, C, *kernel, seed=seed + 1, dtype=dtype)
    geometry = Geometry.of(size, kernel, (1, 1), tuple((p, p) for p in padding), (1, 1))
    y = by_fft(conv.channels_last(x), conv.channels_last(w), geometry, points=points).permute(0, 3, 1, 2)
    cut = fft.cheapest((geometry.h.output, geometry.w.output), kernel, C, M, points)
    assert y.dtype == dtype
    assert y.isfinite().all()
    share = share_of_bound(y, x, w, padding, cut)
    assert share <= 1, f"{share:.2f} of the bound, {cut}"


@pytest.mark.parametrize("points", fft.POINTS)
def test_the_matrix_is_rounded_once(points):
    g = torch.empty(points, points, device=default_device())
    launch.run(spectra.conv_fft_matrix_kernel, (1,), g, T=points)
    h = torch.arange(points, dtype=torch.float64)
    k = torch.arange(points // 2 + 1, dtype=torch.float64)
    angle = 2 * math.pi / points * (k[:, None] * h % points)
    exact = torch.cat([angle.cos(), angle.sin()[1:-1]])
    assert ((g.double().cpu() - exact).abs() <= UNIT[torch.float32] * exact.abs() + 1e-14).all()
    assert (g.cpu()[exact.abs() < 1e-9] == 0).all()


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 3), st.sampled_from([1, 3, 13]), st.sampled_from([1, 4, 20]),
    st.tuples(st.integers(1, 24), st.integers(1, 24)), st.tuples(st.integers(1, 19), st.integers(1, 19)),
    st.tuples(st.integers(0, 9), st.integers(0, 9)), st.sampled_from([torch.float32, torch.float16]),
)  # fmt: skip
def test_drawn_shapes(N, C, M, size, kernel, padding, dtype):
    assume(all(s + 2 * p >= k for s, p, k in zip(size, padding, kernel, strict=True)))
    check(N, C, M, size, kernel, padding, 16, dtype)


@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 4, (40, 37), (5, 7), (2, 0)),
        (1, 2, 3, (45, 36), (24, 17), (3, 8)),  # a filter of 24 rows in one piece
        (1, 1, 2, (33, 33), (31, 31), (15, 15)),  # in blocks of 16 x 16
    ],
)
def test_tiles_of_32_points(shape):
    check(*shape, points=32)


@pytest.mark.parametrize("lines", [3, 4, 5])
def test_one_line_more_than_a_tile_has(lines):
    with launch.force(conv_fft=launch.Tile({"BLOCK_V": 1024}, 4, 1)):
        check(lines, 1, lines, (12, 20), (3, 3), (1, 1))


@pytest.mark.parametrize("M", [15, 16, 17])
def test_as_many_channels_as_a_tile_has(M):
    """Two tiles of rows, and of columns where there is one more."""
    sizes = {**launch.tiles("conv_fft_product")[0].sizes, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}
    with launch.force(conv_fft_product=launch.Tile(sizes, 4, 2)):
        check(17, 3, M, (12, 20), (3, 3), (1, 1))


def test_a_filter_in_blocks_across():
    assert fft.cheapest((1, 3), (1, 20), 1, 1, 16).w.blocks == 3
    check(1, 1, 1, (1, 22), (1, 20), (0, 0))


def test_as_many_images_as_a_tile_has():
    sizes = {**launch.tiles("conv_fft_product")[0].sizes, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}
    with launch.force(conv_fft_product=launch.Tile(sizes, 4, 2)):
        check(16, 1, 2, (3, 3), (2, 2), (0, 0))


def test_a_weight_that_is_not_finite_stays_in_its_output():
    """Also where the channels fill no block, and the next output's stand behind them."""
    x, w = normal(1, 3, 4, 5), normal(2, 3, 2, 2, seed=1)
    w[1] = math.inf
    geometry = Geometry.of((4, 5), (2, 2), (1, 1), ((0, 0), (0, 0)), (1, 1))
    y = by_fft(conv.channels_last(x), conv.channels_last(w), geometry, points=16)
    assert not y[..., 1].isfinite().any()
    exact = F.conv2d(x.double(), w[:1].double())[:, 0]  # a GPU may take TF32 for float32
    torch.testing.assert_close(y[..., 0].double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("points", fft.POINTS)
def test_accuracy_is_that_of_float32(points):
    """The bound has all roundings conspire. They do not, and leave 2^-22; one product in TF32 would leave 2^-12."""
    x, w = normal(2, 24, 24, 4), normal(4, 5, 5, 4, seed=1)
    y = by_fft(x, w, Geometry.of((24, 24), (5, 5), (1, 1), ((2, 2), (2, 2)), (1, 1)), points=points)
    exact = F.conv2d(x.permute(0, 3, 1, 2).double(), w.permute(0, 3, 1, 2).double(), padding=2).permute(0, 2, 3, 1)
    assert (y.double() - exact).norm() <= 2.0**-17 * exact.norm()


def tiles_of_tables():
    seen = set()
    for family in ("conv_fft", "conv_fft_product"):
        for name in launch.table(family) if launch.INTERPRETED else [launch.target()]:
            for tile in launch.tiles(family, name):
                key = (family, str(tile.sizes if launch.INTERPRETED else tile))
                if key not in seen:
                    seen.add(key)
                    yield pytest.param(family, tile, id=f"{family}-{tile}".replace(" ", ","))


@pytest.mark.parametrize(("family", "tile"), list(tiles_of_tables()))
def test_every_tile(family, tile):
    with launch.force(**{family: tile}):
        # Two or three tiles along every axis.
        if family == "conv_fft":
            check(1, 1, 1, (7, 6), (3, 4), (1, 2))
            check(33, 2, 2, (12, 20), (3, 3), (1, 1))
        else:
            check(30, 20, 36, (13, 40), (2, 1), (0, 0), dtype=torch.float16)


def test_epilogue_and_gradient_through_the_engine():
    x, w = normal(2, 3, 13, 12), normal(4, 3, 5, 4, seed=1)
    scale, bias, dy = normal(4, seed=2), normal(4, seed=3), normal(2, 4, 11, 15, seed=4)
    geometry = Geometry.of((13, 12), (5, 4), (1, 1), ((1, 1), (3, 3)), (1, 1))
    y, z = conv.forward(x, w, geometry, bias, "gelu", scale=scale, preactivation=True, form="fft")
    channel = (slice(None), None, None)
    expected = F.conv2d(x.double(), w.double(), padding=(1, 3)) * scale.double()[channel] + bias.double()[channel]
    torch.testing.assert_close(z.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(y.double(), F.gelu(expected), rtol=0, atol=1e-4)
    dx = F.conv_transpose2d(dy.double(), w.double(), padding=(1, 3))
    torch.testing.assert_close(conv.grad_input(dy, w, geometry, form="fft").double(), dx, rtol=0, atol=1e-4)


def test_passes_over_the_images(monkeypatch):
    x, w = conv.channels_last(normal(5, 2, 14, 9)), conv.channels_last(normal(3, 2, 3, 3, seed=1))
    geometry = Geometry.of((14, 9), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    tile = launch.Tile({"BLOCK_V": 2048})
    with launch.force(conv_fft=tile):
        y = by_fft(x, w, geometry, points=16)
        assert torch.equal(y, by_fft(x, w, geometry, points=16))
        monkeypatch.setattr(fft, "WORKSPACE", 2**14)
        passes = by_fft(x, w, geometry, points=16)
        assert torch.equal(passes, by_fft(x, w, geometry, points=16))
    torch.testing.assert_close(passes, y, rtol=0, atol=1e-4)


def test_memory_that_is_not_written_is_not_read():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN
    try:
        assert torch.empty(3).isnan().all()
        check(3, 3, 5, (17, 20), (10, 3), (2, 1))
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def test_what_is_not_finite_stays_in_its_tile():
    x, w = normal(2, 2, 20, 40), normal(3, 2, 5, 5, seed=1)
    geometry = Geometry.of((20, 40), (5, 5), (1, 1), ((0, 0), (0, 0)), (1, 1))
    cut = fft.cheapest((16, 36), (5, 5), 2, 3, 16)
    x_last, w_last = conv.channels_last(x).clone(), conv.channels_last(w)
    before = by_fft(x_last, w_last, geometry, points=16)
    x_last[0, 0, 1, 0] = math.inf
    after = by_fft(x_last, w_last, geometry, points=16)
    assert not after[0, : cut.h.step, : cut.w.step].isfinite().any()
    after[0, : cut.h.step, : cut.w.step] = before[0, : cut.h.step, : cut.w.step]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)


def test_it_is_not_chosen_and_refuses_what_it_cannot_take():
    x, w = normal(1, 2, 9, 9), normal(3, 2, 3, 3)
    strided = Geometry.of((9, 9), (3, 3), (2, 1), ((0, 0), (0, 0)), (1, 1))
    with pytest.raises(conv.UnableError, match="the fft form does not support this shape"):
        conv.forward(x, w, strided, form="fft")
    plain = Geometry.of((9, 9), (3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1))
    with pytest.raises(ValueError, match="tiles of 64 points"):
        by_fft(conv.channels_last(x), conv.channels_last(w), plain, points=64)
    with pytest.raises(conv.UnableError):
        conv.forward(x.double(), w.double(), plain, form="fft")
    problem = Problem(
        FORWARD, plain, 1, 2, 3, x.dtype, launch.precision(x.dtype), target=launch.target(),
        processors=launch.processors(),
    )  # fmt: skip
    assert plan.plan(problem).name != "fft"
    empty, _ = conv.forward(x[:0], w, plain, form="fft")
    assert empty.shape == (0, 3, 7, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("compute", [conv.forward, conv.grad_input])
def test_spectra_follow_the_float32_precision_that_is_set(compute, dtype):
    x, w = normal(1, 2, 8, 8, dtype=dtype), normal(2, 2, 3, 3, dtype=dtype)
    geometry = Geometry.of((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    for name in launch.PRECISIONS:
        used = []

        def note(kernel, grid, args, meta, go, used=used):
            used.append(meta.get("PRECISION"))
            go()

        with launch.in_precision(name), launch.watch(note):
            compute(x, w, geometry, form="fft")
        assert {*used} - {None} == {name}
