"""Elements in order along a dimension, by the sort of integers that `kernels.lookup` has.

Bits of a floating value, read as an integer and with those of negative ones turned over, are in the order of the
values. All rows are sorted at once, 32 bits of the values first and then by row: equal elements keep their order.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import lookup
from minidl.ops.reduce import Chosen, Found
from minidl.runtime import check, order
from minidl.tensors import Tensor

__all__ = ["argsort", "sort"]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_HALF = 2**32


class Sort(Chosen):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, descending: bool) -> tuple[torch.Tensor, ...]:
        found = _order(x, dim, descending)
        ctx.place = x.shape, order.dims(x), dim
        ctx.save(found)
        return x.gather(dim, found) if x.dim() else x.clone(), found


def sort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Found:
    """(values, indices) in rising order along `dim`, or falling; equal ones in their order, NaN above all others.

    Raises IndexError for a dimension out of range.
    """
    return Found(*Sort.apply(input, check.axis("sort", dim, max(input.ndim, 1)), descending))


def argsort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Tensor:
    """The indices of `sort`."""
    return Tensor(_order(input.data, check.axis("argsort", dim, max(input.ndim, 1)), descending))


def _order(x: torch.Tensor, dim: int, descending: bool) -> torch.Tensor:
    """Positions along `dim` in the order of the values, int64."""
    if x.numel() == 0 or not x.dim():
        return torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    last = x.movedim(dim, -1)
    R, key = last.shape[-1], _key(last.reshape(-1))
    if descending:
        key = ~key
    # In steps of 32 bits from the lowest, and by row at the end: each keeps the order of those before it.
    steps = [(key & (_HALF - 1), _HALF), ((key >> 32) + _HALF // 2, _HALF)]
    if key.dtype != torch.int64:
        bits = 8 * key.element_size()
        steps = [(key.long() + 2 ** (bits - 1), 2**bits)]
    if (K := x.numel() // R) > 1:
        steps.append((torch.arange(x.numel(), device=x.device) // R, K))
    at: torch.Tensor | None = None
    for keys, limit in steps:
        _, places = lookup.sort(keys if at is None else keys[at], limit)
        at = places.long() if at is None else at[places.long()]
    assert at is not None
    return (at % R).reshape(last.shape).movedim(-1, dim).contiguous()


def _key(x: torch.Tensor) -> torch.Tensor:
    """Signed integers in the order of the values, equal for equal ones."""
    if not x.dtype.is_floating_point:
        return x if x.dtype not in (torch.bool, torch.uint8) else x.short()
    kind = _BITS[x.element_size()]
    bits, most = x.view(kind), torch.iinfo(kind).max
    infinite = torch.full((), float("inf"), dtype=x.dtype, device=x.device).view(kind)
    key = torch.where(bits < 0, bits ^ most, bits)
    key = torch.where(bits == torch.iinfo(kind).min, 0, key)  # -0
    return torch.where((bits & most) > infinite, most, key)  # NaN
