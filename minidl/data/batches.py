"""Batches in an order that depends only on the seed and the epoch, so that a run can resume from any step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minidl.data.ahead import ahead, fits, pinned
from minidl.data.resident import ResidentRows
from minidl.sparse.csr import CSR

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of range(count), int64, for this seed and epoch.

    It sorts `count` raw words of a Philox generator keyed by (seed, epoch): there is no state to save, and numpy
    guarantees only the raw words across versions.
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable")


def csr_from_scipy(matrix: csr_matrix) -> CSR:
    """Return a scipy sparse matrix as a CSR of the same float dtype on the CPU; repeated entries are added.

    The result equals `CSR.from_torch` of its parts. scipy's counting sort transposes the matrix, because torch's sort
    waits for its threads on a busy machine (measured for 256 documents: 0.3 against 9.5 ms).

    Raises ValueError unless it is a two-dimensional matrix of floats whose indices are in range.
    """
    by_row = matrix.tocsr()
    if by_row.ndim != 2 or by_row.dtype.kind != "f":
        raise ValueError(f"expected a matrix of floats, got {by_row.dtype} with {by_row.ndim} dimensions")
    by_row = _canonical(by_row)
    if by_row.nnz and not 0 <= by_row.indices.min() <= by_row.indices.max() < by_row.shape[1]:
        raise ValueError(f"a column index is outside 0 to {by_row.shape[1] - 1}")
    if max(*by_row.shape, by_row.nnz) >= 2**31:
        raise ValueError(f"a CSR has at most 2^31 - 1 rows, columns and values, got shape {by_row.shape}")
    by_column = by_row.tocsc()
    counts = np.diff(by_column.indptr)
    touched = np.flatnonzero(counts)
    t_counts = counts[touched]
    return CSR(
        (int(by_row.shape[0]), int(by_row.shape[1])),
        _indices(by_row.indptr),
        _indices(by_row.indices),
        torch.from_numpy(np.ascontiguousarray(by_row.data)),
        _by_descending_count(np.diff(by_row.indptr)),
        _indices(touched),
        _indices(np.concatenate([[0], np.cumsum(t_counts)])),
        _indices(by_column.indices),
        torch.from_numpy(np.ascontiguousarray(by_column.data)),
        _by_descending_count(t_counts),
    )


def _canonical(matrix: csr_matrix) -> csr_matrix:
    """Return the matrix by rows with ascending, distinct columns: a copy if that requires a change."""
    by_row = matrix.tocsr()
    if not by_row.has_canonical_format:
        by_row = by_row.copy()
        by_row.sum_duplicates()
    return by_row


def _indices(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))


def _by_descending_count(counts: np.ndarray) -> torch.Tensor:
    """Return int32 indices by descending count, ties by index."""
    most = int(counts.max(initial=0))
    if most < 2**16:  # numpy sorts 16-bit keys by radix, ten times faster
        return _indices(np.argsort((most - counts).astype(np.uint16), kind="stable"))
    return _indices(np.argsort(-counts, kind="stable"))


class Epochs(ABC):
    """The order in which each epoch visits the rows of a data split, and its batches.

    Raises ValueError when there are not as many targets as rows, a batch has no row, or the seed is negative.
    """

    def __init__(self, rows: int, targets: np.ndarray, batch_size: int, seed: int, shuffle: bool) -> None:
        if targets.shape != (rows,):
            raise ValueError(f"got {rows} inputs and targets of shape {list(targets.shape)}, expected [{rows}]")
        if batch_size < 1:
            raise ValueError(f"the batch size must be positive, got {batch_size}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"the seed must be from 0 to 2^64 - 1, got {seed}")
        self.targets, self.batch_size, self.seed, self.shuffle = targets, batch_size, seed, shuffle

    def __len__(self) -> int:
        """Batches in one epoch."""
        return -(-len(self.targets) // self.batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """Return the indices of the rows, int64 [N], in the order of this epoch."""
        if not self.shuffle:
            return np.arange(len(self.targets))
        return epoch_order(len(self.targets), self.seed, epoch)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Any, torch.Tensor]]:
        """Return the batches (features, targets) of an epoch, without the first `start_step`."""
        return self._visit(epoch, self.order(epoch)[start_step * self.batch_size :], self.batch_size)

    def sharded(
        self, epoch: int, start_step: int, split: Callable[[int], Sequence[range]]
    ) -> Iterator[tuple[int, list[tuple[Any, torch.Tensor]]]]:
        """Return for each batch of `epoch` its number of rows and its parts.

        `split` returns the row ranges of the parts for a number of rows, longest first; empty parts are omitted.
        """
        order = self.order(epoch)[start_step * self.batch_size :]
        count, rest = divmod(len(order), self.batch_size)
        full, last = np.split(order, [count * self.batch_size])
        full = full.reshape(count, self.batch_size)
        streams = []
        for rows, few in zip(split(self.batch_size), split(rest), strict=True):
            part = np.concatenate([full[:, rows.start : rows.stop].reshape(-1), last[few.start : few.stop]])
            streams.append(self._visit(epoch, part, len(rows)) if rows else iter(()))
        for size in [self.batch_size] * count + [rest] * (rest > 0):
            yield size, [batch for stream in streams if (batch := next(stream, None)) is not None]

    @abstractmethod
    def _visit(self, epoch: int, order: np.ndarray, size: int) -> Iterator[tuple[Any, torch.Tensor]]:
        """Return batches of `size` rows in this order, as the epoch augments them."""


class Batches(Epochs):
    """Batches of features and targets for one data split.

    `features` is a scipy CSR matrix [N, V] (batches are then `CSR`), an array [N, F] (batches are float32 tensors), or
    an int32 array [N, L], whose rows may end with zeros (batches are int32; on the CPU as long as their longest row).
    `targets` are N whole numbers (int64 batches) or N floats (float32 batches). Every epoch visits each row once; the
    last batch may be smaller. Without `shuffle` the rows keep their order.

    Batches are on the CPU or on `device`. Features that take at most a quarter of the device's free memory are copied
    to the device once (`resident` overrides this), which then builds the batches. Other batches are built and copied
    while earlier steps run. Sparse batches are padded to the longest possible batch, so that all have the same size.

    Raises ValueError as `Epochs`.
    """

    def __init__(
        self,
        features: csr_matrix | np.ndarray,
        targets: Sequence[int] | Sequence[float] | np.ndarray,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        device: torch.device | None = None,
        resident: bool | None = None,
    ) -> None:
        super().__init__(features.shape[0], np.asarray(targets), batch_size, seed, shuffle)
        are_integers = self.targets.dtype.kind in "iu" or self.targets.size == 0
        self.targets = self.targets.astype(np.int64 if are_integers else np.float32)
        kind = np.int32 if features.dtype == np.int32 else np.float32
        self.features: Any = features.astype(kind) if isinstance(features, np.ndarray) else _canonical(features)
        self.device = device
        self._resident: tuple[torch.Tensor | ResidentRows, torch.Tensor] | None = None
        if device is None:
            return
        rows: Any = self.features
        dense = isinstance(rows, np.ndarray)
        if not dense:
            self._longest_first = np.cumsum(np.sort(np.diff(rows.indptr))[::-1])
            self._columns = int(np.count_nonzero(np.bincount(rows.indices, minlength=1)))
        size = rows.nbytes if dense else ResidentRows.nbytes(rows)
        if fits(size, device) if resident is None else resident:
            on_device = torch.tensor(rows, device=device) if dense else ResidentRows(rows, device)
            self._resident = on_device, torch.tensor(self.targets, device=device)

    def _visit(self, epoch: int, order: np.ndarray, size: int) -> Iterator[tuple[CSR | torch.Tensor, torch.Tensor]]:
        if self.device is None:
            return self._on_cpu(order, size)
        if self._resident is None:
            return ahead((self._pinned(x, y) for x, y in self._on_cpu(order, size)), self.device)
        return self._on_device(order, size)

    def _on_device(self, order: np.ndarray, size: int) -> Iterator[tuple[CSR | torch.Tensor, torch.Tensor]]:
        """Return batches of a data set that is on the device."""
        assert self._resident is not None
        features, targets = self._resident
        index = torch.tensor(order, device=self.device)
        parts = [index[start : start + size] for start in range(0, len(order), size)]
        if isinstance(features, ResidentRows):
            rows = features.batches(order, size, self._capacity)
            yield from ((x, targets.index_select(0, part)) for x, part in zip(rows, parts, strict=True))
        else:
            yield from ((features.index_select(0, part), targets.index_select(0, part)) for part in parts)

    def _capacity(self, rows: int) -> tuple[int, int]:
        """Return the entries and columns of the longest possible batch of `rows` rows."""
        entries = int(self._longest_first[rows - 1])
        return entries, min(entries, self._columns)

    def _pinned(self, x: CSR | torch.Tensor, y: torch.Tensor) -> tuple[CSR | torch.Tensor, torch.Tensor]:
        """Return a batch ready for the copy to the device: padded, and in pinned memory for CUDA."""
        assert self.device is not None
        if isinstance(x, torch.Tensor):
            return pinned(x, self.device), pinned(y, self.device)
        return x.pad(*self._capacity(x.shape[0]), pinned=self.device.type == "cuda"), pinned(y, self.device)

    def _on_cpu(self, order: np.ndarray, size: int) -> Iterator[tuple[CSR | torch.Tensor, torch.Tensor]]:
        """Return batches on the CPU."""
        # Gather the rows once: scipy slices batches faster than it gathers rows.
        features, targets = self.features[order], self.targets[order]
        dense = isinstance(features, np.ndarray)
        for start in range(0, len(order), size):
            part = features[start : start + size]
            if not dense:
                part.has_canonical_format = True  # as the matrix; otherwise scipy checks every batch
            elif part.dtype == np.int32 and self.device is None:
                part = np.ascontiguousarray(part[:, : max(1, np.count_nonzero(part.any(axis=0)))])
            x = torch.from_numpy(part) if dense else csr_from_scipy(part)
            yield x, torch.from_numpy(targets[start : start + size])
