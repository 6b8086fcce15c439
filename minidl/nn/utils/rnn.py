"""Sequences of different lengths: padded to one length, or packed without padding, as in torch.nn.utils.rnn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from minidl import ops
from minidl.common import suggestions
from minidl.kernels import check
from minidl.tensors import Tensor

__all__ = [
    "PackedSequence", "pack_padded_sequence", "pack_sequence", "pad_packed_sequence", "pad_sequence", "unpack_sequence",
    "unpad_sequence",
]  # fmt: skip


class _Packed(NamedTuple):
    data: Tensor
    batch_sizes: Tensor
    sorted_indices: Tensor | None
    unsorted_indices: Tensor | None


class PackedSequence(_Packed):
    """Sequences without padding, sorted by length: first the first step of each, then the second, and so on.

    data [N, ...]; batch_sizes [T], int64 on the CPU: the number of sequences in each step; sorted_indices [B], int64
    on data's device: the position in the batch of each sorted sequence; unsorted_indices: its inverse. The two are
    None for a batch that was sorted.
    """

    __slots__ = ()

    def __new__(
        cls, data: Tensor, batch_sizes: Tensor, sorted_indices: Tensor | None = None,
        unsorted_indices: Tensor | None = None,
    ) -> PackedSequence:  # fmt: skip
        if unsorted_indices is None and sorted_indices is not None:
            unsorted_indices = Tensor(sorted_indices.data.argsort())
        return super().__new__(cls, data, batch_sizes, sorted_indices, unsorted_indices)

    def to(self, *args: Any, **options: Any) -> PackedSequence:
        """Move or convert data as `Tensor.to`, and move the indices with it."""
        data = self.data.to(*args, **options)
        indices = (None if index is None else index.to(data.device) for index in self[2:])
        return PackedSequence(data, self.batch_sizes, *indices)


def pack_padded_sequence(
    input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """Pack sequences of the lengths [B] from input [T, B, ...], or [B, T, ...] with batch_first.

    With `enforce_sorted` lengths must not rise, else sequences are sorted by length. Raises ValueError for lengths that
    do, do not fit, or are below 1.
    """
    op = "pack_padded_sequence"
    if input.ndim < 2:
        raise ValueError(f"{op}: input has shape {list(input.shape)}, expected two dimensions or more")
    raw = lengths.data if isinstance(lengths, Tensor) else torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    raw = raw.cpu()
    B, T = input.shape[:2] if batch_first else input.shape[1::-1]
    if list(raw.shape) != [B] or raw.dtype.is_floating_point:
        raise ValueError(
            f"{op}: lengths has shape {list(raw.shape)}, expected one whole number for each of {B} sequences"
        )
    numbers = raw.tolist()
    if B == 0 or min(numbers) < 1 or max(numbers) > T:
        raise ValueError(f"{op}: lengths is {numbers}, expected numbers from 1 to {T}, and one sequence or more")
    indices = None
    if not enforce_sorted:
        raw, indices = raw.sort(descending=True, stable=True)
    elif any(a < b for a, b in itertools.pairwise(numbers)):
        raise ValueError(f"{op}: lengths is {numbers}, expected numbers that do not rise; or set enforce_sorted=False")
    present = torch.arange(raw[0].item(), device="cpu").unsqueeze(1) < raw
    rows = _rows(present, indices, T if batch_first else B, batch_first).to(input.device)
    data = input.reshape(B * T, *input.shape[2:])[Tensor(rows)]
    sorted_indices = None if indices is None else Tensor(indices.to(input.device))
    return PackedSequence(data, Tensor(present.sum(1)), sorted_indices)


def pack_sequence(sequences: Sequence[Tensor], enforce_sorted: bool = True) -> PackedSequence:
    """Pack sequences [L, ...]. Raises as `pad_sequence` and `pack_padded_sequence`."""
    parts = list(sequences)
    return pack_padded_sequence(pad_sequence(parts), [len(x) for x in parts], enforce_sorted=enforce_sorted)


def unpack_sequence(packed_sequences: PackedSequence) -> list[Tensor]:
    """Return the sequences [L, ...] of `pack_sequence`, in the order before they were sorted."""
    return unpad_sequence(*pad_packed_sequence(packed_sequences, batch_first=True), batch_first=True)


def unpad_sequence(
    padded_sequences: Tensor, lengths: Tensor | Sequence[int], batch_first: bool = False
) -> list[Tensor]:
    """Return the sequences [L, ...] of the lengths [B] in [T, B, ...], or [B, T, ...] with batch_first, as views.

    Raises ValueError for lengths that do not fit.
    """
    numbers = lengths.tolist() if isinstance(lengths, Tensor | torch.Tensor) else list(lengths)
    if padded_sequences.ndim < 2:
        raise ValueError(f"unpad_sequence: got shape {list(padded_sequences.shape)}, expected two dimensions or more")
    rows = padded_sequences if batch_first else padded_sequences.transpose(0, 1)
    B, T = rows.shape[:2]
    if len(numbers) != B or not all(0 <= number <= T for number in numbers):
        raise ValueError(f"unpad_sequence: lengths is {numbers}, expected {B} numbers from 0 to {T}")
    return [rows[b, :number] for b, number in enumerate(numbers)]


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sequences padded to [T, B, ...] in the order before they were sorted, and their lengths [B].

    `total_length` replaces T. Raises ValueError if it is shorter than the longest sequence.
    """
    data, sizes, sorted_indices, _ = sequence
    T, B = len(sizes), int(sizes[0].item())
    if total_length is not None:
        if check.integer("pad_packed_sequence", "total_length", total_length) < T:
            raise ValueError(f"pad_packed_sequence: total_length is {total_length}, expected {T} or more")
        T = total_length
    present = torch.arange(B, device="cpu") < sizes.data.unsqueeze(1)
    lengths = present.sum(0)
    indices = None if sorted_indices is None else sorted_indices.data.cpu()
    if indices is not None:
        lengths = torch.empty_like(lengths).scatter_(0, indices, lengths)
    rows = _rows(present, indices, T if batch_first else B, batch_first)
    return _padded(data, rows, (B, T) if batch_first else (T, B), padding_value), Tensor(lengths)


