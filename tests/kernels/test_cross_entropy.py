"""What is special to cross-entropy: targets out of range, rows left out, both ways to the divisor of a mean, float16
gradients, scaling far out. Of `nll` the first two."""

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from minidl.kernels import cross_entropy, nll
from minidl.kernels.cross_entropy.kernels import scale_kernel
from minidl.kernels.cross_entropy.targets import all_targets, target_kernel
from minidl.runtime import launch
from minidl.runtime.records import fields

WHOLE = launch.Tile({"BLOCK_M": 8, "BLOCK_N": 16})
WALK = launch.Tile({"BLOCK_M": 2, "BLOCK_N": 4})
NAN, INF = float("nan"), float("inf")
FORMS = pytest.mark.parametrize("tile", [WHOLE, WALK], ids=["whole", "walk"])


@pytest.fixture(params=[0, 2**18], ids=["before", "alone"])
def reads(request, monkeypatch):
    """How many targets all programs may read: none, so that a launch finds the divisor before, or enough."""
    monkeypatch.setattr(cross_entropy, "READS", request.param)
    return request.param


def classes(*values, device):
    return torch.tensor(values, device=device)


@FORMS
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 17])
def test_every_row_counts_whatever_the_tile(tile, rows, device):
    x = torch.randn(rows, 13, dtype=torch.float64, device=device)
    target = torch.randint(13, (rows,), device=device)
    small = launch.Tile({"BLOCK_N": 4})
    for reduction in ("mean", "sum"):
        with launch.force(cross_entropy=tile, cross_entropy_loop=tile, loss=small):
            got = cross_entropy.cross_entropy(x, target, reduction=reduction)
        torch.testing.assert_close(got, F.cross_entropy(x, target, reduction=reduction), rtol=1e-13, atol=0)


def launches(function):
    """Names of the kernels that a call launches, with whether each program finds the divisor by itself."""
    found = []
    with launch.record(
        lambda kernel, grid, args, meta: found.append((kernel.__name__, fields(meta).get("ALONE"))), launch.target()
    ):
        function()
    return found


def test_few_rows_need_no_launch_for_the_divisor_and_a_tile_of_them_none_for_the_sum(monkeypatch):
    monkeypatch.setattr(cross_entropy, "READS", 2**18)
    checked = [("target_kernel", None)] if launch.INTERPRETED else []
    tiles = {"cross_entropy": launch.Tile({"BLOCK_M": 64, "BLOCK_N": 4}), "cross_entropy_loop": WALK}

    def of(rows, classes=4, **options):
        x, target = torch.empty(rows, classes), torch.zeros(rows, dtype=torch.int64)
        with launch.force(**tiles):
            return launches(lambda: cross_entropy.cross_entropy_parts(x, target, with_grad=True, **options))

    for rows in (1, 64):
        assert of(rows) == [*checked, ("cross_entropy_kernel", True)]
    for rows in (65, 1024, 4096):
        assert of(rows) == [*checked, ("cross_entropy_kernel", True), ("total_kernel", None)]
    for rows in (4097, 2**16):
        assert of(rows) == [("target_kernel", None), ("cross_entropy_kernel", False), ("total_kernel", None)]
    assert of(8, 5) == [("target_kernel", None), ("cross_entropy_loop_kernel", False), ("total_kernel", None)]
    assert of(64, reduction="sum") == [*checked, ("cross_entropy_kernel", False)]
    assert of(65, reduction="sum") == [*checked, ("cross_entropy_kernel", False), ("total_kernel", None)]
    assert of(8, reduction="none") == [*checked, ("cross_entropy_kernel", False)]


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (9, torch.float64), (300, torch.float32)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_the_mean_by_either_way_to_its_divisor(rows, smoothing, weighted, ignored, dtype, reads, device):
    x = torch.randn(rows, 13, dtype=dtype, device=device)
    target = torch.randint(13, (rows,), device=device)
    target[0] = 5
    weight = torch.rand(13, dtype=dtype, device=device) + 0.5 if weighted else None
    options = {"ignore_index": ignored, "label_smoothing": smoothing}
    tile = launch.Tile({"BLOCK_M": 32, "BLOCK_N": 16})
    with launch.force(cross_entropy=tile):
        value, grad = cross_entropy.cross_entropy(x, target, weight, with_grad=True, **options)
        assert torch.equal(cross_entropy.cross_entropy(x, target, weight, **options), value)
    leaf = x.double().requires_grad_()
    expected = F.cross_entropy(leaf, target, None if weight is None else weight.double(), **options)
    expected.backward()
    close = {torch.float64: 1e-13, torch.float32: 2e-6}[dtype]
    torch.testing.assert_close(value.double(), expected.detach(), rtol=close, atol=0)
    torch.testing.assert_close(grad.double(), leaf.grad, rtol=close, atol=close / rows)


