"""The graph: values and the operations that made them, and what an operation keeps for the way back."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from minidl.common import locks
from minidl.runtime import streams
from minidl.sparse.rows import RowGrad


class OpenSum(NamedTuple):
    """The gradient of an output used twice, in two parts, which an operation that `takes_sums` adds as it reads."""

    first: torch.Tensor
    second: torch.Tensor

    def dense(self) -> torch.Tensor:
        return _arithmetic["add"](self.first, self.second)


_arithmetic: dict[str, Callable[..., Any]] = {}


def set_arithmetic(add: Callable[..., torch.Tensor], has_nan: Callable[[torch.Tensor], bool]) -> None:
    """Set the two computations that the engine needs and, as it knows no kernel, does not import."""
    _arithmetic.update(add=add, has_nan=has_nan)


Grad = torch.Tensor | RowGrad
Arrived = Grad | OpenSum | None
Hook = Callable[[torch.Tensor], "torch.Tensor | None"]

_sequence = itertools.count()
accumulating = locks.lock()  # of a sum of gradients: threads may go back to the same leaves


class RemovableHandle:
    """What registered a hook returns: `remove()`, a call, or the end of a `with` block takes the hook away again."""

    def __init__(self, hooks: dict[int, Any], hook: Any) -> None:
        self._hooks, self.id = hooks, next(_sequence)
        hooks[self.id] = hook

    def remove(self) -> None:
        """Take the hook away; nothing happens the second time."""
        self._hooks.pop(self.id, None)

    __call__ = remove

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class Context:
    """What a Function's forward leaves for its backward: saved tensors, and any attribute.

    `needs` has one bool per input: whether its gradient is wanted.
    """

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs = needs
        self._saved: tuple[torch.Tensor | None, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._where = ""
        self._arrived: dict[int, Callable[[int], torch.Tensor | None]] = {}  # of each thread that goes back

    def arrived(self, index: int) -> torch.Tensor | None:
        """In backward: the gradient of an input that other operations have given so far; None where there is none.

        Whoever asks adds it: what backward returns for this input is the sum.
        """
        find = self._arrived.get(threading.get_ident())
        return None if find is None else find(index)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """torch's name of `needs`."""
        return self.needs

    def save_for_backward(self, *tensors: torch.Tensor | Variable | None) -> None:
        """torch's name of `save`; Tensors are kept as torch tensors."""
        self.save(*(t.data if isinstance(t, Variable) else t for t in tensors))

    def save(self, *tensors: torch.Tensor | None) -> None:
        """Keep tensors for backward. Changing one of them in place before that is an error."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and True in self.needs:
            _refuse_hooks(hooks[0])
        self._saved = tensors
        # What torch made under inference_mode counts no versions.
        self._versions = tuple(-1 if t is None or t.is_inference() else t._version for t in tensors)

    def keep(self, result: torch.Tensor) -> None:
        """Take what was saved of a result for unchanged: one more version of it is another's, in memory of its own."""
        memory = result.untyped_storage().data_ptr()
        mine = (t is not None and t.untyped_storage().data_ptr() == memory for t in self._saved)
        self._versions = tuple(version + own for version, own in zip(self._versions, mine, strict=True))

    @property
    def saved(self) -> tuple[Any, ...]:
        """The saved tensors. Raises RuntimeError when one was changed in place since."""
        for index, (tensor, version) in enumerate(zip(self._saved, self._versions, strict=True)):
            if tensor is not None and version >= 0 and tensor._version != version:
                raise RuntimeError(
                    f"{self._where}: saved tensor {index} of shape {list(tensor.shape)} was changed in place "
                    f"(version {tensor._version}, saved at {version}) before backward() used it; "
                    "clone it before changing it, or change it after backward()"
                )
        return self._saved

    saved_tensors = saved


def _refuse_hooks(pack: Callable[..., Any]) -> None:
    """Say what torch's hooks of saved tensors do not do here. Raises RuntimeError for hooks that may change values."""
    where = getattr(pack, "__module__", "")
    if where not in ("torch.utils.checkpoint", "torch.autograd.graph"):
        raise RuntimeError(
            "torch's saved_tensors_hooks do not see what minidl saves for backward: leave the hooks out, or write a "
            "minidl.autograd.Function that saves what you want"
        )
    warnings.warn(
        f"{where} saves no memory here: minidl keeps what backward needs where it is, and computes nothing again",
        stacklevel=2,
    )


