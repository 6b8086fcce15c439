"""Normalise values with the statistics of their channels, and apply the activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minidl.kernels import activation
from minidl.kernels.activation import Activation, activate
from minidl.kernels.norm.rows import (
    channel,
    dense,
    options,
    reverse_tile,
    row_stride,
    rows_of,
    shaped,
    spacing,
    strided_rows,
)
from minidl.kernels.norm.statistics import Statistics
from minidl.kernels.reduce import as_multiple
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed


@triton.jit
def batch_norm_kernel(
    p_x, p_added, p_y, p_mean, p_rstd, p_weight, p_bias, M, C, s_x,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    APART: tl.constexpr, ALIGN: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    C = as_multiple(C, ALIGN)
    o_m, o_c, m_c, m_mc = reverse_tile(M, C, BLOCK_M, BLOCK_C)
    b_mean = channel(p_mean, o_c, m_c, True, 0.0, ACC)
    b_scale = channel(p_rstd, o_c, m_c, True, 0.0, ACC) * channel(p_weight, o_c, m_c, HAS_WEIGHT, 1.0, ACC)
    o_mc = (o_m * C)[:, None] + o_c[None, :]
    o_x = (o_m * row_stride(s_x, C, ALIGN, APART))[:, None] + o_c[None, :]
    b_z = tl.load(p_x + o_x, mask=m_mc, other=0).to(ACC)  # [BLOCK_M, BLOCK_C]
    b_z = (b_z - b_mean) * b_scale + channel(p_bias, o_c, m_c, HAS_BIAS, 0.0, ACC)
    if p_added is not None:
        b_z += tl.load(p_added + o_mc, mask=m_mc, other=0).to(ACC)  # [BLOCK_M, BLOCK_C]
    tl.store(p_y + o_mc, activate(b_z, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_mc)


@replayed
def normalise(
    x: torch.Tensor,
    with_: Statistics,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    act: Activation,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return act((x - mean) rstd weight + bias + added), in x's shape and dtype, channels-last.

    Raises ValueError if `added` has another shape or device.
    """
    if added is not None and (added.shape != x.shape or added.device != x.device):
        raise ValueError(
            f"batch_norm: added is {list(added.shape)} on {added.device}, expected {list(x.shape)} on {x.device}"
        )
    name, slope = activation.parse(act)
    rows = strided_rows(x)
    M, C = rows.shape
    y = rows.new_empty(M, C)
    tile = launch.tile("norm", x.dtype, M=M, C=C)
    grid = (launch.cdiv(M, tile["BLOCK_M"]) * launch.cdiv(C, tile["BLOCK_C"]),)
    launch.run(
        batch_norm_kernel, grid, rows, None if added is None else rows_of(added), y, *with_, dense(weight),
        dense(bias), M, C, rows.stride(0),
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, ACT=activation.CODES[name], SLOPE=slope,
        ACC=launch.acc(x.dtype), **spacing(rows), **options(rows), **tile.options,
    )  # fmt: skip
    return shaped(y, x.shape)
