"""Checks shared by launchers; their errors state the value, what was expected, and what to do."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

Pair = int | Sequence[int]

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SEVERAL = {1: "a sequence of one", 2: "a pair of them", 3: "three of them"}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
MOST = 2**30  # of sizes, strides, paddings and dilations: kernels take them as int32


def floating(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise TypeError unless every tensor that is given is float16, bfloat16, float32 or float64."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, expected a floating type; convert it with .to()")


class Placed(Protocol):
    """What has a dtype and a device."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


def same(op: str, **tensors: Placed | None) -> None:
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


def whole(op: str, name: str, value: Any, least: int | None = None) -> int:
    """A whole number, also of numpy or in a tensor. Raises TypeError for anything else, ValueError below `least`."""
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} is {value!r}, expected a whole number") from None
    if least is not None and found < least:
        raise ValueError(f"{op}: {name} is {found}, expected {least} or more")
    return found


def several(op: str, name: str, value: Any) -> tuple[int, ...]:
    """Whole numbers, of which one may stand alone. Raises TypeError for anything else, also True and False."""
    if any(isinstance(each, bool) for each in (value if isinstance(value, list | tuple) else (value,))):
        raise TypeError(f"{op}: {name} is {value!r}, expected whole numbers")
    if not isinstance(value, list | tuple):
        try:
            return (operator.index(value),)
        except TypeError:
            value = value if isinstance(value, Iterable) else (value,)
    return tuple([whole(op, name, each) for each in value])


def unpacked(op: str, name: str, given: tuple[Any, ...]) -> tuple[int, ...]:
    """Whole numbers that a function was given one by one, or as one sequence. Raises as `several`."""
    return several(op, name, given[0] if len(given) == 1 else given)


def sizes(op: str, given: tuple[Any, ...]) -> tuple[int, ...]:
    """`unpacked` sizes of a tensor. Raises ValueError for one below 0, too."""
    found = unpacked(op, "size", given)
    if any(size < 0 for size in found):
        raise ValueError(f"{op}: size is {list(found)}, expected sizes from 0")
    return found


def axis(op: str, dim: int, rank: int) -> int:
    """`dim` counted from the front. Raises IndexError when it is outside [-rank, rank), TypeError for what is no whole
    number."""
    if isinstance(dim, bool):
        raise TypeError(f"{op}: dim is {dim}, expected a whole number")
    dim = whole(op, "dim", dim)
    if not -rank <= dim < rank:
        raise IndexError(f"{op}: dim {dim} is out of range for a tensor of {rank} dimensions")
    return dim % rank


def axes(op: str, dims: Any, rank: int, name: str = "dim") -> tuple[int, ...]:
    """`several` dimensions, each as `axis` has it."""
    return tuple([axis(op, dim, rank) for dim in several(op, name, dims)])


def pair(op: str, name: str, value: Pair, least: int) -> tuple[int, int]:
    """(height, width), as `numbers` has them."""
    height, width = numbers(op, name, value, least, 2)
    return height, width


def numbers(op: str, name: str, value: Pair, least: int, count: int) -> tuple[int, ...]:
    """A whole number for each of `count` axes; one, or a sequence of one, counts for all, as in torch.

    Raises TypeError for anything else, ValueError for numbers that are not from `least` to MOST.
    """
    try:
        values = several(op, name, value)
    except TypeError:
        values = ()
    whole = len(values) in (1, count)
    if not whole or not all(least <= v <= MOST for v in values):
        text = f"{op}: {name} is {value!r}, expected a whole number from {least} to {MOST}, or {SEVERAL[count]}"
        raise ValueError(text) if whole else TypeError(text)
    return values if len(values) == count else values * count


def memory_order(tensor: torch.Tensor) -> torch.memory_format | None:
    """torch.contiguous_format, torch.channels_last or torch.channels_last_3d, whichever the tensor is dense in; for
    [N, C, L] in the order [N, L, C], which has no name, torch.preserve_format; None for other strides."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    if tensor.dim() == 3:
        return torch.preserve_format if tensor.transpose(1, 2).is_contiguous() else None
    last = LAST.get(tensor.dim())
    return last if last is not None and tensor.is_contiguous(memory_format=last) else None
