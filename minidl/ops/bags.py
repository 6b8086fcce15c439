"""Sums, means and maxima of bags of rows of a table."""

from __future__ import annotations

import math

import torch

from minidl.kernels import check
from minidl.ops import extrema
from minidl.ops.conditional import where
from minidl.ops.elementwise import div, mul
from minidl.ops.indexing import getitem, narrow
from minidl.ops.join import cat
from minidl.ops.lookup import embedding
from minidl.ops.scatter_gather import Summed
from minidl.ops.shape import reshape, to, unsqueeze, wide
from minidl.tensors import Tensor

__all__ = ["embedding_bag"]


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the "mean", "sum" or "max" of the rows of weight [V, H] in each bag: [bags, H]; 0 of an empty bag.

    input: int64 or int32 indices [bags, N], or [L] with offsets [bags], where each bag begins (with
    include_last_offset then the end, L). per_sample_weights, of input's shape, scale the rows of a sum.
    Entries that are padding_idx are in no bag. Rows are added in the order of the input; the mode "max" waits for the
    device. Raises as `embedding`; ValueError for another mode, shapes that do not fit, and on the CPU offsets that do
    not begin at 0, decrease or pass the end.
    """
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"embedding_bag: mode is {mode!r}, expected 'sum', 'mean' or 'max'")
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        raise ValueError("embedding_bag: per_sample_weights needs mode='sum' and input's shape")
    bag, bags = _bags(input, offsets, include_last_offset)
    index = input.data.reshape(-1)
    if padding_idx is not None:
        V = weight.shape[0]
        if not -V <= check.integer("embedding_bag", "padding_idx", padding_idx) < V:
            raise ValueError(f"embedding_bag: padding_idx is {padding_idx}, expected a row of the {V}")
        bag = torch.where(index == padding_idx % V, bags, bag)
    rows = wide(embedding(Tensor(index), weight, None, max_norm, norm_type, scale_grad_by_freq, sparse))
    if per_sample_weights is not None:
        check.same("embedding_bag", weight=weight, per_sample_weights=per_sample_weights)
        rows = mul(rows, unsqueeze(to(reshape(per_sample_weights, len(index)), rows.dtype), 1))
    counts = torch.zeros(bags + 1, dtype=torch.int64, device=bag.device).scatter_add_(0, bag, torch.ones_like(bag))
    if mode == "max":
        return to(_maxima(rows, bag, counts), weight.dtype)
    total = _sums(rows, bag, bags)
    if mode == "mean":
        total = div(total, Tensor(counts[:bags].clamp(min=1).to(rows.dtype).unsqueeze(1)))
    return to(total, weight.dtype)


def _bags(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> tuple[torch.Tensor, int]:
    """Return the bag of each entry, int64 [L], and the number of bags, which is the bag of entries in none."""
    if input.ndim == 2:
        if offsets is not None:
            raise ValueError("embedding_bag: input of two dimensions has a bag in each row; leave offsets out")
        return torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1]), len(input)
    if input.ndim != 1 or offsets is None:
        raise ValueError(f"embedding_bag: input has shape {list(input.shape)}, expected [bags, N], or [L] with offsets")
    starts, L = offsets.data, len(input)
    if starts.dim() != 1 or starts.dtype not in (torch.int64, torch.int32) or len(starts) < include_last_offset:
        raise ValueError(f"embedding_bag: offsets is {starts.dtype} {list(starts.shape)}, expected [bags] integers")
    if not starts.is_cuda:  # reading would wait for the device
        bounds = [0, *starts.tolist(), L]
        if bounds != sorted(bounds) or bounds[1] > 0 or (include_last_offset and bounds[-2] < L):
            raise ValueError(f"embedding_bag: offsets are {bounds[1:-1]}, expected a rise from 0 to at most {L}")
    entries = torch.arange(L, dtype=starts.dtype, device=starts.device)
    bag = torch.searchsorted(starts.contiguous(), entries, right=True) - 1
    return bag.clamp(min=0), len(starts) - include_last_offset


def _sums(rows: Tensor, bag: torch.Tensor, bags: int) -> Tensor:
    return narrow(Summed.apply(bag, rows, bags + 1), 0, 0, bags)


def _maxima(rows: Tensor, bag: torch.Tensor, counts: torch.Tensor) -> Tensor:
    """Return the maxima of the rows of each bag but the last, 0 of none. The gradient goes to the first of equals."""
    bags, L = len(counts) - 1, len(bag)
    longest = int(counts[:-1].max()) if bags else 0
    if not longest:
        return _sums(rows, bag, bags)  # of nothing
    order = torch.argsort(bag, stable=True)
    first = counts.cumsum(0) - counts
    slots = torch.full((bags + 1, max(longest, int(counts[-1]))), L, dtype=torch.int64, device=bag.device)
    slots[bag[order], torch.arange(L, device=bag.device) - first[bag[order]]] = order
    least = Tensor(torch.full((1, rows.shape[1]), -math.inf, dtype=rows.dtype, device=rows.device))
    values = extrema.max(getitem(cat([rows, least]), Tensor(slots[:-1, :longest])), 1).values
    return where(Tensor(counts[:-1].unsqueeze(1) > 0), values, 0)
