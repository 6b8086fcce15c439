"""Sums of pixels by any taps: against the sum itself, pixel by pixel."""

import math

import pytest
import torch

from minidl.kernels import resample
from minidl.kernels.resample import Taps
from minidl.runtime import launch
from minidl.testing import GuardedAllocations

ROWS = Taps(4, (((0, 0.5), (2, 0.5)), (), ((3, 1.0),), ((1, 0.25), (2, 0.75)), ()))
COLUMNS = Taps(3, (((0, 1.0),), ((1, 0.5), (2, 0.5)), (), ((2, 1.0),)))


def expected(x, fill):
    y = torch.full((*x.shape[:2], len(ROWS.shares), len(COLUMNS.shares)), fill)
    for i, rows in enumerate(ROWS.shares):
        for j, columns in enumerate(COLUMNS.shares):
            if rows and columns:
                y[:, :, i, j] = sum(r * c * x[:, :, u, v] for u, r in rows for v, c in columns)
    return y


@pytest.mark.parametrize("fill", [0.0, 7.0])
@pytest.mark.parametrize("last", [False, True])
def test_pixels_without_a_tap_are_filled_and_others_take_theirs_alone(last, fill, device):
    x = torch.arange(72.0).view(2, 3, 4, 3)
    x[0, 0, 2, 2] = math.inf  # the number before row 3
    lie = torch.channels_last if last else torch.contiguous_format
    with launch.force(elementwise=launch.Tile({"BLOCK_N": 32})), GuardedAllocations() as guards:
        y = resample.resample(guards.guard(x.to(device, memory_format=lie)), ROWS, COLUMNS, fill)
    assert y.is_contiguous(memory_format=lie)
    assert torch.equal(y.cpu(), expected(x, fill))
