"""Arithmetic and comparisons element by element, with broadcasting.

Operands have one dtype; a Python number takes the tensor's. Shapes broadcast as torch's do, and a gradient is summed
back to its operand's shape.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import elementwise, reduce
from minidl.tensor import Scalar, Tensor

__all__ = [
    "abs",
    "add",
    "clamp",
    "div",
    "eq",
    "exp",
    "ge",
    "gt",
    "le",
    "log",
    "lt",
    "maximum",
    "minimum",
    "mul",
    "ne",
    "neg",
    "pow",
    "reciprocal",
    "sign",
    "sqrt",
    "square",
    "sub",
    "where",
]

Operand = Tensor | Scalar
_Raw = torch.Tensor | Scalar


class Neg(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return elementwise.neg(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return elementwise.neg(dy)


class Abs(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save(x)
        return elementwise.abs(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return elementwise.abs_grad(dy, *ctx.saved)


class Sign(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return elementwise.sign(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return torch.zeros_like(dy)


class Exp(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = elementwise.exp(x)
        ctx.save(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return elementwise.mul(dy, *ctx.saved)


class Log(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save(x)
        return elementwise.log(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return elementwise.div(dy, *ctx.saved)


class Sqrt(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = elementwise.sqrt(x)
        ctx.save(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return elementwise.sqrt_grad(dy, *ctx.saved)


class Square(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save(x)
        return elementwise.square(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return elementwise.square_grad(dy, *ctx.saved)


class Reciprocal(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = elementwise.reciprocal(x)
        ctx.save(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return elementwise.reciprocal_grad(dy, *ctx.saved)


class Add(Function):
    @staticmethod
    def forward(ctx: Any, a: _Raw, b: _Raw) -> torch.Tensor:
        ctx.shapes = _shape(a), _shape(b)
        return elementwise.add(a, b)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return tuple(reduce.sum_to(dy, shape) if need else None for shape, need in _wanted(ctx))


class Sub(Function):
    @staticmethod
    def forward(ctx: Any, a: _Raw, b: _Raw) -> torch.Tensor:
        ctx.shapes = _shape(a), _shape(b)
        return elementwise.sub(a, b)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (shape_a, need_a), (shape_b, need_b) = _wanted(ctx)
        da = reduce.sum_to(dy, shape_a) if need_a else None
        return da, elementwise.neg(reduce.sum_to(dy, shape_b)) if need_b else None


class _Binary(Function):
    """A function of two operands whose gradients need both. Subclasses give the kernels."""

    @staticmethod
    def compute(a: _Raw, b: _Raw) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    def grad_a(dy: torch.Tensor, a: _Raw, b: _Raw) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    def grad_b(dy: torch.Tensor, a: _Raw, b: _Raw) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def forward(cls, ctx: Any, a: _Raw, b: _Raw) -> torch.Tensor:
        ctx.shapes = _shape(a), _shape(b)
        ctx.numbers = [None if isinstance(x, torch.Tensor) else x for x in (a, b)]
        ctx.save(*(x if isinstance(x, torch.Tensor) else None for x in (a, b)))
        return cls.compute(a, b)

    @classmethod
    def backward(cls, ctx: Any, dy: torch.Tensor) -> Any:
        a, b = (x if number is None else number for x, number in zip(ctx.saved, ctx.numbers, strict=True))
        (shape_a, need_a), (shape_b, need_b) = _wanted(ctx)
        da = reduce.sum_to(cls.grad_a(dy, a, b), shape_a) if need_a else None
        return da, reduce.sum_to(cls.grad_b(dy, a, b), shape_b) if need_b else None


class Mul(_Binary):
    compute = staticmethod(elementwise.mul)

    @staticmethod
    def grad_a(dy: torch.Tensor, a: _Raw, b: _Raw) -> torch.Tensor:
        return elementwise.mul(dy, b)

    @staticmethod
    def grad_b(dy: torch.Tensor, a: _Raw, b: _Raw) -> torch.Tensor:
        return elementwise.mul(dy, a)


class Div(_Binary):
    compute = staticmethod(elementwise.div)
    grad_b = staticmethod(elementwise.div_grad_b)

    @staticmethod
    def grad_a(dy: torch.Tensor, a: _Raw, b: _Raw) -> torch.Tensor:
        return elementwise.div(dy, b)


class Pow(_Binary):
    compute = staticmethod(elementwise.pow)
    grad_a = staticmethod(elementwise.pow_grad_a)
    grad_b = staticmethod(elementwise.pow_grad_b)


class Maximum(_Binary):
    compute = staticmethod(elementwise.maximum)
    grad_a = staticmethod(elementwise.maximum_grad)

    @staticmethod
    def grad_b(dy: torch.Tensor, a: _Raw, b: _Raw) -> torch.Tensor:
        return elementwise.maximum_grad(dy, b, a)


class Minimum(_Binary):
    compute = staticmethod(elementwise.minimum)
    grad_a = staticmethod(elementwise.minimum_grad)

    @staticmethod
    def grad_b(dy: torch.Tensor, a: _Raw, b: _Raw) -> torch.Tensor:
        return elementwise.minimum_grad(dy, b, a)


class Where(Function):
    @staticmethod
    def forward(ctx: Any, condition: torch.Tensor, a: _Raw, b: _Raw) -> torch.Tensor:
        ctx.shapes = (), _shape(a), _shape(b)
        ctx.save(condition)
        return elementwise.where(condition, a, b)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (condition,) = ctx.saved
        _, (shape_a, need_a), (shape_b, need_b) = _wanted(ctx)
        da = reduce.sum_to(elementwise.where(condition, dy, 0), shape_a) if need_a else None
        return None, da, reduce.sum_to(elementwise.where(condition, 0, dy), shape_b) if need_b else None


class Clamp(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: Scalar | None, high: Scalar | None) -> torch.Tensor:
        ctx.save(x)
        ctx.range = low, high
        return elementwise.clamp(x, low, high)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return elementwise.clamp_grad(dy, *ctx.saved, *ctx.range), None, None


def _shape(x: _Raw) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, torch.Tensor) else ()


def _wanted(ctx: Any) -> list[tuple[tuple[int, ...], bool]]:
    """For each operand, its shape and whether its gradient is wanted."""
    return list(zip(ctx.shapes, ctx.needs, strict=True))


def _raw(x: Operand) -> _Raw:
    return x.data if isinstance(x, Tensor) else x


def neg(x: Tensor) -> Tensor:
    """-x."""
    return Neg.apply(x)


def abs(x: Tensor) -> Tensor:
    """|x|. The gradient at 0 is 0."""
    return Abs.apply(x)


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1, as the sign of x (0 for NaN). The gradient is 0."""
    return Sign.apply(x)


