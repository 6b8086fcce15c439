"""What is special to cross-entropy: targets out of range, rows left out, float16 gradients, scaling far out."""

import pytest
import torch
import torch.nn.functional as F

from minidl.kernels import cross_entropy, launch

WHOLE = launch.Tile({"BLOCK_M": 8, "BLOCK_N": 16})
WALK = launch.Tile({"BLOCK_M": 2, "BLOCK_N": 4})
NAN, INF = float("nan"), float("inf")
FORMS = pytest.mark.parametrize("tile", [WHOLE, WALK], ids=["whole", "walk"])


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers in every run."""
    torch.manual_seed(0)


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


def test_no_rows_left_is_nan_for_the_mean(device):
    x, target = torch.randn(4, 3, device=device), torch.full((4,), -100, device=device)
    value, grad = cross_entropy.cross_entropy(x, target, with_grad=True)
    assert value.isnan()
    assert grad.eq(0).all()
    assert cross_entropy.cross_entropy(x, target, reduction="sum") == 0


def test_32_bit_classes_and_probabilities_agree_with_64_bit_classes(device):
    x, target = torch.randn(40, 13, dtype=torch.float64, device=device), torch.randint(13, (40,), device=device)
    expected, grad = cross_entropy.cross_entropy(x, target, label_smoothing=0.1, with_grad=True)
    assert torch.equal(cross_entropy.cross_entropy(x, target.int(), label_smoothing=0.1), expected)
    one = torch.zeros_like(x).scatter_(1, target[:, None], 1.0)
    soft, soft_grad = cross_entropy.cross_entropy(x, one, label_smoothing=0.1, with_grad=True)
    torch.testing.assert_close(soft, expected)
    torch.testing.assert_close(soft_grad, grad)


@pytest.mark.parametrize("wrong", [5, -1, 2**31, 2**62])
def test_a_target_that_is_no_class(wrong, device):
    x, target = torch.randn(3, 5, device=device), classes(0, wrong, 4, device=device)
    if launch.INTERPRETED:
        with pytest.raises(IndexError, match=rf"target holds {wrong}, expected classes from 0 to 4 or ignore_index"):
            cross_entropy.cross_entropy(x, target)
        return
    value, grad = cross_entropy.cross_entropy(x, target, reduction="none", with_grad=True)
    assert value.isnan().tolist() == [False, True, False]
    assert grad.isnan().all(1).tolist() == [False, True, False]
    assert cross_entropy.cross_entropy(x, target).isnan()


def test_the_gradient_of_a_mean_survives_float16(device):
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
        cross_entropy.scale_kernel, grid, g, dy, None, n, N, INNER,
        EACH=True, EARLY=False, ACC=launch.acc(g.dtype), BLOCK_N=1024,
    )  # fmt: skip
    assert torch.equal(g.cpu(), (torch.arange(n) % INNER).float())
