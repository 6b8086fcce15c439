"""Recurrences over packed sequences: lstm, gru, and plain ones with tanh or relu, in torch's order of gates.

    x [N, GATES H]     products of the inputs, the rows of each step side by side
    weight [GATES H, H], bias [GATES H]     of the product with the hidden state
    h, c [B, H]        states
    y [N, H]           GATES: 4 (lstm), 3 (gru) or 1

A step (first, rows) computes rows `first` to `first + rows` of x and y with the states of the first `rows` sequences,
in one launch of `kernels`, product included, or in two: a large weight takes longer to read from the L2 cache in small
blocks than a launch takes. Sequences that have ended, or not begun, keep their states. c has the accumulation type
between steps.

The gradient goes through the steps in reverse, also in one launch each or two: it adds the product of the next step's
gradient with the weight to dh. The weight's gradient is one product over all N rows (`ops.recurrent`). Sums have a
fixed order, and nothing is atomic: results have the same bits in every run. Saved for it: gates [N, 4 H] (plain: y) and
former h [N, H], in x's dtype, and former c [N, H].
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from minidl.kernels import activation, elementwise
from minidl.kernels.gemm import gemm
from minidl.kernels.plan import LaunchPlan
from minidl.kernels.recurrent import kernels
from minidl.runtime import dependent_launch, launch
from minidl.runtime.launch_cache.replay import replayed

# The KIND and the number of gates of each of torch's modes.
KINDS = {
    "LSTM": kernels.LSTM.value, "GRU": kernels.GRU.value, "RNN_TANH": activation.TANH.value,
    "RNN_RELU": activation.RELU.value,
}  # fmt: skip
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
LEAST_BLOCK = 16  # of a matrix instruction
MOST_FUSED = 2**20  # bytes of a weight (H200: 0.72 of the time of two launches at 2**20 bytes, 1.4 at 2**21)

Steps = tuple[tuple[int, int], ...]  # the first row and the number of rows of each step, in order of computation


class Saved(NamedTuple):
    """What the gradient needs: gates, and h and c before each step; c is None except for lstm."""

    gates: torch.Tensor
    before: torch.Tensor
    c_before: torch.Tensor | None


class Problem(NamedTuple):
    """All that the tile and the grid of a step depend on. family: "recurrent", "recurrent_grad", or these "_fused"."""

    family: str
    mode: str
    dtype: torch.dtype
    target: str
    precision: str
    sizes: kernels.Sizes


def recurrence(
    mode: str, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None, weight: torch.Tensor,
    bias: torch.Tensor | None, steps: Steps, save: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Saved | None]:  # fmt: skip
    """Return y, the last h and c, in x's dtype, and with `save` what the gradient needs."""
    x, weight = x.contiguous(), weight.contiguous()
    h = h.clone(memory_format=torch.contiguous_format)
    bias = None if bias is None else bias.contiguous()
    c = None if c is None else c.to(launch.acc_torch(x.dtype), memory_format=torch.contiguous_format, copy=True)
    y, saved = _run(mode, x, h, c, weight, bias, steps, save)
    if steps:
        first, rows = steps[-1]
        h[:rows].copy_(y[first : first + rows])
    return y, h, None if c is None else c.to(x.dtype), saved


@replayed
def _run(
    mode: str, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None, weight: torch.Tensor,
    bias: torch.Tensor | None, steps: Steps, save: bool,
) -> tuple[torch.Tensor, Saved | None]:  # fmt: skip
    """Compute the steps; c changes in place, and h where the number of rows changes, by torch's copies."""
    N, H = len(x), h.shape[1]
    y = x.new_empty(N, H)
    saved = None
    if save:
        saved = Saved(
            x.new_empty(N, 4 * H) if GATES[mode] > 1 else y, x.new_empty(N, H),
            None if c is None else x.new_empty(N, H, dtype=c.dtype),
        )  # fmt: skip
    gates, before, c_before = saved or (None, None, None)
    if GATES[mode] == 1:
        gates = None  # these are y
    former = None
    fused = _fuses(weight)
    for first, rows in steps:
        if former is not None and len(former) > rows:
            h[rows : len(former)].copy_(former[rows:])
        elif former is not None and len(former) < rows:
            h[: len(former)].copy_(former)
            former = None
        at = slice(first, first + rows)
        state = h[:rows] if former is None else former[:rows]
        parts = [None if t is None else t[at] for t in (y, before, c_before, gates)]
        hidden = None if fused else gemm(state, weight.t(), wide=True)
        plan = _plan("recurrent", mode, x.dtype, fused, rows, H)
        plan.run(
            kernels.recurrent_kernel, x[at], state, hidden, weight, bias, None if c is None else c[:rows], *parts,
            plan.sizes, KIND=KINDS[mode], **dependent_launch.options(),
        )  # fmt: skip
        former = y[at]
    return y, saved


