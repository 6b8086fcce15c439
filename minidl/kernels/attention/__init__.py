"""Scaled dot-product attention: y = softmax(scale q k^T + mask) v, and its gradients, without a matrix [L, S].

    q [batch, HEADS, L, E]     k [batch, HEADS / GROUP, S, E]     v [batch, HEADS / GROUP, S, V]
    y [batch, HEADS, L, V]     mask [batch, HEADS, L, S], added, or where it is False not seen; any strides

One program computes a block of rows of a head, in one pass over the keys that they see (`forward`; `backward` for the
gradients; `blocks` for what both share: read it first). A row that sees no key is 0, and so are its gradients. Scores,
sums and softmax are in float32 (float64 for float64); p and ds are rounded to the tensors' dtype before products, as
tensor cores take them. Sums have a fixed order, and nothing is atomic: results have the same bits in every run.
Memory beside the results: 8 bytes a row (16 in float64).
"""

import math
from typing import Any, NamedTuple

import torch
import triton

from minidl.kernels import random
from minidl.kernels.attention.backward import attention_grad_kv_kernel, attention_grad_q_kernel
from minidl.kernels.attention.blocks import MaskStrides, RowStrides, Sizes, Tile
from minidl.kernels.attention.forward import attention_kernel
from minidl.kernels.plan import LaunchPlan
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

MOST_STRIDE = 2**21  # of rows, of which a block has at most 512
LEAST_BLOCK = 16  # of a matrix instruction
HEAD_FAMILIES = (64, 128, 256)
LARGEST_HEAD = HEAD_FAMILIES[-1]


class Options(NamedTuple):
    """scale of q k; keys to the left and right of its position that a query sees (-1: all); probability of dropout."""

    scale: float
    left: int = -1
    right: int = -1
    p: float = 0.0


class Forward(NamedTuple):
    """Strides of the forward kernel's tensors."""

    q: RowStrides
    k: RowStrides
    v: RowStrides
    mask: MaskStrides
    y: RowStrides


class Backward(NamedTuple):
    """Strides of the tensors of gradients; `q` and `k` are read, d's are written."""

    q: RowStrides
    k: RowStrides
    v: RowStrides
    mask: MaskStrides
    y: RowStrides
    dq: RowStrides
    dk: RowStrides
    dv: RowStrides


class Saved(NamedTuple):
    """What gradients need beside the inputs: y, log2 of the sums of powers [batch, HEADS, L], and the dropout key."""

    y: torch.Tensor
    lse: torch.Tensor | None
    key: torch.Tensor | None


class Problem(NamedTuple):
    """All that the tiles and the grids of attention depend on."""

    dtype: torch.dtype
    target: str
    precision: str
    batch: int
    heads: int
    key_heads: int
    L: int
    S: int
    E: int
    V: int
    options: Options
    first: int
    masked: bool


@replayed
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None,
    options: Options, key: torch.Tensor | None = None, first: int = 0, with_lse: bool = True,
) -> Saved:  # fmt: skip
    """Return y in q's dtype and order of memory, and what gradients need.

    lengths [batch]: integers, the keys of each image; key: int64 [2] of `dropout_key` if options.p is above 0; first:
    the number of the first row of queries in a sharded batch.
    """
    q, k, v, mask, lengths = _readable(q, k, v, mask, lengths)
    y = _like(q, v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=launch.acc_torch(q.dtype), device=q.device) if with_lse else None
    if y.numel() == 0:
        return Saved(y, lse, key)
    plan = plan_of("attention", _problem(q, k, v, mask, options, first))
    strides = Forward(*_input_strides(q, k, v, mask), _row_strides(y))
    plan.run(attention_kernel, q, k, v, mask, lengths, key, y, lse, plan.sizes, strides)
    return Saved(y, lse, key)


