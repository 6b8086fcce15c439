"""Results of a module that are computed when they are first needed, so that the operation after can take them in.

`relu(bn(conv(x)) + x)` in a module's `forward` makes one or two launches: a convolution's result is not computed before
the batch norm and the sum have been asked for, the sum not before the activation. An operation that can be taken in
makes a `Tensor` with a `Deferred`; one that takes it in makes another of that. Whatever else touches the values
(`data`, an operation that knows no `Deferred`, the graph) settles the result first: it is computed then, as if at once.

Nothing is left open when the call of the outermost module ends, and nothing is deferred outside of one: what a user
does between two calls finds every result computed. Within a call minidl's own changes in place settle what is open, and
another thread's use settles what it uses; memory that torch changed is found by its version, and refused.

A batch norm in training has its statistics from the convolution before it, if that can hand them on.

So fused and plain execution differ in rounding alone: what is taken in is not rounded in between. On the way back the
gradient of what was used twice may come in two parts (`Function.takes_sums`), rounded as if it were added before.
`fusion(False)` computes everything at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from minidl.autograd.function import Function
from minidl.autograd.graph import Variable
from minidl.autograd.modes import enable_grad, is_grad_enabled, no_grad
from minidl.runtime import launch

V = TypeVar("V", bound=Variable)

MOST = 512  # notes of open results before those that were computed or dropped are forgotten
_local = threading.local()
_state = {"fused": True}


class fusion:  # noqa: N801 (a setting, named and used as torch.set_grad_enabled)
    """Whether operations are fused: from now on, or within `with fusion(False):`. For comparison; it is on by default.

    The setting changes the last bits of results. It holds for all threads.
    """

    def __init__(self, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"fusion: enabled is {enabled!r}, expected True or False")
        settle_all()
        self._before, _state["fused"] = _state["fused"], enabled

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        _state["fused"] = self._before
        if kind is None:
            settle_all()


class deferring:  # noqa: N801 (a context, as no_grad)
    """A context for the call of a module, in which results may be computed later; the outermost one settles them."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        _local.depth = getattr(_local, "depth", 0) + 1
        if _local.depth == 1:
            _local.call = Call(self._owner)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        _local.depth -= 1
        if _local.depth == 0:
            _local.call = None
        if _local.depth == 0 and getattr(_local, "open", None):
            if kind is None:
                settle_all()
            _local.open = []


class Call:
    """The call of an outermost module, its owner: with what others note for as long as it lasts, and whether anything
    that they would have noted may have changed since it began."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.changed = owner, False
        self.notes: dict[str, Any] = {}


def call() -> Call | None:
    """The call under way in this thread, None outside of modules and where nothing is fused."""
    return getattr(_local, "call", None) if _state["fused"] else None


def is_fused() -> bool:
    """Whether operations are fused."""
    return _state["fused"]


def waiting(x: Variable) -> Deferred | None:
    """The Deferred of x that an operation may be taken in by: one that this thread made in the same mode, recorded or
    not."""
    later = x._later
    if later is None or later._recorded != is_grad_enabled() or later._thread != threading.get_ident():
        return None
    return later


def take(x: Variable, method: str, *args: Any) -> Any:
    """What a `method` of x's Deferred returns: mostly a Deferred with an operation taken in; None where it cannot."""
    later = waiting(x)
    taken = None if later is None else getattr(later, method)(*args)
    x._taken = x._taken or taken is not None
    return taken


def in_rows(x: V) -> V:
    """x, or its values in rows of channels that may lie apart, for an operation that reads such."""
    rows = take(x, "in_rows")
    return x if rows is None else rows


def may_wait(x: Variable) -> bool:
    """Whether an operation on x need not be computed at once. A tensor that stands for others (`nn.trace`) sees all."""
    return (
        getattr(_local, "depth", 0) > 0 and _state["fused"] and type(x) is Function.result_class
        and not torch.is_inference_mode_enabled()
    )  # fmt: skip


class Deferred:
    """A result that is not computed yet: what it will be, and what it is computed from.

    A subclass has `compute`, and those of the methods `with_...` that fit: each returns a Deferred with more taken in,
    or None where it cannot be. Operands have their values, so that no chain of results grows.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool, *operands: Any
    ) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self.requires_grad = requires_grad and is_grad_enabled()
        self._recorded, self._thread, self._lock = is_grad_enabled(), threading.get_ident(), threading.RLock()
        held = ((operand, _held(operand)) for operand in operands)
        self._versions = [(operand, t, t._version) for operand, t in held if t is not None]

    def compute(self) -> Variable:
        """The result, by the operation that computes all of it."""
        raise NotImplementedError

    def with_act(self, act: Any) -> Deferred | None:
        """An activation of the result."""
        return None

    def keep_statistics(self) -> Any:
        """A list to which what is known of the result's statistics, or None, is added as it is computed; or None."""
        return None

    def with_norm(self, *norm: Any) -> Deferred | None:
        """The result normalised by running statistics: mean, variance, weight, bias (Tensors or None) and eps."""
        return None

    def with_sum(self, other: Variable) -> Deferred | None:
        """The sum of the result and a tensor of its shape, dtype and device."""
        return None

    def in_rows(self) -> Any:
        """The result [N, C, ...] in rows of C channels that lie apart, in memory that nothing else may see."""
        return None

    def as_concat_pair(self, reads: Any) -> Any:
        """Two tensors of one shape that the result [N, C, ...] joins along the channels, if `reads` takes both."""
        return None

    def settle(self, variable: Variable) -> None:
        """Compute the result and make it the variable's."""
        with self._lock:
            if variable._later is not self:
                return  # another thread has
            self.unchanged()
            with enable_grad() if self._recorded else no_grad():
                made = self.compute()
            variable._become(made)

    def unchanged(self) -> None:
        """Raises RuntimeError where an operand was changed since."""
        for operand, tensor, version in self._versions:
            if tensor._version != version or _held(operand) is not tensor:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} was changed in place before a result of it was used, "
                    "which minidl computes when it is first needed: use the result before, for example by .data, or "
                    "change a clone; minidl.fusion(False) computes every result at once"
                )


def _held(operand: Any) -> torch.Tensor | None:
    if isinstance(operand, Variable):
        return operand._held if operand._later is None else operand.data
    return operand if isinstance(operand, torch.Tensor) else None


def open_(variable: Variable) -> None:
    """Note that a variable has a Deferred, for `settle_all`."""
    found = getattr(_local, "open", None)
    if found is None:
        found = _local.open = []
    elif len(found) >= MOST:
        found[:] = [ref for ref in found if (alive := ref()) is not None and alive._later is not None]
    found.append(weakref.ref(variable))


def settle_all() -> None:
    """Compute every result of this thread that is not computed yet and that someone still holds: something may change
    now."""
    if (under_way := getattr(_local, "call", None)) is not None:
        under_way.changed = True
    found = getattr(_local, "open", None)
    while found:
        variable = found.pop()()
        if variable is not None:
            _ = variable.data


launch.before_changes(settle_all)
