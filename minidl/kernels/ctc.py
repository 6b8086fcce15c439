"""Connectionist temporal classification (Graves et al., ICML 2006): the loss of unaligned labels, and its gradient.

    log_probs x [T, N, C], any strides          targets [N, S] or one after another, int64 or int32
    lengths [3, N] int64: of each sequence the steps, the labels, and the offset of its first label

The path of a sequence goes through L = 2 S + 1 positions: its labels with blanks before, between and after them. In a
step it stays, moves on by one position, or skips a blank between two different labels. With x_t(s) of a position's
label,

    a_t(s) = log(e^a_(t-1)(s) + e^a_(t-1)(s-1) + e^a_(t-1)(s-2)) + x_t(s)       loss = -log(e^a_T(L-1) + e^a_T(L-2))

and b_t(s) is the same from the last step and position, without x_t(s). One program computes a or b of a sequence, a
block of all positions in registers; each step subtracts its maximum, so that magnitudes do not grow with T. The
probability of position s in step t is the softmax over s of a_t(s) + b_t(s), and

    dx_t(c) = dy (e^x_t(c) - the sum of the probabilities of positions with the label c, in the order of positions)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.loss_total import write_total
from minidl.runtime import launch


class Sizes(NamedTuple):
    """T steps of N sequences and C classes, the longest L, x's strides, and the blank."""

    T: int
    N: int
    C: int
    L: int
    s_t: int
    s_n: int
    s_c: int
    blank: int


