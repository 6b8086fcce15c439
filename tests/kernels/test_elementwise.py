"""Which kernel a layout gets, exceptional values, accuracy over whole ranges, integers, addresses beyond 2^31."""

import itertools
import math

import pytest
import torch

from minidl.kernels import activation, elementwise
from minidl.kernels.elementwise.compute import collapse
from minidl.runtime import launch
from minidl.testing import GuardedAllocations

SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0, 0.5, -3.5, 1e-40, 88.8, -88.0, -104.0, 1e38)
INFINITE = (math.inf, -math.inf, math.nan)


def launches(function):
    """Names of the kernels that a call launches."""
    names = []
    with launch.record(lambda kernel, grid, args, meta: names.append(kernel.__name__), launch.target()):
        function()
    return names


@pytest.mark.parametrize(
    ("a", "b", "kernel"),
    [
        (torch.empty(3, 4), torch.empty(3, 4), "flat_kernel"),
        (torch.empty(3, 4), torch.empty(()), "flat_kernel"),
        (torch.empty(3, 4), torch.empty(1, 1, 1), "flat_kernel"),
        (torch.empty(3, 4), torch.empty(4), "tile_kernel"),
        (torch.empty(3, 4), torch.empty(4, 3).t(), "tile_kernel"),
        (torch.empty(8)[::2], torch.empty(4), "tile_kernel"),
    ],
)
def test_one_run_of_memory_gets_the_flat_kernel(a, b, kernel):
    assert launches(lambda: elementwise.add(a, b)) == [kernel]


@pytest.mark.parametrize("shape", [(8, 24), (9, 25)])
def test_planes_of_whole_tiles_and_of_one_element_more(shape, device):
    a, b = torch.randn(shape, device=device), torch.randn(shape[::-1], device=device).t()
    with launch.force(elementwise_tile=launch.Tile({"BLOCK_M": 4, "BLOCK_N": 8})):
        assert torch.equal(elementwise.add(a, b), a + b)


def test_six_dimensions_of_which_none_merge(device):
    shape = (2, 3, 2, 4, 2, 4)
    a = torch.randn(shape, device=device)
    b = torch.randn(shape[::-1], device=device).permute(5, 4, 3, 2, 1, 0)
    chosen = torch.rand(2, 2, 2, 3, 4, 4, device=device).permute(1, 3, 0, 5, 2, 4) > 0.5
    assert torch.equal(elementwise.where(chosen, a, b), torch.where(chosen, a, b))
    with launch.force(elementwise_tile=launch.Tile({"BLOCK_M": 2, "BLOCK_N": 2})), GuardedAllocations():
        y = elementwise.add(a, b)
    assert torch.equal(y, a + b)


def test_collapse_merges_what_all_operands_allow():
    shape = (2, 1, 3, 4, 5)
    full, row = torch.empty(shape).stride(), (0, 0, 0, 0, 1)
    assert collapse(shape, [full, full]) == ([120], [[1], [1]])
    assert collapse(shape, [full, row]) == ([24, 5], [[5, 1], [0, 1]])
    assert collapse((), [(), ()]) == ([], [[], []])


DIVISIONS = {
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div_floor": torch.floor_divide,
}


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "div", "pow", "maximum", "minimum", "fmod", "remainder", *DIVISIONS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exceptional_values_of_two_operands(name, dtype, device):
    pairs = torch.tensor(list(itertools.product(SPECIAL + INFINITE, repeat=2)), dtype=dtype)
    got = getattr(elementwise, name)(pairs[:, 0].to(device), pairs[:, 1].to(device)).cpu()
    expected = DIVISIONS.get(name, getattr(torch, name, None))(pairs[:, 0], pairs[:, 1])
    flushed = expected.abs() < torch.finfo(dtype).tiny  # a GPU may give 0 for these
    assert torch.equal(got.isnan(), expected.isnan())
    torch.testing.assert_close(got[~flushed], expected[~flushed], rtol=1e-6, atol=0, equal_nan=True)
    signed = ~expected.isnan() & (expected != 0 if name in ("maximum", "minimum") else torch.tensor(True))
    assert torch.equal(got.signbit()[signed], expected.signbit()[signed])


@pytest.mark.parametrize(
    ("a", "b"), [(3e38, 7.3), (-1e300, 3.0), (1.6e308, 1.5), (1e308, 1.1e-300), (-1e308, 0.9), (1e-300, -1e300)]
)
def test_a_remainder_of_a_large_quotient_needs_no_larger_one_beside_it(a, b, device):
    """Each alone: all of a block take as many steps as its largest quotient. One that overflows leaves NaN."""
    pair = torch.tensor([[a], [b]], dtype=torch.float64)
    found = elementwise.fmod(*pair.to(device)).item()
    assert math.isnan(found) if math.isinf(a / b) else found == math.fmod(a, b)


