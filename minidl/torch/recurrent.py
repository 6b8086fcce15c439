"""Recurrences of lstm and gru as a torch operator, for one layer and direction.

The layers' loop is that of `nn.recurrent`, with the functions of tensors that this module imports.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import cat as cat
from torch import dropout as dropout
from torch import index_select as index_select
from torch import stack as stack

from minidl.kernels import recurrent as kernels
from minidl.ops.recurrent import Recurrence, check_operands, steps_of
from minidl.torch.activations import linear as linear
from minidl.torch.registry import LOWER, Gradients, accumulator, operator

SETTINGS = "str mode, int[] sizes, bool reverse"


def _fake(x: Any, h: Any, c: Any, weight: Any, bias: Any, mode: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    shape, states = (x.shape[0], h.shape[1]), [0 if c is None else size for size in h.shape]
    gates, before = x.new_empty(shape[0], 4 * shape[1]), x.new_empty(shape)
    of_cells = x.new_empty(0 if c is None else shape, dtype=accumulator(x.dtype))
    return x.new_empty(shape), x.new_empty(h.shape), x.new_empty(states), gates, before, of_cells


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.settings = inputs[5:]
    ctx.mark_non_differentiable(*output[3:])
    ctx.save_for_backward(inputs[3], *output[3:])


def _gradients(ctx: Any, dy: Any, dh: Any, dc: Any, *_: Any) -> Any:
    mask = list(ctx.needs_input_grad[:5])
    weight, *saved = ctx.saved_tensors
    return *recurrence_backward(weight, dy, dh, dc, *saved, *ctx.settings, mask), None, None, None


@operator(
    f"recurrence(Tensor x, Tensor h, Tensor? c, Tensor weight, Tensor? bias, {SETTINGS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake, save=_save, backward=_gradients, cast=(LOWER, (0, 1, 2, 3, 4)),
)  # fmt: skip
def _recurrence(
    x: torch.Tensor, h: torch.Tensor, c: Any, weight: torch.Tensor, bias: Any, mode: str, sizes: Any, reverse: bool
) -> tuple[torch.Tensor, ...]:
    """Return y, the last h and c, and what the gradient needs; without c, empty tensors for it."""
    check_operands(mode, x, h, c, weight, bias)
    y, h, c, saved = kernels.recurrence(mode, x, h, c, weight, bias, steps_of(sizes, reverse))
    assert saved is not None
    none = x.new_empty(0, dtype=accumulator(x.dtype))
    return y, h, x.new_empty(0, 0) if c is None else c, *saved[:2], none if saved.c_before is None else saved.c_before


def _fake_backward(weight: Any, dy: Any, dh: Any, dc: Any, gates: Any, before: Any, *more: Any) -> list[torch.Tensor]:
    (rows, H), (hidden, _), batch = before.shape, weight.shape, more[2][0]
    shapes = (rows, hidden), (batch, H), (batch, H), weight.shape, (hidden,)
    return [weight.new_empty(shape) for shape in shapes]


@operator(
    "recurrence_backward(Tensor weight, Tensor? dy, Tensor? dh, Tensor? dc, Tensor gates, Tensor before, "
    f"Tensor c_before, {SETTINGS}, bool[] wanted) -> Tensor[]",
    _fake_backward,
)  # fmt: skip
def recurrence_backward(
    weight: torch.Tensor, dy: Any, dh: Any, dc: Any, gates: Any, before: Any, c_before: Any, *more: Any
) -> Gradients:
    """Return the requested gradients of x, h, c, weight and bias."""
    mode, sizes, reverse, mask = more
    saved = weight, gates, before, c_before if mode == "LSTM" else None
    ctx = SimpleNamespace(saved=saved, mode=mode, steps=steps_of(sizes, reverse), batch=max(sizes), needs=mask)
    gradients: Gradients = Recurrence.backward(ctx, dy, dh, dc)[:5]
    return gradients


def recurrence(x: torch.Tensor, state: Any, weight: torch.Tensor, bias: Any, *settings: Any) -> Any:
    """Return y and the last states, as `ops.recurrent.recurrence`."""
    mode, sizes, reverse = settings
    return _recurrence(x, *(*state, None)[:2], weight, bias, mode, list(sizes), reverse)[: 1 + len(state)]
