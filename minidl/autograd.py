"""The engine: records which operation made which tensor, and walks back from a result to its gradients.

It knows no operation and no class Tensor: it reads and writes a `Variable`, the place of a value in the graph, and
wraps results in `Function.result_class`. An operation is a `Function` with a forward on plain torch tensors and a
backward from the gradients of its outputs to those of its inputs. Reverse-mode accumulation: Griewank and Walther,
Evaluating Derivatives, 2nd ed., ch. 3. The walk keeps no recursion, visits nodes from the youngest to the oldest (so
sums of gradients have one order), and drops every saved tensor as soon as it has been used.
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch

from minidl.kernels import elementwise, reduce
from minidl.modes import detect_anomaly as detect_anomaly
from minidl.modes import enable_grad as enable_grad
from minidl.modes import is_anomaly_enabled
from minidl.modes import is_grad_enabled as is_grad_enabled
from minidl.modes import no_grad as no_grad
from minidl.modes import set_grad_enabled as set_grad_enabled
from minidl.sparse.rows import RowGrad

inference_mode = no_grad


class OpenSum(NamedTuple):
    """The gradient of an output used twice, in two parts, which an operation that `takes_sums` adds as it reads."""

    first: torch.Tensor
    second: torch.Tensor

    def dense(self) -> torch.Tensor:
        return elementwise.add(self.first, self.second)


Grad = torch.Tensor | RowGrad
Arrived = Grad | OpenSum | None
Hook = Callable[[torch.Tensor], "torch.Tensor | None"]

_PACKAGE = str(Path(__file__).parent) + os.sep
_sequence = itertools.count()


class RemovableHandle:
    """What registered a hook returns: `remove()`, a call, or the end of a `with` block takes the hook away again."""

    def __init__(self, hooks: dict[int, Any], hook: Any) -> None:
        self._hooks, self.id = hooks, max(hooks, default=-1) + 1
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
        self._arrived: Callable[[int], torch.Tensor | None] | None = None

    def arrived(self, index: int) -> torch.Tensor | None:
        """In backward: the gradient of an input that other operations have given so far; None where there is none.

        Whoever asks adds it: what backward returns for this input is the sum.
        """
        return None if self._arrived is None else self._arrived(index)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """torch's name of `needs`."""
        return self.needs

    def save_for_backward(self, *tensors: torch.Tensor | Variable | None) -> None:
        """torch's name of `save`; Tensors are kept as torch tensors."""
        self.save(*(t.data if isinstance(t, Variable) else t for t in tensors))

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """torch's name of `saved`."""
        return self.saved

    def save(self, *tensors: torch.Tensor | None) -> None:
        """Keep tensors for backward. Changing one of them in place before that is an error."""
        self._saved = tensors
        # What torch made under inference_mode counts no versions.
        self._versions = tuple(-1 if t is None or t.is_inference() else t._version for t in tensors)

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