def pad_sequence(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    """Return sequences [L, ...] padded to the longest as [T, B, ...], or [B, T, ...] with batch_first.

    padding_side: "right" or "left". Raises ValueError for no sequences or another side.
    """
    parts: list[Any] = list(sequences)
    if padding_side not in ("left", "right"):
        raise ValueError(f"pad_sequence: padding_side is {padding_side!r}, expected 'left' or 'right'")
    if not parts or not all(isinstance(x, Tensor) and x.ndim for x in parts):
        raise ValueError("pad_sequence: expected one or more Tensors of one dimension or more")
    lengths, B = [len(x) for x in parts], len(parts)
    T = max(lengths)
    starts = [T - length if padding_side == "left" else 0 for length in lengths]
    rows = torch.cat([
        torch.arange(start, start + length) + b * T if batch_first else torch.arange(start, start + length) * B + b
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ])  # fmt: skip
    return _padded(ops.cat(parts), rows, (B, T) if batch_first else (T, B), padding_value)


def _rows(present: torch.Tensor, indices: torch.Tensor | None, stride: int, batch_first: bool) -> torch.Tensor:
    """Return the padded row of each packed one; present [T, B] tells which sequences each step has."""
    step, position = present.nonzero().unbind(1)
    position = position if indices is None else indices[position]
    return position * stride + step if batch_first else step * stride + position


def _padded(data: Tensor, rows: torch.Tensor, lead: tuple[int, int], value: float) -> Tensor:
    """Return data at `rows` of a new tensor [*lead, ...], and `value` elsewhere."""
    shape = math.prod(lead), *data.shape[1:]
    padded = Tensor(torch.full(shape, value, dtype=data.dtype, device=data.device))
    padded[Tensor(rows.to(data.device))] = data
    return padded.reshape(*lead, *data.shape[1:])


def __getattr__(name: str) -> object:
    raise suggestions.attribute("minidl.nn.utils.rnn", name, __all__)
