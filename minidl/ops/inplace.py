"""Operations that change a tensor in place, such as `x += y` and `x.add_(y)`, attached to Tensor by `minidl.ops`.

If no gradient is recorded, a kernel writes into x's memory and increments its version: backward refuses values that an
operation saved before. If one is recorded (`loss += penalty`, or `out += identity` in a module), x becomes the result
in the graph; its memory stays unchanged but gets a new version, so that backward refuses saved values here, too. A leaf
that requires grad is refused, and so is a tensor with views, which would keep its old position in the graph.
A deferred result stays deferred: nothing has read its memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from minidl import random
from minidl.kernels import elementwise
from minidl.kernels import random as random_kernels
from minidl.ops import bitwise, conditional, powers, scatter_gather, unary
from minidl.ops import elementwise as ops
from minidl.ops.binary import raw_operand
from minidl.ops.change import Operand, change, check_fits, refuse_recorded
from minidl.ops.shape import clone, expand, to
from minidl.tensors import Scalar, Tensor


def add_(x: Tensor, other: Operand, alpha: Scalar = 1) -> Tensor:
    """Compute x + alpha * other in place. Raises as `add`; ValueError if `other` does not broadcast to x's shape,
    TypeError if torch does not cast the result to x's dtype."""
    if type(alpha) is int and alpha == 1:
        return _arithmetic("add_", x, ops.add, elementwise.add, other)
    return _arithmetic(
        "add_", x, lambda a, b: ops.add(a, b, alpha=alpha),
        lambda a, b, out: elementwise.add_scaled(a, b, raw_operand(alpha), out), other, integers=False,
    )  # fmt: skip


def sub_(x: Tensor, other: Operand, alpha: Scalar = 1) -> Tensor:
    """Compute x - alpha * other in place. Raises as `add_`."""
    if type(alpha) is int and alpha == 1:
        return _arithmetic("sub_", x, ops.sub, elementwise.sub, other)
    return _arithmetic(
        "sub_", x, lambda a, b: ops.sub(a, b, alpha=alpha),
        lambda a, b, out: elementwise.add_scaled(a, b, -alpha, out), other, integers=False,
    )  # fmt: skip


def mul_(x: Tensor, other: Operand) -> Tensor:
    """Compute x * other in place. Raises as `add_`."""
    return _arithmetic("mul_", x, ops.mul, elementwise.mul, other)


def div_(x: Tensor, other: Operand, *, rounding_mode: str | None = None) -> Tensor:
    """Compute x / other in place, as `div`. Raises as `add_`; TypeError for integers that are not rounded."""
    if rounding_mode is None:
        return _arithmetic("div_", x, ops.div, elementwise.div, other)
    return _from_result("div_", functools.partial(ops.div, rounding_mode=rounding_mode))(x, other)


def pow_(x: Tensor, exponent: Operand) -> Tensor:
    """Compute x to the power `exponent` in place. Raises as `add_` and `pow`."""
    return _arithmetic("pow_", x, powers.pow, elementwise.pow, exponent, integers=False)


