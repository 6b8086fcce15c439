"""The targets of a cross-entropy: checks, and the sum of their weights."""

import torch
import triton.language as tl

from minidl.kernels import check
from minidl.kernels.cross_entropy.kernels import NO_CLASS, target_kernel
from minidl.kernels.loss_total import SHARES, check_reduction
from minidl.runtime import dependent_launch, launch


def target_weights(op, target, weight, R, N, ignore_index, acc, dtype):
    """Return partial sums of the targets' weights and their number. Raises IndexError on the CPU for a wrong class."""
    tile = launch.tile("loss", dtype, N=R)
    programs = max(1, min(SHARES.value, launch.cdiv(R, tile["BLOCK_N"])))
    sums = torch.empty(programs, dtype=acc, device=target.device)
    wrong = None
    if launch.INTERPRETED:
        wrong = torch.full((programs,), NO_CLASS.value, dtype=torch.int64, device=target.device)
    launch.run(
        target_kernel, (programs,), target, weight, sums, wrong, R, N, ignore_index, programs,
        WEIGHTED=weight is not None, ACC=tl.float64 if acc == torch.float64 else tl.float32,
        **dependent_launch.options(), **tile.options,
    )  # fmt: skip
    for value in () if wrong is None else wrong.tolist():
        if value != NO_CLASS.value:
            raise IndexError(
                f"{op}: target holds {value}, expected classes from 0 to {N - 1} or ignore_index ({ignore_index})"
            )
    return sums, programs


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
