"""Rows in parts, runs and pieces: order, ties, NaN, infinities and positions of 64 bits, beside a stable sort."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import reduce, scan
from minidl.kernels.reduce import ranked, sorting
from minidl.runtime import launch

VALUES = [0.0, -0.0, 1.0, -1.0, 2.5, float("inf"), float("-inf"), float("nan"), -float("nan"), 2.0**-24]
WHOLE = [0, 1, -1, 127, -128]
DTYPES = [torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool]


def exact(x, descending):
    return torch.sort(x.cpu(), dim=-1, descending=descending, stable=True)


def same(got, want):
    """The very numbers, -0 apart from 0; any NaN is another's like."""
    assert torch.equal(got.isnan().cpu(), want.isnan())
    got, want = (t.cpu().nan_to_num() if t.is_floating_point() else t.cpu() for t in (got, want))
    assert torch.equal(got, want)
    assert not got.is_floating_point() or torch.equal(got.signbit(), want.signbit())


@given(data=st.data())
def test_any_row_is_in_order(data, device):
    dtype, descending = data.draw(st.sampled_from(DTYPES)), data.draw(st.booleans())
    rows, size = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 7, 16, 17, 33, 64, 131, 200]))
    few = VALUES if dtype.is_floating_point else WHOLE
    drawn = st.lists(st.sampled_from(few), min_size=rows * size, max_size=rows * size)
    x = torch.tensor(data.draw(drawn), dtype=torch.float64 if dtype.is_floating_point else torch.int64)
    x = x.to(dtype).view(rows, size).to(device)
    if data.draw(st.booleans()):
        x = x.t().contiguous().t()
    k = data.draw(st.integers(1, size))
    values, at = exact(x, descending)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "PIECE", 16)
        patch.setattr(sorting, "LONG", data.draw(st.sampled_from([2, 2**30])))
        patch.setattr(ranked, "PART", 64)
        patch.setattr(ranked, "MOST_BLOCKS", 0)
        y, found = reduce.sort(x, descending)
        best, where = reduce.leading(x, k, -1, descending)
    assert torch.equal(found.cpu(), at)
    assert torch.equal(where.cpu(), at[:, :k])
    same(y, values)
    same(best, values[:, :k])


@pytest.mark.parametrize("descending", [False, True])
def test_rows_of_several_blocks_are_joined(descending, device, monkeypatch):
    """Programs take blocks of rows that are no multiple of one."""
    monkeypatch.setattr(sorting, "PIECE", 16)
    monkeypatch.setattr(sorting, "JOINED", 32)
    x = torch.randint(-9, 10, (3, 101), device=device).float()
    y, found = reduce.sort(x, descending)
    values, at = exact(x, descending)
    assert torch.equal(found.cpu(), at)
    same(y, values)


@pytest.mark.parametrize("k", [1, 8, 50, 2048, 3000])
def test_long_rows_take_few_launches(k):
    x = torch.empty(1, 2**22)
    kernels = []
    with launch.record(lambda kernel, *_: kernels.append(kernel.__name__), "sm_90"):
        reduce.leading(x, k)
    assert len(kernels) <= (6 if k <= 50 else 20)
    assert "leading_kernel" not in kernels


def test_running_sums_of_one_row_are_shared_out(device):
    x = torch.randint(-8, 9, (1, 3001), device=device).float()
    with launch.force(elementwise_tile=launch.Tile({"BLOCK_M": 2, "BLOCK_N": 16})):
        assert scan.partition(1, 3001, x.dtype)[2] > 1
        assert scan.depth(1, 3001, x.dtype) < 3001
        assert torch.equal(scan.cumsum(x, 1).cpu(), x.cpu().cumsum(1))
        assert torch.equal(scan.cumsum(x, 1, reverse=True).cpu(), x.cpu().flip(1).cumsum(1).flip(1))


def test_as_many_rows_as_programs_take_and_more(device):
    x = torch.randint(-9, 10, (300, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8).to(device)
    y, found = reduce.sort(x, False)
    values, at = exact(x, False)
    assert torch.equal(found.cpu(), at)
    same(y, values)
