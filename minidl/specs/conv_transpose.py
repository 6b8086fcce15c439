"""The record of `conv_transpose2d`.

An output adds up at most K = C R S products (C of its group), an element of the input's gradient M R S, one of the
weight's gradient N H W, each in a chain as `conv2d` has it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.kernels.activation import Activation
from minidl.specs import bounds
from minidl.specs.base import Bad, Case, Make, OpSpec
from minidl.specs.conv import _chain, _named
from minidl.specs.linalg import _act, _after, _slope_error, sum_error

FAMILIES = ("conv_turn", "conv_few")


def _parts(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[Any, ...], Activation]:
    """x, weight, bias, (stride, padding, output_padding, groups, dilation), act."""
    x, weight, *rest = case.args
    usual: list[Any] = [None, 1, 0, 0, 1, 1, None]
    bias, stride, padding, output_padding, groups, dilation, act = [*rest, *usual[len(rest) :]]
    return x, weight, bias, (stride, padding, output_padding, groups, dilation), act


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    act: Activation = None,
) -> torch.Tensor:
    return _act(_conv(x, weight, bias, stride, padding, output_padding, groups, dilation), act)


def _conv(x: torch.Tensor, weight: torch.Tensor, bias: Any, *how: Any) -> Any:
    # torch cannot transpose a convolution of no images.
    if x.shape[0] == 0:
        one = _conv(x.new_zeros(1, *x.shape[1:]), weight, bias, *how)
        return one[:0] + 0 * (x.sum() + weight.sum())
    return F.conv_transpose2d(x, weight, bias, *how)


def _inputs(make: Make) -> Case:
    groups = make.choice([1, 1, 1, 2, 3])
    N, C, M = make.choice([2, 1, 3, 0]), make.choice([1, 3, 2, 13, 16, 32]), make.choice([2, 1, 3, 5, 12, 16])
    kernel = make.integer(1, 5), make.integer(1, 5)
    stride = make.integer(1, 3), make.integer(1, 3)
    dilation = make.integer(1, 2), make.integer(1, 2)
    ends = tuple(make.integer(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    size = make.choice([1, 2, 5, 9]), make.choice([1, 3, 4, 10])
    padding = []
    for i in range(2):
        whole = (size[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + ends[i]
        padding.append(min(make.integer(0, 3), whole // 2))
    bias = make.tensor(groups * M) if make.integer(0, 1) else None
    act = make.choice([None, "relu", ("leaky_relu", 0.25)])
    x, weight = make.tensor(N, groups * C, *size), make.tensor(groups * C, M, *kernel)
    return Case((x, weight, bias, stride, tuple(padding), ends, groups, dilation, act))


def _terms(weight: torch.Tensor, groups: int) -> tuple[int, int]:
    """The most products in an output, and the filter's taps."""
    taps = weight.shape[2] * weight.shape[3]
    return weight.shape[0] // groups * taps, taps


