"""float8: every code, rounding, scales, exact products of whole numbers in every form and tile, and derived bounds."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import conv, float8
from minidl.kernels.conv import float8 as product
from minidl.kernels.conv import plan
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.problem import FORWARD
from minidl.kernels.conv.problem import Problem as Described
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing.memory import GuardedAllocations
from minidl.testing.specs import bounds
from minidl.testing.specs import float8 as errors
from tests.kernels.test_conv import Problem, whole

pytestmark = pytest.mark.usefixtures("fresh_plans")

E4M3, E5M2 = float8.DTYPES
DTYPES = pytest.mark.parametrize("dtype", float8.DTYPES, ids=["e4m3", "e5m2"])
WIDE = [torch.float32, torch.float16] + [torch.bfloat16] * (not launch.INTERPRETED)
FORMS = "box", "batch", "product"
# (N, C, M, size, kernel, stride, padding, dilation, groups), as in test_conv.py.
SHAPES = {
    "3x3": (3, 64, 24, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "a stride": (5, 32, 9, (7, 6), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "a dilation and groups": (2, 32, 16, (6, 7), (3, 2), (1, 1), (1, 0), (2, 1), 2),
    "1x1": (3, 96, 40, (5, 6), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "one pixel, many images": (70, 160, 33, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "channels that no form takes": (2, 20, 7, (5, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "no images": (0, 32, 8, (5, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1),
}


def one():
    return torch.ones((), device=default_device())


def codes(dtype):
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def same(a, b):
    """Equal with their signs, NaN for NaN."""
    number = ~b.isnan()
    return torch.equal(a.isnan(), ~number) and all(
        torch.equal(f(a.double())[number], f(b.double())[number]) for f in (torch.clone, torch.signbit)
    )


@DTYPES
def test_every_code_and_every_halfway_case(dtype):
    every = codes(dtype)
    for wide in WIDE:
        assert same(float8.dequantize(every.to(default_device()), None, wide).cpu(), every.to(wide))
    numbers = every.float()[every.float().isfinite()].unique()
    between = (numbers[1:] + numbers[:-1]) / 2
    inf = torch.tensor(torch.inf)
    x = torch.cat([numbers, -numbers, between, torch.nextafter(between, inf), torch.nextafter(between, -inf)])
    values, _ = float8.quantize(x.to(default_device()), dtype, one())
    assert torch.equal(values.cpu().view(torch.uint8), x.to(dtype).view(torch.uint8))
    most = torch.finfo(dtype).max
    beyond = torch.tensor([1.5 * most, -1e30, torch.inf, -torch.inf, torch.nan, 3 * 2.0**-149])
    values, _ = float8.quantize(beyond.to(default_device()), dtype, one())
    inf = torch.inf if dtype == E5M2 else torch.nan
    assert same(values.cpu().float(), torch.tensor([most, -most, inf, -inf, torch.nan, 0.0]))


@DTYPES
@given(
    st.lists(st.floats(width=32), max_size=9), st.integers(-149, 127), st.integers(0, 70), st.sampled_from(WIDE),
    st.sampled_from(["dense", "a stride", "an offset", "channels last"]), st.integers(0, 9),
)  # fmt: skip
def test_scales(dtype, given_values, exponent, count, wide, layout, seed):
    drawn = torch.randn(2, 3, 1, 2 * count + 2, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    drawn.view(-1)[: len(given_values)] = torch.tensor(given_values)
    x = drawn.to(wide).to(default_device())
    x = {
        "dense": x, "a stride": x[..., ::2], "an offset": x[..., 1:], "channels last": x.permute(0, 3, 1, 2),
    }[layout]  # fmt: skip
    with GuardedAllocations():
        values, scale = float8.quantize(x, dtype)
    assert (values.shape, values.dtype, scale.shape) == (x.shape, dtype, ())
    finite = x.double().cpu()[x.cpu().isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    s = float(scale)
    most = torch.finfo(dtype).max
    assert torch.frexp(scale.double().cpu())[0] == 0.5
    assert largest <= most * s
    if largest == 0:
        assert s == 1
    else:
        assert s == 2.0**-126 or largest > most * s / 2
    expected = (x.double().cpu() / s).float().to(dtype)
    infinite = x.cpu().isinf()
    assert same(values.cpu().float()[~infinite], expected.float()[~infinite])
    assert same(float8.dequantize(values, scale, torch.float32).cpu(), values.float().cpu() * s)
    back = values.double().cpu() * s  # in float32 the largest numbers may round to infinity
    number = x.cpu().isfinite()
    off = (back - x.double().cpu()).abs()
    assert (off <= errors.rounding(x.double().cpu(), s, dtype))[number].all()


@DTYPES
def test_more_than_a_block_of_values(dtype):
    """Every finite value, the largest one among them: the scale is 1, and nothing is rounded."""
    every = codes(dtype).float()
    x = every[every.isfinite()].to(default_device())
    with launch.force(float8=launch.Tile({"BLOCK_N": 16}, 1, 1)), GuardedAllocations():
        values, scale = float8.quantize(x, dtype)
        back = float8.dequantize(values, scale, torch.float32)
    assert float(scale) == 1
    assert same(values.float().cpu(), x.cpu())
    assert same(back.cpu(), x.cpu())


def check(shape, form=None, kinds=(E4M3, E4M3), out=torch.float32, seed=0):
    """Whether the form takes the shape; the result is exact."""
    p = Problem(shape, seed)
    channel = (slice(None), None, None)
    expected = (p.y * p.scale.double()[channel] * 0.125 + p.bias.double()[channel]).relu()
    x, w = p.x.to(kinds[0]), p.w.to(kinds[1])
    call = partial(
        product.forward, x, w, one() * 0.5, one() * 0.25, p.geometry, p.bias, "relu", scale=p.scale, form=form
    )
    try:
        got = call(out_dtype=out)
    except conv.UnableError:
        return False
    assert got.dtype == out
    assert torch.equal(got, expected.to(out))
    small = call(out_dtype=kinds[0], scale_result=one() * 0.25)
    rounded, _ = float8.quantize(expected.float(), kinds[0], one() * 0.25)
    assert small.dtype == kinds[0]
    assert torch.equal(small.contiguous().view(torch.uint8), rounded.contiguous().view(torch.uint8))
    return True


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_integers_as_torch(name):
    took = [form for form in FORMS if check(SHAPES[name], form)]
    assert took == {
        "3x3": ["box", "batch"], "a stride": ["batch"], "a dilation and groups": ["box", "batch"],
        "1x1": ["box", "batch", "product"], "one pixel, many images": ["box", "batch", "product"],
    }.get(name, []) or not launch.boxes()  # fmt: skip
    for kinds in ((E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)):
        assert check(SHAPES[name], None, kinds, WIDE[-1])


@given(
    st.integers(0, 9), st.integers(1, 3).map(lambda n: 32 * n) | st.integers(0, 40), st.integers(1, 40),
    st.tuples(st.integers(3, 8), st.integers(3, 8)), st.sampled_from([1, 3]), st.integers(1, 2), st.integers(0, 9),
)  # fmt: skip
def test_images_of_any_size(N, C, M, size, kernel, stride, seed):
    pad = (kernel // 2,) * 2
    assert check((N, C, M, size, (kernel,) * 2, (stride,) * 2, pad, (1, 1), 1), seed=seed)


FAMILIES = {"box": "conv_box", "batch": "conv_batch", "product": "gemm"}


def tiles():
    for form, family in FAMILIES.items():
        for name in ("interpreted", "sm_90") if launch.INTERPRETED else [launch.target()]:
            for tile in launch.tiles(family, name, E4M3):
                yield pytest.param(form, tile, id=f"{form}-{tile}".replace(" ", ","))


@pytest.mark.skipif(not launch.boxes(), reason="no boxes on this device")
@pytest.mark.parametrize(("form", "tile"), list(tiles()))
def test_every_tile(form, tile):
    kernel = 1 if form == "product" else 3
    shape = (5, 256 if kernel == 1 else 128, 72, (3, 4), (kernel,) * 2, (1, 1), (kernel // 2,) * 2, (1, 1), 1)
    with launch.force(**{FAMILIES[form]: tile}), GuardedAllocations():
        assert check(shape, form)


@DTYPES
@given(
    st.integers(1, 40), st.integers(1, 9).map(lambda n: 32 * n) | st.integers(1, 300), st.integers(1, 40),
    st.sampled_from([0.0, 1.0, 30.0]), st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_what_rounding_and_summing_may_cost(dtype, rows, K, columns, mean, fast, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, K, generator=generator) + mean for n in (rows, columns))
    (x, scale_x), (w, scale_w) = (float8.quantize(t.to(default_device()), dtype) for t in (a, b))
    got = product.forward(
        x[:, :, None, None], w[:, :, None, None], scale_x, scale_w,
        Geometry.of((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1), out_dtype=torch.float32, fast=fast,
    )[:, :, 0, 0].cpu()  # fmt: skip
    off_a, off_b = (errors.rounding(t.double(), float(s), dtype) for t, s in ((a, scale_x), (b, scale_w)))
    exact, a, b = a.double() @ b.double().T, a.double().abs(), b.double().abs()
    total = (a + off_a) @ (b + off_b).T
    rounding = a @ off_b.T + off_a @ b.T + off_a @ off_b.T
    assert bounds.holds(got, exact, rounding + errors.sum_error(total, K, product.precision(fast)))
    # Without the rounding, which is known.
    known = (x.double() * scale_x).cpu() @ (w.double() * scale_w).cpu().T
    assert bounds.holds(got, known, errors.sum_error(total, K, product.precision(fast)))


def test_what_is_not_finite_stays_in_its_rows():
    x, w = whole(5, 64), whole(7, 64, seed=1)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    values, scale = float8.quantize(x)
    shape = Geometry.of((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1)
    y = product.forward(
        values[:, :, None, None], w.to(E4M3)[:, :, None, None], scale, one(), shape, out_dtype=torch.float32
    )[:, :, 0, 0]
    assert y[1:3].isnan().all()
    kept = [0, 3, 4]
    assert torch.equal(y[kept], (x.double() @ w.double().T)[kept].float())


@DTYPES
def test_the_last_value_counts_in_the_scale(dtype):
    """The only one of its block, the largest of all."""
    x = torch.ones(17, device=default_device())
    x[16] = torch.finfo(dtype).max
    with launch.force(float8=launch.Tile({"BLOCK_N": 16}, 1, 1)):
        assert float8.quantize(x, dtype)[1] == 1


def test_factors_of_more_columns_than_a_block_has():
    factor, bias = whole(37), whole(37, seed=1)
    with launch.force(float8=launch.Tile({"BLOCK_N": 16}, 1, 1)), GuardedAllocations():
        y, z = float8.epilogue(one() * 2, one(), 37, factor, bias, one() * 4)
    assert torch.equal(y, factor / 2)
    assert torch.equal(z, bias / 4)


def test_the_factor_of_a_sum_of_zero_is_finite():
    y, _ = float8.epilogue(one() * 2.0**119, one() * 2.0**119, 3)
    assert torch.equal(y.cpu(), torch.full((3,), 2.0**127))


@pytest.mark.parametrize(
    ("target", "forms"), [("sm_90", {"box", "batch"}), ("sm_80", set()), ("interpreted", {"box", "batch"})]
)
def test_who_takes_it(target, forms):
    geometry = Geometry.of((7, 7), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    problem = Described(FORWARD, geometry, 256, 512, 512, E4M3, out=torch.float16, target=target, processors=132)
    made = {candidate.name for candidate, _ in plan.candidates(problem) if candidate is not None}
    assert made == forms
    assert "float8" in conv.explain(problem)


def test_refusals():
    x, w = whole(2, 32, 5, 5).to(E4M3), whole(3, 32, 3, 3).to(E4M3)
    shape = Geometry.of((5, 5), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    with pytest.raises(TypeError, match=r"x has dtype torch\.float32, expected float8"):
        product.forward(x.float(), w, one(), one(), shape)
    with pytest.raises(TypeError, match=r"out_dtype is torch\.int8"):
        product.forward(x, w, one(), one(), shape, out_dtype=torch.int8)
    with pytest.raises(ValueError, match="need a scale_result"):
        product.forward(x, w, one(), one(), shape, out_dtype=E4M3)
    with pytest.raises(ValueError, match="act is 'tanh', expected None, relu or leaky_relu"):
        product.forward(x, w, one(), one(), shape, act="tanh", out_dtype=E4M3, scale_result=one())
    with pytest.raises(ValueError, match="scale_weight is"):
        product.forward(x, w, one(), torch.ones(3), shape, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="unknown form"):
        product.forward(x, w, one(), one(), shape, out_dtype=torch.float32, form="boxes")
    with pytest.raises(TypeError, match="expected float16, bfloat16"):
        float8.quantize(torch.ones(3, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
        float8.quantize(torch.ones(3), torch.int8)
    with pytest.raises(TypeError, match="expected float16, bfloat16"):
        float8.dequantize(x, None, torch.float64)
