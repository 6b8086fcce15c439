"""Normalise values with the statistics of their channels, and the gradient.

    forward    x [BLOCK_M, BLOCK_C] -> y
    gradient   dy, x [band, BLOCK_C] -> sums [bands, 2, C] -> [2, C]        dy, x, sums [BLOCK_M, BLOCK_C] -> dx

Formulas are in `norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minidl.kernels import elementwise, reduce
from minidl.kernels.activation import NONE, RELU, Activation, activate, activate_grad, activate_grad_from_output
from minidl.kernels.memory_layout import contiguous
from minidl.kernels.norm.launches import Statistics, channel, epilogue_of, plan_of
from minidl.kernels.norm.layout import (
    block_values,
    blocks,
    channel_offsets,
    channels,
    dense,
    in_planes,
    in_rows,
    reverse_tile,
    row_offsets,
    row_stride,
    shaped,
    strided,
)
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.launch_cache.replay import replayed


@triton.jit
def batch_norm_kernel(
    p_x, p_added, p_y, p_mean, p_rstd, p_weight, p_bias, sizes, tile: tl.constexpr, epilogue: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    C = channels(sizes, tile)
    o_m, o_c, m_c, m_mc, _ = reverse_tile(sizes, tile)
    b_mean = channel(p_mean, o_c, m_c, 0.0, tile.ACC)
    b_scale = channel(p_rstd, o_c, m_c, 0.0, tile.ACC) * channel(p_weight, o_c, m_c, 1.0, tile.ACC)
    o_channel = channel_offsets(o_c, sizes, tile)
    o_mc = row_offsets(o_m, C, tile) + o_channel
    o_x = row_offsets(o_m, row_stride(sizes.s_x, C, tile), tile) + o_channel
    b_z = tl.load(p_x + o_x, mask=m_mc, other=0).to(tile.ACC)  # [BLOCK_M, BLOCK_C]
    b_z = (b_z - b_mean) * b_scale + channel(p_bias, o_c, m_c, 0.0, tile.ACC)
    if p_added is not None:
        b_z += tl.load(p_added + o_mc, mask=m_mc, other=0).to(tile.ACC)  # [BLOCK_M, BLOCK_C]
    tl.store(p_y + o_mc, activate(b_z, epilogue.ACT, epilogue.SLOPE).to(p_y.dtype.element_ty), mask=m_mc)


@replayed
def normalise(
    x: torch.Tensor, with_: Statistics, weight: torch.Tensor | None, bias: torch.Tensor | None, act: Activation,
    added: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return act((x - mean) rstd weight + bias + added), in x's shape and dtype; contiguous if x is, else
    channels-last.

    Raises ValueError if `added` has another shape or device.
    """
    if added is not None and (added.shape != x.shape or added.device != x.device):
        raise ValueError(
            f"batch_norm: added is {list(added.shape)} on {added.device}, expected {list(x.shape)} on {x.device}"
        )
    planes = in_planes(x)
    values = strided(x, planes)
    y = values.new_empty(values.shape)
    plan = plan_of("norm", values)
    plan.run(
        batch_norm_kernel, values, None if added is None else dense(added, planes), y, *with_, contiguous(weight),
        contiguous(bias), plan.sizes, epilogue=epilogue_of(act),
    )  # fmt: skip
    return shaped(y, x.shape)


@triton.jit
def activation_grad(b_dy, b_z, m, epilogue: tl.constexpr):
    """Return dy act'(z), and 0 outside the mask, where act' of the bias may not be finite."""
    if epilogue.ACT == RELU:
        return tl.where(b_z <= 0.0, 0.0, b_dy)
    else:
        return tl.where(m, b_dy * activate_grad(b_z, epilogue.ACT, epilogue.SLOPE), 0.0)


@triton.jit
def shifted_and_dz(b_x, b_dy, b_mean, b_scale, b_bias, m_mc, epilogue: tl.constexpr, ACC: tl.constexpr):
    """Return x - mean and dz of a block."""
    b_x = b_x.to(ACC) - b_mean
    b_dz = b_dy.to(ACC)
    if epilogue.ACT != NONE:
        b_dz = activation_grad(b_dz, b_x * b_scale + b_bias, m_mc, epilogue)
    return b_x, b_dz


