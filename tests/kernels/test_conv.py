"""Convolutions: laws that hold exactly on whole numbers, every form on every shape it takes, every tile, refusals."""

import contextlib
import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minidl.kernels import conv
from minidl.kernels.conv import (
    banded,
    banded_grad_weight,
    batch_grad_weight,
    batch_tiled,
    boxed,
    depthwise,
    depthwise_grad_weight,
    forms,
    narrow,
    paired_box,
    phase_weights,
    pixel_choice,
    pixel_grad_weight,
    pixel_tiled,
    plan,
    product,
    unfolded_grad_weight,
)
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.pixel_boxes import shape_of_box
from minidl.kernels.conv.pixel_steps import pixel
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, Unsupported
from minidl.kernels.conv.problem import Problem as Described
from minidl.kernels.conv.rewrites import parts
from minidl.kernels.conv.rewrites.fill import Fill
from minidl.kernels.conv.rewrites.parts import Sum
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing.memory import GuardedAllocations
from tests.launches import replace_run

pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
# The FFT's results are not whole numbers: test_conv_fft.py has its bound. Few outputs have a way back only:
# test_conv_few.py. Products are for kernels of 1x1 and without a scale: test_conv_product.py.
OTHERS = "unfolded", "fft", "few", "product", "columns"
FORMS = pytest.mark.parametrize("form", [form for form in conv.FORMS if form not in OTHERS])
# A shape each form takes: (N, C, M, (H, W), kernel, stride, padding, dilation, groups).
SHAPES = {
    "pixel": (2, 5, 7, (9, 8), (3, 2), (2, 1), (1, 2), (1, 2), 2),
    "batch": (3, 32, 24, (6, 7), (3, 3), (1, 2), (1, 1), (1, 1), 1),
    "box": (3, 32, 32, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "split": (3, 32, 32, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "pair": (3, 32, 24, (6, 8), (3, 5), (1, 1), (1, 2), (1, 1), 1),
    "banded": (2, 3, 6, (8, 19), (3, 5), (2, 1), (1, 2), (1, 1), 1),
    "depthwise": (3, 1, 2, (9, 8), (3, 2), (2, 1), (1, 2), (1, 2), 5),
    "fill": (2, 21, 7, (9, 8), (3, 2), (2, 1), (1, 2), (1, 2), 2),
    "taps": (2, 21, 7, (9, 8), (3, 2), (1, 1), (1, 2), (1, 2), 1),
    "unshuffle": (2, 3, 7, (9, 8), (5, 3), (2, 2), (1, 2), (1, 1), 1),
}


def only(form):
    """A context in which no other form of its name is taken for what it is for, whatever is estimated."""
    others = (o for o in forms.FORMS if o.NAME == form.NAME and set(o.DIRECTIONS) & set(form.DIRECTIONS))
    return forms.among(form, *(set(forms.FORMS) - set(others)))


@pytest.fixture
def monkeypatch(monkeypatch):
    """pytest's; no plan or replay that was made before a change is used after it."""
    change = monkeypatch.setattr

    def setattr(*args, **more):
        change(*args, **more)
        launch.forget()

    monkeypatch.setattr = setattr
    yield monkeypatch
    del monkeypatch.setattr
    monkeypatch.undo()
    launch.forget()


def whole(*shape, seed=0, dtype=torch.float32, low=-3, high=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype).to(default_device())


class Problem:
    """A convolution of whole numbers with its float64 reference."""

    def __init__(self, shape, seed=0, dtype=torch.float32):
        N, C, M, size, kernel, stride, padding, dilation, groups = shape
        self.geometry = Geometry.of(size, kernel, stride, tuple((p, p) for p in padding), dilation, groups)
        self.how = stride, padding, dilation, groups
        self.x = whole(N, groups * C, *size, seed=seed, dtype=dtype)
        self.w = whole(groups * M, C, *kernel, seed=seed + 1, dtype=dtype)
        self.bias = whole(groups * M, seed=seed + 2, dtype=dtype)
        self.scale = whole(groups * M, seed=seed + 3, dtype=dtype)
        self.dy = whole(N, groups * M, self.geometry.h.output, self.geometry.w.output, seed=seed + 4, dtype=dtype)
        x, w = self.x.double().requires_grad_(), self.w.double().requires_grad_()
        self.y = F.conv2d(x, w, None, *self.how)
        self.dx, self.dw = torch.autograd.grad(self.y, (x, w), self.dy.double())
        self.y = self.y.detach()
        self.added = whole(*self.y.shape, seed=seed + 5, dtype=dtype)

    def check(self, form=None, which=lambda name: True):
        """The names of what the form could do, of those that `which` chooses; all of it exact."""
        done = []
        channel = (slice(None), None, None)
        z = self.y * self.scale.double()[channel] + self.bias.double()[channel]
        calls = {
            "forward": (self.y, lambda: conv.forward(self.x, self.w, self.geometry, form=form)[0]),
            "epilogue": (
                z.relu(),
                lambda: conv.forward(self.x, self.w, self.geometry, self.bias, "relu", scale=self.scale, form=form)[0],
            ),
            "preactivation": (
                z,
                lambda: conv.forward(
                    self.x, self.w, self.geometry, self.bias, "relu", scale=self.scale, preactivation=True, form=form
                )[1],
            ),
            "sum": (
                (self.rounded_where_apart(z, form, added=True) + self.added.double()).relu(),
                lambda: conv.forward(
                    self.x, self.w, self.geometry, self.bias, "relu", scale=self.scale, added=self.added, form=form
                )[0],
            ),
            "grad_input": (self.dx, lambda: conv.grad_input(self.dy, self.w, self.geometry, form=form)),
            "grad_input, weights channels-last": (
                self.dx,
                lambda: conv.grad_input(
                    self.dy, self.w.to(memory_format=torch.channels_last), self.geometry, form=form
                ),
            ),
            "grad_weight": (self.dw, lambda: conv.grad_weight(self.x, self.dy, self.geometry, form=form)),
        }
        if min(self.y.shape[2:]) > 1:
            unpooled = self.rounded_where_apart(z.relu(), form, pool="max")
            for pool, function in (("max", F.max_pool2d), ("avg", F.avg_pool2d)):
                calls[pool] = (
                    function(unpooled, 2),
                    lambda pool=pool: conv.forward(
                        self.x, self.w, self.geometry, self.bias, "relu", scale=self.scale, pool=pool, form=form
                    )[0],
                )
        for name, (expected, call) in calls.items():
            if not which(name):
                continue
            try:
                got = call()
            except conv.UnableError:
                continue
            assert got.shape == expected.shape
            assert torch.equal(got, expected.to(got.dtype)), f"{name} in form {form}"
            done.append(name)
        return done

    def described(self, direction=FORWARD, **more):
        """The problem that the launchers make of it."""
        groups = self.geometry.groups
        return Described(
            direction, self.geometry, len(self.x), self.x.shape[1] // groups, len(self.w) // groups, self.x.dtype,
            launch.precision(self.x.dtype), target=launch.target(), processors=launch.processors(), **more,
        )  # fmt: skip

    def rounded_where_apart(self, x, form, **more):
        """x, rounded where a pool or a sum is a launch after the convolution."""
        try:
            found = plan.plan(self.described(bias=True, scale=True, act="relu", form=form, **more))
        except conv.UnableError:
            return x
        return x.to(self.x.dtype).double() if isinstance(found, plan.RewritePlan) and not found.rewrite.name else x


@st.composite
def shapes(draw):
    """Batch 1 to 3, one channel and odd ones, strides that leave a rest, kernels beyond the image."""
    kernel, stride = (draw(st.integers(1, 5)), draw(st.integers(1, 5))), draw(pair)
    padding = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    dilation = draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2]))
    size = draw(st.integers(1, 13)), draw(st.integers(1, 19))
    assume(all(s + 2 * p > d * (k - 1) for s, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    C, M = draw(st.sampled_from([1, 3, 13, 16, 32])), draw(st.sampled_from([1, 4, 8, 12, 16, 20]))
    return draw(st.integers(1, 3)), C, M, size, kernel, stride, padding, dilation, draw(st.sampled_from([1, 1, 2]))


@FORMS
@given(shape=shapes(), seed=st.integers(0, 9))
def test_every_form_gives_the_same_integers(form, shape, seed):
    Problem(shape, seed).check(form)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_each_form_does_all_that_it_is_for(form, dtype):
    if form == "split" and dtype != torch.float32:
        pytest.skip("float32 alone has two parts")
    done = Problem(SHAPES[form], dtype=dtype).check(form)
    assert {"forward", "epilogue", "preactivation"} <= set(done)
    assert "grad_input" in done or form in ("banded", "batch", "pair", "unshuffle")
    assert "grad_weight" in done or form in ("box", "pair", "taps", "unshuffle")
    assert "max" in done or form != "pixel"


@pytest.mark.parametrize("padding", range(4))
def test_strides_side_by_side_begin_where_padding_ends(padding):
    """With an even padding the weights have no rows and columns of zeros before them."""
    p = Problem((1, 3, 4, (7, 8), (4, 4), (2, 2), (padding, padding), (1, 1), 1))
    assert p.check("unshuffle", lambda name: name == "forward") == ["forward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kernel", "padding"), [((3, 3), (1, 1)), ((1, 7), (0, 3)), ((2, 3), (1, 0))])
def test_pairs_of_pixels_in_boxes(kernel, padding, dtype):
    """Columns of a pair that begin in its first and in its second half."""
    p = Problem((2, 32, 7, (5, 8), kernel, (1, 1), padding, (1, 1), 1), dtype=dtype)
    assert {"forward", "epilogue", "preactivation"} <= set(p.check("pair"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(2, 4, 8, (12, 18), (6, 6)), (1, 1, 40, (10, 8), (5, 8)), (3, 8, 16, (6, 3), (2, 1)), (3, 40, 8, (2, 4), (2, 2))],
)
def test_patches_side_by_side_are_a_product_on_the_way_back(shape, dtype):
    if dtype == torch.float32 and not launch.INTERPRETED:
        pytest.skip("tensor cores take no float32 that does not lie along the rows")
    *sizes, size, kernel = shape
    p = Problem((*sizes, size, kernel, kernel, (0, 0), (1, 1), 1), dtype=dtype)
    w = p.w.to(memory_format=torch.channels_last)
    assert torch.equal(conv.grad_input(p.dy, w, p.geometry, form="product"), p.dx.to(dtype))
    bias = whole(sizes[1], dtype=dtype)
    y, _ = conv.transposed(p.dy, w, p.geometry, form="product", batch_invariant=True)
    assert torch.equal(y, p.dx.to(dtype))
    y, z = conv.transposed(p.dy, w, p.geometry, bias, "relu", preactivation=True, form="product")
    expected = p.dx + bias.double().view(-1, 1, 1)
    assert torch.equal(z, expected.to(dtype))
    assert torch.equal(y, expected.relu().to(dtype))


@given(shape=shapes(), seed=st.integers(0, 9))
def test_adjoint(shape, seed):
    """<conv(x, w), y> = <x, conv_transposed(y, w)> = <w, grad_weight(x, y)>."""
    p = Problem(shape, seed)
    y, _ = conv.forward(p.x, p.w, p.geometry)
    through_y = (y.double() * p.dy.double()).sum()
    assert through_y == (p.x.double() * conv.grad_input(p.dy, p.w, p.geometry).double()).sum()
    assert through_y == (p.w.double() * conv.grad_weight(p.x, p.dy, p.geometry).double()).sum()


@FORMS
@pytest.mark.parametrize("C", [1, 3, 16, 32])
def test_a_delta_filter_returns_the_input(form, C):
    x = whole(2, C, 7, 18)
    w = torch.zeros(C, C, 3, 3, device=x.device)
    w[:, :, 1, 1] = torch.eye(C)
    geometry = Geometry.of((7, 18), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    try:
        y, _ = conv.forward(x, w, geometry, form=form)
    except conv.UnableError:
        pytest.skip(f"the {form} form does not take {C} channels")
    assert torch.equal(y, x)
    if form != "unshuffle":
        assert torch.equal(conv.grad_input(y, w, geometry, form=form), x)


SMALL = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "PER_PROCESSOR": 0, "FLATTEN": 0, "PIECES": 1}
LOW = {"BLOCK_M": 16, "BLOCK_K": 32, "DOUBLE": 0}
SMALL_GRAD = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "PER_PROCESSOR": 1}


