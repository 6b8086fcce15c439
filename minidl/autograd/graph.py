"""The graph: values, the operations that computed them, and what an operation saves for backward."""

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


class PendingSum(NamedTuple):
    """The gradient of an output used twice: two parts that the operation adds while it reads them."""

    first: torch.Tensor
    second: torch.Tensor

    def dense(self) -> torch.Tensor:
        return _arithmetic["add"](self.first, self.second)


_arithmetic: dict[str, Callable[..., Any]] = {}


def set_arithmetic(add: Callable[..., torch.Tensor], has_nan: Callable[[torch.Tensor], bool]) -> None:
    """Set the two computations that the engine needs and, as it knows no kernel, does not import."""
    _arithmetic.update(add=add, has_nan=has_nan)


Grad = torch.Tensor | RowGrad
Incoming = Grad | PendingSum | None
Hook = Callable[[torch.Tensor], "torch.Tensor | None"]

_sequence = itertools.count()
accumulating = locks.lock()  # guards sums of gradients: threads may run backward to the same leaves


class RemovableHandle:
    """The handle of a registered hook: `remove()`, a call, or the end of a `with` block removes the hook."""

    def __init__(self, hooks: dict[int, Any], hook: Any, first: bool = False) -> None:
        self._hooks, self.id = hooks, -next(_sequence) if first else next(_sequence)  # hooks run in this order
        hooks[self.id] = hook

    def remove(self) -> None:
        """Remove the hook; a second call does nothing."""
        self._hooks.pop(self.id, None)

    __call__ = remove

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class Context:
    """The values that a Function's forward passes to its backward: saved tensors, and any attribute.

    `needs` has one bool per input: whether its gradient is needed.
    """

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs = needs
        self._saved: tuple[torch.Tensor | None, ...] = ()
        self._versions: tuple[int, ...] = ()
        self.origin = ""  # the operation, with the file and line outside minidl that called it
        self._pending: dict[int, Callable[[int], torch.Tensor | None]] = {}  # by thread that runs backward

    def pending_gradient(self, index: int) -> torch.Tensor | None:
        """Remove and return, in backward, the sum of an input's gradients by other operations so far, or None.

        The caller adds it to its own gradient of the input.
        """
        lookup = self._pending.get(threading.get_ident())
        return None if lookup is None else lookup(index)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """torch's name of `needs`."""
        return self.needs

    def save_for_backward(self, *tensors: torch.Tensor | Variable | None) -> None:
        """Save tensors for backward: torch's name of `save`. Tensors are saved as torch tensors."""
        self.save(*(t.data if isinstance(t, Variable) else t for t in tensors))

    def save(self, *tensors: torch.Tensor | None) -> None:
        """Save tensors for backward. Changing one of them in place before that is an error."""
        self._saved = tensors
        if True not in self.needs:  # no backward follows
            self._versions = (-1,) * len(tensors)
            return
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:
            _refuse_hooks(hooks[0])
        # Tensors created under torch.inference_mode have no version counter.
        self._versions = tuple([-1 if t is None or t.is_inference() else t._version for t in tensors])

    def keep(self, result: torch.Tensor) -> None:
        """Accept one more version of a saved result: the change went to a value in other memory."""
        memory = result.untyped_storage().data_ptr()
        shares = (t is not None and t.untyped_storage().data_ptr() == memory for t in self._saved)
        self._versions = tuple(version + shared for version, shared in zip(self._versions, shares, strict=True))

    @property
    def saved(self) -> tuple[Any, ...]:
        """The saved tensors. Raises RuntimeError if one has changed in place since."""
        for index, (tensor, version) in enumerate(zip(self._saved, self._versions, strict=True)):
            if tensor is not None and version >= 0 and tensor._version != version:
                raise RuntimeError(
                    f"{self.origin}: saved tensor {index} of shape {list(tensor.shape)} was changed in place "
                    f"(version {tensor._version}, saved at {version}) before backward() used it; "
                    "clone it before changing it, or change it after backward()"
                )
        return self._saved

    saved_tensors = saved


def _refuse_hooks(pack: Callable[..., Any]) -> None:
    """Warn that torch's saved-tensor hooks have no effect here; raise RuntimeError for hooks that may change values."""
    where = getattr(pack, "__module__", "")
    if where not in ("torch.utils.checkpoint", "torch.autograd.graph"):
        raise RuntimeError(
            "torch's saved_tensors_hooks do not see the tensors that minidl saves for backward: remove the hooks, or "
            "write a minidl.autograd.Function that saves other tensors"
        )
    warnings.warn(
        f"{where} saves no memory here: minidl keeps the tensors that backward needs, and recomputes none",
        stacklevel=2,
    )


