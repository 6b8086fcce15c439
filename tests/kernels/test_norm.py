"""What is special to batch norm: large means, bands of rows, running statistics, infinities, folding."""

import math

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from minidl import ops
from minidl.kernels import norm
from minidl.kernels.conv import forward
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.norm import alone, fold
from minidl.kernels.norm.layout import Sizes, Tile, block_values
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device

NAN, INF = float("nan"), float("inf")
# Few rows in a block and few channels, so that there are several of both.
SMALL = {
    "norm": launch.Tile({"BLOCK_M": 8, "BLOCK_C": 2}),
    "norm_alone": launch.Tile({"BLOCK_M": 8, "BLOCK_C": 2}),
    "norm_grad": launch.Tile({"BLOCK_M": 8, "BLOCK_C": 2}),
    "norm_join": launch.Tile({"BLOCK_B": 4, "BLOCK_C": 2}),
    "norm_stats": launch.Tile({"BLOCK_M": 8, "BLOCK_C": 2}),
    "norm_planes": launch.Tile({"BLOCK_M": 8, "BLOCK_C": 2}),
    "norm_sums": launch.Tile({"BLOCK_M": 8, "BLOCK_C": 2}),
}


@pytest.fixture(autouse=True, params=["alone", "bands"])
def form(request, monkeypatch):
    """Few values per channel in one launch, and in bands as many values are."""
    if request.param == "bands":
        monkeypatch.setattr(alone, "MOST", 0)


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def whole(*shape, seed=0):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed))