@pytest.mark.parametrize(
    ("form", "family", "sizes", "shape"),
    [
        ("box", "conv_box", {"PIECES": 2}, (3, 64, 96, (6, 7), (2, 3), (1, 1), (1, 1), (1, 1), 1)),
        ("box", "conv_box", {"PER_PROCESSOR": 1, "PIECES": 2}, (3, 32, 96, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1), 2)),
        # Boxes of 4 rows: the fifth down an image has one.
        ("box", "conv_box", {}, (2, 32, 32, (17, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1)),
        # Rows far apart, from one block of channels to the next; pairs of columns in two boxes.
        ("box", "conv_box", {}, (2, 32, 32, (5, 4), (3, 1), (1, 1), (2, 0), (2, 1), 1)),
        ("pair", "conv_box", {"BLOCK_N": 16}, (1, 32, 32, (1, 64), (1, 3), (1, 1), (0, 1), (1, 1), 1)),
        ("batch", "conv_batch", {"DOUBLE": 0}, (2, 64, 96, (5, 4), (3, 3), (1, 1), (2, 2), (1, 1), 1)),
        ("batch", "conv_batch", {"DOUBLE": 0}, (2, 32, 96, (5, 6), (3, 2), (1, 1), (3, 2), (2, 2), 2)),
        # More images than a tile has.
        ("batch", "conv_batch", {"DOUBLE": 0}, (67, 32, 96, (4, 7), (2, 3), (1, 1), (0, 0), (1, 1), 2)),
        # Three runs of images; the first column is read by the second tap.
        ("batch", "conv_batch", LOW, (35, 32, 32, (1, 1), (1, 2), (1, 1), (0, 2), (1, 2), 1)),
    ],
)
def test_more_than_a_tile_of_channels_and_images(form, family, sizes, shape):
    tiles = {family: launch.Tile({**SMALL, **sizes}, 8, 3), "conv_reorder": launch.Tile({"BLOCK_M": 32, "BLOCK_N": 64})}
    with launch.force(**tiles):
        wanted = {"forward", "epilogue", "grad_input"}
        assert wanted == set(Problem(shape).check(form, lambda name: name in wanted))


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("padding", [1, 2, 3])
def test_more_than_a_tile_of_channels_in_the_weight_gradient(padding, taps):
    """With the padding of 2 the last of three taps begins at the first pixel, with that of 3 before it."""
    shape = (17, 32, 48, (5, 6), (2, 3), (1, 1), (1, padding), (1, 1), 2)
    tile = launch.Tile({**SMALL_GRAD, "TAPS": taps}, 4, 3)
    with launch.force(conv_batch_grad_weight=tile):
        assert Problem(shape).check("batch", lambda name: name == "grad_weight") == ["grad_weight"]


def test_three_taps_of_a_row_that_lie_apart_in_the_weight_gradient():
    p = Problem((3, 32, 32, (2, 7), (1, 3), (1, 1), (0, 2), (1, 2), 1))
    with launch.force(conv_batch_grad_weight=launch.Tile({**SMALL_GRAD, "TAPS": 3}, 4, 3)):
        assert p.check("batch", lambda name: name == "grad_weight")


