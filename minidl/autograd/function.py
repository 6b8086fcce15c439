"""Operations: how one runs, what it records, and what a user's own may look like."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch

from minidl.autograd.graph import Context, Node, UnknownTensor, Variable
from minidl.autograd.modes import is_grad_enabled, no_grad

_PACKAGE = str(Path(__file__).parent.parent) + os.sep


class Function:
    """A differentiable operation on plain torch tensors.

        class Square(Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save(x)
                return elementwise.mul(x, x)

            @staticmethod
            def backward(ctx, dy):
                (x,) = ctx.saved
                return elementwise.mul(dy, elementwise.add(x, x))

    `apply` unwraps variables among the arguments, runs forward, and records it when a gradient is wanted. forward
    returns one torch tensor or a tuple of them; backward gets as many gradients (None for an output that was not
    used) and returns one per argument of forward, None where there is none.

    Functions of your own may be written as torch's: with `save_for_backward`, `saved_tensors` and `needs_input_grad`,
    or with `setup_context(ctx, inputs, output)` beside a forward without ctx. Tensors that forward or backward return,
    as `minidl.ops` makes them of torch tensors, are taken as their values.

    With `none_is_one`, for a function of one output, backward gets None in place of the 1 that `backward()` without a
    gradient begins with. That saves two launches: the fill and the product.

    `second` is backward once more, for gradients that are recorded themselves: of Tensors, by operations on Tensors;
    None where there is none. Of a function of your own it is backward.
    """

    none_is_one = False
    second: ClassVar[Callable[..., Any] | None] = None
    result_class: ClassVar[type[Variable]] = Variable

    def __init_subclass__(cls) -> None:
        """A function outside of minidl may return Tensors, and have its context set up apart."""
        super().__init_subclass__()
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
            _open_to_tensors(cls)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def takes_sums() -> bool:
        """Whether backward may be given an `OpenSum` in place of a gradient, which is the same but not added yet."""
        return False

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run forward on the arguments (variables unwrapped) and wrap what it returns."""
        needs = tuple([isinstance(arg, Variable) and arg._requires_grad for arg in args])
        try:
            raw = [
                arg.data if isinstance(arg, Variable) else _alone(cls, arg) if isinstance(arg, torch.Tensor) else arg
                for arg in args
            ]
        except UnknownTensor as unknown:
            return unknown.answer(args)
        if not (True in needs and is_grad_enabled()):
            context = Context((False,) * len(args))
            context._where = cls.__name__
            result = cls.forward(context, *raw)
            return (
                tuple([cls.result_class(out) for out in result])
                if isinstance(result, tuple)
                else cls.result_class(result)
            )
        # What is kept is found again by its identity (`second.Kept`): a constant over a variable's value is another.
        own = {id(value) for value, need in zip(raw, needs, strict=True) if need}
        raw = [
            value.detach() if not need and isinstance(value, torch.Tensor) and id(value) in own else value
            for value, need in zip(raw, needs, strict=True)
        ]
        context = Context(needs)
        context._where = cls.__name__
        result = cls.forward(context, *raw)
        edges = [arg._edge() if need else None for arg, need in zip(args, needs, strict=True)]
        node = Node(cls, context, edges, _caller())
        context._where = str(node)
        node.metas = [None if e is None else (tuple(r.shape), r.dtype) for e, r in zip(edges, raw, strict=True)]
        node.ids = tuple(map(id, (*raw, *result) if isinstance(result, tuple) else (*raw, result)))
        if not isinstance(result, tuple):
            node.outputs = [tuple(result.shape)]
            return _join(cls.result_class(result), node, 0)
        node.outputs = [tuple(out.shape) for out in result]
        return tuple([_join(cls.result_class(out), node, i) for i, out in enumerate(result)])


def _open_to_tensors(cls: type[Function]) -> None:
    """Let forward and backward of a class return variables, and forward have a `setup_context` in torch's way."""
    own = vars(cls)
    if "forward" in own:
        forward, setup = cls.forward, getattr(cls, "setup_context", None)

        def forward_raw(ctx: Any, *args: Any) -> Any:
            with no_grad():
                if setup is None:
                    return _raw(forward(ctx, *args))
                result = _raw(forward(*args))
                setup(ctx, args, result)
                return result

        cls.forward = staticmethod(forward_raw)  # type: ignore[method-assign]
    if "backward" in own:
        backward = cls.backward
        cls.second = staticmethod(backward)
        cls.backward = staticmethod(lambda ctx, *grads: _raw(backward(ctx, *grads)))  # type: ignore[method-assign]


def _raw(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_raw, result))
    return result.data if isinstance(result, Variable) else result


def _alone(function: type[Function], tensor: torch.Tensor) -> torch.Tensor:
    """A torch tensor as an operand, of which torch records nothing. Raises TypeError where it does."""
    if tensor.requires_grad and is_grad_enabled():
        raise TypeError(
            f"{function.__name__}: an operand is a torch tensor that requires grad, whose gradient would end here, as "
            "torch and minidl record apart; pass t.detach(), or minidl.from_torch(t.detach(), requires_grad=True) and "
            "read the gradient there"
        )
    return tensor


def _join(out: Variable, node: Node, index: int) -> Variable:
    if out.data.dtype.is_floating_point:
        out._recorded_by(node, index)
    return out


def _caller() -> str:
    """File and line of the nearest frame outside minidl."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
