"""What `torch.vmap` makes of the operators.

Where one call takes rows that do not know of each other, as the images of a convolution, the mapped dimension is put
with them and it stays one launch; every other operator is called once for each place, as a gradient of weights for each
example is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.torch import registry

# The arguments whose first dimension are such rows, and how many of the results (from the first on) have them.
_ROWS: dict[str, tuple[tuple[int, ...], int]] = {
    "bias_act": ((0,), 1), "linear": ((0,), 1), "convolution": ((0, 4), 1), "batch_norm_inference": ((0, 3), 1),
    "max_pool2d": ((0,), 2), "max_pool2d_backward": ((0, 1), 1), "avg_pool2d": ((0,), 1),
    "avg_pool2d_backward": ((0,), 1), "adaptive_avg_pool2d": ((0,), 1), "adaptive_avg_pool2d_backward": ((0,), 1),
    "scaled_sum": ((0, 2, 3), 1),
}  # fmt: skip


def register() -> None:
    """Give each operator its rule."""
    for name in registry.NAMES:
        op = getattr(getattr(torch.ops, registry.NAMESPACE), name).default
        torch.library.register_vmap(f"{registry.NAMESPACE}::{name}", _rule(name, op), lib=registry._library)


def _rule(name: str, op: Any) -> Callable[..., Any]:
    rows, split = _ROWS.get(name, ((), 0))
    written = [
        i for i, arg in enumerate(op._schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write
    ]

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        size = info.batch_size
        at = {index: dim for index, dim in enumerate(in_dims) if isinstance(dim, int)}
        for index in written:
            if args[index] is not None and index not in at:
                what = op._schema.arguments[index].name
                raise ValueError(
                    f"minidl::{name}: torch.vmap maps x and not {what}, which is updated: map it as well, or call the "
                    "model in evaluation"
                )
        if at and at.keys() <= set(rows) and all(args[index].dim() >= 3 for index in at):
            found = op(*(_merged(arg, at.get(i), size) if i in rows else arg for i, arg in enumerate(args)))
            if isinstance(found, torch.Tensor):
                return found.unflatten(0, (size, -1)), 0
            # What a forward does not keep for a gradient is empty.
            apart = [i < split and each.numel() > 0 for i, each in enumerate(found)]
            parts = (e.unflatten(0, (size, -1)) if a else e for e, a in zip(found, apart, strict=True))
            return tuple(parts), tuple(0 if a else None for a in apart)
        each = [op(*(a.select(at[i], n) if i in at else a for i, a in enumerate(args))) for n in range(size)]
        if isinstance(each[0], torch.Tensor):
            return torch.stack(each), 0
        kind = type(each[0])
        return kind(map(torch.stack, zip(*each, strict=True))), kind([0] * len(each[0]))

    return rule


def _merged(arg: torch.Tensor | None, dim: int | None, size: int) -> torch.Tensor | None:
    """Rows of all places, one place after the other."""
    if arg is None:
        return None
    return (arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)).flatten(0, 1)
