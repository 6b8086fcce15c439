"""The targets of a cross-entropy: the weight of each row, the sum of the weights, and checks of arguments."""

import torch
import triton
import triton.language as tl

from minidl.kernels import check
from minidl.kernels.loss_total import SHARES, check_reduction
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NO_CLASS = tl.constexpr(-(2**63))
# Targets per step of a program that sums the weights of all targets.
TARGETS = tl.constexpr(1024)


@triton.jit
def row_targets(p_t, p_w, o_m, m_m, N, ignore_index, SOFT: tl.constexpr, ACC: tl.constexpr):
    """Return per row: the class, its weight, whether the row is not ignored, and whether the class is in [0, N).

    Ignored rows and classes out of range have weight 0.
    """
    if SOFT:
        b_t = o_m * 0
        m_counts = m_m
        m_class = m_m
    else:
        b_t = tl.load(p_t + o_m, mask=m_m, other=ignore_index).to(tl.int64)  # [BLOCK_M]
        m_counts = m_m & (b_t != ignore_index)
        m_class = (b_t >= 0) & (b_t < N)
    b_wt = (m_counts & m_class).to(ACC)
    if p_w is not None and not SOFT:
        b_wt = tl.load(p_w + b_t, mask=m_counts & m_class, other=0.0).to(ACC)  # [BLOCK_M]
    return b_t, b_wt, m_counts, m_class


@triton.jit
def target_kernel(
    p_t, p_w, p_sum, p_wrong, R, N, ignore_index, programs,
    EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store per program the weight of its targets and, in p_wrong, the largest class out of range (or NO_CLASS)."""
    wait(EARLY)
    i_r = tl.program_id(0).to(tl.int64)
    b_sum = tl.zeros((BLOCK_N,), ACC)
    b_wrong = tl.full((BLOCK_N,), NO_CLASS, tl.int64)
    for r in range(0, R, programs * BLOCK_N):
        o_r = r + i_r * BLOCK_N + tl.arange(0, BLOCK_N)
        b_t, b_wt, m_counts, m_class = row_targets(p_t, p_w, o_r, o_r < R, N, ignore_index, False, ACC)
        b_sum += b_wt
        if p_wrong is not None:
            b_wrong = tl.maximum(b_wrong, tl.where(m_counts & (m_class == 0), b_t, NO_CLASS))
    tl.store(p_sum + i_r, tl.sum(b_sum, axis=0))
    if p_wrong is not None:
        tl.store(p_wrong + i_r, tl.max(b_wrong, axis=0))


@triton.jit
def all_targets(p_t, p_w, R, N, ignore_index, ACC: tl.constexpr):
    """Return the weight of all R targets, added in the same order in every program."""
    b_sum = tl.zeros((TARGETS,), ACC)
    for r in range(0, R, TARGETS):
        o_r = r + tl.arange(0, TARGETS).to(tl.int64)
        _, b_wt, _, _ = row_targets(p_t, p_w, o_r, o_r < R, N, ignore_index, False, ACC)
        b_sum += b_wt
    return tl.sum(b_sum, axis=0)


def divisor_parts(op, target, weight, R, N, ignore_index, dtype, mean):
    """Return partial sums of the divisor of a mean and their number, (None, 1) if not `mean`.

    Raises IndexError on the CPU for a wrong class.
    """
    acc, device = launch.acc_torch(dtype), target.device
    if target.dtype.is_floating_point:
        return torch.full((1,), R, dtype=acc, device=device) if mean else None, 1
    if not (mean or launch.ON_CPU):
        return None, 1
    tile = launch.tile("loss", dtype, N=R)
    programs = max(1, min(SHARES.value, launch.cdiv(R, tile["BLOCK_N"])))
    sums, wrong = torch.empty(programs, dtype=acc, device=device), None
    if launch.ON_CPU:
        wrong = torch.full((programs,), NO_CLASS.value, dtype=torch.int64, device=device)
    launch.run(
        target_kernel, (programs,), target, weight, sums, wrong, R, N, ignore_index, programs, ACC=launch.acc(dtype),
        **dependent_launch.options(), **tile.options,
    )  # fmt: skip
    if wrong is not None:
        launch.note_indirect(tuple)  # the check below depends on values: it is never replayed
    for value in () if wrong is None else wrong.tolist():
        if value != NO_CLASS.value:
            raise IndexError(
                f"{op}: target holds {value}, expected classes from 0 to {N - 1} or ignore_index ({ignore_index})"
            )
    return (sums, programs) if mean else (None, 1)


def check_arguments(x, target, weight, ignore_index, reduction, label_smoothing, op="cross_entropy"):
    """Return whether the targets are probabilities. Raises as `cross_entropy_parts`."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing}, expected a number from 0 to 1")
    soft = target.dtype.is_floating_point
    check_classes(op, x, target, weight, reduction, or_else=f" or {x.dtype} probabilities", soft=soft)
    if soft:
        check.same(op, input=x, target=target)
        if target.shape != x.shape:
            raise ValueError(
                f"{op}: target of probabilities has shape {list(target.shape)}, expected input's {list(x.shape)}"
            )
        if ignore_index != -100:
            raise ValueError(f"{op}: ignore_index {ignore_index} needs targets that are classes, got probabilities")
    return soft


def check_classes(op, x, target, weight, reduction, or_else="", soft=False):
    """Raise TypeError or ValueError unless x, weight and, unless `soft`, the target's classes fit each other."""
    check.floating(op, input=x)
    check_reduction(op, reduction)
    if x.dim() == 0:
        raise ValueError(f"{op}: input is a scalar, expected [N], [R, N] or [R, N, ...]")
    axis = min(1, x.dim() - 1)
    N = x.shape[axis]
    if N == 0:
        raise ValueError(f"{op}: input has shape {list(x.shape)}, expected at least one class along dim {axis}")
    if weight is not None:
        check.same(op, input=x, weight=weight)
        if weight.shape != (N,):
            raise ValueError(f"{op}: weight has shape {list(weight.shape)}, expected [{N}], one number per class")
    if soft:
        return
    if target.dtype not in (torch.int64, torch.int32, torch.uint8):
        raise TypeError(f"{op}: target has dtype {target.dtype}, expected int64, int32 or uint8 classes{or_else}")
    if target.device != x.device:
        raise ValueError(f"{op}: input is on {x.device} and target is on {target.device}; move one of them with .to()")
    expected = x.shape[:axis] + x.shape[axis + 1 :]
    if target.shape != expected:
        raise ValueError(
            f"{op}: target has shape {list(target.shape)}, expected {list(expected)} for input {list(x.shape)}"
        )
