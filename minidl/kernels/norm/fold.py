"""Batch norm with running statistics, folded to a scale and a shift of each channel for inference.

    scale = weight / sqrt(var + eps)        shift = bias + (conv_bias - mean) scale

The epilogue of a convolution then includes the batch norm: act(scale conv(x, w) + shift). All vectors are [C];
conv_bias is the bias of the convolution. Computed in float64, at no cost for so few numbers, and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minidl.kernels.memory_layout import contiguous
from minidl.kernels.norm.launches import Statistics, check_vectors
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed


@triton.jit
def batch_norm_fold_kernel(
    p_mean, p_var, p_weight, p_bias, p_conv_bias, p_scale, p_shift, C,
    EPS: tl.constexpr, EARLY: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """scale = weight / sqrt(var + eps) and, if p_shift is not None, shift = bias + (conv_bias - mean) scale."""
    wait(EARLY)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_scale = 1.0 / tl.sqrt(tl.load(p_var + o_c, mask=m_c, other=1).to(tl.float64) + EPS)  # [BLOCK_C]
    if p_weight is not None:
        b_scale *= tl.load(p_weight + o_c, mask=m_c, other=0).to(tl.float64)
    tl.store(p_scale + o_c, b_scale.to(p_scale.dtype.element_ty), mask=m_c)
    if p_shift is not None:
        b_shift = -tl.load(p_mean + o_c, mask=m_c, other=0).to(tl.float64)  # [BLOCK_C]
        if p_conv_bias is not None:
            b_shift += tl.load(p_conv_bias + o_c, mask=m_c, other=0).to(tl.float64)
        b_shift *= b_scale
        if p_bias is not None:
            b_shift += tl.load(p_bias + o_c, mask=m_c, other=0).to(tl.float64)
        tl.store(p_shift + o_c, b_shift.to(p_shift.dtype.element_ty), mask=m_c)


def running_statistics(mean: torch.Tensor, var: torch.Tensor, eps: float, dtype: torch.dtype) -> Statistics:
    """Return statistics for x of `dtype` from running ones [C]."""
    return Statistics(mean.to(launch.acc_torch(dtype), copy=True), running_rstd(var, eps, dtype))


@replayed
def running_rstd(var: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 / sqrt(var + eps) [C] for x of `dtype`, in the accumulation dtype."""
    rstd = torch.empty(var.shape, dtype=launch.acc_torch(dtype), device=var.device)
    _fold(rstd, None, var, var, None, None, None, eps)
    return rstd


@replayed
def fold(
    conv_weight: torch.Tensor, conv_bias: torch.Tensor | None, running_mean: torch.Tensor, running_var: torch.Tensor,
    weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5, *, wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (scale, shift), both [M], so that scale * conv(x, conv_weight) + shift is the batch norm of the conv.

    conv_weight [M, ...], the others [M] or, if optional, None. Results have conv_weight's dtype, or with `wide` the
    accumulation dtype: a shift of mean / sqrt(var + eps) may exceed float16.
    Raises ValueError for other lengths, TypeError for integers.
    """
    check_vectors(
        "fold_batch_norm", "conv_weight's outputs", conv_weight, conv_weight.shape[0], eps, conv_bias=conv_bias,
        running_mean=running_mean, running_var=running_var, weight=weight, bias=bias,
    )  # fmt: skip
    dtype = launch.acc_torch(conv_weight.dtype) if wide else conv_weight.dtype
    scale, shift = (torch.empty(len(running_mean), dtype=dtype, device=conv_weight.device) for _ in "ab")
    _fold(scale, shift, running_mean, running_var, weight, bias, conv_bias, eps)
    return scale, shift


def _fold(
    scale: torch.Tensor, shift: torch.Tensor | None, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor | None,
    bias: torch.Tensor | None, conv_bias: torch.Tensor | None, eps: float,
) -> None:  # fmt: skip
    C = len(mean)
    # The tile does not depend on C: one compiled kernel serves all batch norms of a network.
    tile = launch.tile("norm_fold", scale.dtype)
    vectors = map(contiguous, (mean, var, weight, bias, conv_bias))
    launch.run(
        batch_norm_fold_kernel, (launch.cdiv(C, tile["BLOCK_C"]),), *vectors, scale, shift, C,
        EPS=float(eps), **dependent_launch.options(), **tile.options,
    )  # fmt: skip
