"""The rules of the operators for `torch.vmap`, and `batch_invariant`.

If an operator takes independent rows, such as the images of a convolution, the mapped dimension is merged with them, in
one launch. Other operators are called once per index, such as the weight gradients of each example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minidl.runtime import launch
from minidl.torch import registry

PASS = 16  # examples
# torch's operators that choose a kernel by the size of the batch.
_OF_BATCHES = {"addmm", "baddbmm", "bmm", "convolution", "mm", "native_batch_norm"}

# The arguments whose first dimension is such rows, and the number of leading results with this dimension.
_ROWS: dict[str, tuple[tuple[int, ...], int]] = {
    "bias_act": ((0,), 1), "linear": ((0,), 1), "convolution": ((0, 4), 1), "batch_norm_inference": ((0, 3), 1),
    "max_pool2d": ((0,), 2), "max_pool2d_backward": ((0, 1), 1), "avg_pool2d": ((0,), 1),
    "scaled_sum": ((0, 2, 3), 1), "attention": ((0, 1, 2, 3, 4), 2), "resample": ((0,), 1),
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
                argument = op._schema.arguments[index].name
                raise ValueError(
                    f"minidl::{name}: torch.vmap maps x but not {argument}, which is updated; map it as well, or call "
                    "the model in evaluation mode"
                )
        if at and at.keys() <= set(rows) and all(args[index].dim() >= 3 for index in at):
            outputs = op(*(_merged(arg, at.get(i), size) if i in rows else arg for i, arg in enumerate(args)))
            if isinstance(outputs, torch.Tensor):
                return outputs.unflatten(0, (size, -1)), 0
            # A result that is not saved for a gradient is empty.
            is_mapped = [i < split and x.numel() > 0 for i, x in enumerate(outputs)]
            parts = (e.unflatten(0, (size, -1)) if a else e for e, a in zip(outputs, is_mapped, strict=True))
            return tuple(parts), tuple(0 if a else None for a in is_mapped)
        results = [op(*(a.select(at[i], n) if i in at else a for i, a in enumerate(args))) for n in range(size)]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        kind = type(results[0])
        return kind(map(torch.stack, zip(*results, strict=True))), kind([0] * len(results[0]))

    return rule


def _merged(arg: torch.Tensor | None, dim: int | None, size: int) -> torch.Tensor | None:
    """Merge the mapped dimension into the first."""
    if arg is None:
        return None
    return (arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)).flatten(0, 1)


class batch_invariant(TorchDispatchMode):  # noqa: N801 (a context)
    """A context in which the result of an example has the same bits in every batch: operators compute passes of a
    constant number of examples, which takes more time.

    Raises ValueError for operators without such a rule, as batch norm in training, and for torch's products and
    convolutions (accelerate the model). Gradients do depend on the batch.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        is_operator = func.namespace == registry.NAMESPACE and not name.endswith("_backward") and len(args[0]) > 0
        rows = _ROWS.get(name, ((0,), 3) if name == "row_norm" and args[3] < args[0].dim() else None)
        if is_operator and rows is not None and args[0].dim() > 1:
            return _in_passes(func, args, *rows)
        if is_operator or (func.namespace == "aten" and name in _OF_BATCHES):
            raise ValueError(f"batch_invariant: the result of {func.namespace}::{name} may depend on the batch")
        return func(*args, **(kwargs or {}))


def _in_passes(op: Any, args: Any, rows: tuple[int, ...], split: int) -> Any:
    """Return the results for all examples; the last pass repeats the last one."""
    size, count = 1 if launch.INTERPRETED else PASS, len(args[0])
    index = torch.arange(count + -count % size, device=args[0].device).clamp(max=count - 1)
    operands = [[x[at] if i in rows and x is not None else x for i, x in enumerate(args)] for at in index.split(size)]
    passes = [op(*each) for each in operands]
    if isinstance(passes[0], torch.Tensor):
        return torch.cat(passes)[:count]
    parts = enumerate(zip(*passes, strict=True))
    return tuple(torch.cat(part)[: len(part[0]) // size * count] if i < split else part[0] for i, part in parts)
