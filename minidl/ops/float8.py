"""Inference in float8: `quantize`, and `linear` and `conv2d` of values with scales.

    with minidl.no_grad():
        weight = ops.float8.quantize(layer.weight)
        y = ops.float8.linear(x, weight, layer.bias)

There are no gradients. On GPUs of compute capability 9.0 and above tensor cores multiply float8 directly, twice as fast
as 16 bits, where the channels of a group (the features) are a multiple of 32; all else is computed in the results'
dtype, to the same values. Each operand is off by up to 2^-4 of each value (e5m2: 2^-3), or half a step of the smallest
numbers, scale * 2^-10 (e5m2: scale * 2^-17).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from minidl.autograd import is_grad_enabled
from minidl.kernels import float8
from minidl.kernels.activation import Activation
from minidl.kernels.check import Pair
from minidl.kernels.conv import float8 as kernels
from minidl.kernels.conv.geometry import Geometry
from minidl.ops.conv_geometry import check_vectors, geometry_of
from minidl.ops.shape import to
from minidl.tensors import Tensor

__all__ = ["Float8", "conv2d", "dequantize", "linear", "quantize"]


class Float8(NamedTuple):
    """x = scale * values: float8 values of any shape and a float32 scale []."""

    values: Tensor
    scale: Tensor


def quantize(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scale: Tensor | None = None) -> Float8:
    """Return x rounded to float8 with a scale: the power of two that brings the largest finite |x| just into range.

    With a `scale` (one float32, as measured on other data) no pass over x computes one; values that it puts out of
    range become the largest value. NaN stays NaN; infinity stays infinity in e5m2 and becomes NaN in e4m3.
    Raises TypeError for other dtypes than float16, bfloat16 and float32 to float8_e4m3fn and float8_e5m2, ValueError
    for a scale of another dtype, size or device, and where a gradient would be recorded.
    """
    _no_gradient("quantize", x)
    values, used_scale = float8.quantize(x.data, dtype, None if scale is None else scale.data)
    return Float8(Tensor(values), Tensor(used_scale))


def dequantize(x: Float8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return scale * values, rounded to float16, bfloat16 or float32. Raises TypeError for other dtypes."""
    return Tensor(float8.dequantize(x.values.data, x.scale.data, dtype))


def linear(
    x: Float8 | Tensor, weight: Float8 | Tensor, bias: Tensor | None = None, act: Activation = None, *,
    out_dtype: torch.dtype | None = None, scale_result: Tensor | None = None, use_fast_accum: bool = False,
) -> Tensor | Float8:  # fmt: skip
    """Return act(x weight^T + bias), in one kernel, as `ops.linear`: the matrix product of torch's `scaled_mm`.

    Shapes: x [..., in], weight [out, in], bias [out] -> [..., out], in `out_dtype`: float16, bfloat16 or float32; None
    is that of a plain x, float32 for a Float8. A plain tensor is quantized first, x in the weight's dtype. With a
    `scale_result` the result is a Float8 of this scale, in out_dtype (None: the weight's), which saves the next layer
    from quantizing it; act is then None, "relu" or "leaky_relu".

    Sums are float32: tensor cores add at most 128 products in registers of about 14 bits before these go on to float32.
    With `use_fast_accum` (torch's name) they add all; the error then grows with their number.
    Raises ValueError for shapes that do not fit or an unknown activation and where a gradient would be recorded,
    TypeError for dtypes.
    """
    x, weight, out_dtype = _operands("linear", x, weight, out_dtype, scale_result, bias)
    rows, out = x.values, weight.values.shape[0] if weight.values.ndim else 0
    if weight.values.ndim != 2 or rows.ndim == 0 or rows.shape[-1] != weight.values.shape[1]:
        raise ValueError(
            f"linear: x has shape {list(rows.shape)}, weight {list(weight.values.shape)}; "
            "expected x [..., in] and weight [out, in]"
        )
    check_vectors("linear", out, bias=None if bias is None else bias.shape)
    pixels, features = math.prod(rows.shape[:-1]), rows.shape[-1]
    one = Geometry.of((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1)
    y = kernels.forward(
        rows.data.reshape(pixels, features, 1, 1), weight.values.data.reshape(out, features, 1, 1),
        x.scale.data, weight.scale.data, one, _float32(bias), act, out_dtype=out_dtype,
        scale_result=_data(scale_result), fast=use_fast_accum, op="linear",
    )  # fmt: skip
    return _result(y.reshape(*rows.shape[:-1], out), scale_result)


def conv2d(
    x: Float8 | Tensor, weight: Float8 | Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair | str = 0,
    dilation: Pair = 1, groups: int = 1, act: Activation = None, *, scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, scale_result: Tensor | None = None, use_fast_accum: bool = False,
    form: str | None = None,
) -> Tensor | Float8:  # fmt: skip
    """Return act(scale * conv(x, weight) + bias), in one kernel; arguments as those of `ops.conv2d` and `linear` here.

    `form`, of those that take float8, is "box", "batch" or "product". Raises as `ops.conv2d` and `linear` here.
    """
    x, weight, out_dtype = _operands("conv2d", x, weight, out_dtype, scale_result, bias, scale)
    shapes = [None if t is None else t.shape for t in (x.values, weight.values, bias, scale)]
    geometry = geometry_of("conv2d", *shapes, stride, padding, dilation, groups)
    y = kernels.forward(
        x.values.data, weight.values.data, x.scale.data, weight.scale.data, geometry, _float32(bias), act,
        scale=_float32(scale), out_dtype=out_dtype, scale_result=_data(scale_result), fast=use_fast_accum, form=form,
    )  # fmt: skip
    return _result(y, scale_result)


def _operands(
    op: str, x: Float8 | Tensor, weight: Float8 | Tensor, out_dtype: torch.dtype | None,
    scale_result: Tensor | None, *vectors: Tensor | None,
) -> tuple[Float8, Float8, torch.dtype]:  # fmt: skip
    """Return both in float8, and the dtype of the result."""
    for vector in vectors:
        if vector is not None:
            _no_gradient(op, vector)
    if not isinstance(weight, Float8):
        weight = quantize(weight)
    if scale_result is not None:
        out_dtype = out_dtype or weight.values.dtype
    if not isinstance(x, Float8):
        out_dtype = out_dtype or x.dtype
        x = quantize(x, weight.values.dtype)
    return x, weight, out_dtype or torch.float32


def _no_gradient(op: str, x: Tensor) -> None:
    if is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{op}: float8 is for inference; call under no_grad()")


def _data(x: Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.data


def _result(y: torch.Tensor, scale: Tensor | None) -> Tensor | Float8:
    return Tensor(y) if scale is None else Float8(Tensor(y), scale)


def _float32(x: Tensor | None) -> torch.Tensor | None:
    return None if x is None else to(x, torch.float32).data
