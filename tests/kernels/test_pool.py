"""What is special to pooling: torch's windows in every mode, ties and NaN, what is kept, large windows."""

import random

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl

from minidl import ops
from minidl.autograd import no_grad
from minidl.kernels import division, pool
from minidl.kernels.pool import kernels
from minidl.kernels.pool.problem import Problem
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device

NAN, INF = float("nan"), float("inf")


def drawn(seed):
    """Arguments of a pooling, without regard to whether a window fits."""
    pick = random.Random(seed)
    kernel = pick.randint(1, 5), pick.randint(1, 5)
    return {
        "shape": (pick.randint(1, 2), pick.choice([1, 3, 5]), pick.randint(1, 11), pick.randint(1, 11)),
        "kernel_size": kernel,
        "stride": pick.choice([None, 1, 2, 3, (2, 1), (3, 4)]),
        "padding": tuple(pick.randint(0, k // 2) for k in kernel),
        "ceil_mode": pick.random() < 0.7,
        "dilation": pick.choice([1, 1, 2, (1, 3)]),
        "count_include_pad": pick.random() < 0.5,
        "divisor_override": pick.choice([None, None, 3]),
    }


def differentiated(function, x, *args, **named):
    """The result and the gradient of x for a fixed gradient of the result, by torch or by minidl."""
    if function.__module__.startswith("minidl"):
        leaf = Tensor(x, requires_grad=True)
        y = function(leaf, *args, **named)
        y.backward(Tensor(cotangent(y.data)))
        return y.data, leaf.grad.data
    leaf = x.clone().requires_grad_()
    y = function(leaf, *args, **named)
    y.backward(cotangent(y))
    return y.detach(), leaf.grad


def cotangent(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype).to(y.device)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (ops.max_pool2d, F.max_pool2d, ("kernel_size", "stride", "padding", "dilation", "ceil_mode")),
        (
            ops.avg_pool2d,
            F.avg_pool2d,
            ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
        ),
    ],
    ids=["max", "avg"],
)
def test_any_configuration_is_torchs(ours, theirs, names, part, device):
    refused = 0
    for seed in range(75 * part, 75 * part + 75):
        case = drawn(seed)
        named = {name: case[name] for name in names}
        x = torch.randn(case["shape"], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        # Small integers have ties.
        x = (x.round() if seed % 3 == 0 else x).to(device)
        try:
            expected = differentiated(theirs, x, **named)
        except RuntimeError:
            refused += 1
            with pytest.raises(ValueError, match="does not fit into an image"):
                ours(Tensor(x), **named)
            continue
        if expected[0].isinf().any():
            continue  # a dilated window that misses the image
        for got, wanted in zip(differentiated(ours, x, **named), expected, strict=True):
            torch.testing.assert_close(
                got, wanted, rtol=1e-12, atol=1e-12, msg=lambda text, case=case: f"{case}: {text}"
            )
    assert 0 < refused < 60


@pytest.mark.parametrize("size", [(7, 5), (1, 1), (12, 4)])
@pytest.mark.parametrize("output", [1, 2, 3, 7, (5, None), (1, 6), (20, 3)])
def test_adaptive_windows_are_torchs(size, output, device):
    x = torch.randn(2, 3, *size, dtype=torch.float64, device=device)
    expected = differentiated(F.adaptive_avg_pool2d, x, output)
    for got, wanted in zip(differentiated(ops.adaptive_avg_pool2d, x, output), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "output"), [((7, 10), (3, 4)), ((5, 7), (4, 3)), ((6, 11), (4, 9)), ((4, 5), (7, 6))])