@triton.jit
def batch_norm_sums_kernel(
    p_dy, p_more, p_x, p_y, p_dz, p_sums, p_mean, p_rstd, p_weight, p_bias, sizes, tile: tl.constexpr,
    epilogue: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the sums of dz and of dz n over each band of rows: [bands, 2, C].

    dy may have two terms, p_dy and p_more; their sum is written to p_dz. If y is not None, act' is computed from it
    and dz is written to p_dz. Values are rounded as stored before they are summed, so other launches see the same.
    """
    wait(EARLY)
    C = channels(sizes, tile)
    o_c = tl.program_id(0) * tile.BLOCK_C + tl.arange(0, tile.BLOCK_C)
    m_c = o_c < C
    o_channel = channel_offsets(o_c, sizes, tile)
    start = tl.program_id(1).to(tl.int64) * sizes.band
    end = tl.minimum(start + sizes.band, sizes.M)
    b_mean = channel(p_mean, o_c, m_c, 0.0, tile.ACC)
    b_rstd = channel(p_rstd, o_c, m_c, 0.0, tile.ACC)
    b_scale = b_rstd * channel(p_weight, o_c, m_c, 1.0, tile.ACC)
    b_bias = channel(p_bias, o_c, m_c, 0.0, tile.ACC)
    b_dbias = tl.full((tile.BLOCK_M, tile.BLOCK_C), 0.0, tile.ACC)
    b_dweight = tl.full((tile.BLOCK_M, tile.BLOCK_C), 0.0, tile.ACC)
    for i in range(blocks(start, end, sizes, tile)):
        o_m, m_m = block_values(start, end, i, sizes, tile)
        m_mc = m_m[:, None] & m_c[None, :]
        o_mc = row_offsets(o_m, C, tile) + o_channel
        o_x = row_offsets(o_m, row_stride(sizes.s_x, C, tile), tile) + o_channel
        b_x = tl.load(p_x + o_x, mask=m_mc, other=0)  # [BLOCK_M, BLOCK_C]
        b_dy = tl.load(p_dy + o_mc, mask=m_mc, other=0)  # [BLOCK_M, BLOCK_C]
        if p_more is not None:
            b_more = tl.load(p_more + o_mc, mask=m_mc, other=0)  # [BLOCK_M, BLOCK_C]
            b_dy = (b_dy.to(tile.ACC) + b_more.to(tile.ACC)).to(p_dz.dtype.element_ty)
        if p_y is not None:
            b_y = tl.load(p_y + o_mc, mask=m_mc, other=0).to(tile.ACC)  # [BLOCK_M, BLOCK_C]
            b_dz = b_dy.to(tile.ACC) * activate_grad_from_output(b_y, epilogue.ACT, epilogue.SLOPE)
            b_dy = b_dz.to(p_dz.dtype.element_ty)
        if p_dz is not None:
            tl.store(p_dz + o_mc, b_dy, mask=m_mc)
        if p_y is not None:
            b_x, b_dz = b_x.to(tile.ACC) - b_mean, b_dy.to(tile.ACC)
        else:
            b_x, b_dz = shifted_and_dz(b_x, b_dy, b_mean, b_scale, b_bias, m_mc, epilogue, tile.ACC)
        b_dbias += b_dz
        # A row past the end has dz = 0, but the mean may not be finite.
        b_dweight += b_dz * tl.where(m_mc, b_x, 0.0)
    b_dbias = tl.sum(b_dbias.to(tl.float64), axis=0).to(tile.ACC)
    b_dweight = tl.sum(b_dweight.to(tl.float64), axis=0).to(tile.ACC)
    o_y = tl.program_id(1).to(tl.int64) * (2 * C) + o_c
    tl.store(p_sums + o_y, b_dbias, mask=m_c)
    tl.store((p_sums + o_y + C)[None, :], b_dweight[None, :] * b_rstd, mask=m_c[None, :])


@triton.jit
def batch_norm_grad_kernel(
    p_dy, p_x, p_so_far, p_dx, p_sums, p_dweight, p_dbias, p_mean, p_rstd, p_weight, p_bias, sizes,
    tile: tl.constexpr, epilogue: tl.constexpr, TRAINING: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write dx, in training from the sums [2, C] over all rows, plus `so_far`; copy the sums to dweight and dbias."""
    wait(EARLY)
    C = channels(sizes, tile)
    o_m, o_c, m_c, m_mc, first = reverse_tile(sizes, tile)
    b_rstd = channel(p_rstd, o_c, m_c, 0.0, tile.ACC)
    b_scale = b_rstd * channel(p_weight, o_c, m_c, 1.0, tile.ACC)
    o_channel = channel_offsets(o_c, sizes, tile)
    o_mc = row_offsets(o_m, C, tile) + o_channel
    b_dz = tl.load(p_dy + o_mc, mask=m_mc, other=0).to(tile.ACC)  # [BLOCK_M, BLOCK_C]
    if TRAINING or epilogue.ACT != NONE:
        o_x = row_offsets(o_m, row_stride(sizes.s_x, C, tile), tile) + o_channel
        b_x = tl.load(p_x + o_x, mask=m_mc, other=0).to(tile.ACC)  # [BLOCK_M, BLOCK_C]
        b_x -= channel(p_mean, o_c, m_c, 0.0, tile.ACC)
    if epilogue.ACT != NONE:
        b_bias = channel(p_bias, o_c, m_c, 0.0, tile.ACC)
        b_dz = activation_grad(b_dz, b_x * b_scale + b_bias, m_mc, epilogue)
    if TRAINING:
        b_share = 1.0 / (tl.full((1, tile.BLOCK_C), 0.0, tile.ACC) + sizes.M)
        b_dbias = channel(p_sums, o_c, m_c, 0.0, tile.ACC) * b_share
        b_dweight = channel(p_sums + C, o_c, m_c, 0.0, tile.ACC) * b_share * b_rstd
        b_dz -= b_dbias + b_x * b_dweight
    m_first = m_c & first
    if p_dweight is not None:
        b_dweight = channel(p_sums + C, o_c, m_c, 0.0, tile.ACC)
        tl.store((p_dweight + o_c)[None, :], b_dweight.to(p_dweight.dtype.element_ty), mask=m_first[None, :])
    if p_dbias is not None:
        b_dbias = channel(p_sums, o_c, m_c, 0.0, tile.ACC)
        tl.store((p_dbias + o_c)[None, :], b_dbias.to(p_dbias.dtype.element_ty), mask=m_first[None, :])
    b_dx = b_dz * b_scale
    if p_so_far is not None:
        b_dx += tl.load(p_so_far + row_offsets(o_m, sizes.s_so_far, tile) + o_channel, mask=m_mc, other=0).to(tile.ACC)
    tl.store(p_dx + o_mc, b_dx.to(p_dx.dtype.element_ty), mask=m_mc)


@replayed
def normalise_grad(
    dy: torch.Tensor, x: torch.Tensor, with_: Statistics, weight: torch.Tensor | None, bias: torch.Tensor | None,
    act: Activation, training: bool, *, more: torch.Tensor | None = None, y: torch.Tensor | None = None,
    so_far: torch.Tensor | None = None, sums: torch.Tensor | None = None, want_x: bool = True, want_affine: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """Return (dx, dweight, dbias, dz); `want_x` and `want_affine` select the first three.

    In `training` the statistics depend on x, so dx includes the gradient through them. dweight and dbias have the
    dtypes of weight and bias. The gradient of the output is dy, or dy + `more`. For a forward pass with a tensor added
    before the activation (one of `activation.FROM_OUTPUT`), pass its result y; dz is then the gradient of that tensor,
    else dz is dy. `so_far`, like x, is added to dx before rounding. With `sums` [2, C] of dz and of dz n, only dx is
    computed.
    """
    epilogue = epilogue_of(act)
    needs_sums = want_affine or (training and want_x and sums is None)
    dz = dy
    planes = in_planes(x)
    if more is not None and not (needs_sums and all((in_planes if planes else in_rows)(term) for term in (dy, more))):
        dy = dz = elementwise.add(dy, more)
        more = None
    if y is not None and not needs_sums:
        dz = shaped(dense(elementwise.act_grad(dy, y, act, from_output=True), planes), x.shape)
        epilogue, y = epilogue_of(None), None
    values_dz, values = dense(dz, planes), strided(x, planes)
    C = x.shape[1]
    vectors = *with_, contiguous(weight), contiguous(bias)
    acc = launch.acc_torch(x.dtype)
    dx = None
    dweight, dbias = (
        torch.empty(C, dtype=acc if extra is None else extra.dtype, device=x.device) if want_affine else None
        for extra in (weight, bias)
    )
    if needs_sums:
        plan = plan_of("norm_sums", values)
        bands = plan.grid[1]
        partial = torch.empty(bands, 2, C, dtype=acc, device=x.device)
        values_more, values_y = (None if extra is None else dense(extra, planes) for extra in (more, y))
        new_dz = None if more is None and y is None else values.new_empty(values.shape)
        plan.run(
            batch_norm_sums_kernel, values_dz, values_more, values, values_y, new_dz, partial, *vectors, plan.sizes,
            epilogue=epilogue,
        )  # fmt: skip
        sums = (reduce.sum_rows(partial.view(bands, 2 * C)) if bands != 1 else partial).view(2, C)
        if new_dz is not None:
            values_dz, dz = new_dz, shaped(new_dz, x.shape)
        if y is not None:
            epilogue = epilogue_of(None)
    if want_x:
        plan = plan_of("norm_grad", values)
        dx = values.new_empty(values.shape)
        values_so_far = None if so_far is None else strided(so_far, planes)
        sizes = plan.sizes._replace(s_so_far=0 if values_so_far is None else values_so_far.stride(0))
        plan.run(
            batch_norm_grad_kernel, values_dz, values, values_so_far, dx, sums, dweight, dbias, *vectors, sizes,
            epilogue=epilogue, TRAINING=training,
        )  # fmt: skip
        dx = shaped(dx, x.shape)
    if sums is not None and dweight is not None and dbias is not None and (dx is None or x.numel() == 0):
        dweight, dbias = sums[1].to(dweight.dtype), sums[0].to(dbias.dtype)
    return dx, dweight, dbias, dz
