"""Guarded memory: writes outside are found, and values, strides and alignment stay as asked."""

import math
from pathlib import Path

import pytest
import torch

from minidl.testing import GuardedAllocations, MemoryGuardError, guarded, poisoned_memory


def overrun(allocate, offset, value=1.0, error=None):
    """Write one element of guarded memory at `offset` from the start of a tensor."""
    with GuardedAllocations():
        x = allocate()
        x.as_strided((1,), (1,), x.storage_offset() + offset).fill_(value)
        if error is not None:
            raise error


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(3, 5),
        lambda: torch.empty_like(torch.ones(3, 5)),
        lambda: torch.ones(1).new_empty((3, 5)),
        lambda: torch.empty_strided((3, 5), (5, 1)),
        lambda: torch.zeros(3, 5),
        lambda: torch.full((3, 5), 2.0),
        lambda: torch.ones(5, 3).t().contiguous(),
        lambda: torch.ones(3, 5).clone(),
        lambda: torch.cat([torch.ones(2, 5), torch.ones(1, 5)]),
        lambda: torch.ones(3, 5).double(),
        lambda: torch.ones(3, 5).to(torch.float16),
    ],
    ids=[
        "empty", "empty_like", "new_empty", "empty_strided", "zeros", "full", "contiguous", "clone", "cat",
        "double", "to",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("offset", "place"), [(-1, "1 before its start"), (15, "1 past its end"), (300, "286 past its end")]
)
def test_a_write_outside_is_found(allocate, offset, place):
    message = rf"shape \[3, 5\] \(.*{Path(__file__).name}:.*\) were written, the first {place}"
    with pytest.raises(MemoryGuardError, match=message):
        overrun(allocate, offset)


def test_a_write_of_nan_is_found_too():
    with pytest.raises(MemoryGuardError):
        overrun(lambda: torch.empty(4), 4, value=math.nan)


def test_values_are_as_asked():
    with GuardedAllocations():
        assert torch.zeros(3).tolist() == [0, 0, 0]
        assert torch.full((2,), 7).tolist() == [7, 7]
        source = torch.arange(6.0).view(2, 3)
        assert torch.equal(source.t().contiguous(), source.t())
        assert torch.cat([source, source]).shape == (4, 3)


def test_alignment_stays():
    with GuardedAllocations() as guards:
        assert torch.empty(3, dtype=torch.float16).data_ptr() % 64 == 0
        inputs = [torch.ones(8)[1:], torch.ones(8, 8).t(), torch.ones(2, 8)[:, ::2], torch.ones(3, 1).expand(3, 4)]
        for x in inputs:
            placed = guards.guard(x)
            assert (placed.data_ptr() % 64, placed.stride()) == (x.data_ptr() % 64, x.stride())
            assert torch.equal(placed, x)


def test_views_are_left_alone():
    with GuardedAllocations() as guards:
        x = torch.ones(2, 3)
        count = len(guards._guards)
        assert x.contiguous().data_ptr() == x.data_ptr()
        assert x.to(torch.float32).data_ptr() == x.data_ptr()
        assert len(guards._guards) == count


def test_the_first_element_of_a_gap():
    guards = GuardedAllocations()
    x = guards.guard(torch.ones(3, 8)[:, :5])
    x.as_strided((1,), (1,), x.storage_offset() + 5).fill_(1.0)
    with pytest.raises(MemoryGuardError, match="the first in a gap between its rows"):
        guards.check()


def test_a_changed_input_is_found():
    guards = GuardedAllocations()
    x = guards.guard(torch.ones(3))
    x[1] = 2.0
    with pytest.raises(MemoryGuardError, match=r"1 elements of the input float32 tensor of shape \[3\]"):
        guards.check()


def test_an_exception_inside_is_not_hidden():
    with pytest.raises(KeyError):
        overrun(lambda: torch.empty(4), 4, error=KeyError)


def test_guarded_output():
    x, check = guarded(torch.zeros(4))
    x.fill_(5.0)
    check()
    x.as_strided((1,), (1,), x.storage_offset() + 4).fill_(1.0)
    with pytest.raises(MemoryGuardError):
        check()


@pytest.mark.parametrize("context", [poisoned_memory, GuardedAllocations])
def test_fresh_memory_is_poisoned(context):
    with context():
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            assert torch.empty(3, 4, dtype=dtype).isnan().all()
            assert torch.ones(1, dtype=dtype).new_empty(5).isnan().all()
        for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
            assert (torch.empty(9, dtype=dtype) > 50).all()
        assert torch.empty(0).numel() == 0
    assert torch.zeros(3).sum() == 0
