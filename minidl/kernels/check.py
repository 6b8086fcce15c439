"""Argument checks shared by launchers; an error states the value, the expected value, and a remedy."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Pair = int | Sequence[int]

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SEVERAL = {1: "a sequence of one", 2: "a pair of them", 3: "three of them"}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
PLAIN = frozenset({int, bool, str, type(None), torch.Size})  # types of arguments that decide a result by their value
MOST = 2**30  # limit of sizes, strides, paddings and dilations: kernels take them as int32


def cached(function: Callable[..., Any]) -> Any:
    """Decorate a function of shapes and settings: its results are cached by the arguments, if these are plain, and
    their types, as 1, 1.0 and True are equal."""

    @functools.lru_cache(maxsize=4096)
    def result(kinds: tuple[type, ...], *args: Any) -> Any:
        return function(*args)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        kinds = tuple([kind for x in args for kind in (map(type, x) if type(x) is tuple else (type(x),))])
        if options or not PLAIN.issuperset(kinds) or torch.compiler.is_compiling():  # Dynamo warns of such a cache
            return function(*args, **options)
        return result(kinds, *args)

    return call


def floating(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise TypeError unless every tensor that is not None is float16, bfloat16, float32 or float64."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, expected a floating type; convert it with .to()")


def same(op: str, **tensors: Any) -> None:
    """Raise TypeError unless all tensors that are not None have one dtype, ValueError unless they share a device."""
    if len({(tensor.dtype, tensor.device) for tensor in tensors.values() if tensor is not None}) == 1:
        return
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


def integer(op: str, name: str, value: Any, least: int | None = None) -> int:
    """Return an integer, also from NumPy or a tensor. Raises TypeError for other types, ValueError below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} is {value!r}, expected a whole number") from None
    if least is not None and number < least:
        raise ValueError(f"{op}: {name} is {number}, expected {least} or more")
    return number


def real(op: str, name: str, value: Any) -> float:
    """Return a number as a float, also from NumPy or a tensor. Raises TypeError for other types."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{op}: {name} is {value!r}, expected a number")
    return float(value)


@cached
def integers(op: str, name: str, value: Any) -> tuple[int, ...]:
    """Return a tuple of integers from a sequence or a single one. Raises TypeError for other values and bools."""
    if any(isinstance(item, bool) for item in (value if isinstance(value, list | tuple) else (value,))):
        raise TypeError(f"{op}: {name} is {value!r}, expected whole numbers")
    if not isinstance(value, list | tuple):
        try:
            return (operator.index(value),)
        except TypeError:
            value = value if isinstance(value, Iterable) else (value,)
    return tuple([integer(op, name, item) for item in value])


def unpacked(op: str, name: str, values: tuple[Any, ...]) -> tuple[int, ...]:
    """Return a tuple of integers from *args that are integers or one sequence. Raises as `integers`."""
    return integers(op, name, values[0] if len(values) == 1 else values)


def sizes(op: str, values: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the `unpacked` sizes of a tensor. Raises ValueError also for a size below 0."""
    sizes_ = unpacked(op, "size", values)
    if any(size < 0 for size in sizes_):
        raise ValueError(f"{op}: size is {list(sizes_)}, expected sizes from 0")
    return sizes_


def axis(op: str, dim: int, rank: int) -> int:
    """Return `dim` as a non-negative axis. Raises IndexError outside [-rank, rank), TypeError for other types."""
    if isinstance(dim, bool):
        raise TypeError(f"{op}: dim is {dim}, expected a whole number")
    dim = integer(op, "dim", dim)
    if not -rank <= dim < rank:
        raise IndexError(f"{op}: dim {dim} is out of range for a tensor of {rank} dimensions")
    return dim % rank


@cached
def axes(op: str, dims: Any, rank: int, name: str = "dim") -> tuple[int, ...]:
    """Return a tuple of dimensions, each checked by `axis`."""
    return tuple([axis(op, dim, rank) for dim in integers(op, name, dims)])


def pair(op: str, name: str, value: Pair, least: int) -> tuple[int, int]:
    """Return (height, width), checked by `numbers`."""
    height, width = numbers(op, name, value, least, 2)
    return height, width


def numbers(op: str, name: str, value: Pair, least: int, count: int) -> tuple[int, ...]:
    """Return an integer for each of `count` axes; a single integer or a sequence of one applies to all, as in torch.

    Raises TypeError for other values, ValueError for numbers outside [least, MOST].
    """
    try:
        values = integers(op, name, value)
    except TypeError:
        values = ()
    right_count = len(values) in (1, count)
    if not right_count or not all(least <= v <= MOST for v in values):
        text = f"{op}: {name} is {value!r}, expected a whole number from {least} to {MOST}, or {SEVERAL[count]}"
        raise ValueError(text) if right_count else TypeError(text)
    return values if len(values) == count else values * count


def memory_order(tensor: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format in which the tensor is dense: torch.contiguous_format, channels_last, channels_last_3d,
    or preserve_format for [N, C, L] with memory order [N, L, C], which has no name; None for other strides."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    if tensor.dim() == 3:
        return torch.preserve_format if tensor.transpose(1, 2).is_contiguous() else None
    last = LAST.get(tensor.dim())
    return last if last is not None and tensor.is_contiguous(memory_format=last) else None