class Variable:
    """A value and its place in the graph: the operation that made it, or the gradient that collects at a leaf."""

    __slots__ = (
        "__weakref__", "_grad", "_held", "_hooks", "_index", "_later", "_node", "_requires_grad", "_taken", "name",
    )  # fmt: skip

    def __init__(self, data: torch.Tensor) -> None:
        self._held = data
        self._later: Any = None
        self._taken = False  # in by an operation that computed it as a part of its own
        self.name = ""
        self._grad: Grad | None = None
        self._node: Node | None = None
        self._index = 0
        self._hooks: dict[int, Hook] = {}
        self._requires_grad = False

    @property
    def data(self) -> torch.Tensor:
        """The value; computed now where it was not needed so far (see `later`)."""
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
        "__weakref__", "context", "edges", "function", "hooks", "metas", "outputs", "retained", "sequence", "where",
    )  # fmt: skip

    def __init__(self, function: type[Function], context: Context, edges: list[Edge | None], where: str) -> None:
        self.function = function
        self.context: Context | None = context
        self.edges = edges
        self.where = where
        self.sequence = next(_sequence)
        self.outputs: list[tuple[int, ...]] = []
        self.metas: list[tuple[tuple[int, ...], torch.dtype] | None] = []
        self.hooks: dict[int, dict[int, Hook]] = {}
        self.retained: dict[int, weakref.ref[Variable]] = {}

    @property
    def name(self) -> str:
        return self.function.__name__

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
# The gradients that have arrived at the outputs of a node, or at a leaf.
Pending = dict["Variable | Node", list["Arrived"]]


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
    """

    none_is_one = False
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
        context = Context(needs)
        context._where = cls.__name__
        result = cls.forward(context, *raw)
        edges = [arg._edge() if need else None for arg, need in zip(args, needs, strict=True)]
        node = Node(cls, context, edges, _caller())
        context._where = str(node)
        node.metas = [None if e is None else (tuple(r.shape), r.dtype) for e, r in zip(edges, raw, strict=True)]
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
        cls.backward = staticmethod(lambda ctx, *grads: _raw(backward(ctx, *grads)))  # type: ignore[method-assign]


def _raw(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_raw, result))
    return result.data if isinstance(result, Variable) else result


def _alone(function: type[Function], tensor: torch.Tensor) -> torch.Tensor:
    """A torch tensor as an operand, of which torch records nothing. Raises TypeError where it does."""
    if tensor.requires_grad and is_grad_enabled() and torch.is_grad_enabled():
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


def grad(
    outputs: Variable | Sequence[Variable],
    inputs: Variable | Sequence[Variable],
    grad_outputs: Variable | Sequence[Variable | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """The gradients of the sum of `outputs` (times `grad_outputs`) in each of `inputs`; no `grad` is changed.

    An input that no output depends on is an error, unless `allow_unused`: then its gradient is None, or zeros with
    `materialize_grads`. Raises RuntimeError as `backward`, and for `create_graph`: gradients are not recorded;
    ValueError for `only_inputs=False`, as in torch.
    """
    if not only_inputs:
        raise ValueError("grad: only_inputs=False is not built; call backward() for the gradients of all leaves")
    ends = [outputs] if isinstance(outputs, Variable) else list(outputs)
    starts = [inputs] if isinstance(inputs, Variable) else list(inputs)
    if grad_outputs is None:
        grad_outputs = [None] * len(ends)
    seeds = [grad_outputs] if isinstance(grad_outputs, Variable) else list(grad_outputs)
    if len(seeds) != len(ends):
        raise RuntimeError(f"grad: got {len(seeds)} grad_outputs for {len(ends)} outputs")
    refuse_create_graph("grad", ends[0], create_graph)
    for what, given in (("an output", ends), ("an input", starts)):
        if any(not t._requires_grad for t in given):
            raise RuntimeError(f"grad: {what} does not require grad, and was not made by an operation that is recorded")
    wanted: dict[Edge, Grad | None] = {edge: None for t in starts if (edge := t._edge()) is not None}
    with no_grad():
        for i, (end, seed) in enumerate(zip(ends, seeds, strict=True)):
            if seed is None and end.data.numel() != 1:
                raise RuntimeError(f"grad: an output of shape {list(end.data.shape)} needs a gradient in grad_outputs")
            if seed is not None and (seed.data.shape, seed.data.dtype) != (end.data.shape, end.data.dtype):
                raise RuntimeError(
                    f"grad: grad_outputs[{i}] has shape {list(seed.data.shape)} and dtype {seed.data.dtype}, expected "
                    f"{list(end.data.shape)} and {end.data.dtype}"
                )
            keep = bool(retain_graph) or i + 1 < len(ends)
            backward(end, None if seed is None else seed.data, keep, wanted)
    found: list[Any] = []
    for start in starts:
        edge = start._edge()
        value = None if edge is None else wanted[edge]
        if value is None and not (allow_unused or materialize_grads):
            raise RuntimeError(
                f"grad: input {len(found)} was not used in the graph of the outputs; pass allow_unused=True for None "
                "as its gradient"
            )
        if value is None and materialize_grads:
            value = torch.zeros_like(start.data)
        value = value.dense() if isinstance(value, RowGrad) else value
        found.append(None if value is None else Function.result_class(value))
    return tuple(found)


def refuse_create_graph(name: str, root: Variable, create_graph: bool) -> None:
    """Raises RuntimeError for a gradient that is to be recorded."""
    if create_graph:
        edge = root._edge()
        made = f"; the first is {edge[0].name}" if edge is not None and isinstance(edge[0], Node) else ""
        raise RuntimeError(
            f"{name}: create_graph=True wants second derivatives, which minidl's operations do not have{made}; "
            "a difference of two first gradients is an approximation"
        )


def backward(
    root: Variable,
    gradient: torch.Tensor | None,
    retain_graph: bool = False,
    wanted: dict[Edge, Grad | None] | None = None,
) -> None:
    """Add d(root)/d(leaf) times `gradient` (None for ones) to the `grad` of every leaf that root depends on.

    With `wanted`, add it to the values of those places in the graph, and to no `grad`.

    Raises RuntimeError, before any gradient is changed, when part of the graph was already used and freed.
    """
    edge = root._edge()
    assert edge is not None
    if isinstance(edge[0], Node):
        waiting = _count_uses(edge[0])
        if gradient is None and (wanted is not None or not _takes_none(*edge)):
            gradient = torch.ones_like(root.data)
        _walk(edge, gradient, waiting, retain_graph, wanted)
    else:
        _to_leaf(edge[0], torch.ones_like(root.data) if gradient is None else gradient, True, wanted)


def _takes_none(node: Variable | Node, index: int) -> bool:
    """Whether the root's gradient of 1 need not be a tensor: nothing but the operation's own backward sees it."""
    return (
        isinstance(node, Node)
        and node.function.none_is_one
        and len(node.outputs) == 1
        and not node.hooks.get(index)
        and index not in node.retained
    )


def _count_uses(root: Node) -> dict[Variable | Node, int]:
    """For every node and leaf that root depends on, how many gradients will arrive there."""
    uses: dict[Variable | Node, int] = {root: 1}
    stack = [root]
    while stack:
        node = stack.pop()
        if node.context is None:
            raise RuntimeError(
                f"{node}: backward() reached this operation a second time, after its saved tensors were freed; "
                "call backward(retain_graph=True) the first time, or compute the result again"
            )
        for edge in node.edges:
            if edge is None:
                continue
            target = edge[0]
            if target not in uses:
                uses[target] = 0
                if isinstance(target, Node):
                    stack.append(target)
            uses[target] += 1
    return uses


def _walk(
    edge: Edge,
    gradient: torch.Tensor | None,
    waiting: dict[Variable | Node, int],
    retain_graph: bool,
    wanted: dict[Edge, Grad | None] | None,
) -> None:
    root, index = edge
    assert isinstance(root, Node)
    pending: Pending = {root: [None] * len(root.outputs)}
    pending[root][index] = gradient
    # A hook may change in place what another gradient shares memory with: then no sum waits.
    hooked = any(any(t.hooks.values()) if isinstance(t, Node) else t._hooks for t in waiting)
    # Leaves whose one gradient so far lies in memory that something else uses too.
    borrowed: set[Variable] = set()
    ready = [(-root.sequence, root)]
    while ready:
        node = heapq.heappop(ready)[1]
        grads = [_run_hooks(node, i, g) for i, g in enumerate(pending.pop(node))]
        if wanted is not None:
            for i, arrived in enumerate(grads):
                if arrived is not None and (node, i) in wanted:
                    whole = arrived if isinstance(arrived, torch.Tensor) else arrived.dense()
                    wanted[node, i] = _add(wanted[node, i], whole.clone())
        one = gradient is None and node is root
        for (target, position), grad, shared in _through(node, grads, pending, retain_graph, one):
            slot = pending.setdefault(target, [None] * (len(target.outputs) if isinstance(target, Node) else 1))
            if grad is not None:
                if not isinstance(target, Node):
                    if shared and slot[0] is None:
                        borrowed.add(target)
                    else:
                        borrowed.discard(target)
                last = waiting[target] == 1 and not hooked
                stays_open = last and isinstance(target, Node) and target.function.takes_sums()
                slot[position] = (_open if stays_open else _add)(slot[position], grad)
            waiting[target] -= 1
            if waiting[target]:
                continue
            if isinstance(target, Node):
                heapq.heappush(ready, (-target.sequence, target))
            else:
                total = pending.pop(target)[0]
                assert not isinstance(total, OpenSum)
                if total is not None:
                    _to_leaf(target, total, target in borrowed, wanted)


def _taken(pending: Pending, edges: list[Edge | None], index: int) -> torch.Tensor | None:
    """What has arrived where an edge leads, no longer pending. Rows are left there."""
    target, position = edges[index] or (None, 0)
    slot = None if target is None else pending.get(target)
    if slot is None or not isinstance(arrived := slot[position], torch.Tensor):
        return None
    slot[position] = None
    return arrived


def _through(
    node: Node, grads: list[Arrived], pending: Pending, retain_graph: bool, one: bool
) -> Iterator[tuple[Edge, Grad | None, bool]]:
    """The gradients of a node's inputs, each with the edge it goes to and whether its memory is also used elsewhere.

    `one` says that the gradient of the output is 1 where it is None.
    """
    context = node.context
    assert context is not None
    if not retain_graph:
        node.context = None
    if not one and all(g is None for g in grads):
        returned: Sequence[Grad | None] = (None,) * len(node.edges)
    else:
        context._arrived = partial(_taken, pending, node.edges)
        # Only a leaf, and so the optimiser, is given rows.
        result = node.function.backward(context, *(g.dense() if isinstance(g, RowGrad) else g for g in grads))
        returned = result if isinstance(result, tuple) else (result,)
        context._arrived = None
        if is_anomaly_enabled():
            _refuse_nan(node, returned)
    if len(returned) != len(node.edges):
        raise RuntimeError(f"{node}: backward returned {len(returned)} gradients for {len(node.edges)} inputs")
    parts = (part for g in grads for part in (g if isinstance(g, OpenSum) else (g,)))
    in_use = {_memory(t) for t in (*parts, *context._saved) if t is not None}
    for edge, meta, grad in zip(node.edges, node.metas, returned, strict=True):
        if edge is None or meta is None:
            continue
        if grad is not None and (tuple(grad.shape), grad.dtype) != meta:
            raise RuntimeError(
                f"{node}: backward returned a gradient of shape {list(grad.shape)} and dtype {grad.dtype} "
                f"for an input of shape {list(meta[0])} and dtype {meta[1]}"
            )
        shared = False
        if grad is not None:
            shared = _memory(grad) in in_use
            in_use.add(_memory(grad))
        yield edge, grad, shared


def _refuse_nan(node: Node, grads: Sequence[Grad | None]) -> None:
    for i, grad in enumerate(grads):
        values = grad.values if isinstance(grad, RowGrad) else grad
        if values is not None and values.numel() and bool(reduce.amax(elementwise.ne(values, values))):
            raise RuntimeError(f"{node}: its gradient of input {i} has NaN")


def _memory(grad: Grad) -> int:
    tensor = grad.values if isinstance(grad, RowGrad) else grad
    return tensor.untyped_storage().data_ptr()


def _run_hooks(node: Node, index: int, grad: Arrived) -> Arrived:
    if isinstance(grad, OpenSum) and (node.hooks.get(index) or index in node.retained):
        grad = grad.dense()
    if grad is None or isinstance(grad, OpenSum):
        return grad
    for hook in node.hooks.get(index, {}).values():
        grad = _apply_hook(hook, grad, str(node))
    reference = node.retained.get(index)
    tensor = reference() if reference is not None else None
    if tensor is not None:
        tensor._grad = _add(tensor._grad, grad)
    return grad


def _apply_hook(hook: Hook, grad: Grad, where: str) -> Grad:
    """The gradient after a hook: what it returns, or the gradient as it was when it returns None."""
    dense = grad.dense() if isinstance(grad, RowGrad) else grad
    version = dense._version
    changed = hook(dense)
    if changed is None:
        return grad if dense._version == version else dense
    if changed.shape != dense.shape or changed.dtype != dense.dtype:
        raise RuntimeError(
            f"{where}: a hook returned shape {list(changed.shape)} and dtype {changed.dtype}, "
            f"expected {list(dense.shape)} and {dense.dtype}"
        )
    return changed


def _to_leaf(leaf: Variable, grad: Grad, shared: bool, wanted: dict[Edge, Grad | None] | None) -> None:
    if wanted is not None and (leaf, 0) not in wanted:
        return
    for hook in leaf._hooks.values():
        grad = _apply_hook(hook, grad, "gradient of a leaf")
    if wanted is not None:
        shares = shared and isinstance(grad, torch.Tensor)
        wanted[leaf, 0] = _add(wanted[leaf, 0], grad.clone() if shares and isinstance(grad, torch.Tensor) else grad)
        return
    if leaf._grad is None and shared and isinstance(grad, torch.Tensor):
        grad = grad.clone()
    leaf._grad = _add(leaf._grad, grad)


def _add(old: Arrived, new: Grad) -> Grad:
    """old + new; either may be rows, and the sum of two is dense."""
    total = _open(old, new)
    return total.dense() if isinstance(total, OpenSum) else total


def _open(old: Arrived, new: Grad) -> Grad | OpenSum:
    return new if old is None else OpenSum(*(g if isinstance(g, torch.Tensor) else g.dense() for g in (old, new)))
