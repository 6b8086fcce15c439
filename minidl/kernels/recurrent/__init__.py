"""Recurrences over packed sequences: lstm, gru, and plain ones with tanh or relu, in torch's order of gates.

    x [N, D GATES H]     products of the inputs, the rows of each step side by side
    weight [D, GATES H, H], bias [D, GATES H]     of the product with the hidden state
    h, c [D, B, H]       states
    y [N, D H]           D: 1 direction or 2; GATES: 4 (lstm), 3 (gru) or 1

A step (first, rows) of a direction computes rows `first` to `first + rows` of x and y with the states of the first
`rows` sequences. One launch of `kernels` computes a step of each direction, product included, or two launches: a large
weight takes longer to read from the L2 cache in small blocks than a launch takes. Products of two directions are a
batch, of states that steps write side by side. Sequences that have ended, or not begun, keep their states. c has the
accumulation type between steps.

The gradient goes through the steps in reverse, also in one launch each or two: it adds the product of the next step's
gradient with the weight to dh. The weight's gradient is one product over all N rows (`ops.recurrent`). Sums have a
fixed order, and nothing is atomic: results have the same bits in every run. Saved for it: gates [N, D 4 H] (plain: y)
and former h [N, D H], in x's dtype, and former c [N, D H].
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from minidl.kernels import activation
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

# Of each direction, the first row and the number of rows of each step, in order of computation.
Steps = tuple[tuple[tuple[int, int], ...], ...]


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
    rows: int
    sizes: kernels.Sizes
    directions: int


def recurrence(
    mode: str, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None, weight: torch.Tensor,
    bias: torch.Tensor | None, steps: Steps, save: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Saved | None]:  # fmt: skip
    """Return y, the last h and c, in x's dtype, and with `save` what the gradient needs."""
    x, weight, h = x.contiguous(), weight.contiguous(), h.contiguous()
    bias = None if bias is None else bias.contiguous()
    c = None if c is None else c.to(launch.acc_torch(x.dtype), memory_format=torch.contiguous_format, copy=True)
    state = None if len(h) == 1 or _fuses(weight) else h.clone()
    y, saved = _run(mode, x, h, c, weight, bias, state, steps, save)
    parts = [t[at] for t, each in zip(y.chunk(len(steps), 1), steps, strict=True) for at in _beginnings(each[::-1])]
    last = torch.cat(parts).view(h.shape) if parts else h.clone()
    return y, last, None if c is None else c.to(x.dtype), saved


@replayed
def _run(
    mode: str, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None, weight: torch.Tensor,
    bias: torch.Tensor | None, state: torch.Tensor | None, steps: Steps, save: bool,
) -> tuple[torch.Tensor, Saved | None]:  # fmt: skip
    """Compute the steps; c changes in place, and state, a copy of h for the products of two directions."""
    N, (D, _, H) = len(x), h.shape
    y = x.new_empty(N, D * H)
    saved = None
    if save:
        saved = Saved(
            x.new_empty(N, D * 4 * H) if GATES[mode] > 1 else y, x.new_empty(N, D * H),
            None if c is None else x.new_empty(N, D * H, dtype=c.dtype),
        )  # fmt: skip
    gates, before, c_before = saved or (None, None, None)
    if GATES[mode] == 1:
        gates = None  # these are y
    fused = _fuses(weight)
    for former, rows, step in _in_order(steps, H):
        hidden = None
        if state is not None:
            hidden = gemm(state, weight.mT, wide=True)
        elif not fused:
            hidden = gemm((y[former] if step.former_rows else h[0])[:rows], weight[0].t(), wide=True)
        plan = _plan("recurrent", mode, x.dtype, fused, rows, h.shape)
        plan.run(
            kernels.recurrent_kernel, x, h, hidden, weight if fused else None, bias, c, y, before, c_before, gates,
            state, plan.sizes, step, KIND=KINDS[mode], **dependent_launch.options(),
        )  # fmt: skip
    return y, saved


