"""Mixed pictures and their targets: against the formula in float64, picture by picture."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import mixing
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing import GuardedAllocations

DTYPES = [torch.float32, torch.float16, torch.float64] + ([] if launch.INTERPRETED else [torch.bfloat16])


def device(array):
    return torch.from_numpy(np.ascontiguousarray(array)).to(default_device())


@given(
    st.integers(0, 5), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.sampled_from(DTYPES)
)
def test_pictures_and_targets_are_mixed(batch, channels, height, width, last, dtype):
    draw = np.random.default_rng(batch + height)
    x = torch.from_numpy(draw.normal(size=(batch, channels, height, width))).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    partner, share = np.roll(np.arange(batch), -1), draw.random(batch).astype(np.float32)
    share[::2] = 1.0
    top, left = draw.integers(0, height, batch), draw.integers(0, width, batch)
    box = np.stack([top, left, draw.integers(top, height + 1), draw.integers(left, width + 1)], 1).astype(np.int32)
    want = torch.from_numpy(share).double()[:, None, None, None] * x.double()
    want += (1 - torch.from_numpy(share).double()[:, None, None, None]) * x.double()[partner]
    for i, (first, second, below, right) in enumerate(box):
        want[i, :, first:below, second:right] = x[partner[i], :, first:below, second:right].double()
    got = mixing.mix(x.to(default_device()), device(partner), device(share), device(box.reshape(-1, 4)))
    assert got.dtype == dtype
    # Four roundings in float32, and one to the dtype.
    scale = float(x.double().abs().max()) if x.numel() else 0.0
    assert torch.allclose(got.cpu().double(), want, rtol=0, atol=scale * (4 * 2.0**-24 + torch.finfo(dtype).eps))

    labels, classes = draw.integers(0, 7, batch), 7
    part = torch.from_numpy(share).double()[:, None]
    units = torch.eye(classes, dtype=torch.float64)
    targets = mixing.mix_targets(device(labels), device(partner), device(share), classes)
    assert torch.allclose(targets.cpu().double(), part * units[labels] + (1 - part) * units[labels[partner]], atol=1e-7)


@pytest.mark.parametrize("width", [16, 17])
def test_rows_of_whole_tiles_and_of_one_value_more(width):
    draw = np.random.default_rng(0)
    x, partner = torch.from_numpy(draw.normal(size=(5, 1, 2, width))).float(), np.array([2, 0, 4, 1, 3])
    labels, halves = draw.integers(0, width, 5), device(np.full(5, 0.5, np.float32))
    box = device(np.tile(np.array([0, 0, 1, 3], np.int32), (5, 1)))
    with launch.force(images=launch.Tile({"BLOCK_M": 4, "BLOCK_N": 8})), GuardedAllocations():
        y = mixing.mix(x.to(default_device()), device(partner), halves, box).cpu()
        targets = mixing.mix_targets(device(labels), device(partner), halves, width).cpu()
    want = 0.5 * x + 0.5 * x[partner]
    want[..., :1, :3] = x[partner][..., :1, :3]
    assert torch.allclose(y, want, rtol=0, atol=1e-6)
    units = torch.eye(width)
    assert torch.equal(targets, 0.5 * units[labels] + 0.5 * units[labels[partner]])


def test_bad_arguments():
    x, one = torch.zeros(2, 1, 3, 3, device=default_device()), torch.zeros(1, device=default_device())
    partner = torch.zeros(2, dtype=torch.int64, device=default_device())
    box = torch.zeros(2, 4, dtype=torch.int32, device=default_device())
    with pytest.raises(TypeError, match=r"x has dtype torch.int64, expected a floating one"):
        mixing.mix(x.long(), partner, one, box)
    with pytest.raises(ValueError, match=r"share \[1\], box \[2, 4\]; expected"):
        mixing.mix(x, partner, one, box)
    with pytest.raises(ValueError, match=r"part \[1\]; expected \[B\] of each"):
        mixing.mix_targets(partner, partner, one, 3)
