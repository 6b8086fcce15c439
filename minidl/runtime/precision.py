"""The precision of float32 matrix products, and the types in which values are accumulated."""

import contextlib
from collections.abc import Iterator

import torch
import triton.language as tl

from minidl.runtime import launch_hooks
from minidl.runtime.target import COMPILED_CPU

PRECISIONS = ("tf32x3", "ieee", "tf32")


class state:  # noqa: N801 (one object)
    float32 = "tf32x3"


def precision(dtype: torch.dtype) -> str:
    """Return `input_precision` for a `tl.dot` of this dtype: the float32 setting for float32, "ieee" for all others.

    Kernels that are compiled for the CPU always compute as "ieee".
    """
    return state.float32 if dtype == torch.float32 and not COMPILED_CPU else "ieee"


def float32_precision() -> str:
    """Return how float32 products are computed: "tf32x3" (default), "ieee" or "tf32"."""
    return state.float32


def set_float32_precision(name: str) -> None:
    """Set how float32 matrix products are computed on a GPU.

    "tf32x3" (default) reaches float32 accuracy on tensor cores with three products of tf32 parts, "ieee" uses float32
    multiply-adds, "tf32" keeps 10 fraction bits of each input. On a CPU products are always computed as "ieee".
    Raises ValueError for another name.
    """
    if name not in PRECISIONS:
        raise ValueError(f"unknown float32 precision {name!r}; known: {', '.join(PRECISIONS)}")
    launch_hooks.settle()
    state.float32 = name


@contextlib.contextmanager
def in_precision(name: str) -> Iterator[None]:
    """A context in which all threads compute float32 products as after `set_float32_precision(name)`."""
    before = state.float32
    set_float32_precision(name)
    try:
        yield
        launch_hooks.settle()
    finally:
        state.float32 = before


def acc(dtype: torch.dtype) -> tl.dtype:
    """Return the Triton type to compute and accumulate values of `dtype` in: float64 for float64, else float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def acc_torch(dtype: torch.dtype) -> torch.dtype:
    """Return the torch dtype of `acc(dtype)`, for buffers of partial results."""
    return torch.float64 if dtype == torch.float64 else torch.float32