def test_adaptive_maxima_go_back_to_their_places(size, output, device):
    """Of windows that overlap a place may have the number that another window gives to a pixel of its own."""
    for seed in range(8):
        x = torch.randperm(3 * size[0] * size[1], generator=torch.Generator().manual_seed(seed)).double()
        x = x.view(1, 3, *size).to(device)
        expected = differentiated(F.adaptive_max_pool2d, x, output)
        for got, wanted in zip(differentiated(ops.adaptive_max_pool2d, x, output), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_nan_and_infinities_in_a_maximum(device):
    rows = [[NAN, 1.0, 2.0, 3.0], [1.0, NAN, 2.0, NAN], [-INF, -INF, -INF, -INF], [INF, -INF, 1.0, INF]]
    x = torch.tensor(rows, device=device).view(4, 1, 2, 2)
    y, dx = differentiated(ops.max_pool2d, x, 2)
    expected_y, expected_dx = differentiated(F.max_pool2d, x, 2)
    torch.testing.assert_close(y, expected_y, equal_nan=True)
    torch.testing.assert_close(dx, expected_dx)
    assert pool.max_pool2d(x, pool.windows("max_pool2d", (2, 2), 2))[0].isnan().flatten().tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_the_first_of_equal_maxima_has_the_gradient(device):
    x = torch.ones(1, 1, 4, 4, device=device)
    leaf = Tensor(x, requires_grad=True)
    ops.max_pool2d(leaf, 3, 1).sum().backward()
    expected = torch.zeros(4, 4)
    expected[:2, :2] = 1
    assert torch.equal(leaf.grad.data.cpu().view(4, 4), expected)


@pytest.mark.parametrize("padding", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_the_first_pixel_of_a_window_of_minus_infinities_has_the_gradient(dilation, padding, device):
    x = torch.full((1, 2, 13, 14), -INF, dtype=torch.float64, device=device)
    for got, wanted in zip(
        differentiated(ops.max_pool2d, x, 4, 1, padding, dilation),
        differentiated(F.max_pool2d, x, 4, 1, padding, dilation),
        strict=True,
    ):
        assert torch.equal(got, wanted)


def test_a_window_without_a_pixel_is_minus_infinity(device):
    x = torch.ones(1, 2, 1, 3, device=device)
    y, dx = differentiated(ops.max_pool2d, x, 2, 1, 1, 2)
    assert (y == -INF).all()
    assert (dx == 0).all()


def test_places_are_kept_only_for_a_gradient(device, monkeypatch):
    kept = []
    original = pool.max_pool2d
    monkeypatch.setattr(pool, "max_pool2d", lambda x, at, keep, *how: kept.append(keep) or original(x, at, keep, *how))
    x = torch.zeros(1, 1, 4, 4, device=device)
    ops.max_pool2d(Tensor(x), 2)
    with no_grad():
        ops.max_pool2d(Tensor(x, requires_grad=True), 2)
    ops.max_pool2d(Tensor(x, requires_grad=True), 2)
    assert kept == [False, False, True]


@pytest.mark.parametrize(("kernel", "dtype"), [(11, torch.int8), (12, torch.int32)])
def test_places_have_the_smallest_type_that_holds_them(kernel, dtype, device):
    x = torch.randn(2, 3, 13, 14, dtype=torch.float64, device=device)
    at = pool.windows("max_pool2d", (13, 14), kernel, 1, kernel // 2)
    _, places = pool.max_pool2d(x, at, keep=True)
    assert places.dtype == dtype
    got = differentiated(ops.max_pool2d, x, kernel, 1, kernel // 2)
    for a, b in zip(got, differentiated(F.max_pool2d, x, kernel, 1, kernel // 2), strict=True):
        torch.testing.assert_close(a, b)


def test_a_tap_beyond_the_window_that_wraps_to_no_place(device):
    """Tap 6 * 40 + 15 = 255 of a window of 3 x 40 is -1 in eight bits, as is the place where no window is."""
    x = torch.randn(1, 2, 24, 60, dtype=torch.float64, device=device)
    got = differentiated(ops.max_pool2d, x, (3, 40), (8, 1))
    for a, b in zip(got, differentiated(F.max_pool2d, x, (3, 40), (8, 1)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_means_over_powers_of_two_are_exact(dtype, device):
    x = torch.randint(-8, 9, (3, 5, 9, 12), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for kernel, stride in ((2, 2), (4, 1), ((1, 8), 3)):
        got = differentiated(ops.avg_pool2d, x, kernel, stride)[0]
        assert torch.equal(got.double(), F.avg_pool2d(x.double(), kernel, stride))


@pytest.mark.parametrize("ours", [ops.max_pool2d, ops.avg_pool2d])
def test_two_runs_give_the_same_bits(ours, device):
    x = torch.randn(5, 33, 21, 17, device=device)
    first, again = (differentiated(ours, x, 5, 2, 2) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d", "max_pool3d", "avg_pool3d"])
@pytest.mark.parametrize("sizes", [(3, 2, 1), (11, 11, 0), (2, 3, 0)])
def test_contiguous_images_stay_contiguous_and_have_the_same_results(device, name, sizes):
    kernel, stride, padding = sizes
    size = (12,) * int(name[-2])
    x = torch.randn(2, 5, *size, device=device)
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    results = []
    for order in (torch.contiguous_format, last):
        leaf = Tensor(x.contiguous(memory_format=order), requires_grad=True)
        y = getattr(ops, name)(leaf, kernel, stride, padding)
        y.backward(Tensor(torch.ones_like(y.data)))
        assert y.data.is_contiguous(memory_format=order)
        assert leaf.grad.data.is_contiguous(memory_format=order)
        results.append((y.data, leaf.grad.data))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_channels_last_stays_without_a_copy(device):
    x = torch.randn(2, 8, 6, 6, device=device).to(memory_format=torch.channels_last)
    assert kernels.last(x).data_ptr() == x.data_ptr()
    assert ops.max_pool2d(Tensor(x), 2).data.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4)])
@pytest.mark.parametrize("ours", [ops.max_pool2d, ops.avg_pool2d, ops.adaptive_avg_pool2d])
def test_nothing_to_pool(ours, shape, device):
    y, dx = differentiated(ours, torch.zeros(shape, device=device), 2)
    assert y.shape == (*shape[:2], 2, 2)
    assert dx.shape == shape


def test_long_images_take_64_bit_indices(device, monkeypatch):
    # The same numbers as with 32 bits, which this image would do with.
    x = torch.randn(2, 3, 9, 10, dtype=torch.float64, device=device)
    plan = kernels.plan

    def wide(problem):
        prepared = plan(problem)
        tile = prepared.meta["tile"]._replace(INDEX=tl.int64)
        return prepared._replace(meta={**prepared.meta, "tile": tile})

    calls = [
        (ops.max_pool2d, (3, 2, 1)), (ops.avg_pool2d, (3, 2, 1)), (ops.adaptive_avg_pool2d, ((4, 7),)),
        (ops.max_pool2d, (2,)), (ops.avg_pool2d, (2, 3, 1)),
    ]  # fmt: skip
    expected = [differentiated(op, x, *args) for op, args in calls]
    monkeypatch.setattr(kernels, "plan", wide)
    for (op, args), wanted in zip(calls, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(differentiated(op, x, *args), wanted, strict=True))


def test_an_image_of_a_long_side_counts_in_64_bits():
    for at, index in (
        (pool.adaptive_windows("adaptive_avg_pool2d", (1, 70_000), (1, 60_000)), tl.int64),
        (pool.windows("p", (18, 18), 2), tl.int32),
    ):
        problem = Problem(at, 1, 1, torch.float32, mean=True, back=False, target=launch.target())
        assert index == kernels.plan(problem).meta["tile"].INDEX


def test_a_product_divides_as_a_division_does():
    sizes = [*range(1, 70), 127, 128, 129, 1000, 4095, 4097, 65537, 2**20 + 1, 2**30, 2**30 + 1, 2**31 - 1]
    for size in sizes:
        packed = division.reciprocal(size)
        product, shift = packed & 0xFFFFFFFF, (packed >> 32) - 1
        most = (2**31 - 1) // size
        for n in {0, 1, size - 1, size, size + 1, most * size - 1, most * size, 2**31 - 2, 2**31 - 1}:
            if 0 <= n < 2**31:
                assert (2 * n * product >> 32) >> shift == n // size
        assert packed >= 2**32


@pytest.mark.parametrize("seed", range(0, 400, 4))
def test_what_is_known_of_windows_beforehand(seed):
    case = drawn(seed)
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    size = case["shape"][2:]
    try:
        at = pool.windows("p", size, *(case[name] for name in names), None, case["count_include_pad"])
    except ValueError:
        return
    rows, columns = (
        [[o * at.stride[a] - at.padding[a] + r * at.dilation[a] for r in range(at.kernel[a])] for o in range(count)]
        for a, count in enumerate(at.output)
    )
    taps = [tap for window in rows for tap in window], [tap for window in columns for tap in window]
    assert at.inside == all(0 <= tap < size[a] for a in (0, 1) for tap in taps[a])
    if at.disjoint:
        assert all(len(set(found)) == len(found) for found in taps)
        assert all(b * s - p >= n for b, s, p, n in zip(at.blocks, at.stride, at.padding, size, strict=True))
        assert all(b >= o for b, o in zip(at.blocks, at.output, strict=True))
    if at.exact:
        assert at.blocks == at.output
        assert at.padding == (0, 0)
        assert all(b * s == n for b, s, n in zip(at.blocks, at.stride, size, strict=True))
    if at.full and case["dilation"] == 1:
        ones = F.avg_pool2d(
            torch.ones(1, 1, *size, dtype=torch.float64), at.kernel, at.stride, at.padding, case["ceil_mode"],
            case["count_include_pad"],
        )  # fmt: skip
        summed = F.avg_pool2d(
            torch.ones(1, 1, *size, dtype=torch.float64), at.kernel, at.stride, at.padding, case["ceil_mode"],
            divisor_override=1,
        )  # fmt: skip
        torch.testing.assert_close(ones * (at.kernel[0] * at.kernel[1]), summed)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(2, 2, 0), (2, 3, 0), ((1, 2), (2, 2), (0, 1)), (3, 4, 1), (1, 5, 0)]
)
@pytest.mark.parametrize(("ours", "theirs"), [(ops.max_pool2d, F.max_pool2d), (ops.avg_pool2d, F.avg_pool2d)])
@pytest.mark.parametrize("size", [(12, 12), (13, 11), (6, 7)])
def test_windows_apart_are_torchs(ours, theirs, kernel, stride, padding, size, device):
    for channels in (8, 12):
        x = torch.randn(3, channels, *size, dtype=torch.float64, device=device)
        for ceil in (False, True):
            how = {"stride": stride, "padding": padding, "ceil_mode": ceil}
            expected = differentiated(theirs, x, kernel, **how)
            for got, wanted in zip(differentiated(ours, x, kernel, **how), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_many_programs(device):
    tile = launch.Tile({"BLOCK_P": 16, "BLOCK_C": 2})
    x = torch.randn(2, 5, 9, 7, dtype=torch.float64, device=device)
    expected = differentiated(ops.max_pool2d, x, 3, 2, 1)
    with launch.force(pool=tile, pool_grad=tile):
        got = differentiated(ops.max_pool2d, x, 3, 2, 1)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("stride", [2**30, 2**40])
def test_the_largest_stride(stride):
    x = torch.arange(50.0).reshape(1, 2, 5, 5).to(default_device())
    if stride > 2**30:
        for op in (ops.max_pool2d, ops.avg_pool2d):
            with pytest.raises(
                ValueError, match="stride is 1099511627776, expected a whole number from 1 to 1073741824"
            ):
                op(Tensor(x), 2, stride)
        return
    for op, theirs in ((ops.max_pool2d, torch.amax), (ops.avg_pool2d, torch.mean)):
        leaf = Tensor(x, True)
        y = op(leaf, 2, stride)
        assert torch.equal(y.data, theirs(x[:, :, :2, :2], (2, 3), keepdim=True))
        y.sum().backward()
        assert leaf.grad.data.sum() == 2


def test_a_tap_before_the_window_that_wraps_to_one_of_it(device):
    """Tap -4 * 64 + 63 of a window of 64 pixels is its last one in eight bits, four rows before the window."""
    x = torch.arange(6 * 64, dtype=torch.float64, device=device).view(1, 1, 6, 64)
    got = differentiated(ops.max_pool2d, x, (1, 64), (5, 1))
    for a, b in zip(got, differentiated(F.max_pool2d, x, (1, 64), (5, 1)), strict=True):
        assert torch.equal(a, b)
