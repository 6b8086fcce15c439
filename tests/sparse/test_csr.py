"""CSR: both halves of a sparse batch agree with dense and scipy arithmetic, and bad parts are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from minidl.data import csr_from_scipy
from minidl.sparse.csr import CSR

FIELDS = ("crow", "col", "val", "order", "rows", "t_crow", "t_col", "t_val", "t_order")


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(0, 9)), draw(st.integers(1, 12))
    cells = draw(st.lists(st.integers(0, 3), min_size=rows * columns, max_size=rows * columns))
    dense = np.array(cells, dtype=np.float32).reshape(rows, columns)
    return sparse.csr_matrix(np.where(dense > 1, dense, 0).astype(np.float32))


def transposed_dense(batch: CSR) -> np.ndarray:
    """The matrix rebuilt from the transposed half alone, [V, B]."""
    rows, starts = batch.rows.numpy(), batch.t_crow.numpy()
    compact = sparse.csr_matrix(
        (batch.t_val.numpy(), batch.t_col.numpy(), starts), shape=(len(rows), batch.shape[0])
    ).toarray()
    full = np.zeros((batch.shape[1], batch.shape[0]), dtype=np.float32)
    full[rows] = compact
    return full


@given(matrices())
def test_both_halves_hold_the_matrix(matrix):
    batch = csr_from_scipy(matrix)
    np.testing.assert_array_equal(batch.to_dense().numpy(), matrix.toarray())
    np.testing.assert_array_equal(transposed_dense(batch), matrix.T.toarray())
    assert batch.nnz == matrix.nnz
    assert all(getattr(batch, name).dtype == torch.int32 for name in FIELDS if not name.endswith("val"))


@given(matrices())
def test_documents_ascend_within_a_column_and_columns_are_distinct_and_ascending(matrix):
    batch = csr_from_scipy(matrix)
    assert (np.diff(batch.rows.numpy()) > 0).all()
    for start, end in zip(batch.t_crow[:-1], batch.t_crow[1:], strict=True):
        assert end > start
        assert (torch.diff(batch.t_col[start:end]) > 0).all()


@given(matrices())
def test_orders_fall_in_count_with_ties_by_index(matrix):
    batch = csr_from_scipy(matrix)
    for starts, order in ((batch.crow, batch.order), (batch.t_crow, batch.t_order)):
        counts = torch.diff(starts).tolist()
        assert order.tolist() == sorted(range(len(counts)), key=lambda i: (-counts[i], i))


@given(matrices())
def test_from_torch_makes_what_scipy_makes(matrix):
    batch = csr_from_scipy(matrix)
    other = CSR.from_torch(batch.crow, batch.col.to(torch.int64), batch.val, batch.shape)
    for name in FIELDS:
        assert torch.equal(getattr(batch, name), getattr(other, name)), name
        assert getattr(batch, name).dtype == getattr(other, name).dtype


def test_repeated_and_unsorted_entries_are_added_and_sorted():
    matrix = sparse.csr_matrix((np.float32([1, 2, 4]), [3, 0, 3], [0, 3]), shape=(1, 5))
    batch = csr_from_scipy(matrix)
    assert batch.col.tolist() == [0, 3]
    assert batch.val.tolist() == [2, 5]
    assert matrix.indices.tolist() == [3, 0, 3], "the caller's matrix is left alone"


def test_astype_shares_indices_and_casts_both_halves():
    batch = csr_from_scipy(sparse.random(6, 9, 0.4, format="csr", dtype=np.float32, random_state=1))
    half = batch.astype(torch.float16)
    assert half.val.dtype == half.t_val.dtype == half.dtype == torch.float16
    assert half.col is batch.col
    assert batch.astype(torch.float32) is batch
    with pytest.raises(ValueError, match=r"values must be floating, got torch\.int32"):
        batch.astype(torch.int32)


def test_to_moves_every_part_in_two_copies():
    batch = csr_from_scipy(sparse.random(6, 9, 0.4, format="csr", dtype=np.float32, random_state=1))
    assert batch.to("cpu") is batch
    there = batch.to("meta")
    for name in FIELDS:
        mine, other = getattr(batch, name), getattr(there, name)
        assert other.device.type == "meta"
        assert (other.dtype, other.shape) == (mine.dtype, mine.shape)
        assert other.storage_offset() * other.element_size() % 16 == 0
    assert there.col.untyped_storage().nbytes() == there.t_order.untyped_storage().nbytes()
    assert there.sizes == batch.sizes


@given(matrices(), st.integers(0, 5), st.integers(0, 5))
def test_room_changes_nothing_but_the_sizes(matrix, entries, columns):
    batch = csr_from_scipy(matrix)
    padded = batch.pad(batch.nnz + entries, len(batch.rows) + columns)
    assert torch.equal(padded.to_dense(), batch.to_dense())
    for name in FIELDS:
        mine, other = getattr(batch, name), getattr(padded, name)
        assert torch.equal(other[: len(mine)], mine), name
        assert other.dtype == mine.dtype
    assert padded.rows[len(batch.rows) :].tolist() == [-1] * columns
    counts = torch.diff(padded.t_crow)
    assert (counts[len(batch.rows) :] == 0).all()
    assert padded.t_order.tolist() == sorted(range(len(counts)), key=lambda i: (-int(counts[i]), i))
    again = padded.pad(padded.nnz + 1, len(padded.rows) + 1)
    assert torch.equal(again.to_dense(), batch.to_dense())


def test_without_room_a_batch_is_refused():
    batch = csr_from_scipy(sparse.random(6, 9, 0.4, format="csr", dtype=np.float32, random_state=1))
    for room in ((batch.nnz - 1, 9), (batch.nnz, len(batch.rows) - 1)):
        with pytest.raises(ValueError, match=rf"has no room in {room[0]} entries and {room[1]} columns"):
            batch.pad(*room)


@pytest.mark.parametrize("packed", [(True, True), (True, False), (False, True)])
def test_a_batch_is_copied_to_the_memory_of_another(packed):
    small, large = (
        csr_from_scipy(sparse.random(6, 9, share, format="csr", dtype=np.float32, random_state=1))
        for share in (0.2, 0.5)
    )
    own, given_ = small.pad(60, 9).clone(), large.pad(60, 9)
    where = [part.data_ptr() for part in own.packed]
    own, given_ = (one if keep else replace(one, packed=None) for one, keep in zip((own, given_), packed, strict=True))
    own.copy_(given_)
    for name in FIELDS:
        assert torch.equal(getattr(own, name), getattr(large.pad(60, 9), name))
    assert own.crow.data_ptr() == where[0]
    with pytest.raises(ValueError, match="cannot be copied"):
        own.copy_(small)


@pytest.mark.parametrize(
    ("crow", "col", "shape", "message"),
    [
        ([0, 2], [0, 1], (2, 3), "crow has 2 entries, expected 3 for 2 rows"),
        ([0, 1, 1], [0, 1], (2, 3), "crow runs from 0 to 1, expected from 0 to 2"),
        ([1, 1, 2], [0, 1], (2, 3), "crow runs from 1 to 2"),
        ([0, 3, 2], [0, 1], (2, 3), "crow decreases"),
        ([0, 1, 2], [0, 3], (2, 3), "columns 0 to 3, expected 0 to 2"),
        ([0, 1, 2], [-1, 2], (2, 3), "columns -1 to 2"),
        ([0, 1, 2], [0, 1], (2, 2**31), "at most"),
        ([[0, 1, 2]], [0, 1], (2, 3), "crow must be a vector"),
    ],
)
def test_parts_that_describe_no_matrix_are_refused(crow, col, shape, message):
    with pytest.raises(ValueError, match=message):
        CSR.from_torch(torch.tensor(crow), torch.tensor(col), torch.ones(2), shape)


def test_values_must_be_floats_and_as_many_as_columns():
    crow, col = torch.tensor([0, 2]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="val must be a vector of floating values"):
        CSR.from_torch(crow, col, torch.ones(2, dtype=torch.int64), (1, 2))
    with pytest.raises(ValueError, match="col has 2 entries and val 3"):
        CSR.from_torch(crow, col, torch.ones(3), (1, 2))
    with pytest.raises(ValueError, match="crow must be a vector of int32"):
        CSR.from_torch(crow.double(), col, torch.ones(2), (1, 2))


@settings(max_examples=20)
@given(st.integers(0, 5))
def test_empty_rows_only(rows):
    batch = csr_from_scipy(sparse.csr_matrix((rows, 7), dtype=np.float32))
    assert batch.nnz == 0
    assert batch.crow.tolist() == [0] * (rows + 1)
    assert batch.t_crow.tolist() == [0]
    assert batch.rows.numel() == batch.t_order.numel() == 0
    assert batch.to("meta").shape == (rows, 7)


def test_scipy_matrices_of_integers_or_with_bad_indices_are_refused():
    with pytest.raises(ValueError, match="expected a matrix of floats"):
        csr_from_scipy(sparse.csr_matrix((2, 2), dtype=np.int32))
    matrix = sparse.csr_matrix((np.float32([1]), [1], [0, 1]), shape=(1, 2))
    matrix.indices[0] = 5
    with pytest.raises(ValueError, match="a column index is outside 0 to 1"):
        csr_from_scipy(matrix)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: {"val": -b.val},
        lambda b: {"val": b.t_val, "t_val": b.val},
        lambda b: {
            "col": b.col[:20], "val": b.val[:20], "t_col": b.t_col[:20], "t_val": b.t_val[:20], "rows": b.rows[:8],
            "t_crow": b.t_crow[:9], "t_order": b.t_order[:8],
        },
    ],
    ids=["other memory", "each other's memory", "less of the memory"],
)  # fmt: skip
def test_tensors_that_were_exchanged_are_what_is_copied(change):
    """`packed` still has the old ones."""
    batch = csr_from_scipy(sparse.random(6, 9, 0.3, format="csr", dtype=np.float32, random_state=1)).pad(60, 9)
    changed = replace(batch, **change(batch))
    copies = [changed.clone(), changed.clone().copy_(changed), replace(changed, **change(batch)).clone()]
    for copy in copies:
        for name in FIELDS:
            assert torch.equal(getattr(copy, name), getattr(changed, name)), name
