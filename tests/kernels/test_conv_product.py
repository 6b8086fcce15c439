"""Convolutions that are one matrix product: which ones, exact on whole numbers, every tile, shares, any batch alike."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import conv
from minidl.kernels.conv import phase_weights, plan, product
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, PHASE, backward_phases
from minidl.kernels.gemm import tiled
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing.memory import GuardedAllocations
from tests.kernels.test_conv import Problem, whole

pytestmark = pytest.mark.usefixtures("fresh_plans")

# (N, C, M, size, kernel, stride, padding, dilation, groups), as in test_conv.py.
SHAPES = {
    "1x1": (3, 32, 24, (5, 6), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "rows in no boxes": (3, 5, 7, (5, 6), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "one pixel": (3, 16, 40, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "one channel": (2, 1, 1, (4, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "a dilation": (2, 8, 16, (3, 2), (1, 1), (1, 1), (0, 0), (3, 2), 1),
    "the whole image": (5, 8, 24, (4, 3), (4, 3), (1, 1), (0, 0), (1, 1), 1),
    "the whole image, a stride": (5, 3, 10, (3, 3), (3, 3), (2, 3), (0, 0), (1, 1), 1),
    "rows of an image": (3, 8, 16, (5, 4), (1, 4), (1, 1), (0, 0), (1, 1), 1),
    "patches of rows": (3, 8, 16, (6, 4), (2, 4), (2, 1), (0, 0), (1, 1), 1),
    "patches of a row": (3, 8, 16, (1, 12), (1, 4), (1, 4), (0, 0), (1, 1), 1),
    "a column": (3, 8, 16, (6, 1), (3, 1), (3, 1), (0, 0), (1, 1), 1),
}
OTHERS = {
    "a stride": (3, 32, 24, (5, 6), (1, 1), (2, 1), (0, 0), (1, 1), 1),
    "a stride along the row": (3, 32, 24, (5, 6), (1, 1), (1, 2), (0, 0), (1, 1), 1),
    "padding": (3, 32, 24, (5, 6), (1, 1), (1, 1), (0, 1), (1, 1), 1),
    "groups": (3, 32, 24, (5, 6), (1, 1), (1, 1), (0, 0), (1, 1), 2),
    "3x3": (3, 32, 24, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "columns of an image": (3, 8, 16, (4, 5), (4, 1), (1, 1), (0, 0), (1, 1), 1),
    "the whole image, with gaps": (3, 8, 16, (3, 5), (3, 3), (1, 1), (0, 0), (1, 2), 1),
    "a rest": (3, 8, 16, (1, 13), (1, 4), (1, 4), (0, 0), (1, 1), 1),
    "patches that overlap": (3, 8, 16, (1, 10), (1, 4), (1, 2), (0, 0), (1, 1), 1),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])


def check(shape, dtype=torch.float32, seed=0):
    """The names of what the form could do; all of it exact."""
    p = Problem(shape, seed, dtype)
    last = p.w.to(memory_format=torch.channels_last)
    z = p.y + p.bias.double()[:, None, None]
    scale = whole(p.y.shape[1], seed=8, dtype=dtype)
    scaled = p.y * scale.double()[:, None, None] + p.bias.double()[:, None, None]
    calls = {
        "forward": (p.y, lambda: conv.forward(p.x, p.w, p.geometry, form="product")[0]),
        "epilogue": (z.relu(), lambda: conv.forward(p.x, p.w, p.geometry, p.bias, "relu", form="product")[0]),
        "scale": (
            scaled.relu(),
            lambda: conv.forward(p.x, p.w, p.geometry, p.bias, "relu", scale=scale, form="product")[0],
        ),
        "preactivation": (
            z,
            lambda: conv.forward(p.x, p.w, p.geometry, p.bias, "relu", preactivation=True, form="product")[1],
        ),
        "sum": (
            (z + p.added.double()).relu(),
            lambda: conv.forward(p.x, p.w, p.geometry, p.bias, "relu", added=p.added, form="product")[0],
        ),
        "grad_input": (p.dx, lambda: conv.grad_input(p.dy, p.w, p.geometry, form="product")),
        "grad_input, weights channels-last": (p.dx, lambda: conv.grad_input(p.dy, last, p.geometry, form="product")),
        "grad_weight": (p.dw, lambda: conv.grad_weight(p.x, p.dy, p.geometry, form="product")),
    }
    done = []
    for name, (expected, call) in calls.items():
        try:
            got = call()
        except conv.UnableError:
            continue
        assert got.shape == expected.shape
        assert torch.equal(got, expected.to(got.dtype)), name
        done.append(name)
    return done


def able(name, shape, dtype=torch.float32):
    """What the form does of a shape: tensor cores take no float32 gradients of the weight, boxes no float64."""
    back = ["grad_input", "grad_input, weights channels-last"] if shape[4] == (1, 1) else []
    precise = launch.INTERPRETED or dtype != torch.float32 or launch.precision(dtype) == "ieee"
    if name in ("patches of a row", "a column") and precise and dtype != torch.float64:
        back = ["grad_input, weights channels-last"]
    return ["forward", "epilogue", "scale", "preactivation", "sum", *back, *["grad_weight"] * precise]


def skip_bfloat16(dtype):
    if dtype == torch.bfloat16 and launch.INTERPRETED:
        pytest.skip("the interpreter has no bfloat16")


@DTYPES
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_integers_as_torch(name, dtype):
    skip_bfloat16(dtype)
    assert check(SHAPES[name], dtype) == able(name, SHAPES[name], dtype)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_product(name):
    assert check(OTHERS[name]) == []


@given(
    st.integers(1, 40), st.sampled_from([1, 3, 8, 13, 16, 40]), st.sampled_from([1, 4, 8, 20]),
    st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(0, 9),
)  # fmt: skip
def test_images_of_any_size(N, C, M, size, seed):
    shape = (N, C, M, size, (1, 1), (1, 1), (0, 0), (1, 1), 1)
    assert check(shape, seed=seed) == able("", shape)


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)), st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)), st.tuples(st.integers(0, 1), st.integers(0, 1)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
)  # fmt: skip
def test_a_product_reads_each_value_once_and_in_order(size, kernel, stride, padding, dilation):
    """The form is able exactly where the inputs of all outputs, one after another, are those of the image."""
    if any(s + 2 * p < d * (k - 1) + 1 for s, p, d, k in zip(size, padding, dilation, kernel, strict=True)):
        return
    geometry = Geometry.of(size, kernel, stride, tuple((p, p) for p in padding), dilation, 1)
    read = []
    for oh, ow in itertools.product(range(geometry.h.output), range(geometry.w.output)):
        for r, s in itertools.product(range(kernel[0]), range(kernel[1])):
            h, w = oh * stride[0] - padding[0] + r * dilation[0], ow * stride[1] - padding[1] + s * dilation[1]
            read.append(h * size[1] + w if 0 <= h < size[0] and 0 <= w < size[1] else None)
    expected = read == list(range(size[0] * size[1]))
    for direction in (FORWARD, GRAD_WEIGHT):
        described = conv.Problem(direction, geometry, 2, 8, 8, torch.float16)
        assert bool(product.able(described)) == expected
    phase = backward_phases(geometry)[0]
    back = conv.Problem(PHASE, geometry, 2, 8, 8, torch.float16, phases=phase)
    assert bool(product.able(back)) == (expected and kernel == (1, 1))


def test_no_pool_and_no_groups():
    p = Problem(SHAPES["1x1"])
    pooled, _ = conv.forward(p.x, p.w, p.geometry, p.bias, "relu", pool="max", form="product")
    expected = F.max_pool2d((p.y + p.bias.double()[:, None, None]).relu(), 2)
    assert torch.equal(pooled.double(), expected)
    for more, reason in (({"pool": "max"}, "a pool"), ({"N": 0}, "no rows")):
        found = product.able(p.described()._replace(**more))
        assert not found
        assert reason in found
    groups = product.able(Problem(OTHERS["groups"]).described())
    assert groups == "more than one group"


SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2, "PIECES": 1}
LARGER = {
    "1x1": (5, 40, 56, (5, 6), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "the whole image": (37, 8, 56, (4, 3), (4, 3), (1, 1), (0, 0), (1, 1), 1),
}


@pytest.mark.parametrize(
    ("processors", "dtype"), [(1, torch.float32), (5, torch.float16), (40, torch.float32), (132, torch.float16)]
)
@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("name", LARGER)
def test_shares_and_more_than_a_tile_along_every_axis(name, boxed, processors, dtype, monkeypatch):
    """One share, some and more; all that an epilogue has follows the sum of the shares."""
    monkeypatch.setattr(launch, "processors", lambda: processors)
    monkeypatch.setattr(conv.Problem, "boxes", conv.Problem.boxes if boxed else lambda *_, **__: False)
    small = launch.Tile(SMALL, 4, 2)
    kernels = set()

    def watcher(kernel, grid, args, meta, go):
        kernels.add(kernel)
        go()

    N, C, M, *rest = LARGER[name]
    with (
        launch.force(gemm=launch.Tile({**SMALL, "FLATTEN": 0}, 4, 2), gemm_pointer=small),
        launch.watch(watcher),
        GuardedAllocations(),
    ):
        assert check((N, C, M, *rest), dtype) == able(name, LARGER[name], dtype)
        # 8 blocks of K each for two shares of few rows.
        assert "forward" in check((1, 320, 24, (1, 1), (1, 1), *rest[2:]), dtype)
    assert (tiled.gemm_tma_kernel in kernels) == (boxed and launch.boxes())
    assert (tiled.gemm_pointer_kernel in kernels) == (not (boxed and launch.boxes()))
    assert (tiled.gemm_sum_kernel in kernels) == (processors > 1)


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize(("N", "patches"), [(2, (4, 4)), (3, (1, 11))])
def test_patches_back_of_more_than_a_tile_along_every_axis(N, patches, pieces, monkeypatch):
    """Two whole tiles of patches, and one patch more."""
    monkeypatch.setattr(launch, "processors", lambda: 3)
    size = tuple(2 * count for count in patches)
    p = Problem((N, 12, 24, size, (2, 2), (2, 2), (0, 0), (1, 1), 1), dtype=torch.float16)
    bias, scale = (whole(12, seed=seed, dtype=torch.float16) for seed in (8, 9))
    w = p.w.to(memory_format=torch.channels_last)
    tile = launch.Tile({**SMALL, "BLOCK_N": 16 if pieces == 1 else 32, "FLATTEN": 0, "PIECES": pieces}, 4, 2)
    with launch.force(gemm=tile):
        y, z = conv.transposed(p.dy, w, p.geometry, bias, "relu", scale=scale, preactivation=True, form="product")
    exact = p.dx * scale.double()[:, None, None] + bias.double()[:, None, None]
    assert torch.equal(z.double(), exact)
    assert torch.equal(y.double(), exact.relu())


def tiles():
    """Every tile of the tables of matrix products, once per size."""
    seen = set()
    for family in product.FAMILIES:
        for name in launch.table(family) if launch.INTERPRETED else [launch.target()]:
            for dtype in (torch.float32, torch.float16):
                for tile in launch.tiles(family, name, dtype):
                    key = family, dtype, str(tile)
                    if key not in seen:
                        seen.add(key)
                        label = f"{family}-{dtype}-{tile}".replace(" ", ",").replace("torch.", "")
                        yield pytest.param(family, dtype, tile, id=label)


@pytest.mark.parametrize(("family", "dtype", "tile"), list(tiles()))
def test_every_tile(family, dtype, tile):
    shape = (7, 72 if family == "gemm" else 71, 264, (5, 6), (1, 1), (1, 1), (0, 0), (1, 1), 1)
    with launch.force(**{family: tile}):
        assert check(shape, dtype) == able("", shape, dtype)


@DTYPES
def test_weights_are_read_as_they_are_on_the_way_back(dtype, monkeypatch):
    """Of 16 bits, or in the interpreter, in channels-last memory: no launch before the product."""
    skip_bfloat16(dtype)
    if dtype.itemsize != 2:
        pytest.skip("turned for tensor cores")
    p = Problem(SHAPES["1x1"], dtype=dtype)
    monkeypatch.setattr(phase_weights, "conv_reorder_kernel", None)
    w = p.w.to(memory_format=torch.channels_last)
    assert torch.equal(conv.grad_input(p.dy, w, p.geometry, form="product"), p.dx.to(dtype))


@pytest.mark.parametrize("shift", [1, 8])
def test_operands_that_begin_anywhere(shift):
    """Boxes begin at a multiple of 16 bytes; others are read through pointers, to the same numbers."""
    p = Problem(SHAPES["1x1"], dtype=torch.float16)

    def shifted(x):
        flat = torch.empty(x.numel() + shift, dtype=x.dtype, device=x.device)[shift:]
        last = flat.view(x.shape[0], *x.shape[2:], x.shape[1])
        return last.copy_(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    x, w, dy = map(shifted, (p.x, p.w, p.dy))
    assert torch.equal(conv.forward(x, w, p.geometry, form="product")[0].double(), p.y)
    assert torch.equal(conv.forward(p.x, w, p.geometry, form="product")[0].double(), p.y)
    assert torch.equal(conv.grad_input(dy, w, p.geometry, form="product").double(), p.dx)
    assert torch.equal(conv.grad_weight(x, p.dy, p.geometry, form="product").double(), p.dw)


def test_a_transposed_convolution_has_its_epilogue():
    p = Problem(SHAPES["1x1"])
    bias = whole(p.x.shape[1], seed=9)
    expected = p.dx + bias.double()[:, None, None]
    y, z = conv.transposed(p.dy, p.w, p.geometry, bias, "relu", preactivation=True, form="product")
    assert torch.equal(z.double(), expected)
    assert torch.equal(y.double(), expected.relu())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_pixel(bad):
    p = Problem(LARGER["1x1"])
    before, _ = conv.forward(p.x, p.w, p.geometry, form="product")
    p.x[1, 3, 2, 4] = bad
    after, _ = conv.forward(p.x, p.w, p.geometry, form="product")
    assert not after[1, :, 2, 4].isfinite().any()
    after[1, :, 2, 4] = before[1, :, 2, 4]
    assert torch.equal(after, before)


@pytest.mark.skipif(launch.INTERPRETED, reason="numpy's sums depend on the number of rows, in every form")
@pytest.mark.parametrize("direction", ["forward", "transposed"])
@pytest.mark.parametrize("processors", [1, 132])
def test_an_image_is_blind_to_the_others(direction, processors, monkeypatch):
    """Fractions, and a K long enough to be shared among processors where images are few."""
    monkeypatch.setattr(launch, "processors", lambda: processors)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 512, 3, 2, generator=generator).to(default_device())
    geometry = Geometry.of((3, 2), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))
    size = (40, 512, 1, 1) if direction == "forward" else (512, 40, 1, 1)
    w = torch.randn(size, generator=generator).to(default_device())
    call = getattr(conv, direction)
    tile = launch.Tile({**SMALL, "FLATTEN": 0}, 4, 2)
    with launch.force(gemm=tile):
        together, _ = call(x, w, geometry, form="product", batch_invariant=True)
        for first, last in ((0, 1), (4, 7)):
            some, _ = call(x[first:last], w, geometry, form="product", batch_invariant=True)
            assert torch.equal(some, together[first:last])


@pytest.mark.parametrize("target", ["sm_90", "sm_80", "interpreted"])
def test_a_blind_plan_does_not_see_the_number_of_images(target):
    """Tile and shares are those of any number; without being blind those of one image are others."""
    geometry = Geometry.of((7, 7), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))
    for batch_invariant in (True, False):
        seen = set()
        for N in (1, 8, 64, 300):
            described = conv.Problem(
                FORWARD, geometry, N, 2048, 512, torch.float16, form="product", batch_invariant=batch_invariant
            )
            made = plan.plan(described._replace(target=target, processors=132))
            found = made.prepared.product.product
            (sizes,) = (one for one in found.scalars if isinstance(one, tiled.Sizes))
            tile = found.meta["tile"]
            seen.add((found.kernel.__name__, sizes.SPLIT, *(getattr(tile, name) for name in SMALL)))
        assert (len(seen) == 1) is batch_invariant


def test_runs_are_bitwise_equal(monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda: 40)
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(shape, generator=generator).half().to(default_device())
        for shape in ((70, 32, 6, 6), (40, 32, 1, 1), (70, 40, 6, 6))
    )
    geometry = Geometry.of((6, 6), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))
    for call in (
        lambda: conv.forward(x, w, geometry, form="product")[0],
        lambda: conv.grad_input(dy, w, geometry, form="product"),
        lambda: conv.grad_weight(x, dy, geometry, form="product"),
    ):
        assert torch.equal(call(), call())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_as_near_to_the_exact_sum_as_pixels_are(dtype):
    """Rounded once from what is accumulated, in shares or not."""
    generator = torch.Generator().manual_seed(1)
    x, w, dy = (
        torch.randn(shape, generator=generator).to(dtype).to(default_device())
        for shape in ((8, 96, 9, 9), (40, 96, 1, 1), (8, 40, 9, 9))
    )
    geometry = Geometry.of((9, 9), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))
    wide_x, wide_w, wide_dy = x.double(), w.double(), dy.double()
    unit, inner = torch.finfo(dtype).eps, torch.finfo(launch.acc_torch(dtype)).eps
    for form in ("product", "pixel"):
        y, _ = conv.forward(x, w, geometry, form=form, precision="ieee")
        exact, total = F.conv2d(wide_x, wide_w), F.conv2d(wide_x.abs(), wide_w.abs())
        assert ((y.double() - exact).abs() <= unit * exact.abs() + 96 * inner * total).all()
        dw = conv.grad_weight(x, dy, geometry, form=form, precision="ieee")[:, :, 0, 0]
        exact = torch.einsum("nmhw,nchw->mc", wide_dy, wide_x)
        total = torch.einsum("nmhw,nchw->mc", wide_dy.abs(), wide_x.abs())
        assert ((dw.double() - exact).abs() <= unit * exact.abs() + 8 * 81 * inner * total).all()


@pytest.mark.skipif(not launch.INTERPRETED, reason="chosen for the interpreter")
def test_the_interpreter_takes_products_of_few_tiles():
    """Many tiles, or many steps along the pixels, take longer than the larger programs of other forms."""

    def name(direction, *shape):
        N, C, M, size = shape
        geometry = Geometry.of((size, size), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))
        return plan.plan(conv.Problem(direction, geometry, N, C, M, torch.float32)).name

    assert name(FORWARD, 4, 64, 256, 14) == name(GRAD_WEIGHT, 4, 64, 256, 14) == "product"
    assert name(FORWARD, 16, 24, 24, 56) == name(GRAD_WEIGHT, 2, 1, 1, 128) == "banded"