@pytest.mark.parametrize("name", [
    "neg", "abs", "exp", "log", "sqrt", "square", "reciprocal", "sign", "floor", "ceil", "trunc", "round", "sin", "cos",
    "log1p", "expm1", "erf", "log2", "rsqrt",
])  # fmt: skip
def test_exceptional_values_of_one_operand(name, device):
    x = torch.tensor([v for v in SPECIAL if v != 1e-40] + list(INFINITE))
    got, expected = getattr(elementwise, name)(x.to(device)).cpu(), getattr(torch, name)(x)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=2.0**-126, equal_nan=True)
    assert torch.equal(got.signbit()[~expected.isnan()], expected.signbit()[~expected.isnan()])


def test_exponential_is_as_good_for_large_numbers_as_for_small(device):
    x = torch.linspace(-87, 88.5, 20001)
    exact = x.double().exp()
    error = (elementwise.exp(x.to(device)).cpu().double() - exact).abs() / exact
    assert error.max() < 8 * 2.0**-24


def test_logarithm_is_relatively_good_beside_1(device):
    x = torch.linspace(0.5, 2, 20001)
    exact = x.double().log()
    error = (elementwise.log(x.to(device)).cpu().double() - exact).abs() / exact.abs().clamp(min=1e-30)
    assert error.max() < 8 * 2.0**-24


def test_gelu_keeps_its_relative_accuracy_in_the_tail(device):
    z = torch.linspace(-12, -1, 5001)
    exact = 0.5 * z.double() * torch.erfc(-z.double() / math.sqrt(2))
    error = (elementwise.act(z.to(device), "gelu").cpu().double() - exact).abs() / exact.abs()
    assert (error < (32 + 2 * z.double() ** 2) * 2.0**-24).all()


@pytest.mark.parametrize("act", activation.NAMES)
@pytest.mark.parametrize("value", [1e30, -1e30, 3e38, -3e38])
def test_gradients_far_out_are_0_or_the_slope(act, value, device):
    x = torch.full((3,), value, device=device)
    slope = elementwise.act_grad(torch.ones_like(x), x, act).cpu()
    flat = act in ("sigmoid", "tanh", "relu6")
    expected = 0.0 if flat or (value < 0 and act != "leaky_relu") else 1.0 if value > 0 else activation.NEGATIVE_SLOPE
    assert slope.tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize("act", [name for name in activation.FROM_OUTPUT if name is not None])
def test_gradient_from_input_and_from_output_agree(act, device):
    x = torch.linspace(-6, 6, 301, device=device)
    dy = torch.ones_like(x)
    torch.testing.assert_close(
        elementwise.act_grad(dy, elementwise.act(x, act), act, from_output=True),
        elementwise.act_grad(dy, x, act),
        rtol=0,
        atol=4e-6,
    )


def test_gradient_that_needs_the_input_is_refused_from_the_output(device):
    x = torch.ones(3, device=device)
    with pytest.raises(ValueError, match="the derivative of gelu does not follow from its output; give its input"):
        elementwise.act_grad(x, x, "gelu", from_output=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers(dtype, device):
    a = torch.arange(12, dtype=dtype).view(3, 4).to(device)
    b = torch.tensor([3, 1, 7, 2], dtype=dtype).to(device)
    for name in ("add", "mul", "maximum", "minimum", "eq", "lt", "ge"):
        assert torch.equal(getattr(elementwise, name)(a, b).cpu(), getattr(torch, name)(a, b).cpu()), name
    assert torch.equal(elementwise.clamp(a, 2, 7).cpu(), a.clamp(2, 7).cpu())
    assert torch.equal(elementwise.where(a > b, a, 5).cpu(), torch.where(a > b, a, 5).cpu())


def test_bools_are_compared_and_chosen_by(device):
    a, b = torch.tensor([True, False, True], device=device), torch.tensor([True, True, False], device=device)
    assert elementwise.eq(a, b).tolist() == [True, False, False]
    assert elementwise.where(a, 1.0 * torch.ones(3, device=device), 0).tolist() == [1, 0, 1]


def test_a_number_is_not_rounded_to_a_narrow_dtype(device):
    x = torch.full((4,), 1000.0, dtype=torch.float16, device=device)
    assert elementwise.mul(x, 0.1).tolist() == [100.0] * 4  # 0.1 as float16 would give 99.94


def test_addresses_beyond_2_31(device):
    far = torch.empty(2**31, dtype=torch.float16, device=device).as_strided((2, 2), (2**31 - 2, 1))
    far.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert elementwise.add(far, far).tolist() == [[2, 4], [6, 8]]
