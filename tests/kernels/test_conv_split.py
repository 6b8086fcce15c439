"""Convolutions of float32 split into two tf32 parts: what they drop, their places, and values that are not finite."""

import pytest
import torch
from torch.nn import functional as F

from minidl.kernels import conv
from minidl.kernels.conv import split_box, split_grad_weight, split_places
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, Problem
from minidl.runtime import launch, tiles
from tests.battery import default_device

# Kernel, stride, padding, dilation, groups.
SHAPES = {
    "3x3": ((3, 3), (1, 1), (1, 1), (1, 1), 1),
    "no padding": ((5, 5), (1, 1), (0, 0), (1, 1), 1),
    "strides": ((3, 3), (2, 3), (2, 1), (1, 1), 1),
    "a stride beyond the kernel": ((1, 1), (2, 2), (0, 0), (1, 1), 1),
    "a stride that begins inside the padding": ((1, 3), (3, 1), (1, 1), (1, 1), 1),
    "dilation": ((3, 2), (1, 1), (2, 3), (2, 3), 1),
    "dilation and strides": ((3, 3), (2, 2), (2, 2), (3, 1), 1),
    "1x1": ((1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1 of groups": ((1, 1), (1, 1), (0, 0), (1, 1), 3),
    "a row of groups": ((1, 2), (1, 1), (0, 0), (1, 1), 2),
    "a row": ((1, 4), (1, 1), (0, 2), (1, 1), 1),
    "a row with padding above": ((1, 2), (1, 1), (2, 0), (1, 2), 1),
    "groups": ((3, 3), (1, 1), (1, 1), (1, 1), 4),
    "groups and strides": ((2, 3), (2, 1), (1, 1), (1, 1), 2),
}


def tensors(name, N=3, C=8, M=12, size=(11, 14), seed=0):
    """Return x, w, dy and the geometry of a shape."""
    kernel, stride, padding, dilation, groups = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    geometry = Geometry.of(size, kernel, stride, tuple((p, p) for p in padding), dilation, groups)
    shapes = (N, C * groups, *size), (M * groups, C, *kernel), (N, M * groups, geometry.h.output, geometry.w.output)
    return *(torch.randn(shape, generator=generator).to(default_device()) for shape in shapes), geometry


def gradient(x, w, dy, name):
    """Return the gradient of the weight in float64, and the sum of absolute products."""
    _, stride, padding, dilation, groups = SHAPES[name]
    results = []
    for a, b in ((x, dy), (x.abs(), dy.abs())):
        weight = torch.zeros_like(w, dtype=torch.float64).requires_grad_()
        y = F.conv2d(a.double(), weight, None, stride, padding, dilation, groups)
        results.append(torch.autograd.grad(y, weight, b.double())[0])
    return results


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"N": 1, "C": 1, "M": 1},
        {"N": 5, "C": 33, "M": 70, "size": (7, 9)},
        {"C": 40, "M": 36, "size": (7, 5)},
        {"C": 4, "M": 2, "size": (6, 5)},
        {"C": 66, "M": 64, "size": (5, 6)},
    ],
)
def test_the_weight_gradient_drops_at_most_the_product_of_the_lower_parts(name, sizes):
    x, w, dy, geometry = tensors(name, **sizes)
    exact, total = gradient(x, w, dy, name)
    dw = conv.grad_weight(x, dy, geometry, form="split")
    pixels = len(x) * dy.shape[2] * dy.shape[3]
    # Each lo drops 2^-22 of its number, lo lo as much; the sum is in float32.
    assert ((dw.double() - exact).abs() <= (3 * 2.0**-22 + (pixels + 2) * 2.0**-23) * total).all()