def recurrence_grad(
    mode: str, dy: torch.Tensor | None, dh: torch.Tensor | None, dc: torch.Tensor | None, weight: torch.Tensor,
    saved: Saved, steps: Steps, batch: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the gradients of x, of the hidden products [N, GATES H] (if equal the same tensor), and of h and c."""
    before = saved.before
    wide, shape = launch.acc_torch(before.dtype), (batch, before.shape[1])
    dy = None if dy is None else dy.contiguous()
    dh = _wide(dh, before, shape, wide)
    dc = _wide(dc, before, shape, wide) if mode == "LSTM" else None
    dx, dhidden = _run_backward(mode, dy, dh, dc, weight.contiguous(), saved, steps)
    return dx, dhidden, dh.to(before.dtype), None if dc is None else dc.to(before.dtype)


@replayed
def _run_backward(
    mode: str, dy: torch.Tensor | None, dh: torch.Tensor, dc: torch.Tensor | None, weight: torch.Tensor, saved: Saved,
    steps: Steps,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute the gradients of the steps, the last first; dh and dc change in place."""
    N, H = saved.before.shape
    dtype = saved.before.dtype
    dx = saved.before.new_empty(N, GATES[mode] * H)
    dhidden = torch.empty_like(dx) if mode == "GRU" else dx
    after = product = None
    fused = _fuses(weight, gradient=True)
    for (first, rows), (_, following) in pairwise((*reversed(steps), (0, 0))):
        at = slice(first, first + rows)
        parts = [None if t is None else t[at] for t in (dy, *saved)]
        gradients = dh[:rows], None if dc is None else dc[:rows], dx[at], None if dhidden is dx else dhidden[at]
        plan = _plan("recurrent_grad", mode, dtype, fused, rows, H, 0 if after is None else len(after))
        plan.run(
            kernels.recurrent_grad_kernel, after, product, weight, *parts, *gradients, plan.sizes, KIND=KINDS[mode],
            **dependent_launch.options(),
        )  # fmt: skip
        after = dhidden[at]
        if not fused:
            product = gemm(after, weight, wide=True)
        if following < rows:  # the last step of these sequences
            ended = gemm(after[following:], weight, wide=True) if product is None else product[following:]
            elementwise.add(dh[following:rows], ended, out=dh[following:rows])
            after = after[:following] if following else None
    return dx, dhidden


def _fuses(weight: torch.Tensor, gradient: bool = False) -> bool:
    """Return whether a step computes its product. A gradient's product in 16 bits is faster in a launch of its own."""
    return weight.numel() * weight.itemsize <= MOST_FUSED and not (gradient and weight.itemsize == 2)


def _wide(
    gradient: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a copy in `dtype`, contiguous; zeros for None."""
    if gradient is None:
        return like.new_zeros(shape, dtype=dtype)
    return gradient.to(dtype, memory_format=torch.contiguous_format, copy=True)


def _plan(family: str, mode: str, dtype: torch.dtype, fused: bool, rows: int, H: int, following: int = 0) -> LaunchPlan:
    sizes, family = kernels.Sizes(rows, H, following), f"{family}_fused" if fused else family
    return plan_of(Problem(family, mode, dtype, launch.target(), launch.precision(dtype), sizes))


@launch.cached
def plan_of(problem: Problem) -> LaunchPlan:
    """Return the launch of a step, or of its gradient."""
    p, gates, (M, H, _) = problem, GATES[problem.mode], problem.sizes
    floor = LEAST_BLOCK if p.family.endswith("_fused") else 1
    K = H if p.family.startswith("recurrent_fused") else gates * H
    tile = launch.tile(p.family, p.dtype, floor=floor, precision=p.precision, target_=p.target, M=M, N=H, K=K)
    record: Any = tile.record(kernels.Tile, ACC=launch.acc(p.dtype), PRECISION=p.precision, GATES=gates)
    grid = (launch.cdiv(M, tile["BLOCK_M"]) * launch.cdiv(H, tile["BLOCK_N"]),)
    return LaunchPlan(grid, p.sizes, record, tile.launch_options)
