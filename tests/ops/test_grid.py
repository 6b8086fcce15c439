"""Images and volumes sampled at positions inside and far outside, against torch; positions that are NaN; refusals."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from minidl import ops
from minidl.autograd import grad
from minidl.tensors import Tensor

KINDS = list(itertools.product(("bilinear", "nearest"), ("zeros", "border", "reflection"), (False, True)))
SHAPES = [((4, 5), (3, 6)), ((1, 7), (2, 2)), ((1, 1), (3, 1)), ((3, 4, 5), (2, 3, 2)), ((1, 2, 1), (4, 1, 3))]


def values(*shape, scale=1.0, device="cpu"):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(device)


@pytest.mark.parametrize(("mode", "padding", "corners"), KINDS)
@pytest.mark.parametrize(("sizes", "out"), SHAPES)
def test_values_and_gradients_are_those_of_torch(sizes, out, mode, padding, corners, device):
    """Some positions are several times the size away, where reflections repeat."""
    x, grid = values(2, 3, *sizes, device=device), values(2, *out, len(sizes), scale=3.0, device=device)
    mine, theirs = [Tensor(t, requires_grad=True) for t in (x, grid)], [t.clone().requires_grad_() for t in (x, grid)]
    y, expected = ops.grid_sample(*mine, mode, padding, corners), F.grid_sample(*theirs, mode, padding, corners)
    dy = values(*expected.shape, device=device)
    y.backward(Tensor(dy))
    expected.backward(dy)
    torch.testing.assert_close(y.data, expected.detach())
    torch.testing.assert_close(mine[0].grad.data, theirs[0].grad)
    if mode == "bilinear":
        torch.testing.assert_close(mine[1].grad.data, theirs[1].grad)
    else:
        assert mine[1].grad is None
        assert not theirs[1].grad.any()


@pytest.mark.parametrize(("mode", "padding"), [(mode, padding) for mode, padding, corners in KINDS if corners])
def test_pixels_are_counted_from_their_centres(mode, padding, device):
    """The identity gives every pixel, also those beside an infinite one, and infinity outside is not read."""
    x = values(1, 2, 3, 5, device=device)
    x[0, 0, 1, 2] = math.inf
    rows, columns = (torch.linspace(-1, 1, n, dtype=torch.float64, device=device) for n in (3, 5))
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)[None]
    expected = F.grid_sample(x, grid, mode, padding, True)
    torch.testing.assert_close(
        ops.grid_sample(Tensor(x), Tensor(grid), mode, padding, True).data, expected, equal_nan=True
    )
    x[:] = math.inf
    y = ops.grid_sample(Tensor(x), Tensor(grid + 4), mode, "zeros", True)
    assert not y.data.any()


def test_a_position_that_is_nan_gives_nan(device):
    grid = values(1, 2, 2, 2, device=device)
    grid[0, 1, 0, 1] = math.nan
    for mode, padding, corners in KINDS:
        y = ops.grid_sample(Tensor(values(1, 3, 4, 5, device=device)), Tensor(grid), mode, padding, corners)
        assert y.data.isnan().sum() == y.data[0, :, 1, 0].isnan().sum() == 3


def test_second_derivatives(device):
    """Of a product with the result, by images and positions, against differences; torch has none."""
    x, grid = (Tensor(t, requires_grad=True) for t in (values(1, 2, 4, 5), values(1, 3, 3, 2, scale=0.5)))

    def slopes(x, grid):
        return grad((ops.grid_sample(x, grid) ** 2).sum(), [x, grid], create_graph=True)

    direction = values(1, 2, 4, 5).flip(3), values(1, 3, 3, 2).flip(1)
    total = sum((Tensor(d) * g).sum() for d, g in zip(direction, slopes(x, grid), strict=True))
    found = grad(total, [x, grid])
    step = 1e-6
    ends = [
        slopes(
            *(Tensor(t.data + sign * step * d, requires_grad=True) for t, d in zip((x, grid), direction, strict=True))
        )
        for sign in (1, -1)
    ]
    for one, above, below in zip(found, *ends, strict=True):
        torch.testing.assert_close(one.data, (above.data - below.data) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "shapes", [((0, 3, 4, 5), (0, 2, 3, 2)), ((2, 0, 4, 5), (2, 2, 3, 2)), ((2, 3, 4, 5), (2, 0, 3, 2))]
)
def test_nothing_of_nothing(shapes, device):
    x, grid = (Tensor(torch.ones(shape, device=device), requires_grad=True) for shape in shapes)
    y = ops.grid_sample(x, grid)
    assert y.shape == (x.shape[0], x.shape[1], *grid.shape[1:3])
    y.sum().backward()
    assert not x.grad.data.any()
    assert not grid.grad.data.any()


@pytest.mark.parametrize("padding", ["border", "reflection"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_derivative_at_outer_pixels_is_that_of_torch(size, corners, padding, device):
    x, ends = values(1, 2, size, size, device=device), [-1.0, 1.0, 0.0, -2.0, 3.0, 1 - 1 / size]
    grid = torch.tensor(list(itertools.product(ends, ends)), dtype=x.dtype, device=device)[None, None]
    mine, theirs = [Tensor(t, requires_grad=True) for t in (x, grid)], [t.clone().requires_grad_() for t in (x, grid)]
    ops.grid_sample(*mine, "bilinear", padding, corners).sum().backward()
    F.grid_sample(*theirs, "bilinear", padding, corners).sum().backward()
    for tensor, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(tensor.grad.data, expected.grad)


def test_sixteen_bits_are_rounded_once(device):
    x, grid = (t.half() for t in (values(2, 3, 9, 8, device=device), values(2, 5, 5, 2, scale=0.6, device=device)))
    exact = F.grid_sample(x.double(), grid.double(), align_corners=False)
    y = ops.grid_sample(Tensor(x), Tensor(grid)).data
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), exact, rtol=2**-11, atol=2**-18)


REFUSED = [
    ({"padding_mode": "wrap"}, ValueError, 'padding_mode is \'wrap\', expected "zeros", "border" or'),
    ({"mode": "trilinear"}, ValueError, 'mode is \'trilinear\', expected "bilinear" or "nearest"'),
    ({"input": (2, 3, 0, 5)}, ValueError, r"got input \[2, 3, 0, 5\] and grid \[2, 2, 2, 2\], expected"),
    ({"input": (3, 4, 5)}, ValueError, r"got input \[3, 4, 5\] and grid"),
    ({"grid": (2, 2, 2, 3)}, ValueError, r"and grid \[2, 2, 2, 3\], expected"),
    ({"grid": (2, 2, 2)}, ValueError, r"and grid \[2, 2, 2\], expected"),
    ({"dtype": torch.float64}, TypeError, "input is torch.float32 and grid is torch.float64; convert one"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_does_not_fit_is_refused(change, error, message, device):
    call = {"input": (2, 3, 4, 5), "grid": (2, 2, 2, 2), "dtype": torch.float32} | change
    x, grid = (torch.zeros(call.pop(name), device=device) for name in ("input", "grid"))
    with pytest.raises(error, match=message):
        ops.grid_sample(Tensor(x), Tensor(grid.to(call.pop("dtype"))), **call)


@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 1, 1, 3), (2, 2, 3, 4, 5)])
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.filterwarnings("ignore:Since version 1.3.0")
def test_points_are_moved_by_matrices(size, align_corners, device):
    axes = len(size) - 2
    theta = values(2, axes, axes + 1)
    ours, theirs = Tensor(theta.to(device), requires_grad=True), theta.requires_grad_()
    y = ops.affine_grid(ours, size, align_corners)
    expected = F.affine_grid(theirs, size, align_corners)
    torch.testing.assert_close(y.data.cpu(), expected.detach())
    weight = values(*expected.shape)
    (y * Tensor(weight.to(device))).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours.grad.data.cpu(), theirs.grad)


@pytest.mark.parametrize("size", [(3, 2, 4, 5), (2, 2, 4), (2, 2, 4, 0), (2, 2, 3, 4, 5)])
def test_points_of_other_sizes_are_refused(size, device):
    with pytest.raises(ValueError, match=r"affine_grid: theta has shape \[2, 2, 3\] and size is .*, expected \[N"):
        ops.affine_grid(Tensor(values(2, 2, 3).to(device)), size)
