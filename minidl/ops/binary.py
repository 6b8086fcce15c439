"""Functions of two operands, element by element, with their gradients; `elementwise` has the operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import recordable
from minidl.kernels import elementwise, reduce
from minidl.kernels.activation import Activation
from minidl.ops.activation_grad import act_back
from minidl.ops.shape import sum_to
from minidl.tensors import Scalar, Tensor

__all__: list[str] = []  # no public operations

Operand = Tensor | Scalar
Raw = torch.Tensor | Scalar
Kernel = Callable[..., torch.Tensor]


def shape_of(x: Raw) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, torch.Tensor) else ()


def shapes_and_needs(ctx: Any) -> list[tuple[tuple[int, ...], bool]]:
    """Return each operand's shape and whether its gradient is needed."""
    return list(zip(ctx.shapes, ctx.needs, strict=True))


def raw_operand(x: Operand) -> Raw:
    return x.data if isinstance(x, Tensor) else x


@recordable(sum_to=sum_to)
class Add(Function):
    compute, sum_to = staticmethod(elementwise.add), staticmethod(reduce.sum_to)

    @classmethod
    def forward(cls, ctx: Any, a: Raw, b: Raw) -> torch.Tensor:
        ctx.shapes = shape_of(a), shape_of(b)
        return cls.compute(a, b)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        return tuple(cls.sum_to(dy, shape) if need else None for shape, need in shapes_and_needs(ctx))


@recordable(act_back=act_back)
class AddAct(Function):
    """act(a + b) of two tensors of one shape, for the activations whose derivative follows from their result."""

    act_back = staticmethod(lambda dy, y, act: elementwise.act_grad(dy, y, act, from_output=True))

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, act: Activation) -> torch.Tensor:
        y = elementwise.add_act(a, b, act)
        ctx.act = act
        ctx.save(y)
        return y

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        (y,) = ctx.saved
        dz = cls.act_back(dy, y, ctx.act)
        return (*(dz if need else None for need in ctx.needs[:2]), None)


@recordable(sum_to=sum_to, neg=lambda dy: -dy)
class Sub(Add):
    compute, neg = staticmethod(elementwise.sub), staticmethod(elementwise.neg)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        da, db = super().backward(ctx, dy)
        return da, None if db is None else cls.neg(db)


class _Binary(Function):
    """A function of two operands, defined by three kernels; each gradient takes dy and both operands."""

    compute: Kernel
    grad_a: Kernel
    grad_b: Kernel
    sum_to = staticmethod(reduce.sum_to)
    reads: tuple[str, str]  # of "ab", the operands that the gradient of each reads

    @classmethod
    def forward(cls, ctx: Any, a: Raw, b: Raw) -> torch.Tensor:
        ctx.shapes = shape_of(a), shape_of(b)
        ctx.numbers = [None if isinstance(x, torch.Tensor) else x for x in (a, b)]
        read = (cls.reads[0] if ctx.needs[0] else "") + (cls.reads[1] if ctx.needs[1] else "")
        ctx.save(*[x if name in read and isinstance(x, torch.Tensor) else None for name, x in (("a", a), ("b", b))])
        return cls.compute(a, b)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        a, b = (x if number is None else number for x, number in zip(ctx.saved, ctx.numbers, strict=True))
        (shape_a, need_a), (shape_b, need_b) = shapes_and_needs(ctx)
        da = cls.sum_to(cls.grad_a(dy, a, b), shape_a) if need_a else None
        return da, cls.sum_to(cls.grad_b(dy, a, b), shape_b) if need_b else None


def binary_function(
    name: str, compute: Kernel, grad_a: Kernel, grad_b: Kernel, on_tensors: tuple[Callable[..., Tensor], ...],
    reads: tuple[str, str] = ("ab", "ab"),
) -> type[Function]:  # fmt: skip
    """Return the Function of two operands with these kernels; `on_tensors` are both gradients on Tensors, and `reads`
    names the operands that the gradient of each reads."""
    kernels = {"compute": compute, "grad_a": grad_a, "grad_b": grad_b}
    function = type(name, (_Binary,), {"reads": reads} | {key: staticmethod(each) for key, each in kernels.items()})
    back_a, back_b = on_tensors
    return recordable(grad_a=back_a, grad_b=back_b, sum_to=sum_to)(function)


def _swapped(gradient: Kernel) -> Kernel:
    """Return the gradient of the other operand, of a function that does not change when they are exchanged."""
    return lambda dy, a, b: gradient(dy, b, a)


def piecewise_linear(gradient: Kernel) -> Callable[..., Tensor]:
    """Return the gradient on Tensors of a function that is linear in pieces."""
    return lambda dy, *operands: dy * Tensor(gradient(torch.ones_like(dy.data), *map(raw_operand, operands)))


def _mul_by_b(dy: torch.Tensor, a: Raw, b: Raw) -> torch.Tensor:
    return elementwise.mul(dy, b)


def _step_gradient(dy: torch.Tensor, a: Raw, b: Raw) -> torch.Tensor:
    """Return the gradient of a step function."""
    return torch.zeros_like(dy)


def _unchanged(dy: Any, a: Any, b: Any) -> Any:
    return dy


Mul = binary_function(
    "Mul", elementwise.mul, _mul_by_b, _swapped(_mul_by_b), (lambda dy, a, b: dy * b, lambda dy, a, b: dy * a),
    ("b", "a"),
)  # fmt: skip
Div = binary_function(
    "Div", elementwise.div, lambda dy, a, b: elementwise.div(dy, b), elementwise.div_grad_b,
    (lambda dy, a, b: dy / b, lambda dy, a, b: -(dy * a) / (b * b)), ("b", "ab"),
)  # fmt: skip
DivTrunc, DivFloor = (
    binary_function(name, kernel, _step_gradient, _step_gradient, (lambda dy, a, b: dy * 0,) * 2, ("", ""))
    for name, kernel in (("DivTrunc", elementwise.div_trunc), ("DivFloor", elementwise.div_floor))
)
Fmod = binary_function(
    "Fmod", elementwise.fmod, _unchanged, elementwise.fmod_grad_b,
    (_unchanged, lambda dy, a, b: -(dy * DivTrunc.apply(a, b))), ("", "ab"),
)  # fmt: skip
Remainder = binary_function(
    "Remainder", elementwise.remainder, _unchanged, elementwise.remainder_grad_b,
    (_unchanged, lambda dy, a, b: -(dy * DivFloor.apply(a, b))), ("", "ab"),
)  # fmt: skip
Maximum, Minimum = (
    binary_function(name, kernel, *both, tuple(map(piecewise_linear, both)))
    for name, kernel, both in (
        ("Maximum", elementwise.maximum, (elementwise.maximum_grad, _swapped(elementwise.maximum_grad))),
        ("Minimum", elementwise.minimum, (elementwise.minimum_grad, _swapped(elementwise.minimum_grad))),
    )
)