def _preactivation(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """z = conv_transpose(x, w) + b and its error in the accumulate type."""
    x, weight, bias, how, _ = _parts(case)
    z = _conv(x, weight, bias, *how)
    terms, taps = _terms(weight, how[3])
    error = sum_error(_conv(x.abs(), weight.abs(), None, *how), terms, _chain(terms, taps), dtype)
    return z, error if bias is None else error + bounds.acc_unit(dtype) * (z.abs() + error)


def _bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    z, error = _preactivation(case, dtype)
    return bounds.rounded(result, _after(_parts(case)[4], z, error, dtype), dtype)


def _grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    x, weight, _, how, act = _parts(case)
    slope, off = _slope_error(act, *_preactivation(case, dtype), dtype)
    dz = (dy * slope).abs()
    error = torch.zeros_like(dz) if act is None else bounds.rounded(dz, dy.abs() * off, dtype)
    error = torch.where(dz + error > torch.finfo(dtype).max, math.inf, error.nan_to_num(nan=math.inf, posinf=math.inf))
    known = dz + error
    with torch.enable_grad():
        a, w = (t.abs().requires_grad_() for t in (x, weight))
        y = _conv(a, w, None, *how)
        dx_known, dw_known = torch.autograd.grad(y, (a, w), known, retain_graph=True)
        dx_error, dw_error = torch.autograd.grad(y, (a, w), error)
    taps = weight.shape[2] * weight.shape[3]
    terms, pixels = weight.shape[1] * taps, x.shape[0] * x.shape[2] * x.shape[3]
    dx = dx_error + sum_error(dx_known, terms, _chain(terms, taps), dtype)
    dw = dw_error + sum_error(dw_known, pixels, _chain(pixels, 1), dtype)
    sums, outputs = known.sum((0, 2, 3)), dy.shape[0] * dy.shape[2] * dy.shape[3]
    db = error.sum((0, 2, 3)) + bounds.gamma(outputs + 2, bounds.acc_unit(dtype)) * sums
    db = torch.where(sums > torch.finfo(dtype).max / 2, math.inf, db)
    return tuple(
        None if g is None else bounds.rounded(g, e.nan_to_num(nan=math.inf, posinf=math.inf), dtype)
        for g, e in zip(grads, (dx, dw, db), strict=True)
    )


def _settings(*settings: Any) -> Any:
    """A call that is right but for its settings from the bias on."""
    return _named((2, 4, 4, 4), (4, 3, 3, 3), extra=settings)


CONV_TRANSPOSE2D = OpSpec(
    name="conv_transpose2d",
    op=ops.conv_transpose2d,
    reference=_reference,
    inputs=_inputs,
    bound=_bound,
    grad_bound=_grad_bound,
    differentiable=(0, 1, 2),
    families=FAMILIES,
    examples={
        "few outputs": _named((2, 16, 5, 6), (16, 3, 5, 5), (3,), extra=(2, 2, 1, 1, 1, "tanh")),
        "many channels": _named((3, 32, 4, 5), (32, 20, 4, 4), (20,), extra=(2, 1, 0, 1, 1, "relu")),
        "stride, padding and dilation": _named((2, 5, 6, 5), (5, 7, 3, 4), (7,), extra=((2, 3), (2, 1), 1, 1, (1, 2))),
        "groups": _named((2, 6, 7, 4), (6, 5, 3, 3), (10,), extra=(1, 1, 0, 2, 1, "gelu")),
        "stride above the kernel": _named((2, 3, 4, 3), (3, 4, 2, 1), (4,), extra=(3, 0, 2, 1, 1, "silu")),
        "one pixel to an image": _named((1, 17, 1, 1), (17, 9, 4, 4), extra=(None,)),
    },
    bad=(
        Bad(_named((2, 3, 4), (3, 4, 1, 1)), ValueError, r"x has shape \[2, 3, 4\].* expected x \[N, C, H, W\]"),
        Bad(_named((2, 3, 4, 4), (2, 3, 1, 1)), ValueError, "x has 3 channels, weight"),
        Bad(_named((2, 3, 4, 4), (3, 2, 1, 1), extra=(None, 1, 0, 0, 2)), ValueError, "and a multiple of groups"),
        Bad(_settings(None, 1, 0, 0, 0), ValueError, "groups is 0"),
        Bad(_settings(None, 1, 0, 0, 1.0), ValueError, "groups is 1.0"),
        Bad(_named((2, 3, 4, 4), (3, 4, 1, 1), (3,)), ValueError, r"bias has shape \[3\], expected \[4\]"),
        Bad(_settings(None, 0), ValueError, "conv_transpose2d: stride is 0, expected a whole number"),
        Bad(_settings(None, 1, -1), ValueError, "padding is -1"),
        Bad(_settings(None, 1, "same"), TypeError, "padding is 'same', expected a whole number"),
        Bad(_settings(None, 2, 0, 2), ValueError, "output_padding is 2, expected less than stride 2 or than dilation"),
        Bad(_settings(None, 1, 0, 0, 1, (1, 2, 3)), TypeError, "dilation is .*, or a pair of them"),
        Bad(_settings(None, 1, 3), ValueError, "the result would have a height of 0; use less padding than 3"),
        Bad(_named((2, 3, 0, 4), (3, 4, 1, 1)), ValueError, "neither may have a size of 0"),
        Bad(lambda make: Case((make.tensor(2, 3, 4, 4), make.tensor(3, 4, 1, 1).half())), TypeError, "convert one of"),
    ),
    exact=True,
    # A zero between the weights is multiplied in one form and not in another.
    specials=False,
)

SPECS = [CONV_TRANSPOSE2D]
