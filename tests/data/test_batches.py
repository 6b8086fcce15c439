"""Batches: the order is a function of seed and epoch, and any tail can be had without its head."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from minidl.data import Batches, epoch_order
from minidl.sparse.csr import CSR


def table(count=23, features=3):
    x = np.arange(count * features, dtype=np.float32).reshape(count, features)
    return x, np.arange(count)


@given(st.integers(0, 40), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_order_is_a_permutation(count, seed, epoch):
    order = epoch_order(count, seed, epoch)
    assert sorted(order) == list(range(count))
    assert (order == epoch_order(count, seed, epoch)).all()


def test_order_never_changes():
    # A changed order would make a resumed run differ from the uninterrupted one.
    assert epoch_order(10, 0, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert epoch_order(10, 1, 2).tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]


def test_orders_differ_by_seed_and_epoch():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@given(st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_an_epoch_visits_every_row_once(batch_size, epoch, shuffle):
    x, y = table()
    batches = Batches(x, y, batch_size, seed=3, shuffle=shuffle)
    seen = list(batches.epoch(epoch))
    assert len(seen) == len(batches)
    assert all(len(labels) == batch_size for _, labels in seen[:-1])
    labels = torch.cat([labels for _, labels in seen])
    assert sorted(labels.tolist()) == list(range(23))
    rows = torch.cat([part for part, _ in seen])
    assert torch.equal(rows, torch.from_numpy(x)[labels])
    if not shuffle:
        assert labels.tolist() == list(range(23))


@given(st.integers(1, 9), st.integers(0, 25))
def test_resuming_at_a_step_yields_the_tail(batch_size, step):
    matrix = sparse.random(23, 40, 0.2, format="csr", dtype=np.float32, random_state=0)
    batches = Batches(matrix, np.arange(23), batch_size, seed=5)
    whole = list(batches.epoch(4))
    tail = list(Batches(matrix, np.arange(23), batch_size, seed=5).epoch(4, start_step=step))
    assert len(tail) == max(0, len(whole) - step)
    for (x, y), (other_x, other_y) in zip(whole[step:], tail, strict=True):
        assert torch.equal(y, other_y)
        assert torch.equal(x.col, other_x.col)
        assert torch.equal(x.t_val, other_x.t_val)


def test_sparse_batches_hold_their_rows():
    matrix = sparse.random(23, 40, 0.2, format="csr", dtype=np.float32, random_state=0)
    for x, y in Batches(matrix, np.arange(23), 5).epoch(0):
        assert isinstance(x, CSR)
        np.testing.assert_array_equal(x.to_dense().numpy(), matrix[y.numpy()].toarray())


@pytest.mark.parametrize("resident", [True, False])
def test_batches_on_a_device_are_those_of_the_cpu(resident, device):
    x, y = table(23, 5)
    expected = Batches(x, y, 4, seed=2)
    found = Batches(x, y, 4, seed=2, device=device, resident=resident)
    for epoch, start in ((0, 0), (3, 2), (1, 6)):
        pairs = list(zip(expected.epoch(epoch, start), found.epoch(epoch, start), strict=True))
        assert len(pairs) == 6 - start
        for one, other in pairs:
            for mine, there in zip(one, other, strict=True):
                assert there.device.type == device.type
                assert torch.equal(mine, there.cpu())


def test_sparse_batches_on_a_device_are_those_of_the_cpu_with_room_for_any(device):
    matrix = sparse.random(23, 40, 0.2, format="csr", dtype=np.float32, random_state=0)
    matrix = sparse.csr_matrix(matrix.toarray() * ~np.isin(np.arange(40), [3, 17]))
    expected = Batches(matrix, np.arange(23), 5, seed=2)
    found = Batches(matrix, np.arange(23), 5, seed=2, device=device)
    sizes = set()
    for epoch in range(3):
        for (x, y), (there, labels) in zip(expected.epoch(epoch), found.epoch(epoch), strict=True):
            assert torch.equal(y, labels.cpu())
            assert torch.equal(there.to("cpu").to_dense(), x.to_dense())
            for name in ("crow", "col", "val", "order", "rows", "t_crow", "t_col", "t_val", "t_order"):
                mine, other = getattr(x, name), getattr(there, name).cpu()
                assert torch.equal(other[: len(mine)], mine), name
            sizes.add((there.shape[0], *there.sizes.values()))
    assert len(sizes) == 2, "one for whole batches and one for the last"
    longest = sorted(np.diff(matrix.indptr), reverse=True)
    assert {(size[0], size[2]) for size in sizes} == {(5, sum(longest[:5])), (3, sum(longest[:3]))}
    assert max(size[4] for size in sizes) <= 38


@pytest.mark.parametrize("empty", [sparse.csr_matrix((3, 7), dtype=np.float32), np.zeros((3, 0))])
def test_batches_without_entries_on_a_device(empty, device):
    ((x, y),) = Batches(empty, [0, 1, 2], 4, shuffle=False, device=device).epoch(0)
    assert x.shape == empty.shape
    assert y.tolist() == [0, 1, 2]


def test_target_types_follow_the_task():
    x, _ = table(4)
    for targets, dtype in (
        ([0, 1, 2, 1], torch.int64),
        ([0.5, 1, 2, 1], torch.float32),
        (np.uint8([1, 2, 3, 4]), torch.int64),
    ):
        ((features, y),) = Batches(x.astype(np.float64), targets, 8).epoch(0)
        assert y.dtype == dtype
        assert features.dtype == torch.float32


def test_wrong_arguments():
    x, y = table(4)
    with pytest.raises(ValueError, match="4 inputs and targets of shape"):
        Batches(x, y[:3], 2)
    with pytest.raises(ValueError, match="batch size must be positive, got 0"):
        Batches(x, y, 0)
    with pytest.raises(ValueError, match="seed must be from 0"):
        Batches(x, y, 2, seed=-1)


def test_no_rows_give_no_batches():
    batches = Batches(np.zeros((0, 3)), [], 4)
    assert len(batches) == 0
    assert list(batches.epoch(0)) == []


@pytest.mark.parametrize("resident", [True, False])
def test_batches_of_whole_numbers_are_as_long_as_their_longest_row(resident):
    x = np.tril(np.arange(1, 37, dtype=np.int32).reshape(6, 6))
    ((first, _), (second, _)) = Batches(x, np.arange(6), 3, shuffle=False).epoch(0)
    assert first.dtype == torch.int32
    assert (first.tolist(), second.tolist()) == (x[:3, :3].tolist(), x[3:].tolist())
    # On a device all batches have one size, so that a step can be captured.
    on_device = Batches(x, np.arange(6), 3, shuffle=False, device=torch.device("cpu"), resident=resident).epoch(0)
    assert torch.equal(torch.cat([part for part, _ in on_device]), torch.from_numpy(x))
    ((empty, _),) = Batches(np.zeros((2, 4), dtype=np.int32), np.arange(2), 2).epoch(0)
    assert empty.shape == (2, 1)