@triton.jit
def labels_at(p_label, first, o, L, sizes):
    """Return the classes of positions, int64, and whether they are in [0, C), and blank only between labels."""
    m_label = (o % 2 == 1) & (o < L)
    b_c = tl.load(p_label + first + o // 2, mask=m_label, other=sizes.blank).to(tl.int64)
    return b_c, (b_c >= 0) & (b_c < sizes.C) & ((b_c != sizes.blank) | (m_label == 0))


@triton.jit
def shifted(b_a, o, by: tl.constexpr):
    """Return the values `by` positions before."""
    return tl.where(o >= by, tl.gather(b_a, tl.maximum(o - by, 0), 0), float("-inf"))


@triton.jit
def paths_kernel(
    p_x, p_label, p_length, p_paths, p_loss, sizes, MEAN: tl.constexpr, ZERO: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a (programs with id 1 of 0) or b (1) of a sequence to [2, N, T, L], unless None, and its loss.

    MEAN divides the loss by the number of labels; ZERO replaces infinity by 0.
    """
    n, reverse = tl.program_id(0).to(tl.int64), tl.program_id(1)
    steps, labels = tl.load(p_length + n), tl.load(p_length + sizes.N + n)
    L = 2 * labels + 1
    o = tl.arange(0, BLOCK)
    o_s = tl.where(reverse == 1, L - 1 - o, o)
    b_c, m_c = labels_at(p_label, tl.load(p_length + 2 * sizes.N + n), tl.where(o < L, o_s, 0), L, sizes)
    m_skip = b_c != tl.gather(b_c, tl.maximum(o - 2, 0), 0)  # never of a blank
    b_none = tl.where(o < L, float("nan"), float("-inf"))  # of a label that is no class, and of no position
    p_x += n * sizes.s_n + b_c * sizes.s_c
    b_a = tl.where(o == 0, 0.0, float("-inf")).to(ACC)
    total = tl.full((), 0.0, ACC)
    t, dt = tl.where(reverse == 1, steps - 1, 0), tl.where(reverse == 1, -1, 1)
    b_x = tl.load(p_x + t * sizes.s_t, mask=(o < L) & m_c & (steps > 0), other=b_none).to(ACC)
    for step in range(steps):
        m_ahead = (o < L) & m_c & (step + 1 < steps)
        b_ahead = tl.load(p_x + (t + dt) * sizes.s_t, mask=m_ahead, other=b_none).to(ACC)
        b_1 = shifted(b_a, o, 1)
        b_2 = tl.where(m_skip, shifted(b_a, o, 2), float("-inf"))
        b_top = tl.maximum(tl.maximum(b_a, b_1), b_2)
        b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_a = b_top + tl.log(tl.exp(b_a - b_top) + tl.exp(b_1 - b_top) + tl.exp(b_2 - b_top))
        b_before = b_a
        b_a += b_x
        top = tl.max(b_a, axis=0)
        top = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
        total += top
        b_a -= top
        if p_paths is not None:
            o_row = ((reverse * sizes.N + n) * sizes.T + t) * sizes.L
            tl.store(p_paths + o_row + o_s, tl.where(reverse == 1, b_before, b_a), mask=o < L)
        b_x = b_ahead
        t += dt
    if reverse == 0:
        last = tl.sum(tl.where(o == L - 1, b_a, 0.0), axis=0)
        if labels > 0:
            label = tl.sum(tl.where(o == L - 2, b_a, 0.0), axis=0)
            top = tl.maximum(last, label)
            top = tl.where(top == float("-inf"), 0.0, top)
            last = top + tl.log(tl.exp(last - top) + tl.exp(label - top))
        loss = 0.0 - (total + last)
        if ZERO:
            loss = tl.where(loss == float("inf"), 0.0, loss)
        if MEAN:
            loss = loss / tl.maximum(labels, 1).to(ACC)
        tl.store(p_loss + n, loss.to(p_loss.dtype.element_ty))


@triton.jit
def ctc_grad_kernel(
    p_dy, p_x, p_label, p_length, p_paths, p_dx, sizes, EACH: tl.constexpr, MEAN: tl.constexpr, ZERO: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dx of BLOCK_N classes of a step of a sequence, taking BLOCK_M positions at a time."""
    row = tl.program_id(0).to(tl.int64)
    t, n = row // sizes.N, row % sizes.N
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < sizes.C
    labels = tl.load(p_length + sizes.N + n)
    L = 2 * labels + 1
    b_dx = tl.zeros((BLOCK_N,), ACC)
    if t < tl.load(p_length + n):
        first = tl.load(p_length + 2 * sizes.N + n)
        p_a = p_paths + (n * sizes.T + t) * sizes.L
        p_b = p_a + sizes.N * sizes.T * sizes.L
        b_top = tl.full((BLOCK_M,), float("-inf"), ACC)
        for m in range(0, L, BLOCK_M):
            o = m + tl.arange(0, BLOCK_M)
            b_a = tl.load(p_a + o, mask=o < L, other=float("-inf"))
            b_top = tl.maximum(b_top, b_a + tl.load(p_b + o, mask=o < L, other=float("-inf")))
        top = tl.max(b_top, axis=0)
        b_total = tl.zeros((BLOCK_M,), ACC)
        b_sum = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        for m in range(0, L, BLOCK_M):
            o = m + tl.arange(0, BLOCK_M)
            b_a = tl.load(p_a + o, mask=o < L, other=float("-inf"))
            b_p = tl.exp(b_a + tl.load(p_b + o, mask=o < L, other=float("-inf")) - top)
            b_p = tl.where(o < L, b_p, 0.0)  # [BLOCK_M]
            b_c, _ = labels_at(p_label, first, o, L, sizes)
            b_total += b_p
            b_sum += tl.where(b_c[:, None] == o_n[None, :], b_p[:, None], 0.0)
        b_x = tl.load(p_x + t * sizes.s_t + n * sizes.s_n + o_n.to(tl.int64) * sizes.s_c, mask=m_n, other=0.0).to(ACC)
        dy = tl.load(p_dy + n if EACH else p_dy).to(ACC)
        if MEAN:
            dy = dy / (tl.maximum(labels, 1) * sizes.N).to(ACC)
        b_dx = (tl.exp(b_x) - tl.sum(b_sum, axis=0) / tl.sum(b_total, axis=0)) * dy
        if ZERO:
            b_dx = tl.where(top == float("-inf"), 0.0, b_dx)
    tl.store(p_dx + row * sizes.C + o_n, b_dx.to(p_dx.dtype.element_ty), mask=m_n)


def ctc_loss(
    x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, longest: int, blank: int, reduction: str,
    zero_infinity: bool, save: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the loss of each sequence [N], their mean after division by their numbers of labels, or their sum, in x's
    dtype, and with `save` what the gradient needs.

    x [T, N, C]; `longest` is the largest number of labels. A label out of range, or blank, gives NaN.
    """
    sizes = _sizes(x, longest, blank)
    acc = launch.acc_torch(x.dtype)
    each, mean = reduction == "none", reduction == "mean"
    parts = torch.empty(sizes.N, dtype=x.dtype if each else acc, device=x.device)
    paths = torch.empty(2, sizes.N, sizes.T, sizes.L, dtype=acc, device=x.device) if save else None
    block = triton.next_power_of_2(sizes.L)
    launch.run(
        paths_kernel, (sizes.N, 2 if save else 1), x, targets, lengths, paths, parts, sizes, MEAN=mean,
        ZERO=zero_infinity, ACC=launch.acc(x.dtype), BLOCK=block, num_warps=max(1, min(block // 128, 8)),
    )  # fmt: skip
    if each:
        return parts, paths
    loss = torch.empty((), dtype=x.dtype, device=x.device)
    write_total(parts, loss, None, sizes.N if mean else 1)
    return loss, paths


def ctc_loss_grad(
    dy: torch.Tensor, x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, paths: torch.Tensor, blank: int,
    reduction: str, zero_infinity: bool,
) -> torch.Tensor:  # fmt: skip
    """Return dx [T, N, C] of `ctc_loss`, from dy in the loss's shape."""
    sizes = _sizes(x, paths.shape[3] // 2, blank)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile = launch.tile("elementwise_tile", x.dtype, M=sizes.L, N=sizes.C)
    launch.run(
        ctc_grad_kernel, (sizes.T * sizes.N, launch.cdiv(sizes.C, tile["BLOCK_N"])), dy.contiguous(), x, targets,
        lengths, paths, dx, sizes, EACH=reduction == "none", MEAN=reduction == "mean", ZERO=zero_infinity,
        ACC=launch.acc(x.dtype), **tile.options,
    )  # fmt: skip
    return dx


def _sizes(x: torch.Tensor, longest: int, blank: int) -> Sizes:
    (T, N, C), (s_t, s_n, s_c) = x.shape, x.stride()
    return Sizes(T, N, C, 2 * longest + 1, s_t, s_n, s_c, blank)
