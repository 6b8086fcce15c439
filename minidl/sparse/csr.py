"""A sparse batch in CSR format: the matrix by rows, and its transpose by the columns that have entries.

The gradient of a sparse layer is the forward kernel on the transposed matrix, so a batch stores both orders:

    forward      row i has columns col[crow[i]:crow[i+1]] with values val[...]
    transposed   column rows[u] has documents t_col[t_crow[u]:t_crow[u+1]], ascending, with values t_val[...]

`order` and `t_order` list rows and touched columns by descending number of entries (ties by index), so that the rows
of a tile have similar lengths. Index tensors are int32. The transposed half is integer bookkeeping when a batch is
built, outside forward and backward.

A batch may have capacity for more entries and columns than it uses (`pad`): batches of different sizes then have
tensors of one size, as a CUDA graph needs. Unused capacity changes no result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

_INT32_MAX = 2**31 - 1
INDICES = ("crow", "col", "order", "rows", "t_crow", "t_col", "t_order")
VALUES = ("val", "t_val")


@dataclass(frozen=True, eq=False)
class CSR:
    """A sparse matrix [B, V] with nnz stored values in U of its columns.

    crow int32 [B+1], col int32 [nnz], val [nnz], order int32 [B]; rows int32 [U] ascending, t_crow int32 [U+1],
    t_col int32 [nnz], t_val [nnz], t_order int32 [U]. All on one device. With unused capacity, col, val, t_col and
    t_val end with entries that nothing reads, and rows with -1, each a column without entries.

    `packed` are the two buffers, of indices and of values, of which the tensors are views (or None).
    """

    shape: tuple[int, int]
    crow: torch.Tensor
    col: torch.Tensor
    val: torch.Tensor
    order: torch.Tensor
    rows: torch.Tensor
    t_crow: torch.Tensor
    t_col: torch.Tensor
    t_val: torch.Tensor
    t_order: torch.Tensor
    packed: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def from_torch(cls, crow: torch.Tensor, col: torch.Tensor, val: torch.Tensor, shape: tuple[int, int]) -> CSR:
        """Build a CSR from integer tensors crow [B+1] and col [nnz] and values val [nnz], with its transposed half.

        Raises ValueError if the tensors do not describe a matrix of that shape.
        """
        crow, col = _check(crow, col, val, shape)
        counts = (crow[1:] - crow[:-1]).to(torch.int64)
        document = torch.repeat_interleave(torch.arange(shape[0], dtype=torch.int32, device=crow.device), counts)
        # A stable sort keeps documents ascending within a column, so that sums have a fixed order.
        sorted_col, by_column = torch.sort(col, stable=True)
        rows, t_counts = torch.unique_consecutive(sorted_col, return_counts=True)
        t_crow = torch.zeros(len(rows) + 1, dtype=torch.int32, device=crow.device)
        torch.cumsum(t_counts, 0, dtype=torch.int32, out=t_crow[1:])
        return cls(
            (int(shape[0]), int(shape[1])),
            crow,
            col,
            val.contiguous(),
            _by_falling_count(counts),
            rows,
            t_crow,
            document[by_column],
            val[by_column],
            _by_falling_count(t_counts),
        )

    @property
    def nnz(self) -> int:
        """The capacity in values: the number of stored values, plus unused capacity from `pad`."""
        return self.col.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.val.dtype

    @property
    def device(self) -> torch.device:
        return self.val.device

    def astype(self, dtype: torch.dtype) -> CSR:
        """Return the matrix with values of another floating dtype; it shares the index tensors."""
        if not dtype.is_floating_point:
            raise ValueError(f"values must be floating, got {dtype}")
        if dtype == self.val.dtype:
            return self
        return replace(self, val=self.val.to(dtype), t_val=self.t_val.to(dtype), packed=None)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CSR:
        """Return the matrix on a device, with two copies: one of all indices and one of all values.

        With `non_blocking` a copy to a GPU is asynchronous, from pinned host memory.
        """
        device = torch.device(device)
        if device == self.val.device or (device.type == self.val.device.type and device.index is None):
            return self
        pinned = non_blocking and device.type == "cuda" and self.val.device.type == "cpu"
        packed = self._buffers() or _pack(self._parts(), self.sizes, pinned)
        indices, values = (part.to(device, non_blocking=non_blocking) for part in packed)
        return unpack(self.shape, (indices, values), self.sizes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The length of each tensor, by name. `copy_` needs the same shape and sizes."""
        return {name: part.numel() for name, part in self._parts().items()}

    def pad(self, nnz: int, touched: int, pinned: bool = False) -> CSR:
        """Return the matrix with capacity for `nnz` entries and `touched` columns, packed, optionally in pinned memory.

        Raises ValueError if it has more entries or columns.
        """
        used = len(self.rows)
        if self.nnz > nnz or used > touched:
            raise ValueError(
                f"a CSR of {self.nnz} entries in {used} columns has no room in {nnz} entries and {touched} columns"
            )
        sizes = {**self.sizes, **dict.fromkeys(("col", "val", "t_col", "t_val"), nnz)}
        sizes.update(rows=touched, t_crow=touched + 1, t_order=touched)
        padded = unpack(self.shape, _pack(self._parts(), sizes, pinned), sizes)
        padded.rows[used:] = -1
        padded.t_crow[used + 1 :] = self.t_crow[-1]
        padded.t_order[used:] = torch.arange(used, touched, dtype=torch.int32, device=self.device)
        return padded

    def clone(self) -> CSR:
        """Return a packed copy of the matrix."""
        indices, values = self._buffers() or _pack(self._parts(), self.sizes, False)
        return unpack(self.shape, (indices.clone(), values.clone()), self.sizes)

    def copy_(self, source: CSR) -> CSR:
        """Copy a matrix of the same shape and sizes into this one, with two copies if both are packed.

        Raises ValueError for another shape or sizes.
        """
        if (source.shape, source.sizes) != (self.shape, self.sizes):
            raise ValueError(
                f"a CSR of {source.shape} and {source.sizes} cannot be copied to {self.shape}, {self.sizes}"
            )
        buffers, source_buffers = self._buffers(), source._buffers()
        if buffers is not None and source_buffers is not None:
            for target, source_buffer in zip(buffers, source_buffers, strict=True):
                target.copy_(source_buffer)
        else:
            parts = source._parts()
            for name, target in self._parts().items():
                target.copy_(parts[name])
        return self

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `packed` if all tensors are still its views: `dataclasses.replace` may have exchanged some."""
        if self.packed is None:
            return None
        for buffer, names in zip(self.packed, (INDICES, VALUES), strict=True):
            starts, end = places(names, self.sizes, buffer.element_size())
            memory, first = buffer.untyped_storage().data_ptr(), buffer.storage_offset()
            if buffer.numel() != end:
                return None
            for name in names:
                part = getattr(self, name)
                actual = part.untyped_storage().data_ptr(), part.storage_offset() - first
                if actual != (memory, starts[name]) or not part.is_contiguous():
                    return None
        return self.packed

    def _parts(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in (*INDICES, *VALUES)}

    def to_dense(self) -> torch.Tensor:
        """Return the dense matrix [B, V], for tests and small tables; duplicate entries are added."""
        dense = torch.zeros(self.shape, dtype=self.val.dtype, device=self.val.device)
        counts = (self.crow[1:] - self.crow[:-1]).to(torch.int64)
        document = torch.repeat_interleave(torch.arange(self.shape[0], device=self.crow.device), counts)
        return dense.index_put_(
            (document, self.col[: len(document)].to(torch.int64)), self.val[: len(document)], accumulate=True
        )

    def __repr__(self) -> str:
        return f"CSR(shape={self.shape}, nnz={self.nnz}, dtype={self.val.dtype}, device={str(self.val.device)!r})"


def _check(
    crow: torch.Tensor, col: torch.Tensor, val: torch.Tensor, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return crow and col as contiguous int32. Raises ValueError for an invalid matrix."""
    B, V = shape
    if not (0 <= B <= _INT32_MAX and 0 <= V <= _INT32_MAX and col.numel() <= _INT32_MAX):
        raise ValueError(f"a CSR has at most 2^31 - 1 rows, columns and values, got shape {tuple(shape)}")
    for name, tensor in (("crow", crow), ("col", col)):
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be a vector of int32 or int64, got {tensor.dtype} {list(tensor.shape)}")
    if val.dim() != 1 or not val.dtype.is_floating_point:
        raise ValueError(f"val must be a vector of floating values, got {val.dtype} {list(val.shape)}")
    if not crow.device == col.device == val.device:
        raise ValueError(f"crow, col and val are on {crow.device}, {col.device} and {val.device}, expected one device")
    if len(crow) != B + 1:
        raise ValueError(f"crow has {len(crow)} entries, expected {B + 1} for {B} rows")
    if len(col) != len(val):
        raise ValueError(f"col has {len(col)} entries and val {len(val)}, expected as many")
    if int(crow[0]) != 0 or int(crow[-1]) != len(col):
        raise ValueError(f"crow runs from {int(crow[0])} to {int(crow[-1])}, expected from 0 to {len(col)}")
    if bool((crow[1:] < crow[:-1]).any()):
        raise ValueError("crow decreases; row starts must not decrease")
    if len(col):
        low, high = (int(bound) for bound in torch.aminmax(col))
        if low < 0 or high >= V:
            raise ValueError(f"col holds columns {low} to {high}, expected 0 to {V - 1}")
    return crow.to(torch.int32).contiguous(), col.to(torch.int32).contiguous()


