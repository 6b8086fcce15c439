"""A sparse data set on a device, which builds the batches of its rows without work on the host.

Several batches are built together, by sorting and gathering their entries. Each is a slice of two buffers, of indices
and of values, with the layout, capacity and order of entries that `CSR.pad` gives the batches of `csr_from_scipy`
(tested). Building batches is integer arithmetic, outside of forward, backward and update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from minidl.sparse.csr import CSR, INDICES, VALUES, places, unpack

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

TOGETHER = 64  # batches that are built together, unless their capacity exceeds
_MOST = 2**26  # entries


class ResidentRows:
    """The rows of a scipy CSR matrix with ascending, distinct columns on a device."""

    def __init__(self, matrix: csr_matrix, device: torch.device) -> None:
        self.shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        self.sizes = np.diff(matrix.indptr).astype(np.int64)
        self.device = device
        self._starts = torch.from_numpy(matrix.indptr[:-1].astype(np.int64)).to(device)
        self._counts = torch.from_numpy(self.sizes).to(device)
        self._columns = torch.from_numpy(np.ascontiguousarray(matrix.indices, dtype=np.int32)).to(device)
        self._values = torch.from_numpy(np.ascontiguousarray(matrix.data)).to(device)

    @staticmethod
    def nbytes(matrix: csr_matrix) -> int:
        """Return the bytes of a matrix on a device."""
        return int(matrix.nnz * (4 + matrix.dtype.itemsize) + matrix.shape[0] * 16)

    def batches(self, order: np.ndarray, batch_size: int, room: Callable[[int], tuple[int, int]]) -> Iterator[CSR]:
        """Return batches of the rows in this order; `room(b)` is the capacity of b rows: entries and columns."""
        full = len(order) // batch_size * batch_size
        if full:
            together = max(1, min(TOGETHER, _MOST // max(1, room(batch_size)[0]))) * batch_size
            for start in range(0, full, together):
                rows = order[start : min(start + together, full)]
                yield from self._build(rows, batch_size, *room(batch_size))
        if rest := len(order) - full:
            yield from self._build(order[full:], rest, *room(rest))

    def _build(self, order: np.ndarray, batch_size: int, entries: int, touched: int) -> Iterator[CSR]:
        """Return batches of `batch_size` rows each."""
        device, count = self.device, len(order) // batch_size
        room = {
            "crow": batch_size + 1, "col": entries, "order": batch_size, "rows": touched, "t_crow": touched + 1,
            "t_col": entries, "t_order": touched, "val": entries, "t_val": entries,
        }  # fmt: skip
        index_starts, index_room = places(INDICES, room, 4)
        value_starts, value_room = places(VALUES, room, self._values.element_size())
        # The last four elements receive discarded values; four keep each batch at a multiple of 16 bytes.
        indices = torch.zeros(count, index_room + 4, dtype=torch.int32, device=device)
        values = torch.zeros(count, value_room, dtype=self._values.dtype, device=device)
        sizes = self.sizes[order]
        total = int(sizes.sum())
        ends = np.cumsum(sizes)
        first = np.concatenate([[0], ends[batch_size - 1 :: batch_size]])  # entries before each batch

        rows = torch.from_numpy(np.ascontiguousarray(order, dtype=np.int64)).to(device)
        batch_start = torch.from_numpy(first).to(device)
        counts = self._counts[rows]
        after = torch.cumsum(counts, 0)
        row = torch.repeat_interleave(torch.arange(len(rows), device=device), counts, output_size=total)
        entry = torch.arange(total, device=device)
        source = self._starts[rows][row] + entry - (after - counts)[row]
        column, value = self._columns[source], self._values[source]
        batch, document = row // batch_size, (row % batch_size).to(torch.int32)
        within = entry - batch_start[batch]

        def put(name: str, batch: torch.Tensor, position: torch.Tensor, numbers: torch.Tensor) -> None:
            indices[batch, index_starts[name] + position] = numbers.to(torch.int32)

        put("col", batch, within, column)
        values[batch, value_starts["val"] + within] = value
        row_batch = torch.arange(len(rows), device=device) // batch_size
        row_within = torch.arange(len(rows), device=device) % batch_size
        put("crow", row_batch, row_within + 1, after - batch_start[row_batch])
        by_count = torch.sort(counts.reshape(count, batch_size), dim=1, descending=True, stable=True).indices
        put("order", row_batch, row_within, by_count.reshape(-1))

        # By batch, then column, then row: the entries of a batch stay together, so that `within` still applies.
        keys, by_column = torch.sort(batch * self.shape[1] + column, stable=True)
        put("t_col", batch, within, document[by_column])
        values[batch, value_starts["t_val"] + within] = value[by_column]
        begins = torch.ones(total, dtype=torch.bool, device=device)
        begins[1:] = keys[1:] != keys[:-1]
        rank = torch.cumsum(begins, 0) - 1
        touched_before = torch.zeros(count + 1, dtype=torch.int64, device=device)  # columns
        touched_before[1:] = torch.cat([rank + 1, rank.new_zeros(1)])[batch_start[1:] - 1]
        discard = index_room - index_starts["rows"]
        position = torch.where(begins, rank - touched_before[batch], discard)
        indices[:, index_starts["rows"] : index_starts["rows"] + touched] = -1
        put("rows", batch, position, column[by_column])
        t_crow = indices[:, index_starts["t_crow"] : index_starts["t_crow"] + touched + 1]
        t_crow.copy_((batch_start[1:] - batch_start[:-1])[:, None].to(torch.int32).expand_as(t_crow))
        put("t_crow", batch, torch.where(begins, position, index_room - index_starts["t_crow"]), within)
        by_count = torch.sort(t_crow[:, 1:] - t_crow[:, :-1], dim=1, descending=True, stable=True).indices
        indices[:, index_starts["t_order"] : index_starts["t_order"] + touched] = by_count.to(torch.int32)
        for i in range(count):
            yield unpack((batch_size, self.shape[1]), (indices[i, :index_room], values[i]), room)
