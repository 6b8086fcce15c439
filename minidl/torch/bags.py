"""Sums and means of rows of a table, as torch operators: a bag is a row of a sparse matrix times the table."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import elementwise, lookup, sparse
from minidl.runtime import launch
from minidl.torch.registry import operator


def _entries(
    index: torch.Tensor, offsets: torch.Tensor, factors: torch.Tensor | None, rows: int, like: torch.Tensor, mean: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, per entry, the row of the table, the bag, and the row's factor (row 0 and NaN for a row out of range)."""
    valid = (index >= 0) & (index < rows)
    if launch.ON_CPU and not bool(valid.all()):
        raise IndexError(f"embedding_bag: input holds {int(index[~valid][0])}, expected rows from 0 to {rows - 1}")
    bag = torch.searchsorted(offsets[1:].contiguous(), torch.arange(len(index), device=index.device), right=True)
    bag = bag.clamp(max=max(len(offsets) - 2, 0))
    if mean:
        counts = (offsets[1:] - offsets[:-1]).to(like.dtype)
        factors = elementwise.reciprocal(counts).index_select(0, bag)
    elif factors is None:
        factors = like.new_ones(len(index))
    factors = torch.where(valid, factors, torch.full((), float("nan"), dtype=like.dtype, device=like.device))
    return torch.where(valid, index, 0), bag, factors


def _bounds(offsets: torch.Tensor, entries: int) -> torch.Tensor:
    """Return the offsets clamped to the entries. In the interpreter, raises an error for invalid ones instead."""
    bounds = offsets.clamp(0, entries)
    if launch.ON_CPU and not torch.equal(bounds, offsets):
        wrong = int(offsets[bounds != offsets][0])
        raise IndexError(f"embedding_bag: offsets holds {wrong}, expected 0 to {entries}, input's length")
    if launch.ON_CPU and len(offsets) > 1:
        if int(offsets[0]) != 0:
            raise ValueError(f"embedding_bag: offsets begins with {int(offsets[0])}, expected 0")
        falls = (offsets.diff() < 0).nonzero()
        if len(falls):
            one, next_ = offsets[int(falls[0]) :][:2].tolist()
            raise ValueError(f"embedding_bag: offsets has {next_} after {one}, expected offsets that never decrease")
    return bounds


def _product(
    crow: torch.Tensor, col: torch.Tensor, factors: torch.Tensor, dense: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Return a sparse matrix in CSR format times `dense`; the longest rows are computed first."""
    order = torch.argsort(crow[1:] - crow[:-1], descending=True, stable=True)
    return sparse.csr_matmul(crow.int(), col.int(), factors, order.int(), dense)


def _fake(index: Any, offsets: Any, weight: Any, *_: Any) -> torch.Tensor:
    return weight.new_empty((offsets.shape[0] - 1, weight.shape[1]))


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    index, offsets, weight, factors, ctx.mean = inputs
    if ctx.needs_input_grad[3]:
        raise ValueError("minidl::embedding_bag: per_sample_weights gets no gradient here; pass it detached")
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(index, offsets, factors)


def _gradients(ctx: Any, dy: torch.Tensor) -> Any:
    return None, None, embedding_bag_backward(dy, *ctx.saved_tensors, ctx.rows, ctx.mean), None, None


@operator(
    "embedding_bag(Tensor index, Tensor offsets, Tensor weight, Tensor? factors, bool mean) -> Tensor",
    _fake, save=_save, backward=_gradients,
)  # fmt: skip
def _embedding_bag(
    index: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor | None, mean: bool
) -> torch.Tensor:
    """Return the sums of bags, from offsets [bags + 1], of rows times factors; with `mean` divided by their number."""
    offsets = _bounds(offsets, len(index))
    index, _, factors = _entries(index, offsets, factors, len(weight), weight, mean)
    return _product(offsets, index, factors, weight)


def _fake_backward(dy: Any, index: Any, offsets: Any, factors: Any, rows: Any, mean: Any) -> torch.Tensor:
    return dy.new_empty((rows, dy.shape[1]))


@operator(
    "embedding_bag_backward(Tensor dy, Tensor index, Tensor offsets, Tensor? factors, SymInt rows, bool mean) -> "
    "Tensor",
    _fake_backward,
)
def embedding_bag_backward(
    dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, factors: torch.Tensor | None, rows: int, mean: bool
) -> torch.Tensor:
    """Return the gradient of the table: the product with the transposed matrix, in the order of the entries."""
    if len(index) == 0 or len(dy) == 0:
        return dy.new_zeros(rows, dy.shape[1])
    offsets = _bounds(offsets, len(index))
    index, bag, factors = _entries(index, offsets, factors, rows, dy, mean)
    entry = torch.arange(len(index), device=index.device)
    factors = torch.where((entry >= offsets[0]) & (entry < offsets[-1]), factors, 0.0)  # 0 outside of all bags
    keys, at = lookup.sort(index, rows)
    crow = torch.searchsorted(keys, torch.arange(rows + 1, device=keys.device, dtype=keys.dtype))
    return _product(crow, bag[at], factors[at], dy.contiguous())


def embedding_bag(
    input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.embedding_bag of the modes "sum" and "mean"; the gradient of weight is dense.

    per_sample_weights gets no gradient. Raises ValueError for the mode "max", max_norm, scale_grad_by_freq, sparse and
    padding_idx, which are not supported. In the interpreter, raises IndexError for a row or offset out of range, and
    ValueError for offsets that do not begin at 0 or decrease. On a GPU, where a check would synchronise, nothing out of
    range is read: the bag of such a row and the gradient of row 0 are NaN; an offset is clamped.
    """
    unsupported = {
        "max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse,
        "padding_idx": padding_idx is not None,
    }  # fmt: skip
    for name, is_set in unsupported.items():
        if is_set:
            raise ValueError(f"embedding_bag: {name} is not supported; leave it out")
    if mode not in ("sum", "mean"):
        raise ValueError(f"embedding_bag: mode is {mode!r}, expected 'sum' or 'mean'")
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        raise ValueError("embedding_bag: per_sample_weights needs mode='sum' and input's shape")
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError("embedding_bag: input of two dimensions has a bag in each row; leave offsets out")
        offsets = torch.arange(len(input) + 1, device=input.device) * input.shape[1]
    elif input.dim() != 1 or offsets is None:
        raise ValueError(f"embedding_bag: input has shape {list(input.shape)}, expected [bags, L], or [L] with offsets")
    elif offsets.dim() != 1:
        raise ValueError(f"embedding_bag: offsets has shape {list(offsets.shape)}, expected [bags]")
    elif not include_last_offset:
        offsets = torch.cat([offsets, offsets.new_full((1,), len(input))])
    factors = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    return _embedding_bag(input.reshape(-1), offsets, weight, factors, mode == "mean")