@replayed
def attention_grad(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    lengths: torch.Tensor | None, saved: Saved, options: Options, first: int = 0, with_mask: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the gradients of q, k, v and, with `with_mask`, of the mask [batch, HEADS, L, S], in their dtypes."""
    q, k, v, mask, lengths = _readable(q, k, v, mask, lengths)
    y, lse, key = saved
    dq, dk, dv = _like(q, q.shape[-1]), _like(k, k.shape[-1]), _like(v, v.shape[-1])
    dmask = None
    if with_mask:
        assert mask is not None
        dmask = torch.zeros(mask.shape, dtype=mask.dtype, device=mask.device)
    if y.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dmask
    assert lse is not None
    if dy.stride() != y.stride():
        dy = torch.empty_like(y).copy_(dy)
    delta = torch.empty_like(lse)
    strides = Backward(*_input_strides(q, k, v, mask), *map(_row_strides, (y, dq, dk, dv)))
    problem = _problem(q, k, v, mask, options, first)
    rows, keys = plan_of("attention_grad", problem), plan_of("keys", problem)
    inputs = q, k, v, mask, lengths, key
    rows.run(attention_grad_q_kernel, *inputs, y, dy, lse, delta, dq, dmask, rows.sizes, strides)
    keys.run(attention_grad_kv_kernel, *inputs, dy, lse, delta, dk, dv, keys.sizes, strides)
    return dq, dk, dv, dmask


def dropout_key(seed: int, stream: Any, device: torch.device) -> torch.Tensor:
    """Return int64 [2] on the device: the seed and stream of one call's dropout, drawn from these."""
    return random.randint((2,), 0, 2**31, seed, stream, device=device)


@launch.cached
def plan_of(kernel: str, problem: Problem) -> LaunchPlan:
    """Return the launch of the forward kernel, "attention", or of the gradients "attention_grad" of q or of "keys".

    A tile's BLOCK_M is of the rows, or keys, that a program holds; BLOCK_N of those that it walks over. Tables know
    MASKED: 1 with a mask or dropout, which take registers.
    """
    p, options, of_keys = problem, problem.options, kernel == "keys"
    family = f"attention{'' if kernel == 'attention' else '_grad'}_{head_family(p.E, p.V)}"
    size, walked = (p.S, p.L) if of_keys else (p.L, p.S)
    tile = launch.tile(
        family, p.dtype, floor=LEAST_BLOCK, precision=p.precision, target_=p.target, M=size, N=walked,
        MASKED=int(p.masked or options.p > 0.0),
    )  # fmt: skip
    block, step = tile["BLOCK_M"], tile["BLOCK_N"]
    blocks = launch.cdiv(size, block) * p.batch * (p.key_heads if of_keys else p.heads)
    record = Tile(
        *((step, block) if of_keys else (block, step)), BLOCK_E=_block(p.E), BLOCK_V=_block(p.V), E=p.E, V=p.V,
        SCALE=options.scale, LEFT=options.left, RIGHT=options.right, DROP=min(round(options.p * 2**32), 2**32 - 1),
        KEPT=1.0 / (1.0 - options.p) if options.p < 1.0 else 0.0, PRECISION=p.precision, ACC=launch.acc(p.dtype),
    )  # fmt: skip
    sizes = Sizes(p.heads, p.heads // p.key_heads, p.L, p.S, p.first)
    return LaunchPlan((blocks,), sizes, record, tile.launch_options)


def head_family(E: int, V: int) -> int:
    """Return the head size, 64, 128 or 256, whose tile tables apply."""
    return next(size for size in HEAD_FAMILIES if max(E, V) <= size)


def _problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: Options, first: int
) -> Problem:
    (batch, heads, L, E), (_, key_heads, S, V) = q.shape, v.shape
    return Problem(
        q.dtype, launch.target(), launch.precision(q.dtype), batch, heads, key_heads, L, S, E, V, options, first,
        mask is not None,
    )  # fmt: skip


def _block(size: int) -> int:
    return max(LEAST_BLOCK, triton.next_power_of_2(size))


def added(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask that is added to scores: -inf where `hidden` is True, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)


def _readable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the operands as the kernels read them."""
    if mask is not None and mask.dtype == torch.bool and q.dtype == torch.float64:
        mask = added(mask.logical_not(), q.dtype)  # Triton 3.7 has no float64 products beside 8-bit loads
    q, k, v = map(_rows_contiguous, (q, k, v))
    return q, k, v, mask, None if lengths is None else lengths.contiguous()


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x with contiguous rows, whose offsets in a block fit int32."""
    return x if x.stride(3) == 1 and x.stride(2) < MOST_STRIDE else x.contiguous()


def _like(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return new memory [batch, heads, rows, size] in the order of x: heads before rows, or rows before heads."""
    batch, heads, rows, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, rows, heads, size).transpose(1, 2)
    return x.new_empty(batch, heads, rows, size)


def _row_strides(x: torch.Tensor) -> RowStrides:
    return RowStrides(*x.stride()[:3])


def _input_strides(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[RowStrides, RowStrides, RowStrides, MaskStrides]:
    of_mask = MaskStrides(0, 0, 0, 0) if mask is None else MaskStrides(*mask.stride())
    return _row_strides(q), _row_strides(k), _row_strides(v), of_mask