def _by_falling_count(counts: torch.Tensor) -> torch.Tensor:
    """Return int32 indices by descending count, ties by index."""
    return torch.sort(counts, descending=True, stable=True).indices.to(torch.int32)


def _pack(
    parts: Mapping[str, torch.Tensor], sizes: Mapping[str, int], pinned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two buffers, of the indices and of the values, with space for the size of each part."""
    indices, values = (
        torch.zeros(
            places(names, sizes, parts[names[0]].element_size())[1],
            dtype=parts[names[0]].dtype, device=parts[names[0]].device, pin_memory=pinned,
        )
        for names in (INDICES, VALUES)
    )  # fmt: skip
    for names, buffer in ((INDICES, indices), (VALUES, values)):
        starts, _ = places(names, sizes, buffer.element_size())
        for name in names:
            buffer[starts[name] : starts[name] + parts[name].numel()] = parts[name]
    return indices, values


def unpack(shape: tuple[int, int], packed: tuple[torch.Tensor, torch.Tensor], sizes: Mapping[str, int]) -> CSR:
    """Return the matrix whose tensors are views of two buffers."""
    parts: dict[str, torch.Tensor] = {}
    for names, buffer in zip((INDICES, VALUES), packed, strict=True):
        starts, _ = places(names, sizes, buffer.element_size())
        parts.update({name: buffer[starts[name] : starts[name] + sizes[name]] for name in names})
    return CSR(shape, **parts, packed=packed)


def places(names: Sequence[str], sizes: Mapping[str, int], itemsize: int) -> tuple[dict[str, int], int]:
    """Return the start of each part in a buffer of values of `itemsize` bytes, and the end of the last one.

    Each part starts at a multiple of 16 bytes, like an allocation: Triton compiles another variant for unaligned
    pointers.
    """
    step = 16 // itemsize
    starts, end = {}, 0
    for name in names:
        starts[name] = end
        end += -(-sizes[name] // step) * step
    return starts, end
