"""Batches built on a device equal padded batches from the host, tensor by tensor."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from minidl.data import Batches, resident
from minidl.sparse.csr import CSR

CPU = torch.device("cpu")


def matrix(rows, columns, density, seed=0, dtype=np.float32, empty=()):
    rows_matrix = sparse.random(rows, columns, density, "csr", dtype=dtype, random_state=seed)
    rows_matrix.sort_indices()
    for row in empty:
        rows_matrix.data[rows_matrix.indptr[row] : rows_matrix.indptr[row + 1]] = 0
    rows_matrix.eliminate_zeros()
    return rows_matrix


def both(features, batch_size, **options):
    """Return batches from the device, and from the host with the same capacity."""
    targets = np.arange(features.shape[0])
    on_device = Batches(features, targets, batch_size, device=CPU, resident=True, **options)
    host = Batches(features, targets, batch_size, device=CPU, resident=False, **options)
    assert on_device._resident is not None
    assert host._resident is None
    return on_device, host


def same(one, other):
    (x, y), (other_x, other_y) = one, other
    assert y.tolist() == other_y.tolist()
    assert (x.shape, x.sizes) == (other_x.shape, other_x.sizes)
    used = int(x.crow[-1])
    for name, part in x._parts().items():
        expected = getattr(other_x, name)
        assert part.dtype == expected.dtype
        if name in ("col", "val", "t_col", "t_val"):
            part, expected = part[:used], expected[:used]  # what is behind is read by nobody
        assert torch.equal(part, expected), name


@settings(deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 30), st.sampled_from([0.0, 0.05, 0.3, 1.0]), st.integers(1, 12),
    st.integers(0, 3), st.booleans(), st.sets(st.integers(0, 5)),
)  # fmt: skip
def test_batches_are_those_of_the_host(rows, columns, density, batch_size, seed, shuffle, empty):
    features = matrix(rows, columns, density, seed, empty=[row for row in empty if row < rows])
    on_device, host = both(features, batch_size, seed=seed, shuffle=shuffle)
    for epoch in (0, 1):
        batches = list(on_device.epoch(epoch))
        assert len(batches) == len(on_device)
        for one, other in zip(batches, host.epoch(epoch), strict=True):
            same(one, other)
    if len(on_device) > 1:
        same(next(on_device.epoch(1, 1)), next(host.epoch(1, 1)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_more_batches_than_are_made_at_a_time(monkeypatch, dtype):
    monkeypatch.setattr(resident, "TOGETHER", 3)
    on_device, host = both(matrix(50, 20, 0.2, dtype=dtype), 4)
    for one, other in zip(on_device.epoch(0), host.epoch(0), strict=True):
        same(one, other)
        assert one[0].val.dtype == (torch.float32 if dtype == np.float32 else torch.float64)


def test_each_batch_is_two_buffers_at_multiples_of_16_bytes():
    on_device, _ = both(matrix(64, 33, 0.1), 8)
    for x, _ in on_device.epoch(0):
        assert x._buffers() is not None
        for name, part in x._parts().items():
            assert part.data_ptr() % 16 == 0, name
        clone = CSR.clone(x)
        assert clone.copy_(x).to_dense().equal(x.to_dense())