def clamp_(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """Limit x to [min, max] in place. Raises as `clamp` and `add_`."""
    if isinstance(min, Tensor | torch.Tensor) or isinstance(max, Tensor | torch.Tensor):
        return _from_result("clamp_", conditional.clamp)(x, min, max)
    return change(
        "clamp_", x, lambda a: conditional.clamp(a, min, max), lambda a, out: elementwise.clamp(a, min, max, out)
    )


def _arithmetic(
    name: str, x: Tensor, function: Callable[..., Tensor], kernel: Callable[..., torch.Tensor], other: Operand,
    integers: bool = True,
) -> Tensor:  # fmt: skip
    """Return x, changed by `kernel`, or by function's result for integers unless `integers` and both dtypes agree."""
    if x.dtype.is_floating_point:
        return change(name, x, function, kernel, other)
    result = _result_kernel(name, function)

    def kernel_or_result(a: torch.Tensor, b: Any, out: torch.Tensor) -> torch.Tensor:
        same = not isinstance(b, torch.Tensor) or b.dtype == a.dtype
        direct = integers and same and a.dtype != torch.bool
        return (kernel if direct else result)(a, b, out=out)

    return change(name, x, function, kernel_or_result, other)


def _result_kernel(name: str, function: Callable[..., Tensor]) -> Callable[..., torch.Tensor]:
    """Return the kernel that writes function's result, in torch's result dtype, into `out`."""

    def kernel(*operands: Any, out: torch.Tensor) -> torch.Tensor:
        result = function(*(Tensor(each) if isinstance(each, torch.Tensor) else each for each in operands)).data
        check_fits(name, result, out)
        return out.copy_(result)

    return kernel


def _from_result(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the method that writes function's result into x."""
    kernel = _result_kernel(name, function)
    return lambda x, *others: change(name, x, function, kernel, *others)


def copy_(x: Tensor, src: Tensor | torch.Tensor, non_blocking: bool = False) -> Tensor:
    """Copy the values of another tensor in place, broadcast to x's shape, in x's dtype and on its device."""
    if not isinstance(src, Tensor | torch.Tensor):
        raise TypeError(f"copy_: src is of type {type(src).__name__}, expected a Tensor")
    if len(src.shape) > x.ndim or any(
        a not in (1, b) for a, b in zip(reversed(src.shape), reversed(x.shape), strict=False)
    ):
        raise ValueError(f"copy_: src has shape {list(src.shape)}, expected {list(x.shape)}")

    def recorded(a: Tensor, b: Any) -> Tensor:
        b = b if isinstance(b, Tensor) else Tensor(b)
        return clone(expand(to(b, a.device, a.dtype), a.shape))

    def kernel(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(b, non_blocking)

    return change("copy_", x, recorded, kernel, src)


def apply_in_place(function: Callable[[Tensor], Tensor], x: Tensor, inplace: bool) -> Tensor:
    """Return function(x), a result of x's shape, computed in place with `inplace`, torch's argument of activations."""
    return _from_result("inplace=True", function)(x) if inplace else function(x)


def masked_fill_(x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    """Fill with value, a number or a tensor of one element, where mask is true, in place. Raises as `masked_fill`."""
    return _from_result("masked_fill_", lambda a, v: conditional.masked_fill(a, mask, v))(x, value)


def scatter_(
    x: Tensor, dim: int, index: Tensor, src: Operand | None = None, *, value: Scalar | None = None,
    reduce: str | None = None,
) -> Tensor:  # fmt: skip
    """Write src or a number at `index` along `dim` in place. Raises as `scatter`."""
    values = value if src is None else src
    return _from_result("scatter_", lambda a, v: scatter_gather.scatter(a, dim, index, v, reduce=reduce))(x, values)


def scatter_add_(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Add src at `index` along `dim` in place. Raises as `scatter_add`."""
    return _from_result("scatter_add_", lambda a, v: scatter_gather.scatter_add(a, dim, index, v))(x, src)


def index_add_(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Scalar = 1) -> Tensor:
    """Add alpha times source at `index` along `dim` in place. Raises as `index_add`."""
    return _from_result("index_add_", lambda a, v: scatter_gather.index_add(a, dim, index, v, alpha=alpha))(x, source)


def fill_diagonal_(x: Tensor, fill_value: Scalar, wrap: bool = False) -> Tensor:
    """Fill the diagonal with one value in place; with `wrap` again, one row below, in a matrix with more rows than
    columns.

    Raises ValueError for a vector, or more than two dimensions of different sizes.
    """
    refuse_recorded("fill_diagonal_", x)
    if x.ndim < 2 or (x.ndim > 2 and len(set(x.shape)) > 1):
        raise ValueError(f"fill_diagonal_: x has shape {list(x.shape)}, expected a matrix, or equal sizes")
    x.data.fill_diagonal_(fill_value, wrap)
    return x


def zero_(x: Tensor) -> Tensor:
    """Fill with zeros in place."""
    refuse_recorded("zero_", x)
    x.data.zero_()
    return x


def fill_(x: Tensor, value: Scalar) -> Tensor:
    """Fill with one value in place."""
    refuse_recorded("fill_", x)
    x.data.fill_(value)
    return x


def normal_(x: Tensor, mean: float = 0.0, std: float = 1.0, seed: int | None = None) -> Tensor:
    """Fill with normally distributed values in place. Seeds as `rand`."""
    refuse_recorded("normal_", x)
    random_kernels.normal_(x.data, mean, std, *random.key(seed), random.first_index(x.shape))
    return x


def uniform_(x: Tensor, low: float = 0.0, high: float = 1.0, seed: int | None = None) -> Tensor:
    """Fill with uniform values from [low, high) in place. Seeds as `rand`."""
    refuse_recorded("uniform_", x)
    random_kernels.uniform_(x.data, low, high, *random.key(seed), random.first_index(x.shape))
    return x


__all__ = ["METHODS"]

# Operations of one and of two operands that have an in-place method, `exp_` of `exp`.
_OF_ONE = {name: getattr(unary, name) for name in unary.__all__ if name != "log10"}
_OF_ONE |= {name: getattr(powers, name) for name in powers.__all__ if name != "pow"}
_OF_TWO = {function.__name__: function for function in (ops.floor_divide, ops.fmod, ops.remainder)}


def _in_place(name: str) -> Callable[..., Tensor]:
    """Return the method that writes the result of the operation `name` into the tensor."""

    def of_one(x: Tensor, **named: Any) -> Tensor:
        return _from_result(f"{name}_", functools.partial(_OF_ONE[name], **named))(x)

    def of_two(x: Tensor, other: Operand) -> Tensor:
        return _from_result(f"{name}_", _OF_TWO[name])(x, other)

    method: Callable[..., Tensor] = of_two if name in _OF_TWO else of_one
    method.__doc__ = f"`{name}`, written into the tensor."
    return method


METHODS: dict[str, Callable[..., Tensor | None]] = {
    "__iadd__": add_, "__isub__": sub_, "__imul__": mul_, "__itruediv__": div_, "__ipow__": pow_,
    "__ifloordiv__": _from_result("//=", ops.floor_divide), "__imod__": _from_result("%=", ops.remainder),
    "__ilshift__": _from_result("<<=", bitwise.left_shift), "__irshift__": _from_result(">>=", bitwise.right_shift),
    "__iand__": _from_result("&=", bitwise.bitwise_and), "__ior__": _from_result("|=", bitwise.bitwise_or),
    "__ixor__": _from_result("^=", bitwise.bitwise_xor),
    **{f"{name}_": _in_place(name) for name in (*_OF_ONE, *_OF_TWO)},
    **{f.__name__: f for f in (add_, sub_, mul_, div_, pow_, clamp_, copy_, zero_, fill_, normal_, uniform_)},
    **{f.__name__: f for f in (fill_diagonal_, index_add_, masked_fill_, scatter_, scatter_add_)},
}  # fmt: skip
