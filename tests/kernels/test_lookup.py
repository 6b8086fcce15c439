"""Rows looked up by many programs and by indices that are none, their gradient, and keys sorted by many programs."""

import contextlib

import pytest
import torch

from minidl.kernels import lookup
from minidl.runtime import launch
from minidl.testing import GuardedAllocations


@pytest.mark.parametrize("value", [-1, 5])
def test_an_index_that_is_none_is_refused_or_gives_nan(value, device):
    weight = torch.randn(7, 4, device=device)[1:6]  # there is something on either side
    index = torch.tensor([4, value, 0], device=device)
    refused = pytest.raises(IndexError, match=f"input holds {value}, expected indices from 0 to 4")
    with refused if launch.INTERPRETED else contextlib.nullcontext():
        y = lookup.embedding(index, weight)
        assert y[1].isnan().all()
        assert torch.equal(y[::2], weight[[4, 0]])


def test_tiles_take_their_rows_and_columns(device):
    """Rows lie apart, and an index is there more often than a tile has rows."""
    index = torch.tensor([4, 0, 4, 4, 2, 4, 4, 0, 4, 3], device=device)
    weight, dy = (torch.arange(float(rows * 20), device=device).view(rows, 20)[:, :13] for rows in (5, 10))
    with launch.force(elementwise_tile=launch.Tile({"BLOCK_M": 4, "BLOCK_N": 8})), GuardedAllocations() as guards:
        y = lookup.embedding(index, guards.guard(weight))
        dw = lookup.embedding_grad(guards.guard(dy), index, 5, padding=3)
    assert torch.equal(y, weight[index])
    expected = torch.zeros(5, 13, device=device).index_add_(0, index, dy)
    expected[3] = 0
    assert torch.equal(dw, expected)


@pytest.mark.parametrize("count", [96, 150])
def test_keys_of_many_programs_are_sorted(count, monkeypatch, device):
    """Their counts are more than one program adds at once, too."""
    monkeypatch.setattr(lookup, "KEYS", 32)
    monkeypatch.setattr(lookup, "SORTING", {"BLOCK": 32, "num_warps": 1})
    keys = torch.randint(300, (count,), generator=torch.Generator().manual_seed(0))
    expected, places = keys.sort(stable=True)
    with GuardedAllocations() as guards:
        found, order = lookup.sort(guards.guard(keys.to(device)), 300)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(order.cpu(), places.int())
