"""Deferred results: computed at first use, so that the next operation can be fused with them.

`relu(bn(conv(x)) + x)` in a module's `forward` takes one or two launches: the convolution waits for the batch norm and
the sum, the sum for the activation. An operation that can be fused returns a Tensor with a `Deferred`; the operation
after it returns a Tensor with a larger one. Every other use of the values (`data`, an operation that does not fuse, the
graph) settles the result first: it is computed then.

Results are deferred only during the call of an outermost module, and all are settled when it ends. During a call, an
in-place change by minidl settles all open results, and a use by another thread settles the ones it uses; memory that
torch changed is detected by its version, and refused.

A batch norm in training gets its statistics from the convolution before it if that can compute them.

Fused and plain execution differ only in rounding: intermediate results are not rounded. In backward, the gradient of a
result used twice may arrive in two parts (`PendingSum`), rounded as if they had been added first.
`fusion(False)` computes every result at once.
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
from minidl.runtime import launch

V = TypeVar("V", bound=Variable)

MAX_OPEN = 512  # references to open results before those already settled or freed are removed


class _Thread(threading.local):
    call: Call | None = None  # of the outermost module: results may be deferred
    open: list[weakref.ref[Variable]] | None = None


thread = _Thread()
_state = {"fused": True}


class fusion:  # noqa: N801 (a setting, named and used as torch.set_grad_enabled)
    """Switch fusion of operations: from now on, or within `with fusion(False):`. For comparison; it is on by default.

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
    """A context for the call of an outermost module, in which results may be deferred; it settles them at its end."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        thread.call = Call(self._owner)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        thread.call = None
        if thread.open:
            if kind is None:
                settle_all()
            thread.open = None


class Call:
    """The call of an outermost module, its owner, with notes that last as long as the call.

    `changed` says that a tensor which the notes describe may have changed since the call began.
    """

    def __init__(self, owner: Any) -> None:
        self.owner, self.changed = owner, False
        self.notes: dict[str, Any] = {}


def call() -> Call | None:
    """Return the current call in this thread; None outside of modules and without fusion."""
    return thread.call if _state["fused"] else None


def is_fused() -> bool:
    """Return whether operations are fused."""
    return _state["fused"]


def waiting(x: Variable) -> Deferred | None:
    """Return the Deferred of x if an operation may be fused with it: created by this thread in the same grad mode."""
    deferred = x._deferred
    if deferred is None or deferred._recorded != torch.is_grad_enabled() or deferred._thread != threading.get_ident():
        return None
    return deferred


def fuse(x: Variable, method: str, *args: Any) -> Any:
    """Return the result of a `method` of x's Deferred, mostly a Deferred with one more operation; None if
    impossible."""
    deferred = waiting(x)
    extended = None if deferred is None else getattr(deferred, method)(*args)
    x._fused = x._fused or extended is not None
    return extended


def in_rows(x: V) -> V:
    """Return x, or its values in rows of channels with a stride of their own, for an operation that accepts them."""
    rows = fuse(x, "in_rows")
    return x if rows is None else rows


def defers() -> bool:
    """Return whether this thread's results may be deferred now."""
    return thread.call is not None and _state["fused"] and not torch.is_inference_mode_enabled()


def may_wait(x: Variable) -> bool:
    """Return whether an operation on x may be deferred. A placeholder (`nn.placeholder`) must see every operation."""
    return type(x) is Function.result_class and defers()


class Deferred:
    """A result that is not computed yet: its shape, dtype and device, and its operands.

    A subclass has `compute`, and the methods `with_...` that it supports: each returns a Deferred with one more
    operation, or None if it cannot be fused. Operands have values, so that chains of deferred results do not grow.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool, *operands: Any
    ) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self._recorded, self._thread, self._lock = torch.is_grad_enabled(), threading.get_ident(), threading.RLock()
        self.requires_grad = requires_grad and self._recorded
        self._versions = []
        for x in operands:
            if x is not None:
                tensor = x if isinstance(x, torch.Tensor) else x._data if x._deferred is None else x.data
                self._versions.append((x, tensor, tensor._version))

    def compute(self) -> Variable:
        """Return the result, by the operation that computes all of it."""
        raise NotImplementedError

    def with_act(self, act: Any) -> Deferred | None:
        """Return an activation of the result."""
        return None

    def keep_statistics(self) -> Any:
        """Return a list that receives the result's statistics, or None, when it is computed; None if unsupported."""
        return None

    def with_norm(self, *norm: Any) -> Deferred | None:
        """Return the result normalised by running statistics: mean, variance, weight, bias (Tensors or None) and
        eps."""
        return None

    def with_sum(self, other: Variable) -> Deferred | None:
        """Return the sum of the result and a tensor of its shape, dtype and device."""
        return None

    def in_rows(self) -> Any:
        """Return the result [N, C, ...] in rows of C channels with padding between rows, in private memory."""
        return None

    def as_concat_pair(self, reads: Any) -> Any:
        """Return the two tensors of one shape whose concatenation [N, C, ...] the result is, if `reads` accepts
        them."""
        return None

    def settle(self, variable: Variable) -> None:
        """Compute the result and assign it to the variable."""
        with self._lock:
            if variable._deferred is not self:
                return  # settled by another thread
            self.unchanged()
            before = torch.is_grad_enabled()
            torch._C._set_grad_enabled(self._recorded)
            try:
                output = self.compute()
            finally:
                torch._C._set_grad_enabled(before)
            variable._become(output)

    def unchanged(self) -> None:
        """Raise RuntimeError if an operand has changed since."""
        for operand, tensor, version in self._versions:
            if tensor._version != version or (isinstance(operand, Variable) and operand._data is not tensor):
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} was changed in place before a result of it was used, "
                    "which minidl computes when it is first needed: use the result before, for example by .data, or "
                    "change a clone; minidl.fusion(False) computes every result at once"
                )


def open_(variable: Variable) -> None:
    """Note that a variable has a Deferred, for `settle_all`."""
    variables = thread.open
    if variables is None:
        variables = thread.open = []
    elif len(variables) >= MAX_OPEN:
        variables[:] = [ref for ref in variables if (alive := ref()) is not None and alive._deferred is not None]
    variables.append(weakref.ref(variable))


def settle_all() -> None:
    """Compute every result of this thread that is not computed yet and that someone still holds: something may change
    now."""
    if thread.call is not None:
        thread.call.changed = True
    variables = thread.open
    while variables:
        variable = variables.pop()()
        if variable is not None:
            _ = variable.data


launch.before_changes(settle_all)
