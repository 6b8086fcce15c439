"""The dtypes of two operands brought together as torch's `result_type`: integers and bools take the other's type.

Two floating types of tensors with dimensions are left as they are, for the kernel to refuse: which of them a product
is computed in decides its accuracy, so that a program says it.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import UnknownTensor
from minidl.ops.shape import to
from minidl.tensors import Scalar, Tensor

__all__: list[str] = []  # no public operations

Operand = Tensor | torch.Tensor | Scalar


def alike(a: Any, b: Any, floating: bool = False) -> tuple[Any, Any]:
    """Return two operands, at least one a tensor, in one dtype; a number stays a number.

    With `floating`, whole numbers become float32, as for a quotient.
    """
    kind, other = dtype_of(a), dtype_of(b)
    if kind is other and (kind is None or kind.is_floating_point):
        return a, b
    if kind is None or other is None:
        dtype = kind or other
        number = python_number(b if other is None else a)
        a, b = (a, number) if other is None else (number, b)
        if dtype is None or dtype.is_floating_point or not isinstance(number, int | float):
            return a, b
        result = _with_number(dtype, number)
    else:
        result = other if kind is other else torch.result_type(_stand_in(a, kind), _stand_in(b, other))
    if floating and not result.is_floating_point:
        result = torch.get_default_dtype()
    both = kind is not None and other is not None and kind.is_floating_point and other.is_floating_point
    if both and (len(a.shape) == 0) == (len(b.shape) == 0) and not torch._C._is_any_autocast_enabled():
        return a, b
    return _cast(a, kind, result), _cast(b, other, result)


def python_number(x: Any) -> Any:
    """Return a number of NumPy as Python's; an array, whose dtype would count, and all else as it is."""
    return x.item() if type(x).__module__ == "numpy" and type(x).__name__ != "ndarray" else x


def dtype_of(x: Any) -> torch.dtype | None:
    """Return the dtype of a tensor; None for numbers, and for placeholders (`nn.placeholder`)."""
    if type(x) is Tensor and x._deferred is None:
        return x._data.dtype  # a third of a microsecond less than by `dtype`
    try:
        return x.dtype if isinstance(x, Tensor | torch.Tensor) else None
    except UnknownTensor:
        return None


def _with_number(kind: torch.dtype, number: Scalar) -> torch.dtype:
    return torch.result_type(torch.empty(1, dtype=kind, device="meta"), number)


def _stand_in(x: Any, kind: torch.dtype) -> torch.Tensor:
    """Return a tensor without values, with as many dimensions as matter to `result_type`."""
    return torch.empty((1,) * (len(x.shape) > 0), dtype=kind, device="meta")


def _cast(x: Any, kind: torch.dtype | None, result: torch.dtype) -> Any:
    if kind is None or kind is result:
        return x
    return to(x, result) if isinstance(x, Tensor) else x.to(result)
