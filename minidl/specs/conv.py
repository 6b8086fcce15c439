"""The record of `conv2d`.

An output adds up K = C R S products (C of its group), an element of the input's gradient at most M R S, one of the
weight's gradient N OH OW. Every form adds a block of products at a time and then the blocks, shares of them first; what
lies outside the image adds nothing. So the chain is no longer than K, nor than a block and the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.kernels import launch
from minidl.kernels.activation import Activation
from minidl.specs import bounds
from minidl.specs.base import Bad, Case, Make, OpSpec
from minidl.specs.linalg import _act, _after, _slope_error, sum_error

FAMILIES = (
    "conv",
    "conv_flat",
    "conv_grad_weight",
    "conv_band",
    "conv_banded",
    "conv_banded_grad_weight",
    "conv_held",
    "conv_two_rows",
    "conv_turn",
)
# The most products that a compiled kernel adds in one step, with the pixels whose bands are folded after it; and the
# fewest channels or pixels that a step covers.
BLOCK, LEAST = 192, 16


def _chain(terms: int, rows: int) -> int:
    """The longest chain for sums of `terms` products that stand in `rows` stretches."""
    if launch.INTERPRETED:
        return terms + 2
    steps = rows * math.ceil(terms / max(rows, 1) / LEAST)
    return min(terms, BLOCK + 2 * steps) + 2


def _parts(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[Any, ...], Activation]:
    """x, weight, bias, (stride, padding, dilation, groups), act."""
    x, weight, *rest = case.args
    usual: list[Any] = [None, 1, 0, 1, 1, None]
    bias, stride, padding, dilation, groups, act = [*rest, *usual[len(rest) :]]
    return x, weight, bias, (stride, padding, dilation, groups), act


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    act: Activation = None,
) -> torch.Tensor:
    return _act(_conv(x, weight, bias, stride, padding, dilation, groups), act)


def _conv(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    # torch 2.11 divides by 0 where there are no images to convolve with groups.
    if x.shape[0] == 0:
        one = _conv(x.new_zeros(1, *x.shape[1:]), weight, bias, stride, padding, dilation, groups)
        return one[:0] + 0 * (x.sum() + weight.sum())
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _inputs(make: Make) -> Case:
    groups = make.choice([1, 1, 1, 2, 3])
    N, C, M = make.choice([2, 1, 3, 0]), make.choice([1, 3, 2, 13, 16, 32]), make.choice([2, 1, 5, 12, 16, 20])
    R, S = make.integer(1, 5), make.integer(1, 5)
    stride = (make.integer(1, 3), make.integer(1, 3))
    dilation = (make.integer(1, 2), make.integer(1, 2))
    padding: Any = make.choice(["numbers", "numbers", "numbers", "same", "valid"])
    low = (0, 0)
    if padding == "numbers":
        low = padding = (make.integer(0, 3), make.integer(0, 3))
    elif padding == "same":
        stride, low = (1, 1), (dilation[0] * (R - 1) // 2, dilation[1] * (S - 1) // 2)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in zip(dilation, (R, S), low, strict=True)]
    H, W = (smallest + make.choice([0, 1, 2, 5, 9]) for smallest in least)
    bias = make.tensor(groups * M) if make.integer(0, 1) else None
    act = make.choice([None, "relu", ("leaky_relu", 0.25)])
    return Case(
        (
            make.tensor(N, groups * C, H, W),
            make.tensor(groups * M, C, R, S),
            bias,
            stride,
            padding,
            dilation,
            groups,
            act,
        )
    )


def _preactivation(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """z = conv(x, w) + b and its error in the accumulate type."""
    x, weight, bias, how, _ = _parts(case)
    z = _conv(x, weight, bias, *how)
    terms = weight[0].numel() if len(weight) else 0
    total = _conv(x.abs(), weight.abs(), None, *how)
    error = sum_error(total, terms, _chain(terms, weight.shape[2] * weight.shape[3]), dtype)
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
    taps, M = weight.shape[2] * weight.shape[3], len(weight) // how[3]
    pixels = dy.numel() // max(len(weight), 1)
    dx = dx_error + sum_error(dx_known, M * taps, _chain(M * taps, taps), dtype)
    dw = dw_error + sum_error(dw_known, pixels, _chain(pixels, 1), dtype)
    sums = known.sum((0, 2, 3))
    db = error.sum((0, 2, 3)) + bounds.gamma(pixels + 2, bounds.acc_unit(dtype)) * sums
    db = torch.where(sums > torch.finfo(dtype).max / 2, math.inf, db)
    return tuple(
        None if g is None else bounds.rounded(g, e.nan_to_num(nan=math.inf, posinf=math.inf), dtype)
        for g, e in zip(grads, (dx, dw, db), strict=True)
    )


def _named(*shapes: tuple[int, ...], extra: tuple[Any, ...] = ()) -> Callable[[Make], Case]:
    return lambda make: Case((*(make.tensor(*shape) for shape in shapes), *extra))


CONV2D = OpSpec(
    name="conv2d",
    op=ops.conv2d,
    reference=_reference,
    inputs=_inputs,
    bound=_bound,
    grad_bound=_grad_bound,
    differentiable=(0, 1, 2),
    families=FAMILIES,
    examples={
        "few channels": _named((2, 1, 9, 11), (6, 1, 3, 3), (6,)),
        "many channels": _named((3, 32, 6, 5), (20, 32, 3, 3), (20,), extra=(1, 1, 1, 1, "relu")),
        "stride, padding and dilation": _named((2, 5, 13, 12), (7, 5, 3, 4), (7,), extra=((2, 3), (2, 1), (2, 1))),
        "groups": _named((2, 6, 7, 8), (9, 2, 3, 3), (9,), extra=(1, "same", 1, 3, "gelu")),
        "depthwise": _named((2, 8, 7, 7), (8, 1, 5, 5), extra=(None, 1, 2, 1, 8, "tanh")),
        "one pixel": _named((1, 17, 1, 1), (3, 17, 1, 1), (3,), extra=(1, 0, 1, 1, "silu")),
        "kernel larger than the image": _named((2, 3, 2, 3), (4, 3, 5, 5), extra=(None, 1, 2)),
    },
    bad=(
        Bad(_named((2, 3, 4), (4, 3, 1, 1)), ValueError, r"x has shape \[2, 3, 4\].* expected x \[N, C, H, W\]"),
        Bad(_named((2, 3, 4, 4), (4, 2, 1, 1)), ValueError, "x has 3 channels, weight"),
        Bad(_named((2, 4, 4, 4), (3, 2, 1, 1), extra=(None, 1, 0, 1, 2)), ValueError, "a multiple of groups"),
        Bad(_named((2, 3, 4, 4), (4, 3, 1, 1), extra=(None, 1, 0, 1, 0)), ValueError, "groups is 0"),
        Bad(
            _named((2, 3, 4, 4), (4, 3, 5, 1)), ValueError, "kernel's height 5 .* is above that of the padded input, 4"
        ),
        Bad(_named((2, 3, 4, 4), (4, 3, 1, 1), (3,)), ValueError, r"bias has shape \[3\], expected \[4\]"),
        Bad(_named((2, 3, 4, 4), (4, 3, 1, 1), extra=(None, 0)), ValueError, "stride is 0, expected a whole number"),
        Bad(_named((2, 3, 4, 4), (4, 3, 1, 1), extra=(None, 2**40)), ValueError, "stride is .* from 1 to 1073741824"),
        Bad(_named((2, 3, 4, 4), (4, 3, 1, 1), extra=(None, 1, 0, 1, 1.0)), ValueError, "groups is 1.0"),
        Bad(_named((2, 3, 4, 4), (4, 3, 1, 1), extra=(None, 1, -1)), ValueError, "padding is -1"),
        Bad(_named((2, 3, 4, 4), (4, 3, 1, 1), extra=(None, 1, "full")), ValueError, 'expected "same", "valid"'),
        Bad(_named((2, 3, 4, 4), (4, 3, 3, 3), extra=(None, 2, "same")), ValueError, 'padding "same" is for stride 1'),
        Bad(_named((2, 3, 4, 4), (4, 3, 1, 1), extra=(None, 1, 0, (1, 2, 3))), TypeError, "or a pair of them"),
        Bad(
            _named((2, 3, 4, 4), (4, 3, 1, 1), extra=(None, True)), TypeError, "stride is True, expected a whole number"
        ),
        Bad(_named((2, 3, 0, 4), (4, 3, 1, 1)), ValueError, "neither may have a size of 0"),
        Bad(lambda make: Case((make.tensor(2, 3, 4, 4), make.tensor(4, 3, 1, 1).half())), TypeError, "convert one of"),
    ),
    exact=True,
    # A zero of the padding is multiplied in one form and not in another: tests/kernels/test_conv.py has the rule.
    specials=False,
)

SPECS = [CONV2D]
