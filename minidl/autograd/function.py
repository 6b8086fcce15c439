"""Operations: how one runs and is recorded, and the forms of user-defined ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TypeVar

import torch

from minidl.autograd.graph import Context, Edge, Meta, Node, UnknownTensor, Variable
from minidl.autograd.modes import is_grad_enabled, no_grad

F = TypeVar("F", bound="Function")

# What answers operations on torch's tensors, from operation, arguments and options, while `nn.onnx` exports a module.
rerouted: list[Callable[..., Any]] = []
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

    `apply` unwraps variables among the arguments, runs forward, and records it when a gradient is needed. forward
    returns one torch tensor or a tuple of them; backward receives as many gradients (None for an unused output) and
    returns one per argument of forward, or None.

    User-defined functions may use torch's names: `save_for_backward`, `saved_tensors` and `needs_input_grad`, or
    `setup_context(ctx, inputs, output)` with a forward without ctx. If forward or backward returns Tensors, such as
    results of `minidl.ops`, their values are used.

    With `seed_is_optional`, for a function of one output, backward may receive None for a gradient of 1.

    `recorded_backward` is backward for `create_graph`: from Tensors to Tensors, by recorded operations, so that
    gradients of every order follow; None if unsupported. For user-defined functions it is backward. Others derive it:

    - `recordable`: backward itself, with operations in place of its kernels
    - `in_operations`: backward itself, written in operations, for functions whose host time does not matter
    - `linear`: the function is the gradient of its gradient
    """

    seed_is_optional = False
    recorded_backward: ClassVar[Callable[..., Any] | None] = None
    result_class: ClassVar[type[Variable]] = Variable

    def __init_subclass__(cls) -> None:
        """Let a function outside minidl return Tensors and have a `setup_context`."""
        super().__init_subclass__()
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
            _accept_tensors(cls)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def accepts_pending_sums() -> bool:
        """Return whether backward accepts a `PendingSum` as a gradient."""
        return False

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run forward on the arguments (variables unwrapped) and wrap what it returns."""
        # Loops, as a call of a comprehension takes as long as what it computes for two or three arguments.
        recorded, result_class = torch.is_grad_enabled(), cls.result_class
        raw: list[Any] = []
        edges: list[Edge | None] = []
        metas: list[Meta | None] = []
        variable_ids = set()
        try:
            for arg in args:
                edge = meta = None
                if isinstance(arg, Variable):
                    need, value = recorded and arg._requires_grad, arg._data
                    if arg._deferred is not None or type(arg).data is not Variable.data:
                        value = arg.data
                    if need:
                        edge = (arg, 0) if arg._node is None else (arg._node, arg._index)
                        meta = value.shape, value.dtype
                        variable_ids.add(id(value))
                else:
                    value = _unrecorded(cls, arg) if isinstance(arg, torch.Tensor) else arg
                raw.append(value)
                edges.append(edge)
                metas.append(meta)
        except UnknownTensor as unknown:
            return unknown.answer(args)
        if variable_ids:
            for index, value in enumerate(raw):
                # `RecordedContext` identifies saved tensors by id: a constant over a variable's value needs another id.
                if edges[index] is None and id(value) in variable_ids and isinstance(value, torch.Tensor):
                    raw[index] = value.detach()
        context = Context(tuple([edge is not None for edge in edges]))
        if variable_ids:
            context.origin = _origin(cls.__name__)
        result = cls.forward(context, *raw)
        outputs = result if isinstance(result, tuple) else (result,)
        variables = tuple(map(result_class, outputs))
        if variable_ids:
            node = Node(cls, context, edges, metas)
            node.tensor_ids = tuple(map(id, (*raw, *outputs)))
            for index, variable in enumerate(variables):
                node.outputs.append(outputs[index].shape)
                if outputs[index].dtype.is_floating_point:
                    variable._recorded_by(node, index)
        return variables if isinstance(result, tuple) else variables[0]


def recordable(**operations: Callable[..., Any]) -> Callable[[type[Function]], Any]:
    """Return a decorator that derives `recorded_backward` from backward, with operations in place of kernels.

    backward, a class method, calls its kernels as attributes of the class; `operations` replaces them by name.
    """

    def derive(function: type[Function]) -> type[Function]:
        attributes = {name: staticmethod(operation) for name, operation in operations.items()}
        variant: type[Function] = type(function.__name__, (function,), attributes)
        function.recorded_backward = variant.backward
        return function

    return derive


class TensorContext:
    """A context for backward in operations: its saved tensors are variables, here without a graph."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)

    @property
    def saved(self) -> tuple[Any, ...]:
        return tuple(None if t is None else self._variable(t) for t in self.context.saved)

    saved_tensors = saved

    def _variable(self, tensor: torch.Tensor) -> Variable:
        return Function.result_class(tensor)


