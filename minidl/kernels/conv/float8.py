"""Convolution of float8 values with one scale per tensor (`kernels.float8`), accumulated in float32.

    y = act(scale_x scale_w scale conv(values of x, values of w) + bias), in float16, bfloat16 or float32, or
    y / scale_result in float8, for activations that commute with positive factors

`box`, `batch` and `product` read float8 directly if the channels of a group are a multiple of 32. On sm_90 tensor cores
add products in registers of about 14 bits; sums move to float32 registers after at most 128 products (`fast`: never).
On other targets blocks are converted to float16. For unsupported shapes, and on older devices, tensors are converted to
the result's dtype, which represents every value, before the convolution.
"""

from __future__ import annotations

import torch

from minidl.kernels import activation, check, float8
from minidl.kernels.activation import Activation
from minidl.kernels.conv import channels_last, check_form
from minidl.kernels.conv import forward as forward_wide
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.problem import FORWARD, Operands, Problem
from minidl.runtime import launch

LINEAR = (None, "relu", "leaky_relu")  # act(c x) = c act(x) for c > 0


def forward(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    geometry: Geometry,
    bias: torch.Tensor | None = None,
    act: Activation = None,
    *,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    scale_result: torch.Tensor | None = None,
    fast: bool = False,
    form: str | None = None,
    op: str = "conv2d",
) -> torch.Tensor:
    """Return y [N, groups * M, OH, OW] of x [N, groups * C, H, W] and w [groups * M, C, R, S], both in a float8 dtype.

    scale_x, scale_w and, for float8 results, scale_result are one float32 each; scale (of a folded batch norm) and bias
    [groups * M] are float32.
    Raises TypeError for dtypes; ValueError for devices, scales, an activation that is unsupported for float8 results,
    or a form that does not support the shape.
    """
    check_operands(op, x, w, scale_x, scale_w, out_dtype, scale_result, act, scale=scale, bias=bias)
    check_form(form)
    M, C, _, _ = w.shape
    values, weights = channels_last(x), channels_last(w)
    problem = Problem(
        FORWARD, geometry, x.shape[0], C, M // geometry.groups, x.dtype, precision(fast), bias is not None, True, act,
        aligned=values.data_ptr() % 16 == 0, w_aligned=weights.data_ptr() % 16 == 0, form=form,
        target=launch.target(), processors=launch.processors(), out=out_dtype,
    )  # fmt: skip
    if form is not None or takes(problem):
        factor, shift = float8.epilogue(scale_x, scale_w, M, scale, bias, scale_result)
        return plans.plan(problem).run(Operands(values, weights, shift, factor))[0].permute(0, 3, 1, 2)
    # float8 results must be rounded only once.
    wide = torch.float32 if scale_result is not None else out_dtype
    factor, shift = float8.epilogue(scale_x, scale_w, M, scale, bias)
    wide_x, wide_w = (float8.dequantize(t, None, wide) for t in (x, w))
    y, _ = forward_wide(wide_x, wide_w, geometry, shift, act, scale=factor, precision=exact(wide))
    return y if scale_result is None else float8.quantize(y, out_dtype, scale_result)[0]


def precision(fast: bool = False) -> str:
    """Return the precision of float8 products on the target in use."""
    return ("float8_fast" if fast else "float8") if launch.target() == "sm_90" else "float16"


def exact(dtype: torch.dtype) -> str | None:
    """Return the fastest precision in which products of float8 values in `dtype` are exact: tf32 has 11 bits."""
    return "tf32" if dtype == torch.float32 else None


@launch.cached
def takes(problem: Problem) -> bool:
    """Return whether a form reads the float8 values directly."""
    return min(problem.N, problem.M, problem.C) > 0 and plans.cheapest(problem) is not None


def check_operands(
    op: str, x: torch.Tensor, w: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor, out_dtype: torch.dtype,
    scale_result: torch.Tensor | None, act: Activation, **vectors: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless operands are float8 tensors on one device with valid scales."""
    float8.check_values(op, x=x, weight=w)
    if out_dtype not in (*float8.SOURCES, *float8.DTYPES):
        raise TypeError(f"{op}: out_dtype is {out_dtype}, expected float16, bfloat16, float32 or float8")
    if (out_dtype in float8.DTYPES) != (scale_result is not None):
        raise ValueError(f"{op}: out_dtype is {out_dtype}; float8 results, and only these, need a scale_result")
    if scale_result is not None:
        float8.check_scale(op, "scale_result", scale_result, x)
        if activation.parse(act)[0] not in LINEAR:
            raise ValueError(f"{op}: act is {act!r}, expected None, relu or leaky_relu for results of float8")
    if launch.INTERPRETED and out_dtype == torch.bfloat16:
        raise TypeError(launch.NO_BFLOAT16)
    float8.check_scale(op, "scale_x", scale_x, x)
    float8.check_scale(op, "scale_weight", scale_w, x)
    checked = {name: vector for name, vector in vectors.items() if vector is not None}
    if w.device != x.device:
        raise ValueError(f"{op}: x is on {x.device} and weight on {w.device}; move one of them with .to()")
    check.same(op, scale_x=scale_x, **checked)
