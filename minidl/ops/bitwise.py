"""Bitwise operations and shifts of integers and bools, computed by torch."""

from __future__ import annotations

from typing import Any

import torch

from minidl.ops.promotion import python_number
from minidl.tensors import Scalar, Tensor

__all__ = ["bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor"]


def bitwise_not(input: Tensor) -> Tensor:
    """Return ~input, of integers or bools. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_not(_integer("bitwise_not", input)))


def bitwise_and(input: Tensor, other: Tensor | Scalar) -> Tensor:
    """Return input & other, of integers or bools. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_and(_integer("bitwise_and", input), _integer("bitwise_and", other)))


def bitwise_or(input: Tensor, other: Tensor | Scalar) -> Tensor:
    """Return input | other, of integers or bools. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_or(_integer("bitwise_or", input), _integer("bitwise_or", other)))


def bitwise_xor(input: Tensor, other: Tensor | Scalar) -> Tensor:
    """Return input ^ other, of integers or bools. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_xor(_integer("bitwise_xor", input), _integer("bitwise_xor", other)))


def left_shift(input: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """Return input << other, of integers. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_left_shift(_integer("<<", input), _integer("<<", other)))


def right_shift(input: Tensor | Scalar, other: Tensor | Scalar) -> Tensor:
    """Return input >> other, of integers, with the sign. Raises TypeError for floating types."""
    return Tensor(torch.bitwise_right_shift(_integer(">>", input), _integer(">>", other)))


def _integer(name: str, x: Any) -> Any:
    """Return the raw operand. Raises TypeError unless it is of integers or bools."""
    raw = x.data if isinstance(x, Tensor) else python_number(x)
    floating = raw.dtype.is_floating_point if isinstance(raw, torch.Tensor) else not isinstance(raw, int)
    if floating:
        kind = raw.dtype if isinstance(raw, torch.Tensor) else type(raw).__name__
        raise TypeError(f"{name}: got {kind}, expected integers or bools")
    return raw