def recurrence_grad(
    mode: str, dy: torch.Tensor | None, dh: torch.Tensor | None, dc: torch.Tensor | None, weight: torch.Tensor,
    saved: Saved, steps: Steps, batch: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the gradients of x, of the hidden products [N, D GATES H] (if equal the same tensor), and of h and c."""
    before, weight = saved.before, weight.contiguous()
    D, width, H = weight.shape
    wide, shape = launch.acc_torch(before.dtype), (D, batch, H)
    dy = None if dy is None else dy.contiguous()
    dh = _wide(dh, before, shape, wide)
    dc = _wide(dc, before, shape, wide) if mode == "LSTM" else None
    state = None if D == 1 or _fuses(weight, gradient=True) else before.new_zeros(D, batch, width)
    dx, dhidden = _run_backward(mode, dy, dh, dc, weight, state, saved, steps)
    for d, columns in enumerate(dhidden.chunk(D, 1)):
        if parts := [columns[at] for at in _beginnings(steps[d])]:
            gemm(parts[0] if len(parts) == 1 else torch.cat(parts), weight[d], wide=True, onto=dh[d])
    return dx, dhidden, dh.to(before.dtype), None if dc is None else dc.to(before.dtype)


@replayed
def _run_backward(
    mode: str, dy: torch.Tensor | None, dh: torch.Tensor, dc: torch.Tensor | None, weight: torch.Tensor,
    state: torch.Tensor | None, saved: Saved, steps: Steps,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute the gradients of the steps, the last first; dh and dc change in place, and state."""
    before = saved.before
    dx = before.new_empty(len(before), weight[..., 0].numel())
    dhidden = torch.empty_like(dx) if mode == "GRU" else dx
    fused = _fuses(weight, gradient=True)
    for former, rows, step in _in_order(tuple(each[::-1] for each in steps), dh.shape[2]):
        operands = (dhidden[former], weight[0]) if state is None else (state, weight)
        product = gemm(*operands, wide=True) if step.former_rows and not fused else None
        plan = _plan("recurrent_grad", mode, before.dtype, fused, rows, dh.shape)
        plan.run(
            kernels.recurrent_grad_kernel, product, weight if fused and step.former_rows else None, dy, *saved, dh,
            dc, dx, None if dhidden is dx else dhidden, state, plan.sizes, step, KIND=KINDS[mode],
            **dependent_launch.options(),
        )  # fmt: skip
    return dx, dhidden


def _in_order(steps: Steps, H: int) -> Iterator[tuple[slice, int, kernels.Step]]:
    """Yield for each step the rows in N of the first direction's step before it, the most rows of a direction, and what
    kernels take."""
    for before, now in pairwise([((0, 0),) * len(steps), *zip(*steps, strict=True)]):
        numbers = [H * n for pair in zip(now, before, strict=True) for each in pair for n in each]
        yield slice(before[0][0], sum(before[0])), max(rows for _, rows in now), kernels.Step(*numbers)


def _beginnings(steps: tuple[tuple[int, int], ...]) -> list[slice]:
    """Return the rows of each sequence's first step, in the order of sequences."""
    return [slice(first + n, first + rows) for (_, n), (first, rows) in pairwise(((0, 0), *steps)) if rows > n]


def _fuses(weight: torch.Tensor, gradient: bool = False) -> bool:
    """Return whether a step computes its product. A gradient's product in 16 bits is faster in a launch of its own."""
    return weight[0].numel() * weight.itemsize <= MOST_FUSED and not (gradient and weight.itemsize == 2)


def _wide(
    gradient: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a copy in `dtype`, contiguous; zeros for None."""
    if gradient is None:
        return like.new_zeros(shape, dtype=dtype)
    return gradient.to(dtype, memory_format=torch.contiguous_format, copy=True)


def _plan(family: str, mode: str, dtype: torch.dtype, fused: bool, rows: int, states: tuple[int, ...]) -> LaunchPlan:
    """Return the launch for states [D, B, H]."""
    (D, B, H), family = states, f"{family}_fused" if fused else family
    sizes = kernels.Sizes(H, B * H)
    return plan_of(Problem(family, mode, dtype, launch.target(), launch.precision(dtype), rows, sizes, D))


@launch.cached
def plan_of(problem: Problem) -> LaunchPlan:
    """Return the launch of a step, or of its gradient."""
    p, gates, M, H = problem, GATES[problem.mode], problem.rows, problem.sizes.H
    floor = LEAST_BLOCK if p.family.endswith("_fused") else 1
    K = H if p.family.startswith("recurrent_fused") else gates * H
    tile = launch.tile(p.family, p.dtype, floor=floor, precision=p.precision, target_=p.target, M=M, N=H, K=K)
    constants = {"PRECISION": p.precision, "GATES": gates, "DIRECTIONS": p.directions}
    record: Any = tile.record(kernels.Tile, ACC=launch.acc(p.dtype), **constants)
    grid = launch.cdiv(M, tile["BLOCK_M"]) * launch.cdiv(H, tile["BLOCK_N"]), p.directions
    return LaunchPlan(grid, p.sizes, record, tile.launch_options)
