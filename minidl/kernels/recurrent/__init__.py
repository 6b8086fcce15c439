"""Recurrences over packed sequences: lstm, gru, and plain ones with tanh or relu, in torch's order of gates.

    x [N, GATES H]     products of the inputs, the rows of each step side by side
    weight [GATES H, H], bias [GATES H]     of the product with the hidden state
    h, c [B, H]        states
    y [N, H]           GATES: 4 (lstm), 3 (gru) or 1

A step (first, rows) computes rows `first` to `first + rows` of x and y with the states of the first `rows` sequences:
one product h weight^T, accumulated and left in float32 (float64 for float64), and one launch of `kernels`. States
change in place, so sequences that have ended, or not begun, keep theirs. c has the accumulation type between steps.

The gradient goes through the steps in reverse: one launch of `kernels`, then the product dgates weight, which the
launch of the next step adds to dh. The weight's gradient is one product over all N rows (`ops.recurrent`). Sums have a
fixed order, and nothing is atomic: results have the same bits in every run. Saved for it: gates [N, 4 H] (plain: y) and
former h [N, H], in x's dtype, and former c [N, H].
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from minidl.kernels import activation, elementwise
from minidl.kernels.bias_act import Tile
from minidl.kernels.gemm import gemm
from minidl.kernels.recurrent import kernels
from minidl.runtime import dependent_launch, launch
from minidl.runtime.launch_cache.replay import replayed

# The KIND and the number of gates of each of torch's modes.
KINDS = {
    "LSTM": kernels.LSTM.value, "GRU": kernels.GRU.value, "RNN_TANH": activation.TANH.value,
    "RNN_RELU": activation.RELU.value,
}  # fmt: skip
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}

Steps = tuple[tuple[int, int], ...]  # the first row and the number of rows of each step, in order of computation


class Saved(NamedTuple):
    """What the gradient needs: gates, and h and c before each step; c is None except for lstm."""

    gates: torch.Tensor
    before: torch.Tensor
    c_before: torch.Tensor | None


def recurrence(
    mode: str, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None, weight: torch.Tensor,
    bias: torch.Tensor | None, steps: Steps, save: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Saved | None]:  # fmt: skip
    """Return y, the last h and c, in x's dtype, and with `save` what the gradient needs."""
    N, H = len(x), h.shape[1]
    x, h = x.contiguous(), h.clone(memory_format=torch.contiguous_format)
    bias = None if bias is None else bias.contiguous()
    wide = launch.acc_torch(x.dtype)
    c = None if c is None else c.to(wide, memory_format=torch.contiguous_format, copy=True)
    y = x.new_empty(N, H)
    saved = None
    if save:
        saved = Saved(
            x.new_empty(N, 4 * H) if GATES[mode] > 1 else y, x.new_empty(N, H),
            None if c is None else x.new_empty(N, H, dtype=wide),
        )  # fmt: skip
    gates, before, c_before = saved or (None, None, None)
    if GATES[mode] == 1:
        gates = None  # these are y
    for first, rows in steps:
        hidden = gemm(h[:rows], weight.t(), wide=True)
        at = slice(first, first + rows)
        parts = [None if t is None else t[at] for t in (y, before, c_before, gates)]
        states = h[:rows], None if c is None else c[:rows]
        _step(mode, "recurrent", x.dtype, (rows, H), x[at], hidden, bias, *states, *parts)
    return y, h, None if c is None else c.to(x.dtype), saved


def recurrence_grad(
    mode: str, dy: torch.Tensor | None, dh: torch.Tensor | None, dc: torch.Tensor | None, weight: torch.Tensor,
    saved: Saved, steps: Steps, batch: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the gradients of x, of the hidden products [N, GATES H] (if equal the same tensor), and of h and c."""
    N, H = saved.before.shape
    dtype, wide = saved.before.dtype, launch.acc_torch(saved.before.dtype)
    dx = saved.before.new_empty(N, GATES[mode] * H)
    dhidden = torch.empty_like(dx) if mode == "GRU" else dx
    dy = None if dy is None else dy.contiguous()
    dh = _wide(dh, dx, (batch, H), wide)
    dc = _wide(dc, dx, (batch, H), wide) if mode == "LSTM" else None
    product = None
    for (first, rows), (_, following) in pairwise((*reversed(steps), (0, 0))):
        at = slice(first, first + rows)
        parts = [None if t is None else t[at] for t in (dy, *saved)]
        gradients = dh[:rows], None if dc is None else dc[:rows], dx[at], None if dhidden is dx else dhidden[at]
        sizes = rows, 0 if product is None else len(product), H
        _step(mode, "recurrent_grad", dtype, sizes, product, *parts, *gradients)
        product = gemm(dhidden[at], weight, wide=True)
        if following < rows:  # the last step of these sequences
            elementwise.add(dh[following:rows], product[following:], out=dh[following:rows])
            product = product[:following]
    return dx, dhidden, dh.to(dtype), None if dc is None else dc.to(dtype)


def _wide(
    gradient: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a copy in `dtype`, contiguous; zeros for None."""
    if gradient is None:
        return like.new_zeros(shape, dtype=dtype)
    return gradient.to(dtype, memory_format=torch.contiguous_format, copy=True)


@replayed
def _step(mode: str, family: str, dtype: torch.dtype, sizes: tuple[int, ...], *tensors: torch.Tensor | None) -> None:
    """Launch the kernel of a family for tensors in its order; sizes: M, then others, then H."""
    kernel = kernels.recurrent_kernel if family == "recurrent" else kernels.recurrent_grad_kernel
    tile = launch.tile(family, dtype, M=sizes[0], N=sizes[-1])
    grid = (launch.cdiv(sizes[0], tile["BLOCK_M"]) * launch.cdiv(sizes[-1], tile["BLOCK_N"]),)
    launch.run(
        kernel, grid, *tensors, *sizes, tile=tile.record(Tile, ACC=launch.acc(dtype)), KIND=KINDS[mode],
        **dependent_launch.options(), **tile.launch_options,
    )  # fmt: skip
