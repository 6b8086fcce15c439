"""Rows looked up by indices that are none, and keys sorted by many programs."""

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
