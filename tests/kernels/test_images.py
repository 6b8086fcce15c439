"""Batches of pictures: the kernel against indexing in NumPy, picture by picture."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import images
from minidl.runtime import launch
from minidl.tensors import default_device

DTYPES = [torch.float32, torch.float16, torch.float64] + ([] if launch.INTERPRETED else [torch.bfloat16])


def device(array):
    return torch.from_numpy(np.ascontiguousarray(array)).to(default_device())


def problem(count, height, width, channels, batch, shift, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    index = draw.integers(0, count, batch)
    moves = draw.integers(-shift, shift + 1, (batch, 3), dtype=np.int32)
    moves[:, 2] = draw.integers(0, 2, batch)
    # Halves and powers of two: what the kernel computes is exact.
    mean = draw.integers(0, 256, channels).astype(np.float32) / 2
    std = np.float32(2.0) ** draw.integers(-1, 7, channels).astype(np.float32)
    return x, index, moves, mean, std


def moved(picture, dy, dx, flip, replicate):
    """What the kernel's formula says, by padding and slicing."""
    height, width, _ = picture.shape
    reach = max(abs(dy), abs(dx))
    turned = picture[:, ::-1] if flip else picture
    padded = np.pad(turned, ((reach, reach), (reach, reach), (0, 0)), mode="edge" if replicate else "constant")
    return padded[reach - dy : reach - dy + height, reach - dx : reach - dx + width]


def expected(x, index, moves, mean, std, replicate):
    chosen = [moved(x[i], dy, dx, flip, replicate) for i, (dy, dx, flip) in zip(index, moves, strict=True)]
    pixels = np.stack(chosen) if chosen else np.zeros((0, *x.shape[1:]))
    return ((pixels.astype(np.float32) - mean) / std).transpose(0, 3, 1, 2)


@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(0, 6),
    st.integers(0, 4), st.booleans(), st.sampled_from(DTYPES),
)  # fmt: skip
def test_pictures_are_chosen_moved_mirrored_and_standardised(
    count, height, width, channels, batch, shift, replicate, dtype
):
    x, index, moves, mean, std = problem(count, height, width, channels, batch, shift)
    y = images.pick(*map(device, (x, index, moves, mean, std)), dtype, replicate)
    want = torch.from_numpy(expected(x, index, moves, mean, std, replicate))
    assert y.dtype == dtype
    assert torch.equal(y.cpu(), want.to(dtype))
    still = images.pick(device(x), device(index), None, device(mean), device(std), dtype)
    want = torch.from_numpy(expected(x, index, np.zeros_like(moves), mean, std, replicate))
    assert torch.equal(still.cpu(), want.to(dtype))


def tiles():
    targets = list(launch.table("images")) if launch.INTERPRETED else [launch.target()]
    return {str(tile): tile for name in targets for tile in launch.tiles("images", name)}


@pytest.mark.parametrize("tile", tiles())
def test_every_tile_gives_the_same(tile):
    given_ = problem(7, 21, 17, 3, 11, 3)
    parts = [*map(device, given_), torch.float32]
    usual = images.pick(*parts)
    with launch.force(images=tiles()[tile]):
        assert torch.equal(images.pick(*parts), usual)
        still = images.pick(parts[0], parts[1], None, *parts[3:])
    assert torch.equal(still, images.pick(parts[0], parts[1], None, *parts[3:]))


def test_memory_is_channels_last():
    x, index, _, mean, std = problem(4, 5, 6, 3, 2, 0)
    y = images.pick(device(x), device(index), None, device(mean), device(std), torch.float32)
    assert y.shape == (2, 3, 5, 6)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_a_strided_data_set_is_copied():
    x, index, moves, mean, std = problem(4, 8, 8, 1, 3, 1)
    wide = device(np.repeat(x, 2, axis=2))[:, :, ::2]
    args = [*map(device, (index, moves, mean, std)), torch.float32]
    assert torch.equal(images.pick(wide, *args), images.pick(device(x), *args))


def test_one_mean_for_all_channels_may_be_expanded():
    x, index, moves, *_ = problem(4, 5, 6, 3, 2, 1)
    parts = [*map(device, (x, index, moves))]
    mean, std = (torch.full((1,), value, device=parts[0].device) for value in (3.0, 2.0))
    got = images.pick(*parts, mean.expand(3), std.expand(3), torch.float32)
    assert torch.equal(got, images.pick(*parts, mean.repeat(3), std.repeat(3), torch.float32))


def test_what_does_not_fit_is_refused():
    x, index, moves, mean, std = map(device, problem(4, 5, 6, 3, 2, 1))
    with pytest.raises(TypeError, match=r"x has dtype torch\.float32, expected torch\.uint8"):
        images.pick(x.float(), index, moves, mean, std, torch.float32)
    with pytest.raises(ValueError, match=r"mean \[1\].*expected \[N, H, W, C\], \[C\] and \[C\]"):
        images.pick(x, index, moves, mean[:1], std, torch.float32)
    with pytest.raises(ValueError, match=r"moves \[1, 3\]; expected \[B\] and \[B, 3\]"):
        images.pick(x, index, moves[:1], mean, std, torch.float32)


@pytest.mark.parametrize("width", [16, 17])
def test_rows_of_whole_tiles_and_of_one_value_more(width):
    x, index, moves, mean, std = problem(3, 3, width, 1, 3, 2)
    with launch.force(images=launch.Tile({"BLOCK_M": 4, "BLOCK_N": 8}, 1, 1)):
        y = images.pick(*map(device, (x, index, moves, mean, std)), torch.float32)
    assert torch.equal(y.cpu(), torch.from_numpy(expected(x, index, moves, mean, std, replicate=False)))