def test_every_program_finds_the_same_divisor(reads, device):
    """Rows that hold the same have the same gradient to the bit, wherever they stand."""
    rows = 3000
    x = torch.randn(7, device=device).expand(rows, 7)
    target = torch.randint(7, (rows,), device=device)
    weight = torch.rand(7, device=device) + 0.5
    with launch.force(cross_entropy=launch.Tile({"BLOCK_M": 64, "BLOCK_N": 8})):
        _, grad = cross_entropy.cross_entropy(x, target, weight, with_grad=True)
        half = cross_entropy.cross_entropy_parts(x.half(), target, weight.half(), with_grad=True)
    for c in range(7):
        same = grad[target == c]
        assert torch.equal(same, same[:1].expand_as(same))
    exact = weight.half().double()[target].sum()
    assert half.divisor.item() == pytest.approx(exact.item(), rel=1e-5)


@triton.jit
def all_targets_kernel(p_t, p_w, p_y, R, N, ignore_index):
    tl.store(p_y, all_targets(p_t, p_w, R, N, ignore_index, tl.float32))


@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_no_class_counts_by_neither_way(weighted, device):
    """A GPU does not refuse it, and one way must not divide by more than the other."""
    target = torch.tensor([0, 5, -1, 4, 2**40, 1, -100, 2], device=device)
    weight = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], device=device) if weighted else None
    sums = torch.full((2,), NAN, device=device)
    launch.run(all_targets_kernel, (1,), target, weight, sums, 8, 5, -100)
    launch.run(
        target_kernel, (1,), target, weight, sums[1:], None, 8, 5, -100, 1, EARLY=False, ACC=tl.float32, BLOCK_N=8
    )  # fmt: skip
    assert sums.tolist() == ([23.0, 23.0] if weighted else [4.0, 4.0])


@FORMS
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_rows_are_zero_whatever_they_hold(tile, smoothing, device):
    x = torch.randn(5, 13, device=device)
    x[1], x[3] = NAN, -INF
    target = classes(0, -100, 5, -100, 12, device=device)
    kept = [0, 2, 4]
    with launch.force(cross_entropy=tile, cross_entropy_loop=tile):
        value, grad = cross_entropy.cross_entropy(x, target, label_smoothing=smoothing, with_grad=True)
        each = cross_entropy.cross_entropy(x, target, reduction="none", label_smoothing=smoothing)
    expected = F.cross_entropy(x[kept].double(), target[kept], label_smoothing=smoothing)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert each[1] == 0
    assert each[3] == 0
    assert grad[[1, 3]].eq(0).all()
    assert grad[kept].isfinite().all()


@FORMS
def test_the_class_that_is_ignored_may_be_one_of_them(tile, device):
    """Rows past the last have its number, too: nothing is read there."""
    x = torch.randn(5, 13, device=device)
    x[1, 1] = INF
    target = classes(0, 1, 5, 1, 12, device=device)
    with launch.force(cross_entropy=tile, cross_entropy_loop=tile):
        value, grad = cross_entropy.cross_entropy(x, target, ignore_index=1, with_grad=True)
    expected = F.cross_entropy(x[[0, 2, 4]].double(), target[[0, 2, 4]])
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert grad[[1, 3]].eq(0).all()