def in_operations(function: type[F]) -> type[F]:
    """Decorate a function whose backward is written in operations on variables, for gradients of every order."""
    backward = function.backward
    function.recorded_backward = staticmethod(backward)

    def raw_backward(ctx: Context, *grads: torch.Tensor | None) -> Any:
        return _raw(backward(TensorContext(ctx), *(None if dy is None else Function.result_class(dy) for dy in grads)))

    function.backward = staticmethod(raw_backward)  # type: ignore[method-assign]
    return function


@in_operations
class _Gradient(Function):
    """The gradient of a linear function, as an operation; its own gradient is the function."""

    @staticmethod
    def forward(ctx: Any, dy: torch.Tensor, gradient: Callable[..., torch.Tensor], function: Any) -> torch.Tensor:
        ctx.function = function
        return gradient(dy)

    @staticmethod
    def backward(ctx: Any, ddx: Variable) -> Any:
        return ctx.function(ddx), None, None


def linear(apply: Callable[[Any, Any], Variable], argument: int = 0) -> Callable[[type[F]], type[F]]:
    """Return a decorator for functions whose first output is linear in one argument.

    `apply(ctx, x)` returns the function of another x, recorded.
    """

    def derive(function: type[F]) -> type[F]:
        def recorded_backward(ctx: TensorContext, dy: Variable, *others: None) -> Any:
            context = ctx.context
            gradients: list[Any] = [None] * len(context.needs)
            gradients[argument] = _Gradient.apply(
                dy, lambda raw: function.backward(context, raw, *others)[argument], partial(apply, context)
            )
            return tuple(gradients)

        function.recorded_backward = staticmethod(recorded_backward)
        return function

    return derive


def _accept_tensors(cls: type[Function]) -> None:
    """Let forward and backward of a class return variables, and forward have a `setup_context` in torch's way."""
    members = vars(cls)
    if "forward" in members:
        forward, setup = cls.forward, getattr(cls, "setup_context", None)

        def forward_raw(ctx: Any, *args: Any) -> Any:
            with no_grad():
                if setup is None:
                    return _raw(forward(ctx, *args))
                result = _raw(forward(*args))
                setup(ctx, args, result)
                return result

        cls.forward = staticmethod(forward_raw)  # type: ignore[method-assign]
    if "backward" in members:
        backward = cls.backward
        cls.recorded_backward = staticmethod(backward)
        cls.backward = staticmethod(lambda ctx, *grads: _raw(backward(ctx, *grads)))  # type: ignore[method-assign]


def _raw(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_raw, result))
    return result.data if isinstance(result, Variable) else result


def _unrecorded(function: type[Function], tensor: torch.Tensor) -> torch.Tensor:
    """Return a torch tensor as an operand. Raises TypeError if torch records its gradient."""
    if rerouted:
        raise UnknownTensor("it is torch's", lambda args: rerouted[-1](function, args, {}))
    if tensor.requires_grad and is_grad_enabled():
        raise TypeError(
            f"{function.__name__}: an operand is a torch tensor that requires grad, whose gradient would end here, as "
            "torch and minidl record separate graphs; pass t.detach(), or minidl.from_torch(t.detach(), "
            "requires_grad=True) and read the gradient there"
        )
    return tensor


def _origin(name: str) -> str:
    """Return the name of a function with file and line of the nearest frame outside minidl."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return f"{name} ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return name