class Variable:
    """A value and its position in the graph: the operation that computed it, or a leaf's accumulated gradient."""

    __slots__ = (
        "__weakref__", "_after", "_data", "_deferred", "_fused", "_grad", "_hooks", "_index", "_node", "_recorded_grad",
        "_requires_grad", "_stream", "name",
    )  # fmt: skip

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._deferred: Any = None
        self._fused = False  # True if another operation computed it in its kernel
        self.name = ""
        self._grad: Grad | None = None
        self._recorded_grad: Variable | None = None  # _grad as a variable of the graph, with create_graph
        self._stream: Any = None  # the CUDA stream of the last addition to _grad
        self._node: Node | None = None
        self._index = 0
        self._hooks: dict[int, Hook] = {}
        self._after: dict[int, Callable[[Any], object]] = {}  # called when a leaf's gradient is complete
        self._requires_grad = False

    @property
    def data(self) -> torch.Tensor:
        """The value; computed now if it is deferred (see `deferred`)."""
        if self._deferred is not None:
            self._settle()
        return self._data

    @data.setter
    def data(self, value: torch.Tensor | Variable) -> None:
        self._settle()
        self._data = value.data if isinstance(value, Variable) else value

    def _settle(self) -> None:
        """Compute the value now if it is not computed yet."""
        deferred = self._deferred
        if deferred is not None:
            deferred.settle(self)

    def _become(self, other: Variable) -> None:
        """Take over the value and the position in the graph of another variable."""
        self._data = other.data
        self._node, self._index, self._requires_grad = other._node, other._index, other._requires_grad
        self._deferred = None

    def _graph_grad(self) -> Variable | None:
        """Return `_grad` as a variable of the graph; None if it was not recorded, or has been replaced."""
        if self._recorded_grad is not None and self._recorded_grad._data is not self._grad:
            self._recorded_grad = None
        return self._recorded_grad

    def _adds_on(self, stream: Any) -> None:
        """Record that a stream adds to `_grad` next, after the additions of the previous stream."""
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
    """One recorded operation: its function and context for backward, and the origin of its inputs."""

    __slots__ = (
        "__weakref__", "context", "edges", "function", "hooks", "metas", "origin", "outputs", "retained", "sequence",
        "tensor_ids",
    )  # fmt: skip

    def __init__(self, function: Any, context: Context, edges: list[Edge | None], metas: list[Meta | None]) -> None:
        self.function = function
        self.context: Context | None = context
        self.edges, self.metas, self.origin = edges, metas, context.origin
        self.sequence = next(_sequence)
        self.outputs: list[tuple[int, ...]] = []
        self.tensor_ids: tuple[int, ...] = ()  # of the inputs and then the outputs, valid while the context holds them
        self.hooks: dict[int, dict[int, Hook]] = {}
        self.retained: dict[int, weakref.ref[Variable]] = {}

    @property
    def name(self) -> str:
        return self.function.__name__

    def gradients(self, result: Any) -> tuple[Any, ...]:
        """Return the result of backward as a tuple. Raises RuntimeError unless it has a gradient for each input."""
        grads = result if isinstance(result, tuple) else (result,)
        if len(grads) != len(self.edges):
            raise RuntimeError(f"{self}: backward returned {len(grads)} gradients for {len(self.edges)} inputs")
        return grads

    def mismatch(self, grad: Any, meta: Meta) -> RuntimeError:
        """Return the error for a gradient whose shape or dtype is not its input's."""
        return RuntimeError(
            f"{self}: backward returned a gradient of shape {list(grad.shape)} and dtype {grad.dtype} "
            f"for an input of shape {list(meta[0])} and dtype {meta[1]}"
        )

    def refuse_nan(self, grads: Sequence[Grad | Variable | None]) -> None:
        """Raise RuntimeError for a gradient of an input that has NaN."""
        for i, grad in enumerate(grads):
            values = grad.values if isinstance(grad, RowGrad) else grad.data if isinstance(grad, Variable) else grad
            if values is not None and values.numel() and _arithmetic["has_nan"](values):
                raise RuntimeError(f"{self}: its gradient of input {i} has NaN")

    def __str__(self) -> str:
        return self.origin


class UnknownTensor(Exception):  # noqa: N818 (an operation catches it)
    """Raised by a placeholder tensor (see `nn.placeholder`) when its values or shape are read.

    `answer` returns the result of an operation from its arguments.
    """

    def __init__(self, message: str, answer: Callable[[Any], Any]) -> None:
        super().__init__(message)
        self.answer = answer


# Shape and dtype of an input.
Meta = tuple[tuple[int, ...], torch.dtype]
# The destination of an input's gradient: a leaf tensor, or output number i of another node.
Edge = tuple["Variable | Node", int]