@FORMS
def test_infinite_logits_as_torch(tile, device):
    rows = [
        [0.0, -INF, 1.0, 2.0, -INF],
        [-INF, 0.0, 1.0, 2.0, 3.0],
        [INF, 0.0, 1.0, 2.0, 3.0],
        [-INF] * 5,
        [0.0, 1.0, NAN, 2.0, 3.0],
    ]
    x, target = torch.tensor(rows, device=device), torch.zeros(5, dtype=torch.int64, device=device)
    for smoothing in (0.0, 0.1):
        with launch.force(cross_entropy=tile, cross_entropy_loop=tile):
            got = cross_entropy.cross_entropy(x, target, reduction="none", label_smoothing=smoothing)
        expected = F.cross_entropy(x.double(), target, reduction="none", label_smoothing=smoothing)
        torch.testing.assert_close(got, expected.float(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_no_rows_left_is_nan_for_the_mean(weighted, dtype, reads, device):
    x, target = torch.randn(4, 3, device=device).to(dtype), torch.full((4,), -100, device=device)
    weight = torch.rand(3, device=device).to(dtype) if weighted else None
    value, grad = cross_entropy.cross_entropy(x, target, weight, with_grad=True)
    assert value.isnan()
    assert F.cross_entropy(x, target, weight).isnan()
    assert grad.eq(0).all()
    assert cross_entropy.cross_entropy(x, target, reduction="sum") == 0


def test_no_rows_at_all_are_nan_for_the_mean(reads, device):
    x, target = torch.empty(0, 3, device=device), torch.empty(0, dtype=torch.int64, device=device)
    value, grad = cross_entropy.cross_entropy(x, target, with_grad=True)
    assert value.isnan()
    assert F.cross_entropy(x, target).isnan()
    assert grad.shape == (0, 3)
    assert cross_entropy.cross_entropy(x, target, reduction="sum") == 0


def test_small_classes_and_probabilities_agree_with_64_bit_classes(reads, device):
    x, target = torch.randn(40, 13, dtype=torch.float64, device=device), torch.randint(13, (40,), device=device)
    expected, grad = cross_entropy.cross_entropy(x, target, label_smoothing=0.1, with_grad=True)
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(cross_entropy.cross_entropy(x, target.to(dtype), label_smoothing=0.1), expected)
    each, _ = nll.nll_loss(x, target, ignore_index=3, reduction="none")
    assert torch.equal(nll.nll_loss(x, target.to(torch.uint8), ignore_index=3, reduction="none")[0], each)
    one = torch.zeros_like(x).scatter_(1, target[:, None], 1.0)
    soft, soft_grad = cross_entropy.cross_entropy(x, one, label_smoothing=0.1, with_grad=True)
    torch.testing.assert_close(soft, expected)
    torch.testing.assert_close(soft_grad, grad)


@pytest.mark.parametrize("wrong", [5, -1, 2**31, 2**62])
def test_a_target_that_is_no_class(wrong, reads, device):
    x, target = torch.randn(3, 5, device=device), classes(0, wrong, 4, device=device)
    if launch.INTERPRETED:
        with pytest.raises(IndexError, match=rf"target holds {wrong}, expected classes from 0 to 4 or ignore_index"):
            cross_entropy.cross_entropy(x, target)
        return
    value, grad = cross_entropy.cross_entropy(x, target, reduction="none", with_grad=True)
    assert value.isnan().tolist() == [False, True, False]
    assert grad.isnan().all(1).tolist() == [False, True, False]
    assert cross_entropy.cross_entropy(x, target).isnan()


@FORMS
def test_the_loss_of_no_class_is_nan(tile, device):
    """Where targets are not looked at before, as on a GPU."""
    x, target = torch.randn(3, 5, device=device), classes(0, 5, -100, device=device)
    with launch.force(cross_entropy=tile, cross_entropy_loop=tile):
        each = cross_entropy.in_place(x, target, None, -100, 0.0, (None, 1), x.dtype, with_grad=True)
    assert each.isnan().tolist() == [False, True, False]
    assert x.isnan().all(1).tolist() == [False, True, False]


def test_an_ignored_class_beyond_32_bits_is_none_of_32_bit_classes(reads, device):
    """Cut to 32 bits it would be class 0."""
    x, target = torch.randn(3, 5, dtype=torch.float64, device=device), classes(0, 1, 4, device=device)
    expected = F.cross_entropy(x, target)
    for of in (target, target.int()):
        got = cross_entropy.cross_entropy(x, of, ignore_index=2**32)
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)


def test_more_targets_than_programs_read_at_once(device, monkeypatch):
    monkeypatch.setattr(cross_entropy, "READS", 0)
    x, weight = torch.randn(1100, 3, dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    x, weight, target = x.to(device), weight.to(device), torch.arange(1100, device=device) % 3
    with launch.force(loss=launch.Tile({"BLOCK_N": 4})):
        got = cross_entropy.cross_entropy(x, target, weight)
    torch.testing.assert_close(got, F.cross_entropy(x, target, weight), rtol=1e-12, atol=0)


@pytest.mark.parametrize("ignored", [-100, 1])
def test_each_likelihood_of_an_ignored_row_is_zero(ignored, device):
    x, target = torch.randn(5, 3, device=device), classes(0, ignored, 2, ignored, 0, device=device)
    each, _ = nll.nll_loss(x, target, ignore_index=ignored, reduction="none")
    assert torch.equal(each, F.nll_loss(x, target, ignore_index=ignored, reduction="none"))


def test_a_likelihood_of_no_class_is_nan_and_has_no_gradient(device, monkeypatch):
    """Where targets are not looked at before, as on a GPU; no logarithm is read for it, and none written."""
    monkeypatch.setattr(nll, "divisor_parts", lambda *_: (None, 1))
    x, target = torch.randn(5, 3, device=device), classes(0, 3, -1, 2, 2**40, device=device)
    each, _ = nll.nll_loss(x, target, reduction="none")
    assert each.isnan().tolist() == [False, True, True, False, True]
    assert nll.nll_loss(x, target, reduction="sum")[0].isnan()
    dx = nll.nll_loss_grad(torch.ones(5, device=device), x, target, None, -100, None)
    assert dx.tolist() == [[-1, 0, 0], [0] * 3, [0] * 3, [0, 0, -1], [0] * 3]


def test_the_gradient_of_a_mean_survives_float16(reads, device):
    rows, scale = 4096, 2.0**16
    x = (8 * torch.randn(rows, 16)).half().to(device)
    target = torch.randint(16, (rows,), device=device)
    parts = cross_entropy.cross_entropy_parts(x, target, with_grad=True)
    grad = cross_entropy.cross_entropy_grad_(parts.grad, torch.tensor(scale, device=device), parts.divisor)
    leaf = x.double().requires_grad_()
    (F.cross_entropy(leaf, target) * scale).backward()
    # 1 - p is off by 2^-24 in float32, and float16 ends at 2^-25; divided by the rows before, it would at 2^-13.
    smallest = scale / rows * 2.0**-23
    torch.testing.assert_close(grad.double(), leaf.grad, rtol=2e-3, atol=smallest)
    assert (grad[leaf.grad.abs() > smallest] != 0).all()


def test_a_gradient_of_one_is_not_written_again(device):
    grad = torch.full((4, 5), NAN, device=device)
    before = grad.clone()
    after = cross_entropy.cross_entropy_grad_(grad, torch.ones((), device=device))
    assert after.data_ptr() == grad.data_ptr()
    assert torch.equal(after.view(torch.int32), before.view(torch.int32))


def test_gradients_of_each_row_of_images(device):
    x = torch.randn(3, 4, 2, 5, dtype=torch.float64, device=device)
    target = torch.randint(4, (3, 2, 5), device=device)
    dy = torch.randn(3, 2, 5, dtype=torch.float64, device=device)
    parts = cross_entropy.cross_entropy_parts(x, target, reduction="none", with_grad=True)
    grad = cross_entropy.cross_entropy_grad_(parts.grad, dy.transpose(1, 2).contiguous().transpose(1, 2))
    leaf = x.clone().requires_grad_()
    F.cross_entropy(leaf, target, reduction="none").backward(dy)
    torch.testing.assert_close(grad, leaf.grad)


def test_the_scale_of_a_row_beyond_two_to_the_32_logits(device):
    """N * INNER is above 2^32 where no row is that long by itself."""
    N, INNER, n = 65537, 65537, 200_000
    g = torch.ones(n, device=device)
    dy = torch.arange(INNER, dtype=torch.float32, device=device)
    grid = (-(-n // 1024),)
    launch.run(
        scale_kernel, grid, g, dy, None, n, N, INNER,
        EACH=True, EARLY=False, ACC=launch.acc(g.dtype), BLOCK_N=1024,
    )  # fmt: skip
    assert torch.equal(g.cpu(), (torch.arange(n) % INNER).float())
