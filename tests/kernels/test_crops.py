"""Parts of pictures: against the formula in float64, torch's antialiased resizing, and `pick` where none is resized."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import crops, images
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing import GuardedAllocations

DTYPES = [torch.float32, torch.float16, torch.float64] + ([] if launch.INTERPRETED else [torch.bfloat16])


def device(array):
    return torch.from_numpy(np.ascontiguousarray(array)).to(default_device())


def problem(count, height, width, channels, batch, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    index = draw.integers(0, count, batch)
    rows, columns = draw.integers(1, height + 1, batch), draw.integers(1, width + 1, batch)
    places = draw.integers(0, height - rows + 1), draw.integers(0, width - columns + 1)
    parts = np.stack([*places, rows, columns, draw.integers(0, 2, batch)], 1).astype(np.int32).reshape(-1, 5)
    return x, index, parts, draw.normal(100, 20, channels).astype(np.float32), np.full(channels, 50, np.float32)


def weights(count, places):
    """float64 [places, count]: the share of each pixel in each place."""
    scale = count / places
    middles = (np.arange(places) + 0.5) * scale
    found = 1 - np.abs(np.arange(count) + 0.5 - middles[:, None]) / max(scale, 1)
    found = np.maximum(found, 0)
    return found / found.sum(1, keepdims=True)


def expected(x, index, parts, size, mean, std):
    """By products with matrices, picture by picture."""
    found = [np.zeros((0, x.shape[3], *size))]
    for i, (top, left, rows, columns, flip) in zip(index, parts, strict=True):
        part = x[i, top : top + rows, left : left + columns].astype(np.float64).transpose(2, 0, 1)
        y = weights(rows, size[0]) @ part @ weights(columns, size[1]).T
        y = y[:, :, ::-1] if flip else y
        found.append(((y - mean[:, None, None]) / std[:, None, None])[None])
    return torch.from_numpy(np.concatenate(found))


def off(most):
    """How far from the formula pictures of at most so many rows and columns may be, but for rounding the result.

    Places are off by 3 roundings of up to `most` pixels, of which a weight has 1/reach each; pixels are up to 255,
    their difference is the slope, and sums have 2 reach terms of weights below 1.
    """
    return 255 * 2 * most * 4 * 2.0**-24 * 4 / 50


@given(
    st.integers(1, 3), st.integers(1, 17), st.integers(1, 13), st.sampled_from([1, 3]), st.integers(0, 4),
    st.tuples(st.integers(1, 11), st.integers(1, 11)), st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
def test_parts_are_resized_as_torch_does(count, height, width, channels, batch, size, dtype, seed):
    x, index, parts, mean, std = problem(count, height, width, channels, batch, seed)
    y = crops.crop(device(x), device(index), device(parts), size, device(mean), device(std), dtype)
    want = expected(x, index, parts, size, mean, std)
    assert (y.shape, y.dtype) == (want.shape, dtype)
    near = torch.finfo(dtype).eps * want.abs().max() if want.numel() else 0.0
    assert torch.allclose(y.cpu().double(), want, rtol=0, atol=float(off(17) + near))


@pytest.mark.parametrize("size", [(3, 2), (5, 5), (13, 11)])
def test_the_formula_is_torchs(size):
    """But for a single column, for which torch leaves out the rows' pass."""
    part = np.random.default_rng(0).random((2, 9, 7))
    y = torch.nn.functional.interpolate(torch.from_numpy(part)[None], size, mode="bilinear", antialias=True)[0]
    assert np.allclose(weights(9, size[0]) @ part @ weights(7, size[1]).T, y.numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("replicate", [False, True])
def test_a_whole_picture_that_is_moved_is_what_pick_gives(replicate):
    draw = np.random.default_rng(0)
    x = device(draw.integers(0, 256, (3, 6, 7, 3), dtype=np.uint8))
    moves = np.array([[1, -2, 0], [0, 2, 1], [-1, 1, 1], [0, 0, 0], [0, 1, 0], [2, -2, 1]], np.int32)
    index = device(np.array([2, 0, 1, 1, 1, 2]))
    mean, std = device(np.full(3, 64, np.float32)), device(np.full(3, 32, np.float32))
    left = np.where(moves[:, 2] != 0, moves[:, 1], -moves[:, 1])
    parts = np.stack([-moves[:, 0], left, np.full(6, 6), np.full(6, 7), moves[:, 2]], 1).astype(np.int32)
    y = crops.crop(x, index, device(parts), (6, 7), mean, std, torch.float32, replicate)
    assert torch.equal(y, images.pick(x, index, device(moves), mean, std, torch.float32, replicate))


def test_every_tile():
    """Which products and sums are one instruction differs from tile to tile, so bits do."""
    targets = list(launch.table("images")) if launch.INTERPRETED else [launch.target()]
    given = problem(5, 21, 17, 3, 7)
    x, index, parts, mean, std = map(device, given)
    want = expected(*given[:3], (9, 23), *given[3:])
    bound = off(23) + torch.finfo(torch.float32).eps * want.abs().max()
    for tile in {str(tile): tile for name in targets for tile in launch.tiles("images", name)}.values():
        with launch.force(images=tile):
            y = crops.crop(x, index, parts, (9, 23), mean, std, torch.float32)
            assert torch.allclose(y.cpu().double(), want, rtol=0, atol=float(bound))


@pytest.mark.parametrize("width", [16, 17])
def test_rows_of_whole_tiles_and_of_one_value_more(width):
    given = problem(2, 7, 9, 1, 3)
    x, index, parts, mean, std = map(device, given)
    with launch.force(images=launch.Tile({"BLOCK_M": 4, "BLOCK_N": 8})), GuardedAllocations():
        y = crops.crop(x, index, parts, (3, width), mean, std, torch.float32)
    assert torch.allclose(y.cpu().double(), expected(*given[:3], (3, width), *given[3:]), rtol=0, atol=off(17) + 1e-6)


def test_bad_arguments():
    x, index, parts, mean, std = map(device, problem(2, 4, 4, 3, 2))
    with pytest.raises(TypeError, match=r"x has dtype torch.float32, expected torch.uint8"):
        crops.crop(x.float(), index, parts, (4, 4), mean, std, torch.float32)
    with pytest.raises(ValueError, match=r"mean \[1\], std \[3\]"):
        crops.crop(x, index, parts, (4, 4), mean[:1], std, torch.float32)
    with pytest.raises(ValueError, match=r"parts \[1, 5\]; expected \[B\] and \[B, 5\]"):
        crops.crop(x, index, parts[:1], (4, 4), mean, std, torch.float32)