def test_several_tiles_and_shares():
    x, w, dy, geometry = tensors("3x3", N=4, C=40, M=72, size=(9, 10))
    exact, total = gradient(x, w, dy, "3x3")
    tile = launch.Tile({"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32}, 4, 2)
    with launch.force(conv_split_grad_weight=tile):
        dw = conv.grad_weight(x, dy, geometry, form="split")
    assert ((dw.double() - exact).abs() <= 1e-4 * total).all()


@pytest.mark.parametrize("name", SHAPES)
def test_one_part_is_the_nearest_tf32_number(name):
    x, w, dy, geometry = tensors(name)
    exact, total = gradient(x, w, dy, name)
    with launch.in_precision("tf32"):
        dw = conv.grad_weight(x, dy, geometry, form="split")
    pixels = len(x) * dy.shape[2] * dy.shape[3]
    assert ((dw.double() - exact).abs() <= (2.0**-10 + 2.0**-20 + (pixels + 2) * 2.0**-23) * total).all()


@pytest.mark.parametrize(("images", "slice", "last"), [(6, 2, 0), (7, 2, 1), (3, 1, 0)])
@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
@pytest.mark.parametrize("name", ["strides", "1x1"])
def test_slices_of_images(monkeypatch, name, images, slice, last, precision):
    x, w, dy, geometry = tensors(name, N=images)
    exact, total = gradient(x, w, dy, name)
    with launch.in_precision(precision):
        unsliced = conv.grad_weight(x, dy, geometry, form="split")
        problem = Problem(GRAD_WEIGHT, geometry, images, 8, 12, torch.float32, precision, form="split")
        most = split_places.written(split_places.slice_of(problem._replace(N=slice))[0])
        monkeypatch.setattr(split_places, "MOST", int(1.1 * most))
        tiles.forget()
        prepared = split_grad_weight.prepare(problem)
        assert (prepared.images, prepared.last.images if prepared.last else 0) == (slice, last)
        dw = conv.grad_weight(x, dy, geometry, form="split")
    tiles.forget()
    for each in (unsliced, dw):
        assert ((each.double() - exact).abs() <= (1e-3 if precision == "tf32" else 1e-5) * total).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_a_pixel_that_is_not_finite_reaches_its_channel_alone(value):
    x, w, dy, geometry = tensors("3x3")
    x[1, 3, 5, 6] = value
    exact, _ = gradient(x, w, dy, "3x3")
    dw = conv.grad_weight(x, dy, geometry, form="split")
    assert torch.equal(dw.isfinite(), exact.float().isfinite())
    assert torch.equal(dw.isnan(), exact.float().isnan())
    infinite = exact.float().isinf()
    assert torch.equal(dw[infinite], exact.float()[infinite])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_forward_product_that_is_not_finite(value):
    x, w, _, geometry = tensors("3x3", C=32, M=40)
    x[2, 7, 4, 4] = value
    exact = F.conv2d(x.double(), w.double(), None, 1, 1)
    y, _ = conv.forward(x, w, geometry, form="split")
    finite = exact.isfinite()
    assert torch.equal(y.isnan(), exact.isnan())
    assert torch.equal(y[~finite & ~exact.isnan()], exact.float()[~finite & ~exact.isnan()])
    torch.testing.assert_close(y[finite], exact.float()[finite], rtol=1e-5, atol=1e-5)


def test_parts_beyond_the_limit_are_left_to_other_forms():
    geometry = Geometry.of((224, 224), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    problem = Problem(
        GRAD_WEIGHT, geometry, 32, 64, 64, torch.float32, "tf32x3", target="sm_90", processors=132
    )  # fmt: skip
    assert split_grad_weight.able(problem)
    prime = split_grad_weight.prepare(problem._replace(N=127))
    assert (split_grad_weight.prepare(problem).images, prime.images, prime.last.images) == (20, 20, 7)
    assert split_grad_weight.prepare(problem._replace(precision="tf32")).images == 32
    assert "not float32" in split_grad_weight.able(problem._replace(precision="ieee"))
    large = Geometry.of((20000, 20000), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    assert "more than 2 GiB" in split_grad_weight.able(problem._replace(geometry=large, N=2))
    forward = problem._replace(direction=FORWARD, form="split")
    assert "more than 2 GiB" in split_box.able(forward._replace(N=128))
    assert split_box.able(forward)
    assert split_box.able(forward._replace(form=None))
