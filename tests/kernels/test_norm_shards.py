"""Statistics of a batch from those of its shards: against exact fractions, and as of the whole batch."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidl.distributed.parts import cut
from minidl.kernels import norm
from minidl.runtime import launch
from minidl.tensors import default_device

EPS, UNIT = 1e-5, 2.0**-53
SMALL = {"norm_join": launch.Tile({"BLOCK_B": 4, "BLOCK_C": 2})}


def shares_of(rows, shards):
    shares = [len(each) / rows for each in cut(rows, shards)]
    return torch.tensor(shares, dtype=torch.float64).to(default_device())


@given(
    rows=st.integers(1, 70), shards=st.integers(1, 64), values=st.integers(2, 50), C=st.integers(1, 5),
    scale=st.sampled_from([0.0, 1.0, 1e8]), seed=st.integers(0, 9), small=st.booleans(),
)  # fmt: skip
def test_shards_are_joined_within_the_roundings_of_float64(rows, shards, values, C, scale, seed, small):
    """The products and sums of so many shards, whose shares are rounded; with large means as well."""
    draw, M, parts = np.random.default_rng(seed), rows * values, cut(rows, shards)
    table = np.concatenate([draw.normal(size=(shards, C)) + scale, draw.random((shards, C))], 1)
    table[[not part for part in parts]] = 0.0  # no examples, as if there were no such shard
    old = draw.random((2, C))
    mean, var = torch.from_numpy(old.copy()).to(default_device())
    given = torch.from_numpy(table).to(default_device()), shares_of(rows, shards), M, torch.float64, EPS
    with launch.force(**SMALL if small else {}):
        found = norm.join_shards(*given, 0.25, norm.Buffers(mean, var))
    gamma = (shards + 8) * UNIT
    for c in range(C):
        means, variances = ([Fraction(float(x)) for x in column] for column in (table[:, c], table[:, C + c]))
        w = [Fraction(len(part), rows) for part in parts]
        exact = sum(a * b for a, b in zip(w, means, strict=True))
        off = gamma * float(sum(a * abs(b) for a, b in zip(w, means, strict=True)))
        assert abs(Fraction(found.mean[c].item()) - exact) <= off
        squares = sum(a * (v + (m - exact) ** 2) for a, v, m in zip(w, variances, means, strict=True))
        off_squares = 2 * gamma * float(squares) + 2 * off * float(squares) ** 0.5 + off * off
        assert abs(Fraction(1 / found.rstd[c].item() ** 2 - EPS) - squares) <= off_squares + 8 * UNIT * float(
            squares + 1
        )
        moved = 0.75 * Fraction(float(old[0, c])) + Fraction(1, 4) * exact
        assert abs(Fraction(mean[c].item()) - moved) <= off + 4 * UNIT * (abs(old[0, c]) + abs(float(exact)))
        moved = 0.75 * Fraction(float(old[1, c])) + Fraction(1, 4) * squares * M / (M - 1)
        assert abs(Fraction(var[c].item()) - moved) <= 2 * off_squares + 8 * UNIT * (old[1, c] + float(squares))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_shards_give_what_the_batch_gives(dtype, momentum, mean, device):
    """Of any sizes, with running statistics, which may have any strides, and counts of batches."""
    x = (torch.randn(13, 5, 6, 7, generator=torch.Generator().manual_seed(0)) + mean).to(dtype).to(device)

    def buffers():
        return norm.Buffers(*torch.ones(5, 2, device=device).unbind(1), torch.tensor(3, device=device))

    whole, apart = buffers(), [buffers() for _ in range(8)]
    right = norm.batch_statistics(x, EPS, momentum, whole)
    parts = [x[part.start : part.stop] for part in cut(13, 8)]
    rows = [torch.cat(norm.batch_statistics(p, None, momentum, b)) for p, b in zip(parts, apart, strict=True)]
    assert all(b.mean.tolist() == [1.0] * 5 and b.batches == 4 for b in apart)
    found = norm.join_shards(torch.stack(rows), shares_of(13, 8), 13 * 42, dtype, EPS, momentum, apart[0])
    # Values reach 4 from the mean, from the first 8: a few of the units of that in which bands are summed.
    off = 1e-14 if dtype == torch.float64 else 1e-6
    for got, wanted in zip((*found, *apart[0][:2]), (*right, *whole[:2]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2 * off, atol=off)
    assert whole.batches == 4
