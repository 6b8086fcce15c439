"""What is special to softmax: rows longer than a tile, infinities and NaN, addresses beyond 32 bits."""

import pytest
import torch

from minidl.kernels import softmax
from minidl.kernels.softmax import rows
from minidl.runtime import launch

WHOLE = launch.Tile({"BLOCK_M": 4, "BLOCK_N": 16})
WALK = launch.Tile({"BLOCK_M": 2, "BLOCK_N": 4})
# What is kept of a row: less than a block, a block, more than the row.
KEPT = (2, 4, 16)
NAN, INF = float("nan"), float("inf")

FORMS = pytest.mark.parametrize("tile", [WHOLE, WALK], ids=["whole", "walk"])
KINDS = pytest.mark.parametrize(
    ("ours", "grad", "theirs"),
    [
        (softmax.softmax, softmax.softmax_grad, torch.softmax),
        (softmax.log_softmax, softmax.log_softmax_grad, torch.log_softmax),
    ],
    ids=["softmax", "log_softmax"],
)


def forced(tile, kept=4):
    """The tile for whole rows, and with `kept` for those that do not fit it."""
    loop = launch.Tile({**tile.sizes, "BLOCK_KEPT": kept})
    return launch.force(softmax=tile, softmax_grad=tile, softmax_loop=loop, softmax_grad_loop=tile)


@FORMS
@KINDS
@pytest.mark.parametrize("kept", KEPT)
def test_infinities_and_nan_as_torch(tile, ours, grad, theirs, kept, device):
    rows = [
        [1.0, 2.0, 3.0, 0.5, NAN, 2.0],
        [NAN] * 6,
        [-INF] * 6,
        [INF, 1.0, 2.0, 3.0, 4.0, 5.0],
        [1.0, 2.0, 3.0, 4.0, 5.0, INF],
        [-INF, -INF, -INF, -INF, -INF, 7.0],
        [7.0, -INF, -INF, -INF, -INF, -INF],
        [NAN, -INF, -INF, -INF, -INF, -INF],
        [INF, -INF, NAN, 0.0, 0.0, 0.0],
        [-3e38, 3e38, 0.0, 1.0, 2.0, 3.0],
    ]
    x = torch.tensor(rows, device=device)
    with forced(tile, kept):
        y = ours(x)
    torch.testing.assert_close(y, theirs(x.double(), -1).float(), equal_nan=True)


@KINDS
def test_integer_rows_do_not_depend_on_a_shift(ours, grad, theirs, device):
    x = torch.randint(-20, 20, (50, 37), device=device).float()
    assert torch.equal(ours(x), ours(x + 1000.0))


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kept", KEPT)
def test_rows_of_every_length_with_a_part_kept(ours, grad, theirs, dtype, kept, device):
    """Blocks of 4: the walk ends before, at and behind what is kept."""
    for N in range(1, 24):
        x = 3.0 * torch.randn(5, N, device=device)
        x = x.to(dtype)
        with forced(launch.Tile({"BLOCK_M": 2, "BLOCK_N": 4}), kept):
            y = ours(x)
        exact = theirs(x.double(), -1)
        near = torch.finfo(dtype).eps * exact.abs() + 2e-6 * (1.0 + exact.abs())
        assert ((y.double() - exact).abs() <= near).all(), N


def near(got, exact, dtype):
    torch.testing.assert_close(got.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@FORMS
@KINDS
@pytest.mark.parametrize(
    ("N", "dtype"),
    [(8, torch.float16), (16, torch.float32), (17, torch.float64), (20, torch.float16), (33, torch.float16)],
)
def test_rows_that_begin_anywhere(tile, ours, grad, theirs, dtype, N, device):
    """Rows that are multiples of 16 bytes or not, apart from each other or not, behind a first element that is not."""
    memory = torch.randn(6 * (N + 9), device=device).to(dtype)
    for step, first in ((N, 0), (N, 1), (N + 8, 0), (N + 8, 3), (N + 1, 0), (N + 4, 0)):
        x = memory.as_strided((5, N), (step, 1), first)
        with forced(tile if tile is WALK else launch.Tile({"BLOCK_M": 4, "BLOCK_N": 64})):
            y = ours(x)
            dx = grad(x, y)
        exact = theirs(x.double(), -1)
        near(y, exact, dtype)
        z = y.double()
        d = x.double()
        near(dx, z * (d - (d * z).sum(-1, True)) if ours is softmax.softmax else d - z.exp() * d.sum(-1, True), dtype)


@KINDS
@pytest.mark.parametrize("where", [0, 1, 7, 8, 40, 47, 48])
def test_nan_and_infinities_at_the_ends_of_rows_stay_there(ours, grad, theirs, where, device):
    """Heads and tails are read apart from the rest, and never those of a neighbour."""
    for value in (NAN, INF, -INF):
        x = torch.randn(9, 49, device=device).half()
        x[4, where] = value
        with forced(launch.Tile({"BLOCK_M": 1, "BLOCK_N": 16}), 16):
            y = ours(x)
        near_zero = torch.finfo(torch.float16).eps
        torch.testing.assert_close(y.double(), theirs(x.double(), -1), rtol=2e-3, atol=near_zero, equal_nan=True)


@FORMS
@KINDS
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dimension_of_a_view(tile, ours, grad, theirs, dim, device):
    base = torch.randn(7, 11, 5, dtype=torch.float64, device=device)
    for x in (base, base.permute(2, 0, 1), base[::2, 1:], base[:, :1].expand(7, 4, 5)):
        leaf = x.clone().requires_grad_()
        expected = theirs(leaf, dim)
        dy = torch.randn(x.shape, dtype=torch.float64, device=device).flip(0)
        expected.backward(dy)
        with forced(tile):
            y = ours(x, dim)
            dx = grad(dy, y, dim)
        torch.testing.assert_close(y, expected.detach(), rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(dx, leaf.grad, rtol=1e-12, atol=1e-13)


@KINDS
@pytest.mark.parametrize("N", [64, 37])
def test_rows_in_pieces_of_a_warp(ours, grad, theirs, N, device, monkeypatch):
    """As GPUs take them, of which each warp has rows of its own."""
    monkeypatch.setattr(rows, "lanes", lambda *_: 16)
    x, dy = (torch.randn(5, N, dtype=torch.float64, device=device) for _ in range(2))
    leaf = x.clone().requires_grad_()
    expected = theirs(leaf, 1)
    expected.backward(dy)
    with forced(launch.Tile({"BLOCK_M": 4, "BLOCK_N": 64})):
        y = ours(x)
        dx = grad(dy, y)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(dx, leaf.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("shape", "strides"), [((2, 3), (2**31, 1)), ((3, 2), (1, 2**31))])
def test_addresses_beyond_32_bits(shape, strides, device):
    # The memory is reserved but for a few pages never touched.
    x = torch.empty(2**31 + 3, dtype=torch.float16, device=device).as_strided(shape, strides)
    values = torch.tensor([[0.5, -1.0, 2.0], [1.0, 3.0, -2.0]], dtype=torch.float16, device=device).reshape(shape)
    x.copy_(values)
    assert torch.equal(softmax.softmax(x, 1), softmax.softmax(values, 1))
    assert torch.equal(softmax.softmax_grad(x, values, 1), softmax.softmax_grad(values, values, 1))


def test_a_gradient_of_another_shape_is_refused(device):
    with pytest.raises(ValueError, match=r"dy has shape \[3\], expected y's shape \[4\]"):
        softmax.softmax_grad(torch.ones(3, device=device), torch.ones(4, device=device))
