"""Checks shared by launchers; their errors state the value, what was expected, and what to do."""

from collections.abc import Sequence

import torch

Pair = int | Sequence[int]

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST = 2**30  # of sizes, strides, paddings and dilations: kernels take them as int32


def floating(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise TypeError unless every tensor that is given is float16, bfloat16, float32 or float64."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, expected a floating type; convert it with .to()")


def same(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise TypeError unless all tensors that are given have one dtype, ValueError unless they are on one device."""
    (first_name, first), *rest = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    for name, tensor in rest:
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"{op}: {first_name} is {first.dtype} and {name} is {tensor.dtype}; convert one of them with .to()"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{op}: {first_name} is on {first.device} and {name} is on {tensor.device}; move one of them with .to()"
            )


def axis(op: str, dim: int, rank: int) -> int:
    """`dim` counted from the front. Raises IndexError when it is outside [-rank, rank)."""
    if not -rank <= dim < rank:
        raise IndexError(f"{op}: dim {dim} is out of range for a tensor of {rank} dimensions")
    return dim % rank


def pair(op: str, name: str, value: Pair, least: int) -> tuple[int, int]:
    """(height, width) of a whole number or a pair of them; a sequence of one counts for both, as in torch.

    Raises TypeError for anything else, ValueError for numbers that are not from `least` to MOST.
    """
    values = (value,) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    # bool is an int to Python, and True is found in a cache under 1.
    whole = len(values) in (1, 2) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    if not whole or not all(least <= v <= MOST for v in values):
        text = f"{op}: {name} is {value!r}, expected a whole number from {least} to {MOST}, or a pair of them"
        raise ValueError(text) if whole else TypeError(text)
    return values[0], values[-1]


def memory_order(tensor: torch.Tensor) -> torch.memory_format | None:
    """torch.contiguous_format or torch.channels_last, whichever the tensor is dense in; None for other strides."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else None