def around_nothing(N, C, *space):
    """Whole numbers [N, C, ...] whose sum is 0 in every channel."""
    M = N * math.prod(space)
    half = whole(M // 2, C)
    rows = torch.cat([half, -half, half.new_zeros(M % 2, C)])
    rows = rows[torch.randperm(M, generator=torch.Generator().manual_seed(1))]
    return rows.view(N, *space, C).movedim(-1, 1)


def differentiated(x, weight, bias, training=True, act=None, dy=None, running=(None, None)):
    """y and the gradients of x, weight and bias."""
    leaves = [Tensor(t, requires_grad=True) for t in (x, weight, bias)]
    running = [None if t is None else Tensor(t.clone()) for t in running]
    y = ops.batch_norm(leaves[0], *running, *leaves[1:], training, act=act)
    y.backward(Tensor(numbers(*x.shape, seed=9).to(x) if dy is None else dy))
    return y.data, *(leaf.grad.data for leaf in leaves)


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 7), (5, 3, 4, 6), (3, 2, 2, 3, 4), (200, 1)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("forced", [{}, SMALL], ids=["table", "small tiles"])
def test_values_and_gradients_are_torchs(shape, training, forced, device, monkeypatch):
    # Several bands also where one program would do.
    monkeypatch.setattr(launch, "processors", lambda: 2)
    C = shape[1]
    x, w, b = (numbers(*s, seed=i).to(device) for i, s in enumerate((shape, (C,), (C,))))
    running = numbers(C, seed=4).to(device), numbers(C, seed=5).to(device).abs() + 0.1
    with launch.force(**forced):
        got = differentiated(x * 3 + 7, w, b, training, "relu", running=running)
    leaves = [t.clone().requires_grad_() for t in (x * 3 + 7, w, b)]
    y = F.relu(F.batch_norm(leaves[0], *(t.clone() for t in running), *leaves[1:], training))
    y.backward(numbers(*shape, seed=9).to(device))
    for a, e in zip(got, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (5, 3, 7, 9), (3, 4, 40), (3, 2, 2, 3, 4)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("processors", [1, 2, 32])
def test_planes_are_read_and_written_in_their_order(shape, training, processors, device, monkeypatch):
    """Bands have several images, one, or a part of one; nothing is copied, and results are those of channels-last."""
    monkeypatch.setattr(launch, "processors", lambda: processors)
    C = shape[1]
    x, w, b = (numbers(*size, seed=i, dtype=torch.float32).to(device) for i, size in enumerate((shape, (C,), (C,))))
    running = numbers(C, seed=4).to(device), numbers(C, seed=5).to(device).abs() + 0.1
    dy = numbers(*shape, seed=9).to(x)
    with launch.force(**SMALL):
        planes = differentiated(x, w, b, training, "relu", dy, running)
        rows = differentiated(x.movedim(1, -1).contiguous().movedim(-1, 1), w, b, training, "relu", dy, running)
    assert all(values.is_contiguous() for values in planes[:2])
    for got, expected in zip(planes, rows, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


@triton.jit
def positions_kernel(p, start, sizes, tile: tl.constexpr):
    first = start.to(tl.int64)
    o_m, _ = block_values(first, first + sizes.S, 0, sizes, tile)
    tl.store(p + tl.arange(0, tile.BLOCK_M), o_m)


def test_an_image_may_have_more_than_two_thousand_million_values(device):
    positions = torch.zeros(8, dtype=torch.int64, device=device)
    tile = Tile(ALIGN=8, APART=False, ACC=tl.float32, BLOCK_M=8, BLOCK_C=1, PIXELS=8)
    launch.run(positions_kernel, (1,), positions, 2**16, Sizes(2**17, 2**16, 1, 2**16), tile=tile)
    assert positions.tolist() == list(range(2**32, 2**32 + 8))


@pytest.mark.parametrize("shape", [(40, 5), (5, 3, 4, 6), (3, 16, 3, 3), (7, 1, 3, 3), (3, 2, 2, 3, 4)])
@pytest.mark.parametrize("training", [True, False])
def test_channels_of_a_wider_tensor_are_read_where_they_lie(shape, training, device, monkeypatch):
    """What lies beside them is NaN and is not read; results are those of a tensor by itself.

    Lanes read other numbers where rows lie apart, and sums are in another order: those of whole numbers are exact, of
    which a mean of 0 takes nothing away.
    """
    monkeypatch.setattr(launch, "processors", lambda: 2)
    N, C, *space = shape
    wide = torch.full((N, *space, C + 11), NAN, device=device)
    x = wide[..., 4 : 4 + C].movedim(-1, 1)
    x.copy_(around_nothing(*shape))
    dy = whole(*shape, seed=9).to(x)
    w, b = (numbers(C, seed=i, dtype=torch.float32).to(device) for i in (1, 2))
    running = numbers(C, seed=4).to(device), numbers(C, seed=5).to(device).abs() + 0.1
    read = []
    with launch.watch(lambda kernel, grid, args, meta, go: (read.append(args[:2]), go())), launch.force(**SMALL):
        apart = differentiated(x, w, b, training, "relu", dy, running)
    assert any(t is not None and t.data_ptr() == x.data_ptr() for args in read for t in args)
    with launch.force(**SMALL):
        dense = differentiated(x.movedim(1, -1).contiguous().movedim(-1, 1), w, b, training, "relu", dy, running)
    for got, expected in zip(apart, dense, strict=True):
        # A GPU's compiler joins other products and sums to one rounding: of four that a gradient has.
        off = 0.0 if launch.INTERPRETED else 4 * 2.0**-24 * expected.abs().max().item()
        assert (got - expected).abs().max() <= off
        assert got.dim() < 3 or got.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize("training", [True, False])
def test_what_is_added_to_the_gradient_is_not_rounded_before(training, device):
    """Channels of a wider tensor with NaN beside them; float16 beside float64."""
    x, dy, wide = (numbers(*shape, seed=i).half() for i, shape in enumerate([(6, 5, 3, 3), (6, 5, 3, 3), (6, 9, 3, 3)]))
    wide[:, 5:] = NAN
    more = wide.to(device).contiguous(memory_format=torch.channels_last)[:, :5]
    w, b = numbers(5, seed=4).float().to(device), numbers(5, seed=5).float().to(device)
    found = norm.batch_statistics(x.to(device), 1e-5, None, None)
    given = dy.to(device), x.to(device), found, w, b, "relu"
    with launch.force(**SMALL):
        if training and alone.fits(x):
            dx = alone.normalised_grad(*given, more)[0]
        else:
            dx = norm.normalise_grad(*given, training, so_far=more)[0]
    leaf = x.to(device).double().requires_grad_()
    z = F.batch_norm(leaf, None, None, w.double(), b.double(), True)
    if not training:
        mean, rstd = (t.double().view(1, 5, 1, 1) for t in found)
        z = (leaf - mean) * rstd * w.double().view(1, 5, 1, 1) + b.double().view(1, 5, 1, 1)
    F.relu(z).backward(dy.to(device).double())
    exact = leaf.grad + more.double()
    assert ((dx.double() - exact).abs() <= 2.0**-11 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("forced", [{}, SMALL], ids=["table", "small tiles"])
def test_a_large_mean_does_not_cancel(forced, device, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda: 2)
    # Squares of these need 27 bits more than float32 has: their mean less that of the mean squared is nothing.
    x = (
        numbers(64, 3, 9, 9) * 0.25 + torch.tensor([0.0, 1000.0, -4000.0], dtype=torch.float64).view(1, 3, 1, 1)
    ).float()
    with launch.force(**forced):
        found = norm.batch_statistics(x.to(device), 0.0, None, None)
    exact = x.double()
    mean, var = exact.mean((0, 2, 3)), exact.var((0, 2, 3), correction=0)
    relative = (1 / found.rstd.double().cpu() ** 2 / var - 1).abs()
    # The mean is right to its last place, and the variance as if there were no mean.
    assert ((found.mean.double().cpu() - mean).abs() <= 2.0**-24 * mean.abs() + 1e-6).all()
    assert (relative < 1e-6).all(), relative


def test_statistics_of_one_value_repeated_are_exact(device):
    x = torch.tensor([0.1, -3.7e4, 1e-3], device=device).view(1, 3, 1, 1).expand(16, 3, 8, 8)
    with launch.force(**SMALL):
        found = norm.batch_statistics(x, 1.0, None, None)
    assert torch.equal(found.mean, x[0, :, 0, 0])
    assert torch.equal(found.rstd, torch.ones_like(found.rstd))


def test_one_value_per_channel_is_a_shards_mean(device):
    """What a shard of one value tells the others: nothing is read behind its only row."""
    x = torch.tensor([[3.0, -7.5, 0.25, 1e4, -1e-3]], device=device)
    found = norm.batch_statistics(x, None, None, None)
    assert torch.equal(found.mean, x[0].double())
    assert found.rstd.tolist() == [0] * 5


@pytest.mark.parametrize("processors", [1, 7, 132])
def test_bands_cover_all_rows_once(processors, device, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda: processors)
    for rows in (2, 3, 8, 9, 1000, 1057):
        # Integers: sums and means of powers of two are exact in any order.
        x = torch.arange(rows, dtype=torch.float64, device=device).view(rows, 1)
        with launch.force(**SMALL):
            found = norm.batch_statistics(x, 0.0, None, None)
            dbias = norm.normalise_grad(torch.ones_like(x), x, found, None, None, None, True)[2]
        torch.testing.assert_close(found.mean.cpu(), x.mean(0).cpu(), rtol=1e-14, atol=0)
        torch.testing.assert_close(1 / found.rstd.cpu() ** 2, x.var(0, correction=0).cpu(), rtol=1e-13, atol=0)
        assert dbias.item() == rows


def test_a_batch_counts_once_whatever_the_tiles(device, monkeypatch):
    """Three tiles of channels and two bands of rows, of which one program counts."""
    monkeypatch.setattr(launch, "processors", lambda: 2)
    count = torch.tensor(3, device=device)
    running = [Tensor(torch.zeros(5, device=device)), Tensor(torch.ones(5, device=device))]
    with launch.force(**SMALL):
        ops.batch_norm(
            Tensor(numbers(40, 5, dtype=torch.float32).to(device)), *running, training=True, num_batches_tracked=count
        )
    assert count.item() == 4


def test_few_channels_fill_a_gpu(monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda: 132)
    tile = launch.Tile({"BLOCK_M": 64, "BLOCK_C": 16})
    with launch.force(norm_stats=tile):
        assert norm.bands(torch.Size([128, 16, 56, 56]), torch.float16, "norm_stats") > 7 * 132


def test_two_runs_give_the_same_bits(device, monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda: 4)
    x, w, b = (numbers(*s, seed=i, dtype=torch.float32).to(device) for i, s in enumerate(((9, 5, 7, 7), (5,), (5,))))
    with launch.force(**SMALL):
        first, again = (differentiated(x, w, b, act="gelu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_nothing_leaks_between_channels(device):
    x = numbers(6, 4, 5, 5, dtype=torch.float32).to(device)
    clean = differentiated(x, torch.ones(4, device=device), torch.zeros(4, device=device))
    x[2, 1, 3, 3], x[1, 2, 0, 0] = NAN, INF
    spoilt = differentiated(x, torch.ones(4, device=device), torch.zeros(4, device=device))
    for a, b in zip(clean[:2], spoilt[:2], strict=True):
        assert torch.equal(a[:, [0, 3]], b[:, [0, 3]])
        assert b[:, [1, 2]].isnan().all()


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_rows_past_the_end_add_nothing_where_the_activation_of_0_has_no_derivative(act, device):
    """A 0 there would be so far from the mean that it becomes -inf, where both derivatives are inf times 0."""
    x, dy = whole(6, 2).double() + 100, whole(6, 2, seed=1).double()
    weight, bias = torch.full((2,), 1e38, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    with launch.force(**SMALL):
        *_, dweight, dbias = differentiated(
            x.float().to(device), weight.float().to(device), bias.float().to(device), act=act, dy=dy.float().to(device)
        )
    n = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
    dz = torch.where(n > 0, dy, 0.0)
    torch.testing.assert_close(dbias.cpu().double(), dz.sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dweight.cpu().double(), (dz * n).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 48, 64])
@pytest.mark.parametrize("act", [None, "relu", "tanh"])
@pytest.mark.parametrize("forced", [{}, SMALL], ids=["table", "small tiles"])
def test_rows_past_the_end_add_nothing_where_a_mean_is_not_finite(rows, act, forced, device, monkeypatch):
    """They are 0 times how far 0 is from the mean. What is not finite in x shows where torch has it, too."""
    monkeypatch.setattr(launch, "processors", lambda: 2)
    mean = torch.tensor([0.0, INF, -INF, NAN, 1.0, -2.0, 0.5], dtype=torch.float64)
    x, dy = numbers(rows, 7), numbers(rows, 7, seed=1).abs()
    x[rows // 2, 5], x[rows // 3, 6] = INF, NAN
    w, b = numbers(7, seed=2), numbers(7, seed=3)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    # Of torch.nn.functional, 2.11 takes no eps of 0.
    y = torch.batch_norm(leaves[0], *leaves[1:], mean, torch.ones(7, dtype=torch.float64), False, 0.1, 0.0, False)
    (y if act is None else getattr(torch, act)(y)).backward(dy)
    found = norm.Statistics(mean.to(device), torch.ones_like(mean).to(device))
    given = dy.to(device), x.to(device), found, w.to(device), b.to(device), act
    with launch.force(**forced):
        if alone.fits(x):
            _, *got = alone.normalised_grad(*given)  # dx is that of training
            expected = leaves[1:]
        else:
            got, expected = norm.normalise_grad(*given, False)[:3], leaves
    for a, leaf in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), leaf.grad, rtol=1e-11, atol=1e-11, equal_nan=True)


def test_rows_past_the_end_add_nothing_where_they_are_beside_a_result(device):
    """The activation's derivative from what it gave; none is not finite."""
    x, y, dy = (numbers(11, 2, seed=i).to(device) for i in range(3))
    found = norm.Statistics(*(torch.tensor(t, dtype=torch.float64, device=device) for t in ([INF, 0.5], [1.0, 1.0])))
    with launch.force(**SMALL):
        _, dweight, dbias, dz = norm.normalise_grad(dy.abs(), x, found, None, None, "relu", False, y=y.abs())
    assert dweight[0] == -INF
    torch.testing.assert_close(dweight[1], (dz * (x - 0.5))[:, 1].sum(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dbias, dz.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [2, 6, 8, 9, 12, 16, 41])
def test_lanes_without_rows_add_nothing_where_squares_are_beyond_all_numbers(rows, device, monkeypatch):
    """What is 1e20 apart has a variance of inf in float32, and 0 times inf would be NaN."""
    monkeypatch.setattr(launch, "processors", lambda: 2)
    x = torch.full((rows, 3), 1e20, device=device)
    x[0] = 0.0
    with launch.force(**SMALL):
        if alone.fits(x):
            _, found = alone.normalised(x, None, None, None, 0.1, 1e-5, None)
        else:
            found = norm.batch_statistics(x, 1e-5, None, None)
    torch.testing.assert_close(found.mean, x.double().mean(0).float(), rtol=1e-6, atol=0)
    assert found.rstd.tolist() == [0.0] * 3


def test_an_empty_batch_in_evaluation(device):
    x = torch.zeros(0, 3, 4, 4, device=device)
    y, dx, dw, db = differentiated(
        x, torch.ones(3, device=device), torch.zeros(3, device=device), training=False,
        running=(torch.zeros(3, device=device), torch.ones(3, device=device)),
    )  # fmt: skip
    assert y.shape == dx.shape == x.shape
    assert dw.tolist() == db.tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(1, 3), (0, 3), (1, 3, 1, 1), (5, 3, 0, 2)])
def test_too_few_values_in_training(shape, device):
    with pytest.raises(ValueError, match="expected more than 1 value per channel when training, got input size"):
        ops.batch_norm(Tensor(torch.zeros(shape, device=device)), None, None, training=True)


def test_parameters_and_buffers_may_be_wider(device):
    x = numbers(7, 3, 4, 4, dtype=torch.float16).to(device)
    w, b = numbers(3, seed=1, dtype=torch.float32).to(device), numbers(3, seed=2, dtype=torch.float32).to(device)
    running = torch.zeros(3, device=device), torch.ones(3, device=device)
    y, dx, dw, db = differentiated(x, w, b, running=running)
    assert [t.dtype for t in (y, dx, dw, db)] == [torch.float16] * 2 + [torch.float32] * 2
    expected = F.batch_norm(x.double(), None, None, w.double(), b.double(), True)
    torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=2e-3)


def test_a_gradient_that_nobody_wants_is_not_computed(device, monkeypatch):
    launched = []
    monkeypatch.setattr(
        launch,
        "run",
        lambda kernel, *args, run=launch.run, **meta: (launched.append(kernel.__name__), run(kernel, *args, **meta)),
    )
    x, ones = numbers(4, 3, dtype=torch.float32).to(device), torch.ones(3, device=device)
    weight, running = Tensor(ones, requires_grad=True), (Tensor(ones), Tensor(ones))
    ops.batch_norm(Tensor(x), *running, weight, None, False).sum().backward()
    assert "batch_norm_grad_kernel" not in launched
    launched.clear()
    ops.batch_norm(Tensor(x, requires_grad=True), *running, Tensor(ones), None, False).sum().backward()
    assert "batch_norm_sums_kernel" not in launched


def test_folding_gives_the_batch_norm_of_a_convolution(device):
    x, w = numbers(3, 4, 9, 9).to(device), numbers(6, 4, 3, 3, seed=1).to(device)
    conv_bias, mean, var, weight, bias = (numbers(6, seed=i).to(device) for i in range(2, 7))
    var = var.abs() + 0.1
    scale, shift = fold.fold(w, conv_bias, mean, var, weight, bias, 1e-3)
    geometry = Geometry.of((9, 9), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    y, _ = forward(x, w, geometry, shift, "relu", scale=scale)
    expected = F.relu(F.batch_norm(F.conv2d(x, w, conv_bias, padding=1), mean, var, weight, bias, eps=1e-3))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_running_statistics_with_gaps_leave_what_lies_between():
    x = numbers(4, 3, 2, 2).to(default_device())
    table = torch.zeros(3, 4, dtype=torch.float64, device=x.device)
    dense = norm.Buffers(*(torch.zeros(3, dtype=torch.float64, device=x.device) for _ in range(2)))
    norm.batch_statistics(x, 1e-5, 0.5, norm.Buffers(table[:, 0], table[:, 2]))
    norm.batch_statistics(x, 1e-5, 0.5, dense)
    nothing = torch.zeros_like(dense.mean)
    assert torch.equal(table, torch.stack((dense.mean, nothing, dense.var, nothing), 1))


def test_an_eps_that_is_no_number_is_refused():
    x, vector = numbers(4, 3), torch.ones(3, dtype=torch.float64)
    for call in (
        lambda: norm.check_arguments(x, None, None, None, None, True, NAN),
        lambda: fold.fold(x, None, vector[:1].expand(4), vector[:1].expand(4), None, None, NAN),
    ):
        with pytest.raises(ValueError, match="eps is nan, expected 0 or more"):
            call()


def test_folding_takes_any_number_of_blocks_of_channels():
    w, mean, bias = (numbers(7, seed=i).to(default_device()) for i in range(3))
    with launch.force(norm_fold=launch.Tile({"BLOCK_C": 2})):
        scale, shift = fold.fold(w, None, mean, torch.ones_like(mean), w, bias, 0.0)
    assert torch.equal(scale, w)
    torch.testing.assert_close(shift, bias - mean * w, rtol=1e-14, atol=1e-14)