class Variable:
    """A value and its place in the graph: the operation that made it, or the gradient that collects at a leaf."""

    __slots__ = (
        "__weakref__", "_after", "_grad", "_held", "_hooks", "_index", "_later", "_node", "_requires_grad", "_slope",
        "_stream", "_taken", "name",
    )  # fmt: skip

    def __init__(self, data: torch.Tensor) -> None:
        self._held = data
        self._later: Any = None
        self._taken = False  # in by an operation that computed it as a part of its own
        self.name = ""
        self._grad: Grad | None = None
        self._slope: Variable | None = None  # _grad at its place in the graph, where it was recorded
        self._stream: Any = None  # of a GPU, that _grad was last added to on
        self._node: Node | None = None
        self._index = 0
        self._hooks: dict[int, Hook] = {}
        self._after: dict[int, Callable[[Any], object]] = {}  # called once a leaf has all of its gradient
        self._requires_grad = False

    @property
    def data(self) -> torch.Tensor:
        """The value; computed now where it was not needed so far (see `later`)."""
        if self._later is not None:
            self._settle()
        return self._held

    @data.setter
    def data(self, value: torch.Tensor | Variable) -> None:
        self._settle()
        self._held = value.data if isinstance(value, Variable) else value

    def _settle(self) -> None:
        """Compute the value now if it is not computed yet."""
        later = self._later
        if later is not None:
            later.settle(self)

    def _become(self, made: Variable) -> None:
        """Take the value and the place in the graph of another variable."""
        self._held = made.data
        self._node, self._index, self._requires_grad = made._node, made._index, made._requires_grad
        self._later = None

    def _graph_grad(self) -> Variable | None:
        """`_grad` at its place in the graph; None where it was not recorded, or is another by now."""
        if self._slope is not None and self._slope._held is not self._grad:
            self._slope = None
        return self._slope

    def _adds_on(self, stream: Any) -> None:
        """Note that a stream adds to `_grad` next: after what another one has added."""
        before, self._stream, grad = self._stream, stream, self._grad
        if grad is not None:
            streams.follow(stream, before, *((grad,) if isinstance(grad, torch.Tensor) else (grad.rows, grad.values)))

    def _recorded_by(self, node: Node, index: int) -> None:
        self._node, self._index, self._requires_grad = node, index, True

    def _edge(self) -> Edge | None:
        self._settle()
        if self._node is not None:
            return self._node, self._index
        return (self, 0) if self._requires_grad else None


class Node:
    """One recorded operation: how to go back through it, and where its inputs came from."""

    __slots__ = (
        "__weakref__", "context", "edges", "function", "hooks", "ids", "metas", "outputs", "retained", "sequence",
        "where",
    )  # fmt: skip

    def __init__(self, function: Any, context: Context, edges: list[Edge | None], where: str) -> None:
        self.function = function
        self.context: Context | None = context
        self.edges = edges
        self.where = where
        self.sequence = next(_sequence)
        self.outputs: list[tuple[int, ...]] = []
        self.metas: list[tuple[tuple[int, ...], torch.dtype] | None] = []
        self.ids: tuple[int, ...] = ()  # of the inputs and then the outputs, as they are while the context keeps them
        self.hooks: dict[int, dict[int, Hook]] = {}
        self.retained: dict[int, weakref.ref[Variable]] = {}

    @property
    def name(self) -> str:
        return self.function.__name__

    def refuse_nan(self, grads: Sequence[Grad | Variable | None]) -> None:
        """Raises RuntimeError for a gradient of an input that has NaN."""
        for i, grad in enumerate(grads):
            values = grad.values if isinstance(grad, RowGrad) else grad.data if isinstance(grad, Variable) else grad
            if values is not None and values.numel() and _arithmetic["has_nan"](values):
                raise RuntimeError(f"{self}: its gradient of input {i} has NaN")

    def __str__(self) -> str:
        return f"{self.name} ({self.where})" if self.where else self.name


class UnknownTensor(Exception):  # noqa: N818 (no error: an operation answers it)
    """Raised by a tensor that stands for any other (see `nn.trace`) where its values or shape are asked for.

    `answer` makes the result of an operation from its arguments.
    """

    def __init__(self, message: str, answer: Callable[[Any], Any]) -> None:
        super().__init__(message)
        self.answer = answer


# Where the gradient of an input goes: to a leaf tensor, or to output number i of another node.
Edge = tuple["Variable | Node", int]