def exp(x: Tensor) -> Tensor:
    """e to the power x. Raises TypeError for integers."""
    return Exp.apply(x)


def log(x: Tensor) -> Tensor:
    """The natural logarithm: -inf for 0, NaN below. Raises TypeError for integers."""
    return Log.apply(x)


def sqrt(x: Tensor) -> Tensor:
    """The square root: NaN below 0. Raises TypeError for integers."""
    return Sqrt.apply(x)


def square(x: Tensor) -> Tensor:
    """x x."""
    return Square.apply(x)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x. Raises TypeError for integers."""
    return Reciprocal.apply(x)


def add(a: Operand, b: Operand) -> Tensor:
    """a + b. Raises TypeError for different dtypes, ValueError for shapes that do not broadcast."""
    return Add.apply(a, b)


def sub(a: Operand, b: Operand) -> Tensor:
    """a - b. Raises TypeError for different dtypes, ValueError for shapes that do not broadcast."""
    return Sub.apply(a, b)


def mul(a: Operand, b: Operand) -> Tensor:
    """a b, element by element. Raises TypeError for different dtypes, ValueError for shapes that do not broadcast."""
    return Mul.apply(a, b)


def div(a: Operand, b: Operand) -> Tensor:
    """a / b. Raises TypeError for integers or different dtypes, ValueError for shapes that do not broadcast."""
    return Div.apply(a, b)


def pow(a: Operand, b: Operand) -> Tensor:
    """a to the power b; NaN for a negative a and a b that is no integer.

    The gradients at the edges are torch's: 0 in a where b is 0, 0 in b where a is 0 and b is not negative.
    Raises TypeError for integers or different dtypes, ValueError for shapes that do not broadcast.
    """
    if isinstance(a, Tensor) and not isinstance(b, Tensor):
        if b == 2:
            return Square.apply(a)
        if b == 0.5:
            return Sqrt.apply(a)
        if b == -1:
            return Reciprocal.apply(a)
    return Pow.apply(a, b)


def maximum(a: Operand, b: Operand) -> Tensor:
    """The larger of a and b; NaN where one is. Equal operands share the gradient.

    Raises TypeError for different dtypes, ValueError for shapes that do not broadcast.
    """
    return Maximum.apply(a, b)


def minimum(a: Operand, b: Operand) -> Tensor:
    """The smaller of a and b; NaN where one is. Equal operands share the gradient.

    Raises TypeError for different dtypes, ValueError for shapes that do not broadcast.
    """
    return Minimum.apply(a, b)


def where(condition: Tensor, a: Operand, b: Operand) -> Tensor:
    """a where condition is true, else b; all three broadcast.

    Raises TypeError for a condition that is not torch.bool or different dtypes of a and b, ValueError for shapes that
    do not broadcast.
    """
    return Where.apply(condition, a, b)


def clamp(x: Tensor, min: Scalar | None = None, max: Scalar | None = None) -> Tensor:
    """x moved into [min, max]; None leaves a side open. NaN stays. The gradient outside is 0, at the ends that inside.

    Raises ValueError when both are None or min is above max.
    """
    return Clamp.apply(x, min, max)


def eq(a: Operand, b: Operand) -> Tensor:
    """a == b, as torch.bool. Raises TypeError for different dtypes, ValueError for shapes that do not broadcast."""
    return Tensor(elementwise.eq(_raw(a), _raw(b)))


def ne(a: Operand, b: Operand) -> Tensor:
    """a != b, as torch.bool. Raises TypeError for different dtypes, ValueError for shapes that do not broadcast."""
    return Tensor(elementwise.ne(_raw(a), _raw(b)))


def lt(a: Operand, b: Operand) -> Tensor:
    """a < b, as torch.bool. Raises TypeError for different dtypes, ValueError for shapes that do not broadcast."""
    return Tensor(elementwise.lt(_raw(a), _raw(b)))


def le(a: Operand, b: Operand) -> Tensor:
    """a <= b, as torch.bool. Raises TypeError for different dtypes, ValueError for shapes that do not broadcast."""
    return Tensor(elementwise.le(_raw(a), _raw(b)))


def gt(a: Operand, b: Operand) -> Tensor:
    """a > b, as torch.bool. Raises TypeError for different dtypes, ValueError for shapes that do not broadcast."""
    return Tensor(elementwise.gt(_raw(a), _raw(b)))


def ge(a: Operand, b: Operand) -> Tensor:
    """a >= b, as torch.bool. Raises TypeError for different dtypes, ValueError for shapes that do not broadcast."""
    return Tensor(elementwise.ge(_raw(a), _raw(b)))
