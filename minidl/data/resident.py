"""A sparse data set on a device, and batches of its rows made there: nothing is made on the host for a step.

Some batches are made at a time, by sorting and gathering their entries together. Each is a part of two buffers, one of
indices and one of values, with the parts, the room and the order of entries that `CSR.pad` gives the batches of
`csr_from_scipy` (tested). Making batches is bookkeeping of integers, outside of forward, backward and update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from minidl.sparse.csr import CSR, INDICES, VALUES, places, unpack

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

TOGETHER = 64  # batches that are made at a time, unless they have room for more than
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
        """What a matrix takes on a device."""
        return int(matrix.nnz * (4 + matrix.dtype.itemsize) + matrix.shape[0] * 16)

    def batches(self, order: np.ndarray, batch_size: int, room: Callable[[int], tuple[int, int]]) -> Iterator[CSR]:
        """Batches of the rows in this order; `room(b)` is that of a batch of b rows, for entries and for columns."""
        whole = len(order) // batch_size * batch_size
        if whole:
            together = max(1, min(TOGETHER, _MOST // max(1, room(batch_size)[0]))) * batch_size
            for start in range(0, whole, together):
                rows = order[start : min(start + together, whole)]
                yield from self._made(rows, batch_size, *room(batch_size))
        if rest := len(order) - whole:
            yield from self._made(order[whole:], rest, *room(rest))

    def _made(self, order: np.ndarray, batch_size: int, entries: int, touched: int) -> Iterator[CSR]:
        """Batches of `batch_size` rows each."""
        device, count = self.device, len(order) // batch_size
        room = {
            "crow": batch_size + 1, "col": entries, "order": batch_size, "rows": touched, "t_crow": touched + 1,
            "t_col": entries, "t_order": touched, "val": entries, "t_val": entries,
        }  # fmt: skip
        index_places, index_room = places(INDICES, room, 4)
        value_places, value_room = places(VALUES, room, self._values.element_size())
        # The end takes what is to be written nowhere; four places keep each batch at a multiple of 16 bytes.
        indices = torch.zeros(count, index_room + 4, dtype=torch.int32, device=device)
        values = torch.zeros(count, value_room, dtype=self._values.dtype, device=device)
        sizes = self.sizes[order]
        total = int(sizes.sum())
        ends = np.cumsum(sizes)
        first = np.concatenate([[0], ends[batch_size - 1 :: batch_size]])  # entries before each batch

        rows = torch.from_numpy(np.ascontiguousarray(order, dtype=np.int64)).to(device)
        of_batch = torch.from_numpy(first).to(device)
        counts = self._counts[rows]
        after = torch.cumsum(counts, 0)
        row = torch.repeat_interleave(torch.arange(len(rows), device=device), counts, output_size=total)
        place = torch.arange(total, device=device)
        source = self._starts[rows][row] + place - (after - counts)[row]
        column, value = self._columns[source], self._values[source]
        batch, document = row // batch_size, (row % batch_size).to(torch.int32)
        within = place - of_batch[batch]

        def put(name: str, at: torch.Tensor, where: torch.Tensor, what: torch.Tensor) -> None:
            indices[at, index_places[name] + where] = what.to(torch.int32)

        put("col", batch, within, column)
        values[batch, value_places["val"] + within] = value
        row_batch = torch.arange(len(rows), device=device) // batch_size
        row_within = torch.arange(len(rows), device=device) % batch_size
        put("crow", row_batch, row_within + 1, after - of_batch[row_batch])
        by_count = torch.sort(counts.reshape(count, batch_size), dim=1, descending=True, stable=True).indices
        put("order", row_batch, row_within, by_count.reshape(-1))

        # By batch, then column, then row: entries of a batch stay together, so that places within it do not change.
        keys, by_column = torch.sort(batch * self.shape[1] + column, stable=True)
        put("t_col", batch, within, document[by_column])
        values[batch, value_places["t_val"] + within] = value[by_column]
        begins = torch.ones(total, dtype=torch.bool, device=device)
        begins[1:] = keys[1:] != keys[:-1]
        rank = torch.cumsum(begins, 0) - 1
        before = torch.zeros(count + 1, dtype=torch.int64, device=device)  # columns touched before each batch
        before[1:] = torch.cat([rank + 1, rank.new_zeros(1)])[of_batch[1:] - 1]
        nowhere = index_room - index_places["rows"]
        at = torch.where(begins, rank - before[batch], nowhere)
        indices[:, index_places["rows"] : index_places["rows"] + touched] = -1
        put("rows", batch, at, column[by_column])
        t_crow = indices[:, index_places["t_crow"] : index_places["t_crow"] + touched + 1]
        t_crow.copy_((of_batch[1:] - of_batch[:-1])[:, None].to(torch.int32).expand_as(t_crow))
        put("t_crow", batch, torch.where(begins, at, index_room - index_places["t_crow"]), within)
        by_count = torch.sort(t_crow[:, 1:] - t_crow[:, :-1], dim=1, descending=True, stable=True).indices
        indices[:, index_places["t_order"] : index_places["t_order"] + touched] = by_count.to(torch.int32)
        for i in range(count):
            yield unpack((batch_size, self.shape[1]), (indices[i, :index_room], values[i]), room)
