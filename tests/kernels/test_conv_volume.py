"""Convolutions of volumes: whole numbers in both forms, tiles, sums that are never rounded between slices, views."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minidl.kernels.conv import (
    depthwise,
    even_parts,
    narrow,
    narrow_grad_weight,
    stacks,
    volume,
    voxels,
)
from minidl.kernels.conv.geometry import Axis, Geometry, Volume
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing.memory import GuardedAllocations

FORMS = ("cube", "unfold", "stack", None)


def whole(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype).to(default_device())


class Problem:
    """A convolution of whole numbers, which are exact in float32, with its float64 reference."""

    def __init__(self, N, C, M, size, kernel, stride, padding, dilation, groups=1, dtype=torch.float32, seed=0):
        axes = (
            Axis.of("conv3d", "depth", n, k, s, (p, p), d)
            for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
        )
        d, h, w = axes
        self.volume = Volume(d, Geometry(h, w, groups))
        self.x = whole(N, groups * C, *size, seed=seed, dtype=dtype)
        self.w = whole(groups * M, C, *kernel, seed=seed + 1, dtype=dtype)
        self.bias, self.scale = (whole(groups * M, seed=seed + i, dtype=dtype) for i in (2, 3))
        x, w_ = (t.double().requires_grad_() for t in (self.x, self.w))
        y = F.conv3d(x, w_, None, stride, padding, dilation, groups)
        self.dy = whole(*y.shape, seed=seed + 4, dtype=dtype)
        self.dx, self.dw = torch.autograd.grad(y, (x, w_), self.dy.double())
        of_channel = (slice(None), None, None, None)
        self.z = y.detach() * self.scale.double()[of_channel] + self.bias.double()[of_channel]
        self.vectors = tuple(whole(groups * C, seed=seed + i, dtype=dtype) for i in (5, 6))
        self.back = self.dx * self.vectors[1].double()[of_channel] + self.vectors[0].double()[of_channel]

    def check(self, *forms):
        for form in forms:
            y, z = volume.forward(
                self.x, self.w, self.volume, self.bias, "relu", scale=self.scale, preactivation=True, form=form
            )
            assert torch.equal(y, self.z.relu().to(y.dtype)), form
            assert torch.equal(z, self.z.to(z.dtype)), form
            assert y.is_contiguous(memory_format=torch.channels_last_3d)
            dx = volume.grad_input(self.dy, self.w, self.volume, form=form)
            assert torch.equal(dx, self.dx.to(dx.dtype)), form
            bias, scale = self.vectors
            y, z = volume.transposed(
                self.dy, self.w, self.volume, bias, "relu", scale=scale, preactivation=True, form=form
            )
            assert torch.equal(y, self.back.relu().to(y.dtype)), form
            assert torch.equal(z, self.back.to(z.dtype)), form
            dw = volume.grad_weight(self.x, self.dy, self.volume, form=form)
            assert torch.equal(dw, self.dw.to(dw.dtype)), form


@st.composite
def problems(draw):
    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(3))

    kernel, stride, dilation, padding = each(1, 3), each(1, 3), each(1, 2), each(0, 2)
    size = draw(st.tuples(*[st.sampled_from([1, 2, 3, 4, 6])] * 3))
    for n, k, p, d in zip(size, kernel, padding, dilation, strict=True):
        assume(n + 2 * p >= d * (k - 1) + 1)
    C, M = draw(st.sampled_from([32, 32, 3, 1])), draw(st.sampled_from([32, 32, 5, 1]))
    return draw(st.integers(1, 2)), C, M, size, kernel, stride, padding, dilation, draw(st.sampled_from([1, 1, 2]))


@settings(max_examples=max(2, settings.default.max_examples // 2))
@given(problems(), st.sampled_from([torch.float32, torch.float16, torch.float64]), st.integers(0, 9))
def test_every_form_gives_the_same_integers(shape, dtype, seed):
    Problem(*shape, dtype=dtype, seed=seed).check(*FORMS)


SMALL = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "PIECES": 1, "FLATTEN": 0}


@pytest.mark.parametrize("per_processor", [0, 2])
def test_more_than_a_tile_along_every_axis(per_processor):
    """With strides of 1, and with others, of which slices have whole ones and a tile one slice."""
    shapes = (
        (2, 64, 40, (3, 5, 6), (3, 2, 3), (1, 1, 1), (1, 1, 0), (1, 2, 1), 2),
        (2, 32, 40, (5, 12, 16), (3, 3, 2), (2, 2, 1), (1, 1, 1), (1, 1, 1), 1),
        (2, 32, 24, (4, 9, 8), (3, 2, 3), (1, 3, 2), (1, 4, 2), (2, 1, 1), 2),
        # Channels that end within a block, forward and back; backward phases without taps, with a common divisor.
        (1, 72, 80, (3, 4, 6), (3, 2, 3), (1, 1, 1), (1, 1, 0), (1, 1, 1), 1),
        (1, 32, 64, (6, 8, 8), (2, 3, 3), (3, 2, 2), (0, 1, 2), (1, 2, 1), 1),
        (2, 32, 32, (7, 6, 6), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), 2),
        # One tap in depth, with padding there: what is beyond a volume is not its neighbour.
        (2, 32, 8, (2, 4, 4), (1, 3, 3), (1, 2, 2), (1, 1, 1), (1, 1, 1), 1),
    )
    for shape in shapes:
        with launch.force(conv_box=launch.Tile({**SMALL, "PER_PROCESSOR": per_processor})):
            p = Problem(*shape)
            problem = volume.problem_of(FORWARD, p.x, p.w, p.volume)
            assert volume.forms(problem) == ("cube", "stack")
            p.check("cube")


@pytest.mark.parametrize(
    "shape",
    [
        # Boxes of two volumes, the last of which has one, and of two slices.
        (5, 32, 24, (6, 3, 2), (2, 2, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1),
        # Two boxes of a row, where a stride leaves every other column.
        (1, 32, 24, (1, 1, 64), (1, 1, 3), (1, 1, 2), (0, 0, 1), (1, 1, 1), 1),
        # Backward, the last row and the last column belong to the first phase only.
        (1, 32, 32, (3, 3, 3), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), 1),
    ],
)
def test_boxes_that_end_beyond_what_is_there(shape):
    tiles = {
        "conv_box": launch.Tile({**SMALL, "BLOCK_N": 16, "PER_PROCESSOR": 0}),
        "conv_box_grad_weight": launch.Tile(
            {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "TAPS": 1, "PER_PROCESSOR": 1}
        ),
    }
    p = Problem(*shape, dtype=torch.float16)
    with launch.force(**tiles), GuardedAllocations():
        p.check("cube")


def test_one_channel_more_than_a_tile_of_voxels_has():
    p = Problem(1, 32, 33, (2, 2, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1))
    with launch.force(conv_box=launch.Tile({**SMALL, "PER_PROCESSOR": 0})), GuardedAllocations():
        y, z = volume.forward(p.x, p.w, p.volume, p.bias, scale=p.scale, preactivation=True, form="cube")
    assert torch.equal(y, p.z.to(y.dtype))
    assert torch.equal(z, p.z.to(y.dtype))


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("whole_tiles", [False, True])
def test_gradients_of_weights_in_boxes(whole_tiles, taps, monkeypatch):
    """A program for each tile or equal parts, of one tap or of a row of them."""
    tile = launch.Tile({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "TAPS": taps, "PER_PROCESSOR": 1})
    monkeypatch.setattr(launch, "processors", lambda: 7)
    in_line = even_parts.in_line

    def cut(*args):
        line = in_line(*args)
        return line._replace(each=line.boxes + even_parts.PAUSE) if whole_tiles else line

    monkeypatch.setattr(even_parts, "in_line", cut)
    for shape in (
        (3, 40, 24, (3, 5, 6), (3, 2, 3), (1, 1, 1), (1, 1, 0), (1, 2, 1), 1),
        (2, 16, 40, (4, 3, 5), (2, 3, 3), (1, 1, 1), (0, 2, 1), (1, 1, 1), 2),
        # One output along an axis, whose stride is none.
        (1, 16, 8, (2, 4, 4), (3, 1, 3), (3, 1, 1), (1, 0, 1), (1, 1, 1), 1),
        (2, 16, 24, (3, 4, 5), (3, 3, 3), (2, 1, 4), (0, 1, 0), (1, 1, 1), 1),
    ):
        p = Problem(*shape, dtype=torch.float16)
        with launch.force(conv_box_grad_weight=tile), GuardedAllocations() as guards:
            got = volume.grad_weight(p.x, p.dy, p.volume, form="cube")
        assert torch.equal(got, p.dw.to(got.dtype))
        guards.check()


def test_a_tile_with_more_slots_than_are_read_at_once(monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda: 132)
    monkeypatch.setattr(even_parts, "LEAST", 1)
    tile = launch.Tile({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "TAPS": 1, "PER_PROCESSOR": 1})
    p = Problem(1, 32, 32, (4, 8, 9), (1, 1, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1), dtype=torch.float16)
    x, dy = (t.movedim(1, -1).contiguous() for t in (p.x, p.dy))
    with launch.force(conv_box_grad_weight=tile):
        plan = volume.plan(volume.problem_of(GRAD_WEIGHT, x, dy, p.volume, "cube"))
        assert plan.prepared.number > even_parts.TOGETHER.value + 1
        assert torch.equal(plan.run(x, dy)[0].movedim(-1, 1), p.dw.half())


@pytest.mark.parametrize("tile", [(16, 16), (64, 1), (1, 64)])
def test_slices_side_by_side_in_any_tile(tile):
    with launch.force(conv_fill=launch.Tile({"BLOCK_M": tile[0], "BLOCK_N": tile[1]})):
        for groups in (1, 3):
            Problem(2, 5, 4, (4, 5, 3), (3, 1, 2), (2, 1, 1), (2, 0, 1), (1, 1, 1), groups).check("stack")


@pytest.mark.parametrize("form", ["cube", "stack"])
def test_slices_are_one_sum(form):
    """2048 + 1 - 2048 is 0 where float16 holds the sum in between."""
    x = torch.zeros(1, 32, 3, 2, 2, dtype=torch.float16)
    x[:, 0, 0], x[:, 0, 1], x[:, 0, 2] = 2048, 1, -2048
    x, w = x.to(default_device()), torch.ones(32, 32, 3, 1, 2, dtype=torch.float16).to(default_device())
    w[..., 1:] = 0
    at = Volume(
        Axis.of("conv3d", "depth", 3, 3, 1, (0, 0), 1), Geometry(Axis(2, 1, 2, 1, 0, 1), Axis(2, 2, 1, 1, 0, 1))
    )
    assert (volume.forward(x, w, at, form=form)[0] == 1).all()
    dy = torch.zeros(1, 32, 3, 2, 1, dtype=torch.float16)
    dy[:, 0] = x[:, 0, ..., :1].cpu()
    at = at._replace(d=Axis.of("conv3d", "depth", 5, 3, 1, (0, 0), 1))
    assert (volume.grad_input(dy.to(default_device()), w, at, form=form)[:, 0, 2, :, 0] == 1).all()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(2, 4), (8, 2)])
def test_slices_side_by_side_in_more_than_a_tile(rows, columns, wide, monkeypatch):
    if wide:
        monkeypatch.setattr(stacks, "INT32_LIMIT", 1)
    tile = launch.Tile({"BLOCK_M": rows, "BLOCK_N": columns}, 4, 3)
    with launch.force(conv_fill=tile):  # nothing that was made before is used in it or after it
        Problem(2, 5, 3, (5, 4, 3), (3, 2, 2), (2, 1, 1), (1, 0, 1), (1, 1, 1), 2).check("stack")


@pytest.mark.parametrize(
    ("kernel", "stride", "copies"),
    [((1, 3, 3), (1, 2, 1), 0), ((3, 1, 1), (2, 1, 1), 0), ((1, 1, 1), (1, 1, 1), 0), ((1, 3, 3), (2, 1, 1), 1)],
)
def test_slices_and_columns_are_views(kernel, stride, copies):
    padding = tuple(k // 2 for k in kernel)
    p = Problem(2, 16, 8, (5, 4, 6), kernel, stride, padding, (1, 1, 1))
    launched = []

    def watcher(kernel, grid, args, meta, go):
        launched.append(kernel)
        go()

    with launch.watch(watcher):
        volume.forward(p.x, p.w, p.volume)
    assert launched.count(stacks.conv_stack_kernel) == copies
    p.check(None)


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "stride", "padding", "dilation"),
    [
        ((1, 1), (5, 6, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        ((1, 1), (7, 5, 8), (3, 2, 3), (2, 2, 1), (1, 0, 1), (1, 1, 2)),
        ((1, 1), (9, 4, 5), (5, 3, 3), (3, 1, 2), (2, 1, 1), (2, 1, 1)),
        ((1, 1), (6, 5, 5), (2, 3, 3), (4, 1, 1), (0, 1, 1), (1, 1, 1)),
        ((1, 2), (5, 5, 6), (3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1)),
        ((2, 1), (4, 5, 6), (3, 1, 3), (2, 1, 1), (1, 0, 1), (1, 1, 1)),
        ((1, 1), (6, 5, 4), (1, 3, 3), (2, 1, 1), (0, 1, 1), (1, 1, 1)),
    ],
)
def test_a_group_for_each_channel_copies_nothing(channels, size, kernel, stride, padding, dilation):
    """Slices outside, backward phases in depth without taps, several outputs or inputs to a group."""
    launched = []

    def watcher(kernel, grid, args, meta, go):
        launched.append(kernel)
        go()

    for dtype in (torch.float16, torch.float32):
        with launch.watch(watcher):
            Problem(2, *channels, size, kernel, stride, padding, dilation, 6, dtype).check(None)
    assert stacks.conv_stack_kernel not in launched
    assert depthwise.conv_depthwise_kernel in launched


@pytest.mark.parametrize(("kernel", "padding"), [((3, 3, 2), (1, 1, 0)), ((2, 4, 3), (1, 1, 1))])
def test_a_group_for_each_channel_in_parts_of_the_taps(kernel, padding, monkeypatch):
    """Of the rows of each slice, forward and back; of the weight gradient in blocks of channels and columns, too."""
    for module in (narrow, narrow_grad_weight):
        monkeypatch.setattr(module, "MOST_ROWS", 2)
    sizes = {
        "BLOCK_R": 2, "BLOCK_W": 1, "BLOCK_P": 16, "BLOCK_C": 4, "SUMS": 4, "PER_PROCESSOR": 1, "OUTPUTS": 32,
    }  # fmt: skip
    with launch.force(conv_depthwise_grad_weight=launch.Tile(sizes)), GuardedAllocations():
        Problem(2, 1, 1, (3, 4, 5), kernel, (1, 1, 1), padding, (1, 1, 1), 6).check(None)


@pytest.mark.parametrize("stride", [(2, 2, 2), (1, 2, 3), (3, 1, 1)])
def test_one_voxel_of_several(stride):
    """1x1x1 with strides: every other voxel is neither read nor written."""
    memories = torch.contiguous_format, torch.channels_last_3d
    for C, groups, memory in ((16, 2, memories[0]), (32, 2, memories[1]), (40, 1, memories[1])):
        p = Problem(2, C, 8, (6, 4, 6), (1, 1, 1), stride, (0, 0, 0), (1, 1, 1), groups)
        p.x = p.x.contiguous(memory_format=memory)
        p.check(None)
        read = torch.zeros(6, 4, 6, dtype=torch.bool)
        read[:: stride[0], :: stride[1], :: stride[2]] = True
        p.x[:, :, ~read] = torch.nan
        p.check(None)


def test_a_gradient_of_no_voxels():
    axis, none = Axis.of("conv3d", "depth", 6, 3, 1, (1, 1), 1), Axis(0, 3, 0, 1, 1, 1)
    dx = volume.grad_input(torch.zeros(2, 8, 6, 0, 6), torch.zeros(8, 4, 3, 3, 3), Volume(axis, Geometry(none, axis)))
    assert list(dx.shape) == [2, 4, 6, 0, 6]


def test_what_is_not_finite_stays_with_its_neighbours():
    x, w = whole(1, 32, 6, 6, 6), whole(32, 32, 3, 3, 3, seed=1)
    axis = Axis.of("conv3d", "depth", 6, 3, 1, (1, 1), 1)
    at = Volume(axis, Geometry(axis, axis))
    expected, _ = volume.forward(x, w, at, form="cube")
    x[:, 5, 2, 3, 1] = torch.nan
    got, _ = volume.forward(x, w, at, form="cube")
    touched = torch.zeros(6, 6, 6, dtype=torch.bool)
    touched[1:4, 2:5, 0:3] = True
    assert got[:, :, touched].isnan().all()
    assert torch.equal(got[:, :, ~touched], expected[:, :, ~touched])


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 16, 56, 56), (3, 5, 7, 9), (1, 1, 2, 1000), (300, 1, 1, 2)])
def test_shape_of_cube(sizes):
    """Powers of two with the product asked for; no other such box needs fewer of them."""

    def number(box):
        return math.prod(-(-size // extent) for size, extent in zip(sizes, box, strict=True))

    box = voxels.cube_shape(sizes, 128)
    others = [other for other in itertools.product([2**i for i in range(8)], repeat=4) if math.prod(other) == 128]
    assert box in others
    assert number(box) == min(map(number, others))


@pytest.mark.parametrize("kernel", [(3, 3, 3), (3, 1, 1), (1, 3, 3)])
def test_no_volumes_and_no_channels(kernel):
    padding = tuple(k // 2 for k in kernel)
    Problem(0, 3, 4, (3, 4, 5), kernel, (1, 1, 1), padding, (1, 1, 1)).check(None)
    at = Problem(2, 1, 4, (3, 4, 5), kernel, (1, 1, 1), padding, (1, 1, 1)).volume
    x, w, bias = whole(2, 0, 3, 4, 5), whole(4, 0, *kernel), whole(4)
    y, _ = volume.forward(x, w, at, bias)
    assert torch.equal(y, bias[:, None, None, None].expand(2, 4, 3, 4, 5))
    assert volume.grad_input(y, w, at).shape == x.shape
    assert volume.grad_weight(x, y, at).shape == w.shape