@pytest.mark.parametrize("form", ["pixel", "banded", "box"])
def test_positions_counted_in_64_bits(form, monkeypatch):
    """As where there are 2^31 of them."""
    for module in (pixel_choice, pixel_tiled, pixel_grad_weight, banded, boxed):
        monkeypatch.setattr(module, "INT32_LIMIT", 1)
    small = launch.Tile({"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}, 4, 1)
    bands = launch.Tile({"BLOCK_M": 16, "BLOCK_K": 16}, 4, 1)
    with launch.force(conv=small, conv_flat=small, conv_banded=bands):
        assert {"forward", "epilogue", "grad_weight"} <= set(Problem((5, *SHAPES[form][1:])).check(form))


def test_shares_of_the_weight_gradient_of_bands_counted_in_64_bits(monkeypatch):
    monkeypatch.setattr(banded, "INT32_LIMIT", 1)
    monkeypatch.setattr(launch, "processors", lambda: 4)
    p = Problem((8, 1, 4, (33, 5), (1, 3), (1, 1), (0, 1), (1, 1), 1))
    grids = []

    def watcher(kernel, grid, args, meta, go):
        grids.append((kernel.__name__, grid))
        go()

    tile = launch.Tile({"BLOCK_M": 16, "BLOCK_K": 16}, 4, 1)
    with only(banded_grad_weight), launch.force(conv_banded_grad_weight=tile), launch.watch(watcher):
        assert p.check("banded", lambda name: name == "grad_weight")
    assert grids[0][0] == "conv_banded_grad_weight_kernel"
    assert grids[0][1] == (1, 2) or not launch.INTERPRETED


@FORMS
def test_permuting_the_batch_permutes_the_output(form):
    p = Problem((5, *SHAPES[form][1:]))
    order = [3, 0, 4, 2, 1]
    y, _ = conv.forward(p.x, p.w, p.geometry, form=form)
    permuted, _ = conv.forward(p.x[order], p.w, p.geometry, form=form)
    assert torch.equal(permuted, y[order])


# Each form that takes a sum, with a shape that it is able to.
SUMS = {
    pixel_tiled: (2, 5, 8, (9, 8), (3, 2), (2, 1), (1, 2), (1, 2), 2),
    boxed: SHAPES["box"],
    batch_tiled: (3, 32, 48, (6, 7), (3, 3), (1, 2), (1, 1), (1, 1), 1),
    paired_box: (2, 32, 8, (5, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    banded: (2, 3, 8, (8, 19), (3, 5), (2, 1), (1, 2), (1, 1), 1),
    product: (3, 16, 24, (5, 6), (1, 1), (1, 1), (0, 0), (1, 1), 1),
}
# Those of them that a family of tiles serves.
ADDING = {
    "conv": pixel_tiled, "conv_flat": pixel_tiled, "conv_box": boxed, "conv_batch": batch_tiled,
    "conv_batch_narrow": batch_tiled, "conv_banded": banded,
}  # fmt: skip
# Forms that share a name with others: one alone, a shape of some tiles that it takes, and what it does of it.
ALONE = {
    "conv_unfolded_grad_weight": (
        unfolded_grad_weight, (3, 72, 136, (9, 17), (3, 2), (1, 1), (1, 1), (1, 2), 1), {"grad_weight"},
    ),
}  # fmt: skip


@contextlib.contextmanager
def summing(form):
    """A context in which there is this form alone, and no sum is a launch after it."""
    with pytest.MonkeyPatch.context() as change, forms.among(form):
        change.setattr(Sum, "others", lambda self, problem: Unsupported("a test"))
        yield


def tiles_of_forms():
    """Every tile of every table, once per size, with a form that it serves."""
    names = {
        "conv": "pixel", "conv_flat": "pixel", "conv_grad_weight": "pixel",
        "conv_box": "box", "conv_box_grad_weight": "box",
        "conv_batch": "batch", "conv_batch_narrow": "batch", "conv_batch_grad_weight": "batch",
        "conv_back": "batch", "conv_depthwise": "depthwise",
        "conv_depthwise_grad_weight": "depthwise", "conv_fill": "fill", "conv_reorder": "pixel",
        "conv_unshuffle": "unshuffle", "conv_split": "split", "conv_split_across": "split", "conv_split_box": "split",
        "conv_split_grad_weight": "split",
    }  # fmt: skip
    seen, elsewhere = set(), ("conv_fft", "conv_few", "conv_taps", "gemm")
    for family in (family for family in conv.FAMILIES if not family.startswith(elsewhere)):
        for name in launch.table(family) if launch.INTERPRETED else [launch.target()]:
            for dtype in (torch.float32,) if "split" in family else (torch.float32, torch.float16):
                for tile in launch.tiles(family, name, dtype):
                    key = (family, *tile.sizes.items()) if launch.INTERPRETED else (family, dtype, str(tile))
                    if key not in seen:
                        seen.add(key)
                        label = f"{family}-{dtype}-{tile}".replace(" ", ",").replace("torch.", "")
                        yield pytest.param(family, names.get(family, "banded"), dtype, tile, id=label)


@pytest.mark.parametrize("form", ["pixel", "batch", "box", "depthwise", "fill", "unshuffle"])
def test_copies_of_more_than_a_tile(form, monkeypatch):
    """What a form prepares, as weights in another order or channels filled up, in tiles of 4 x 4 and of 2 x 16."""
    monkeypatch.setattr(narrow, "DIRECT", 0)
    for rows, columns in ((4, 4), (2, 16)):
        tile = launch.Tile({"BLOCK_M": rows, "BLOCK_N": columns}, 4, 3)
        single = launch.Tile({"BLOCK_M": rows * columns}, 4, 3)
        with launch.force(conv_reorder=tile, conv_fill=tile, conv_unshuffle=single):
            assert Problem(SHAPES[form]).check(form)
            if form == "depthwise":  # a last tile with one column, and one that is full
                rest = (5, 4), (3, 2), (1, 1), (1, 0), (1, 1)
                assert Problem((2, 1, 1, *rest, 17)).check(form)
                assert Problem((2, 1, 1, *rest, 16)).check(form, lambda name: name == "forward")


# One call for each kernel and epilogue that a tile matters to; the small problem has all of them.
TELLING = ("epilogue", "max", "grad_input", "grad_weight")


def served(family):
    """Chooses what runs a tile of the family: `check` takes it."""
    if family.endswith(("grad_weight", "across")):
        return lambda name: name == "grad_weight"
    return lambda name: name != "grad_weight" or family == "conv_band"


@pytest.mark.parametrize(("family", "form", "dtype", "tile"), list(tiles_of_forms()))
def test_every_tile_of_every_form(family, form, dtype, tile):
    if family == "conv_back":
        back_in_one_launch(dtype, tile)
        return
    if family in ALONE:
        by_one_form(family, dtype, tile)
        return
    if (family, dtype, launch.INTERPRETED) == ("conv_box_grad_weight", torch.float32, False):
        pytest.skip("a GPU's boxes hold float32 only along the pixels")
    which = served(family)
    with launch.force(**{family: tile}):
        assert Problem(SHAPES[form], dtype=dtype).check(form, lambda name: which(name) and name in TELLING)
        # Two or three tiles along every axis, the last one of images, rows and columns with one of them.
        larger = {
            "pixel": (6, 40, 150, (9, 8), (3, 2), (1, 1), (1, 0), (2, 3), 1),
            "batch": (129, 64, 136, (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 1),
            "box": (3, 64, 136, (9, 17), (3, 2), (1, 1), (1, 1), (1, 2), 1),
            "split": (3, 64, 136, (9, 17), (3, 2), (1, 1), (1, 1), (1, 2), 1),
            "banded": (9, 4, 24, (9, 40), (3, 3), (1, 1), (1, 1), (1, 1), 1),
            "pair": (129, 32, 64, (6, 8), (3, 5), (1, 1), (0, 0), (1, 1), 1),
            "depthwise": (3, 1, 1, (9, 24), (3, 3), (1, 1), (1, 1), (1, 1), 64),
            "fill": (3, 70, 40, (9, 17), (3, 2), (1, 1), (1, 1), (1, 2), 1),
            "unshuffle": (9, 3, 40, (33, 40), (7, 7), (2, 2), (3, 3), (1, 1), 1),
        }
        assert Problem(larger[form], dtype=dtype).check(form, lambda name: which(name) and name in TELLING)
        if family in ADDING:
            N, C, *rest = SUMS[ADDING[family]]
            more = Problem((N, 64 if family in ("conv", "conv_batch") else C, *rest), dtype=dtype)
            with summing(ADDING[family]):
                assert more.check(which=lambda name: name == "sum")
        if family == "conv_batch_grad_weight":
            # Images in halves, even widths.
            halves = Problem((40, 64, 136, (6, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1), dtype=dtype)
            assert halves.check(form, lambda name: name == "grad_weight")


def by_one_form(family, dtype, tile):
    form, shape, expected = ALONE[family]
    # Programs with several tiles. Tensor cores take float32 in the precision in which whole numbers are exact, too.
    with pytest.MonkeyPatch.context() as change, launch.in_precision("tf32"):
        change.setattr(launch, "processors", lambda: 1)
        p = Problem(shape, dtype=dtype)
        able = form.able(p.described())
        if not able:
            pytest.skip(str(able))
        with summing(form), launch.force(**{family: tile}):
            assert set(p.check(form.NAME, lambda name: name in expected)) == expected


def back_in_one_launch(dtype, tile):
    with launch.force(conv_back=tile):
        for stride, kernel, memory in (
            ((2, 2), (5, 4), torch.contiguous_format),
            ((1, 3), (3, 2), torch.channels_last),
        ):
            p = Problem((129, 136, 64, (5, 6), kernel, stride, (2, 1), (1, 1), 1), dtype=dtype)
            assert in_one_launch(p, (memory,))


def in_one_launch(p, memories=(torch.contiguous_format, torch.channels_last)):
    """Check the gradient of the input with all phases in one launch, for weights in these memory layouts."""
    for memory in memories:
        w = p.w.to(memory_format=memory)
        got, _ = conv.transposed(p.dy, w, p.geometry, form="batch")
        assert torch.equal(got, p.dx.to(got.dtype))
    return True


@pytest.mark.parametrize(("N", "C"), [(17, 16), (17, 17), (16, 16)])
def test_whole_tiles_and_one_channel_and_image_more_on_the_way_back(N, C, monkeypatch):
    tile = launch.Tile({"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "PIECES": 1}, 4, 2)
    names = launched(monkeypatch)
    p = Problem((N, C, 32, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), 1))
    with launch.force(conv_back=tile), GuardedAllocations():
        assert in_one_launch(p, (torch.contiguous_format,))
    assert "conv_back_kernel" in names


@given(shape=shapes(), seed=st.integers(0, 9), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_all_walks_back_in_one_launch(shape, seed, dtype):
    N, C, M, *rest = shape
    assert in_one_launch(Problem((N, C, 32 * (M % 3 + 1), *rest), seed, dtype))


@pytest.mark.parametrize("processors", [1, 20, 132])
def test_shares_of_the_weight_gradient(processors, monkeypatch):
    """One share, some, and more than there are steps."""
    monkeypatch.setattr(launch, "processors", lambda: processors)
    p = Problem((70, 32, 40, (5, 6), (3, 2), (1, 1), (1, 1), (1, 1), 2))
    sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16, "TAPS": 1, "PER_PROCESSOR": 4}
    with launch.force(conv_batch_grad_weight=launch.Tile(sizes)):
        assert torch.equal(conv.grad_weight(p.x, p.dy, p.geometry, form="batch"), p.dw.to(p.x.dtype))


@pytest.mark.parametrize("groups", [1, 2])
def test_shares_of_the_weight_gradient_of_pixels(groups, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda: 40)
    p = Problem((9, 17 * groups, 18 * groups, (6, 8), (3, 2), (1, 1), (1, 1), (1, 1), groups))
    with launch.force(conv_grad_weight=launch.Tile({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "TAPS": 1})):
        assert torch.equal(conv.grad_weight(p.x, p.dy, p.geometry, form="pixel"), p.dw.to(p.x.dtype))


@pytest.mark.parametrize(("processors", "taps"), [(1, 3), (7, 1), (132, 3)])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 32, 40, (9, 8), (3, 3), (1, 1), (1, 1), (1, 1), 2),
        (5, 32, 72, (8, 12), (4, 3), (2, 2), (1, 1), (1, 1), 1),
        # More outputs than inputs; strides above padding and taps, along both axes or one; several images of a box.
        (3, 32, 32, (9, 9), (3, 3), (1, 1), (2, 2), (1, 1), 1),
        (2, 32, 32, (8, 8), (1, 1), (4, 2), (0, 0), (1, 1), 1),
        (1, 32, 32, (6, 6), (3, 2), (2, 1), (1, 1), (1, 1), 1),
        (9, 32, 32, (4, 4), (3, 3), (1, 1), (0, 0), (1, 1), 1),
    ],
)
def test_equal_parts_of_the_weight_gradient_in_boxes(shape, processors, taps, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda: processors)
    p = Problem(shape, dtype=torch.float16)
    tile = launch.Tile({"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16, "TAPS": taps, "PER_PROCESSOR": 1})
    with launch.force(conv_box_grad_weight=tile), GuardedAllocations():
        assert torch.equal(conv.grad_weight(p.x, p.dy, p.geometry, form="box"), p.dw.half())


@pytest.mark.parametrize("shape", [(2, 32, 32, (9, 9), (3, 3), (2, 2)), (2, 32, 4, (8, 8), (3, 3), (1, 1))])
def test_weight_gradients_without_boxes(shape):
    """A stride that does not divide the image, and channels of 8 bytes."""
    p = Problem((*shape, (1, 1), (1, 1), 1), dtype=torch.float16)
    with pytest.raises(conv.UnableError):
        conv.grad_weight(p.x, p.dy, p.geometry, form="box")


@pytest.mark.parametrize(
    "shape",
    [
        (3, 40, 24, (7, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1),
        (2, 16, 72, (9, 8), (3, 2), (1, 1), (2, 0), (1, 3), 1),
        (3, 64, 16, (6, 5), (3, 3), (1, 1), (1, 1), (2, 1), 2),
        (2, 32, 16, (6, 7), (2, 3), (2, 1), (0, 0), (1, 1), 1),
        (5, 16, 16, (3, 3), (5, 1), (1, 1), (3, 0), (1, 1), 1),
        # Columns of no tap, where all others find an input.
        (2, 16, 16, (6, 9), (2, 3), (2, 2), (0, 0), (1, 1), 1),
    ],
)
@pytest.mark.parametrize("side", [0, -1])
@pytest.mark.parametrize(("whole_tiles", "shares"), [(1.0, 1), (0.0, 3), (0.5, 7)])
def test_unfolded_from_both_sides_whole_and_in_shares(shape, side, whole_tiles, shares, monkeypatch):
    """Tiles that are whole, in shares, and both; pixels of the output and, with strides of 1, of the input."""
    sides = unfolded_grad_weight.sides

    def split(problem, tile, tiles, blocks, *_):
        return int(tiles * whole_tiles), min(shares, blocks), 0.0

    monkeypatch.setattr(unfolded_grad_weight, "sides", lambda problem: [sides(problem)[side]])
    monkeypatch.setattr(unfolded_grad_weight, "_split", split)
    p = Problem(shape, dtype=torch.float16)
    tile = launch.Tile({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 16}, 4, 2)
    forced = launch.force(conv_unfolded_grad_weight=tile)
    with forms.among(unfolded_grad_weight), forced, GuardedAllocations() as guards:
        assert torch.equal(conv.grad_weight(p.x, p.dy, p.geometry), p.dw.to(torch.float16))
    guards.check()


def test_more_shares_than_are_added_at_once(monkeypatch):
    """A block of pixels each."""
    monkeypatch.setattr(unfolded_grad_weight, "_split", lambda *_: (0, 21, 0.0))
    p = Problem((1, 16, 16, (16, 20), (1, 2), (1, 1), (0, 1), (1, 1), 1), dtype=torch.float16)
    tile = launch.Tile({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16}, 4, 2)
    with forms.among(unfolded_grad_weight), launch.force(conv_unfolded_grad_weight=tile):
        assert unfolded_grad_weight.cut(p.described(GRAD_WEIGHT)).shares == 21
        assert torch.equal(conv.grad_weight(p.x, p.dy, p.geometry), p.dw.to(torch.float16))


@pytest.mark.parametrize("M", [1, 2, 5])
def test_gradients_of_the_weights_of_few_outputs_are_filled(M):
    """Their output's gradient alone is copied where the inputs fill 16 bytes."""
    p = Problem((3, 72, M, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1), dtype=torch.float16)
    assert "grad_weight" in p.check("fill")
    (made,) = Fill().others(Described(GRAD_WEIGHT, p.geometry, 3, 72, M, torch.float16, form="fill"))
    assert (made.C, made.M) == (72, 16)


@pytest.mark.parametrize(
    ("shape", "swaps"),
    [
        ((3, 11, 1, (9, 10), (3, 3), (1, 1), (1, 1), (1, 1), 1), True),
        ((2, 13, 4, (9, 7), (5, 5), (1, 1), (2, 2), (1, 1), 1), True),
        ((2, 13, 2, (6, 7), (2, 3), (1, 1), (2, 3), (2, 1), 1), True),
        ((2, 3, 8, (8, 9), (3, 2), (1, 1), (0, 0), (2, 1), 1), False),
        ((2, 13, 6, (9, 7), (5, 5), (2, 1), (2, 2), (1, 1), 1), False),
    ],
)
def test_bands_of_the_output_gradient(shape, swaps):
    """Where its channels are fewer, the output's gradient is what the bands are of."""
    p = Problem(shape)
    if launch.INTERPRETED:  # a GPU's estimates of such small problems are equal
        assert banded_grad_weight.cheapest(p.described(GRAD_WEIGHT))[1] == swaps
    assert p.check("banded", lambda name: name == "grad_weight") or not swaps


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("processors", [1, 5, 7, 1000])
def test_pairs_of_tiles_as_one_of_twice_the_channels(processors, groups, monkeypatch):
    """All tiles in pairs, some, and none; both ways, with all that an epilogue has."""
    monkeypatch.setattr(launch, "processors", lambda: processors)
    constants = []
    run = launch.run

    def spy(kernel, grid, *args, **meta):
        if kernel is batch_tiled.conv_batch_kernel:
            constants.append(meta["tile"].DOUBLE)
        run(kernel, grid, *args, **meta)

    replace_run(monkeypatch, spy)
    sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "PIECES": 1, "PER_PROCESSOR": 1, "FLATTEN": 0}
    dtype = torch.float32 if processors in (1, 7) else torch.float16
    p = Problem((33, 64, 64, (2, 3), (3, 2), (1, 1), (1, 1), (1, 1), groups), dtype=dtype)
    with launch.force(conv_batch=launch.Tile({**sizes, "DOUBLE": 1})):
        p.check("batch", lambda name: name != "grad_weight")
    assert set(constants) == {int(processors < 1000)}


@pytest.mark.parametrize("processors", [1, 20])
@pytest.mark.parametrize("N", [3, 33])
@pytest.mark.parametrize(
    ("H", "kernel", "stride", "padding", "dilation", "parts"),
    [
        (8, 3, 1, 1, 1, 8),
        (12, 5, 1, 2, 1, 4),
        (12, 3, 1, 2, 2, 4),
        (16, 3, 2, 1, 1, 8),
        (16, 4, 2, 1, 1, 8),
        (24, 5, 3, 2, 1, 8),
        (20, 1, 1, 0, 1, 4),
        (12, 4, 2, 1, 3, 1),
        (9, 3, 1, 1, 1, 1),
    ],
)
def test_parts_of_an_image_count_as_images(H, kernel, stride, padding, dilation, parts, N, processors, monkeypatch):
    """The rows where parts meet, read from whole images; one share and some; a width whose outer taps have no pixel."""
    monkeypatch.setattr(batch_grad_weight, "PART", 1)
    monkeypatch.setattr(batch_grad_weight, "RUN", 1)
    monkeypatch.setattr(launch, "processors", lambda: processors)
    sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16, "TAPS": 1, "PER_PROCESSOR": 4}
    for width, beside, groups, dtype in ((5, 2, 1, torch.float32), (1, 1, 2, torch.float16)):
        shape = (N, 32, 32, (H, width), (kernel, 3), (stride, 1), (padding, beside), (dilation, 1), groups)
        p = Problem(shape, dtype=dtype)
        assert batch_grad_weight.parts_of(p.described(GRAD_WEIGHT)) == parts
        with launch.force(conv_batch_grad_weight=launch.Tile(sizes)):
            assert torch.equal(conv.grad_weight(p.x, p.dy, p.geometry, form="batch"), p.dw.to(dtype))


def test_rows_that_no_tap_reads_are_not_read_for_parts_of_an_image(monkeypatch):
    """The last row of the input is read by all taps but the first, the first row by all but the last."""
    monkeypatch.setattr(batch_grad_weight, "PART", 1)
    monkeypatch.setattr(batch_grad_weight, "RUN", 1)
    p = Problem((3, 32, 32, (8, 1), (3, 1), (1, 1), (1, 0), (1, 1), 1))
    assert batch_grad_weight.parts_of(p.described(GRAD_WEIGHT)) > 1
    sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16, "TAPS": 1, "PER_PROCESSOR": 4}
    for row, tap in ((-1, 0), (0, 2)):
        x = p.x.clone()
        x[:, :, row] = math.inf
        with launch.force(conv_batch_grad_weight=launch.Tile(sizes)):
            dw = conv.grad_weight(x, p.dy, p.geometry, form="batch")
        assert torch.equal(dw[:, :, tap], p.dw[:, :, tap].to(dw.dtype))
        assert not dw[:, :, 1].isfinite().any()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [((3, 2), (2, 1), (1, 2)), ((5, 5), (2, 2), (1, 1)), ((1, 1), (1, 1), (1, 1))]
)
def test_weights_read_as_they_are_on_the_way_back(kernel, stride, dilation, groups, monkeypatch):
    """float16 weights in channels-last memory are not turned round for the gradient of the input."""
    p = Problem((5, 40, 64, (8, 9), kernel, stride, (1, 2), dilation, groups), dtype=torch.float16)
    w = p.w.to(memory_format=torch.channels_last)
    monkeypatch.setattr(phase_weights, "conv_reorder_kernel", None)
    for form in ("batch", "box"):
        assert torch.equal(conv.grad_input(p.dy, w, p.geometry, form=form), p.dx.to(w.dtype))


@pytest.mark.parametrize("stride", [(2, 2), (1, 3), (4, 2)])
def test_one_launch_for_all_walks_back(stride, monkeypatch):
    """More images than a row tile has, odd sizes, strides beyond the kernel, groups."""
    monkeypatch.setattr(batch_tiled, "run", lambda *_: pytest.fail("a launch for each phase"))
    for kernel, groups, dtype in (
        ((5, 4), 1, torch.float32), ((2, 3), 2, torch.float16), ((1, 1), 1, torch.float32),
    ):  # fmt: skip
        assert in_one_launch(Problem((70, 8, 32, (7, 6), kernel, stride, (2, 1), (1, 1), groups), dtype=dtype))


def test_images_of_one_pixel_in_strides_of_their_own():
    """torch gives a dimension of size 1 any stride; boxes ask for multiples of 16 bytes."""
    x = whole(5, 32, 1, 1, dtype=torch.float16).as_strided((5, 32, 1, 1), (32, 1, 1, 1))
    p = Problem((5, 32, 32, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1), 1), dtype=torch.float16)
    for form in ("batch", "box"):
        got, _ = conv.forward(x, p.w, p.geometry, form=form)
        assert torch.equal(got, conv.forward(x.clone(), p.w, p.geometry, form="pixel")[0])


def test_weights_whose_taps_do_not_begin_at_16_bytes_are_turned():
    p = Problem((3, 20, 32, (6, 6), (2, 2), (1, 1), (0, 0), (1, 1), 1), dtype=torch.float16)
    w = p.w.to(memory_format=torch.channels_last)
    for form in ("batch", "box"):
        assert torch.equal(conv.grad_input(p.dy, w, p.geometry, form=form), p.dx.to(w.dtype))


@pytest.mark.parametrize("pixels", [16, 64, 128])
@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 56, 56), (3, 7, 9), (1000, 1, 2), (1, 1, 5000), (5, 300, 1)])
def test_shape_of_box(shape, pixels):
    """Powers of two with the product asked for; no other such box needs fewer of them."""

    def number(box):
        return math.prod(-(-size // extent) for size, extent in zip(shape, box, strict=True))

    box = shape_of_box(*shape, pixels)
    sides = [2**i for i in range(9)]
    others = [other for other in itertools.product(sides, repeat=3) if math.prod(other) == pixels]
    assert box in others
    assert number(box) == min(map(number, others))


@FORMS
def test_runs_are_bitwise_equal(form):
    p = Problem(SHAPES[form])
    x, dy = torch.randn_like(p.x), torch.randn_like(p.dy)
    for call in (
        lambda: conv.forward(x, p.w, p.geometry, form=form)[0],
        lambda: conv.grad_weight(
            x, dy, p.geometry, form=None if form in ("box", "pair", "taps", "unshuffle") else form
        ),
    ):
        assert torch.equal(call(), call())


@FORMS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_neighbours(form, bad):
    """Outputs none of whose inputs are the bad one are as ever; in bands, none in reach of the band."""
    N, C, M, size, kernel, *_, groups = SHAPES[form]
    groups = groups if form == "depthwise" else 1
    geometry = Geometry.of(size, kernel, (1, 1), ((1, 1), (2, 2)), (1, 1), groups)
    x, w = whole(N, groups * C, *size), whole(groups * M, C, *kernel, seed=1)
    before, _ = conv.forward(x, w, geometry, form=form)
    x[0, ::C, 4, 4] = bad
    after, _ = conv.forward(x, w, geometry, form=form)
    reached = torch.zeros(1, 1, *size, device=x.device)
    reached[0, 0, 4, 4] = 1
    touched = F.conv2d(reached, torch.ones(1, 1, *kernel, device=x.device), None, 1, (1, 2))[0, 0] > 0
    if form in ("banded", "pair", "fill", "unshuffle"):
        touched |= touched.any(1, keepdim=True)
    assert torch.equal(after[1:], before[1:])
    assert torch.equal(after[0][:, ~touched], before[0][:, ~touched])
    exact = F.conv2d(x.double().cpu(), w.double().cpu(), None, 1, (1, 2), 1, groups).isnan().to(x.device)
    if form not in ("banded", "pair", "fill", "unshuffle"):
        assert torch.equal(
            after.isnan() | after.isinf(), ~F.conv2d(x.double(), w.double(), None, 1, (1, 2), 1, groups).isfinite()
        )
        assert torch.equal(after.isnan(), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_from_one_before_a_row_to_its_end(dtype):
    """Fourteen outputs of sixteen values, the first of them padding on the left, where alone there is some."""
    x, w = whole(2, 1, 4, 15, dtype=dtype), whole(1, 1, 1, 3, seed=1, dtype=dtype)
    at = Geometry.of((4, 15), (1, 3), (1, 1), ((0, 0), (1, 0)), (1, 1))
    for z in (False, True):
        y, _ = conv.forward(x, w, at, form="banded", preactivation=z)
        assert torch.equal(y, F.conv2d(F.pad(x, (1, 0)), w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("W", [8, 17, 20, 29])
def test_what_is_not_finite_stays_in_its_row(W, dtype):
    """The last group's values reach past the row's end, for W = 8 by one of 16 in float64, to the first of the next."""
    x, w = whole(2, 3, 4, W, dtype=dtype), whole(4, 3, 1, 3, seed=1, dtype=dtype)
    x[:, :, 2, 0] = math.nan
    y, _ = conv.forward(x, w, Geometry.of((4, W), (1, 3), (1, 1), ((0, 0), (0, 0)), (1, 1)), form="banded")
    assert y[:, :, [0, 1, 3]].isfinite().all()
    assert y[:, :, 2, 0].isnan().all()


@pytest.mark.parametrize("C", [3, 12])
def test_bands_of_several_blocks_of_rows(C):
    """Of the 12 channels they are read as boxes."""
    p = Problem((2, C, 8, (4, 19), (2, 3), (1, 1), (1, 1), (1, 1), 1))
    with only(banded), launch.force(conv_banded=launch.Tile({"BLOCK_M": 16, "BLOCK_K": 16}, 4, 1)):
        assert banded.groups_of(p.described())[1] > 16
        assert p.check("banded", lambda name: name == "forward") == ["forward"]


def test_taps_may_be_more_than_32_bits_apart(device):
    """One image of 2.7e9 values, of which four pixels are read."""
    H, W, C = 513, 2**17, 40
    x = torch.empty(1, H, W, C, dtype=torch.float16, device=device)
    for value, (h, w) in enumerate([(0, 0), (0, W - 1), (H - 1, 0), (H - 1, W - 1)], start=1):
        x[0, h, w] = value
    x = x.permute(0, 3, 1, 2)
    geometry = Geometry.of((H, W), (2, 1), (1, W - 1), ((0, 0), (0, 0)), (H - 1, 1))
    weight = torch.tensor([1.0, 0.5], dtype=torch.float16, device=device).view(1, 1, 2, 1).expand(1, C, 2, 1)
    y, _ = conv.forward(x, weight, geometry)
    assert y.flatten().tolist() == [C * 2.5, C * 4.0]
    dw = conv.grad_weight(x, torch.ones_like(y), geometry)
    assert torch.equal(dw[0, :, :, 0].cpu(), torch.tensor([[3.0, 7.0]], dtype=torch.float16).expand(C, 2))


def test_bands_are_not_for_rows_that_far_apart():
    """One image of 2.2e9 values."""
    for dilation, able in ((600, False), (300, True)):
        at = Geometry.of((690, 2**20), (2, 1), (1, 1), ((0, 0), (0, 0)), (dilation, 1))
        assert bool(banded.able(Described(FORWARD, at, 1, 3, 4, torch.float16))) is able
        assert bool(banded_grad_weight.able(Described(GRAD_WEIGHT, at, 1, 3, 3, torch.float16))) is able


@triton.jit
def place_kernel(p_y, i_first, QH, QW, POOL: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr):
    n, h, w = pixel(i_first, BLOCK, QH, QW, POOL, LONG)
    o = tl.arange(0, BLOCK)
    tl.store(p_y + o, n)
    tl.store(p_y + BLOCK + o, h.to(tl.int64))
    tl.store(p_y + 2 * BLOCK + o, w.to(tl.int64))


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("QH", "QW", "long"), [(6, 10, False), (6, 10, True), (50_000, 60_000, True)])
def test_pixels_of_images_of_any_size_are_found(QH, QW, long, pool, device):
    last = 3 * QH * QW - 8
    y = torch.empty(3, 16, dtype=torch.int64, device=device)
    place_kernel[(1,)](y, last - 8, QH, QW, POOL=pool, LONG=long, BLOCK=16)
    places = []
    for i in range(last - 8, last + 8):
        n, i = divmod(i, QH * QW)
        if pool:
            window, corner = divmod(i, 4)
            h, w = divmod(window, QW // 2)
            places.append((n, 2 * h + corner // 2, 2 * w + corner % 2))
        else:
            places.append((n, *divmod(i, QW)))
    assert list(zip(*y.tolist(), strict=True)) == places


def test_no_images_and_no_channels():
    geometry = Geometry.of((5, 6), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    w, bias = whole(4, 2, 3, 3), whole(4)
    y, _ = conv.forward(whole(0, 2, 5, 6), w, geometry, bias)
    assert y.shape == (0, 4, 5, 6)
    assert conv.forward(whole(0, 2, 5, 6), w, geometry, bias, "relu", added=y)[0].shape == (0, 4, 5, 6)
    assert conv.grad_input(y, w, geometry).shape == (0, 2, 5, 6)
    assert torch.equal(conv.grad_weight(whole(0, 2, 5, 6), y, geometry), torch.zeros_like(w))
    y, _ = conv.forward(whole(2, 0, 5, 6), whole(4, 0, 3, 3), geometry, bias, "relu")
    assert torch.equal(y, bias.relu()[None, :, None, None].expand(2, 4, 5, 6))


def test_sums_of_every_form_that_takes_them():
    assert {form for form in forms.FORMS if forms.abilities(form).added} == set(SUMS)


@pytest.mark.parametrize("form", SUMS, ids=lambda form: form.__name__.rpartition(".")[2])
def test_a_sum_is_rounded_once_and_its_operand_read_alone(form):
    """2049 - 2048 is 1, and in float16 the first is 2048. What is added may lie in any order."""
    p = Problem(SUMS[form], dtype=torch.float16)
    added = torch.full_like(p.added, -2048)
    bias = torch.full(p.bias.shape, 2049.0, device=added.device)
    scale = torch.ones_like(bias)
    with summing(form), GuardedAllocations():
        assert plan.plan(p.described(bias=True, scale=True, added=True)).form is form
        for given in (added, added.to(memory_format=torch.channels_last), added[..., :1].expand_as(added)):
            y, z = conv.forward(p.x, p.w, p.geometry, bias, scale=scale, added=given)
            assert z is None
            assert torch.equal(y.double(), p.y + 1)
        assert (added == -2048).all()
        added[0, -1] = torch.nan
        y, _ = conv.forward(p.x, p.w, p.geometry, bias, "relu", scale=scale, added=added)
        assert torch.equal(y.isnan(), added.isnan())


@pytest.mark.parametrize("form", ["box", "pixel", "product"])
def test_an_image_is_added_to_its_own_convolution(form):
    kernel, padding = ((1, 1), (0, 0)) if form == "product" else ((3, 3), (1, 1))
    p = Problem((2, 32, 32, (5, 6), kernel, (1, 1), padding, (1, 1), 1))
    x = p.x.to(memory_format=torch.channels_last)
    y, _ = conv.forward(x, p.w, p.geometry, p.bias, "relu", added=x, form=form)
    assert torch.equal(y.double(), (p.y + p.bias.double()[:, None, None] + p.x.double()).relu())
    assert torch.equal(x, p.x)


def test_a_sum_in_a_launch_of_its_own():
    p = Problem(SHAPES["depthwise"], dtype=torch.float16)
    assert "sum" in p.check("depthwise", lambda name: name == "sum")
    problem = p.described(added=True, form="depthwise")
    (part,) = plan.plan(problem).parts
    assert (part.problem.added, part.problem.act, part.name) == (False, None, "depthwise")
    assert "depthwise, then a sum" in plan.explain(problem)


def test_layouts_are_copied_only_where_they_must_be():
    x = whole(2, 16, 5, 6)
    last = x.to(memory_format=torch.channels_last)
    assert conv.channels_last(last).data_ptr() == last.data_ptr()
    geometry = Geometry.of((5, 6), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    w = whole(8, 16, 3, 3)
    y, _ = conv.forward(last, w, geometry)
    assert y.is_contiguous(memory_format=torch.channels_last)
    for other in (x, x.transpose(2, 3).contiguous().transpose(2, 3), torch.cat([x, x], 1)[:, :16]):
        assert torch.equal(conv.forward(other, w, geometry)[0], y)


def test_the_gradients_of_a_stride_beyond_the_kernel():
    """Inputs that no output reads have a gradient of zero."""
    p = Problem((2, 16, 32, (11, 9), (2, 1), (5, 4), (0, 1), (1, 1), 1))
    for form in ("pixel", "batch"):
        assert "grad_input" in p.check(form)


def test_a_batch_of_many_drawn_shapes_in_the_form_that_is_chosen():
    draw = random.Random(0)
    for seed in range(12):
        C, M = draw.choice([1, 3, 16, 64]), draw.choice([1, 3, 16, 48])
        size = draw.randint(3, 12), draw.randint(3, 12)
        kernel = draw.randint(1, 3), draw.randint(1, 3)
        shape = (draw.choice([1, 64, 70]), C, M, size, kernel, (draw.randint(1, 2),) * 2, (1, 0), (1, 1), 1)
        assert {"forward", "grad_input", "grad_weight"} <= set(Problem(shape, seed).check())


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(50))
def test_five_hundred_drawn_shapes_forms_and_tiles(block, monkeypatch):
    """Ten each: a drawn shape, dtype, form and tile of that form; exact on whole numbers, and twice the same.

    Images whole in even blocks, in as many parts as can be in odd ones.
    """
    if block % 2:
        monkeypatch.setattr(batch_grad_weight, "PART", 1)
    families = {
        "pixel": ("conv", "conv_flat", "conv_grad_weight"),
        "batch": ("conv_batch", "conv_batch_narrow", "conv_batch_grad_weight"),
        "box": ("conv_box",),
        "pair": ("conv_box",),
        "banded": ("conv_banded", "conv_banded_grad_weight"),
        "depthwise": ("conv_depthwise", "conv_depthwise_grad_weight"),
    }
    draw = random.Random(block)
    for seed in range(10):
        form = draw.choice(sorted(families))
        dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16])
        channels = (
            [32, 64, 96, 128]
            if form in ("batch", "box", "pair")
            else [1, 2, 3, 4, 12]
            if form == "banded"
            else [1]
            if form == "depthwise"
            else [1, 3, 13, 40]
        )
        written, groups = draw.choice([1, 4, 8, 24, 32, 96, 136]), draw.choice([1, 1, 2])
        if form == "depthwise":
            written, groups = draw.choice([1, 1, 2, 3]), draw.choice([3, 16, 40, 96, 144])
        kernel = draw.randint(1, 5), draw.randint(1, 7)
        dilation = (draw.randint(1, 2), 1 if form == "banded" else draw.randint(1, 2))
        padding = draw.randint(0, 3), draw.randint(0, 3)
        size = tuple(
            max(1, d * (k - 1) + 1 - 2 * p) + draw.choice([0, 1, 3, 8, 17])
            for d, k, p in zip(dilation, kernel, padding, strict=True)
        )
        shape = (
            draw.choice([1, 3, 64, 130]), draw.choice(channels), written, size, kernel,
            (draw.randint(1, 3), draw.randint(1, 2)), padding, dilation, 1 if form == "banded" else groups,
        )  # fmt: skip
        tiles = {name: draw.choice(launch.tiles(name, dtype=dtype)) for name in families[form]}
        with launch.force(**tiles):
            problem = Problem(shape, seed, dtype)
            problem.check(form)
            if form == "batch" and problem.dy.shape[1] // shape[-1] % 32 == 0:
                assert in_one_launch(problem)
            x, dy = torch.randn_like(problem.x), torch.randn_like(problem.dy)
            for call in (
                lambda p=problem, x=x, form=form: conv.forward(x, p.w, p.geometry, form=form)[0],
                lambda p=problem, dy=dy, form=form: conv.grad_input(dy, p.w, p.geometry, form=form),
                lambda p=problem, x=x, dy=dy, form=form: conv.grad_weight(x, dy, p.geometry, form=form),
            ):
                try:
                    assert torch.equal(call(), call())
                except conv.UnableError:
                    continue


@pytest.mark.parametrize(("dtype", "processors"), [(torch.float64, 1), (torch.float16, 3)])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "groups", "M"),
    [
        ((3, 3), (1, 1), (1, 1), 16, 1), ((5, 5), (2, 2), (1, 1), 17, 1), ((7, 7), (1, 1), (1, 1), 8, 1),
        ((1, 9), (1, 3), (1, 2), 5, 1), ((11, 1), (3, 1), (2, 1), 3, 2), ((3, 3), (2, 2), (2, 3), 40, 3),
        ((2, 4), (4, 3), (1, 1), 7, 4),
    ],
)  # fmt: skip
def test_depthwise(kernel, stride, dilation, groups, M, dtype, processors, monkeypatch):
    """Every direction, exact on whole numbers; channels that are no multiple of a vector, and several of one input; the
    weight gradient in one share and in three."""
    monkeypatch.setattr(launch, "processors", lambda: processors)
    size = tuple(d * (k - 1) + extra for k, d, extra in zip(kernel, dilation, (9, 12), strict=True))
    p = Problem((3, 1, M, size, kernel, stride, (kernel[0] // 2, kernel[1] // 2), dilation, groups), dtype=dtype)
    assert {"forward", "epilogue", "preactivation", "grad_input", "grad_weight"} <= set(p.check("depthwise"))


def test_depthwise_is_taken_for_depthwise():
    p = Problem((2, 1, 1, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1), 64))
    for direction in (FORWARD, GRAD_WEIGHT):
        assert plan.plan(p.described(direction)).name == "depthwise"


@pytest.mark.parametrize(
    ("size", "stride", "padding", "bad"), [(8, 2, 0, (0, slice(None), 7)), (5, 1, 1, (0, 0, 4, 2))]
)
def test_depthwise_gradient_is_finite_where_the_others_are(size, stride, padding, bad):
    """Rows of outputs past the last, which a tile has, take nothing of their inputs."""
    p = Problem((1, 1, 1, (size,) * 2, (3, 3), (stride,) * 2, (padding,) * 2, (1, 1), 4))
    p.x[bad] = float("inf")
    got, other = (conv.grad_weight(p.x, p.dy, p.geometry, form=form) for form in ("depthwise", "pixel"))
    assert torch.equal(got.isfinite(), other.isfinite())
    assert got.isfinite().sum() >= 30


@pytest.mark.parametrize("shape", [(65536, 2, (32, 513), 0), (2**20, 1, (2045, 1), 4)])
def test_depthwise_leaves_what_32_bits_do_not_count_to_others(shape):
    groups, M, size, padding = shape
    kernel = size if padding == 0 else (1, 9)
    at = Geometry.of(size, kernel, (1, 1), ((0, 0), (padding,) * 2), (1, 1), groups)
    for direction, form in ((FORWARD, depthwise), (GRAD_WEIGHT, depthwise_grad_weight)):
        assert not form.able(Described(direction, at, 1, 1, M, torch.float16))


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((1, 5, 1, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1), 4), "more than 4 channels to a sum"),
        ((1, 2, 2, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1), 4), "several channels"),
        ((1, 1, 8, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1), 1), "one group"),
    ],
)
def test_depthwise_says_what_it_cannot(shape, why):
    p = Problem(shape)
    with pytest.raises(conv.UnableError, match="depthwise form does not support this shape"):
        conv.forward(p.x, p.w, p.geometry, form="depthwise")
    assert why in conv.explain(p.described())


@pytest.mark.parametrize("M", [12, 24])
@pytest.mark.parametrize("size", [(14, 13), (13, 14), (8, 20)])
def test_bands_that_cannot_pool_are_pooled_afterwards(M, size, monkeypatch):
    p = Problem((3, 1, M, size, (7, 7), (1, 1), (0, 0), (1, 1), 1))
    monkeypatch.setattr(pixel_tiled, "run", lambda *_: pytest.fail("the slow form was taken"))
    channel = (slice(None), None, None)
    z = (p.y * p.scale.double()[channel] + p.bias.double()[channel]).relu()
    for pool, function in (("max", F.max_pool2d), ("avg", F.avg_pool2d)):
        y, _ = conv.forward(p.x, p.w, p.geometry, p.bias, "relu", scale=p.scale, pool=pool, form="banded")
        assert torch.equal(y.double(), function(z, 2))


def launched(monkeypatch):
    """Names of the kernels launched from now on."""
    names, run = [], launch.run
    replace_run(monkeypatch, lambda kernel, *args, **meta: (names.append(kernel.__name__), run(kernel, *args, **meta)))
    return names


@pytest.mark.parametrize(("H", "kernel", "stride", "row"), [(8, (3, 3), 2, 7), (10, (1, 3), 3, 1)])
def test_rows_that_no_output_reads_spoil_none(H, kernel, stride, row, monkeypatch):
    """The last pair may have one row, and pairs rows between those that they read."""
    p = Problem((2, 1, 12, (H, 40), kernel, (stride, stride), (0, 0), (1, 1), 1), dtype=torch.float16)
    x = p.x.clone()
    x[:, :, row] = math.nan
    y = conv.forward(x, p.w, p.geometry, form="banded")[0]
    exact = torch.nn.functional.conv2d(x.double(), p.w.double(), stride=stride)
    assert torch.equal(y.isnan(), exact.isnan())


@pytest.mark.parametrize(
    ("C", "M", "padding", "form"), [(32, 64, 0, "pair"), (64, 32, 2, "pair"), (128, 128, 2, "batch")]
)
def test_which_convolutions_go_in_pairs(C, M, padding, form):
    p = Problem((1, C, M, (12, 12), (5, 5), (1, 1), (padding, padding), (1, 1), 1), dtype=torch.float16)
    assert plan.plan(p.described()._replace(N=2000, target="sm_90", processors=132)).name == form


def test_bands_that_can_pool_do_it_in_their_kernel(monkeypatch):
    p = Problem((2, 1, 16, (12, 14), (5, 5), (1, 1), (0, 0), (1, 1), 1))
    monkeypatch.setattr(parts.pools, "max_pool2d", lambda *_: pytest.fail("a second kernel"))
    y, _ = conv.forward(p.x, p.w, p.geometry, pool="max", form="banded")
    assert torch.equal(y.double(), F.max_pool2d(p.y, 2))


def test_refusals():
    p = Problem(SHAPES["pixel"])
    with pytest.raises(ValueError, match="unknown form 'fast'; known: pixel, box, batch, pair, split, banded"):
        conv.forward(p.x, p.w, p.geometry, form="fast")
    with pytest.raises(conv.UnableError, match="the banded form does not support this shape; use one of: pixel"):
        conv.forward(p.x, p.w, p.geometry, form="banded")
    with pytest.raises(ValueError, match="unknown pool"):
        conv.forward(p.x, p.w, p.geometry, pool="min")
    for more, why in (
        ({"added": p.added, "pool": "max"}, "with pool or preactivation"),
        ({"added": p.added, "preactivation": True}, "with pool or preactivation"),
        ({"added": p.added[:, 1:]}, r"added has shape \[2, 13, .*expected \[2, 14"),
    ):
        with pytest.raises(ValueError, match=why):
            conv.forward(p.x, p.w, p.geometry, **more)
    with pytest.raises(TypeError, match="convert one of them"):
        conv.forward(p.x, p.w, p.geometry, added=p.added.double())
    with pytest.raises(ValueError, match="pool afterwards"):
        conv.forward(p.x, p.w, p.geometry, pool="max", preactivation=True)
    with pytest.raises(TypeError, match="convert one of them"):
        conv.grad_weight(p.x, p.dy.double(), p.geometry)


@settings(deadline=None)
@given(
    st.integers(1, 30), st.integers(1, 7), st.integers(1, 5), st.integers(0, 6), st.integers(1, 4)
)  # fmt: skip
def test_the_backward_walks_hold_every_pair_once(size, kernel, stride, padding, dilation):
    """The (input, tap) pairs of the forward phase and of the backward phases are the same."""
    assume(size + 2 * padding > dilation * (kernel - 1))
    axis = Geometry.of((size, 9), (kernel, 1), (stride, 1), ((padding, padding), (0, 0)), (dilation, 1)).h
    forward, w = set(), axis.forward()
    for q in range(w.count):
        for j, tap in enumerate(w.taps):
            i = w.in_start + q * w.in_step + j * w.in_tap
            if 0 <= i < size:
                forward.add((i, tap, w.out_start + q * w.out_step))
    backward, covered = [], []
    for w in axis.backward():
        for q in range(w.count):
            covered.append(w.out_start + q * w.out_step)
            for j, tap in enumerate(w.taps):
                o = w.in_start + q * w.in_step + j * w.in_tap
                if 0 <= o < axis.output:
                    backward.append((covered[-1], tap, o))
    assert sorted(covered) == list(range(size))
    assert sorted(backward) == sorted(forward)
