"""The spec of cross-entropy of a linear layer.

If the logits of a row have errors up to m, its loss changes by at most 2 Q m, Q the sum of its shares: its gradient
Q p - q adds up to 2 Q in magnitude. In that gradient p changes by at most p (exp(2 m) - 1). Gradients of input and
weight are products of its stored value; in float16 they are divided after rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.kernels.linear_cross_entropy import rows_at_once
from minidl.testing.specs import bounds, products
from minidl.testing.specs.base import Bad, Case, integers, refuses, spec_factory, tensors
from minidl.testing.specs.cross_entropy import cross_entropy_grad_bound, divisor_of, row_losses, shares_of
from minidl.testing.specs.linalg import product_error
from minidl.testing.specs.loss import options, positive, reduced, reduction
from minidl.testing.specs.make import Make
from minidl.testing.specs.softmax import row_tile


def _op(input: Any, linear_weight: Any, target: Any, linear_bias: Any = None, **more: Any) -> Any:
    return ops.linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, **more)


def _reference(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, bias: Any = None, **more: Any) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w, bias), target, **more)


def _logits(case: Case, dtype: torch.dtype) -> tuple[Case, torch.Tensor, torch.Tensor]:
    """Return the case of cross-entropy of all rows, the largest error of each row's logits, and x as a matrix."""
    x, w, target, *bias = case.args
    linear_bias = bias[0] if bias else None
    x, target = (x, target) if x.dim() == 2 else (x.unsqueeze(0), target.unsqueeze(0))
    z = F.linear(x, w, linear_bias)
    error = product_error(x, w.T, len(x), len(w), w.shape[1], dtype)
    error = bounds.rounded(z, products.with_bias(z, error, linear_bias, dtype), dtype)
    # Logits are stored in the dtype, like the output of a linear layer.
    error = torch.where(z.abs() + error > torch.finfo(dtype).max, math.inf, error)
    return Case((z, target), case.kwargs), error.amax(1, keepdim=True), x


def _bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    flat, m, x = _logits(case, dtype)
    if x.shape[0] == 0:
        return torch.zeros_like(result)
    q, axis, counted = shares_of(flat)
    loss, error = row_losses(flat, dtype)
    # 2.5 instead of 2 covers the growth of the other errors by the errors of logits.
    error = error + torch.where(counted, 2.5 * q.abs().sum(axis, keepdim=True) * m, 0.0).squeeze(axis)
    R, N = q.shape
    tile = row_tile("cross_entropy", min(R, rows_at_once(R, N)), N, dtype)
    total = reduced(flat, loss, error, divisor_of(flat), dtype, tile["BLOCK_M"])
    return total.view(result.shape)


def _grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    flat, m, x = _logits(case, dtype)
    if x.shape[0] == 0:
        return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)
    w = case.args[1].abs()
    kind = options(case)["reduction"]
    dy = dy.reshape(-1) if kind == "none" else dy
    z = flat.args[0].detach().requires_grad_()
    (dz,) = torch.autograd.grad(F.cross_entropy(z, flat.args[1], **case.kwargs), z, dy)
    divisor = divisor_of(flat) if kind == "mean" else 1.0
    factor = (dy.unsqueeze(1) if kind == "none" else dy).abs() / divisor
    q, axis, counted = shares_of(flat)
    p = q.abs().sum(axis, keepdim=True) * z.detach().softmax(1)
    (off,) = cross_entropy_grad_bound(flat, dy, (dz,), dtype)
    off = off + torch.where(counted, (1 + 8 * bounds.UNIT[dtype]) * factor * p * torch.expm1(2 * m), 0.0)
    off = off.nan_to_num(nan=math.inf, posinf=math.inf)
    magnitude, (R, N), K = dz.abs() + off, dz.shape, w.shape[1]
    most = 1 + (float(factor.max()) if factor.numel() else 0.0)
    chunks = bounds.gamma(-(-R // rows_at_once(R, N)) + 1, bounds.acc_unit(dtype))
    dw = magnitude.T @ x.abs()
    errors = [
        (off @ w + most * product_error(magnitude, w, R, K, N, dtype)).view(case.args[0].shape),
        off.T @ x.abs() + most * product_error(magnitude.T, x, N, K, R, dtype) + chunks * dw,
        products.bias_error(magnitude, off, (0,), dtype) + chunks * magnitude.sum(0),
    ]
    # Rounded when computed, and again after dy and, in float16, the divisor.
    rounded_errors = (
        None if grad is None else bounds.rounded(grad, error, dtype) + most * bounds.TINY[dtype]
        for grad, error in zip(grads, errors, strict=False)
    )  # fmt: skip
    return products.gradient_bounds(
        grads, [torch.zeros(()) if each is None else each for each in rounded_errors], dtype
    )


def _inputs(make: Make) -> Case:
    R, K, N = make.size(0, 20), make.size(1, 30), make.size(1, 30)
    settings: dict[str, Any] = {"reduction": reduction(make), "label_smoothing": make.choice([0.0, 0.1])}
    if make.integer(0, 1):
        settings["weight"] = positive(N)(make)
    bias = make.tensor(N) if make.integer(0, 1) else None
    if make.integer(0, 3) == 0:
        return Case((make.tensor(R, K), make.tensor(N, K), make.tensor(R, N, low=0.125, high=1.0), bias), settings)
    settings["ignore_index"] = make.choice([-100, 0])
    rows = [R][: make.integer(0, 1)]
    return Case((make.tensor(*rows, K), make.tensor(N, K), make.integers(*rows, low=0, high=N - 1), bias), settings)


SPECS = [
    spec_factory()(
        "linear_cross_entropy",
        op=_op,
        reference=_reference,
        inputs=_inputs,
        bound=_bound,
        grad_bound=_grad_bound,
        differentiable=(0, 1, 3),
        families=("cross_entropy", "cross_entropy_loop", "loss"),
        examples={
            "few classes": tensors((40, 16), (10, 16), integers(40, high=9), (10,)),
            "many classes": tensors((3, 8), (9001, 8), integers(3, high=9000), None, label_smoothing=0.1),
            "rows": tensors((20, 16), (9, 16), integers(20, high=8), (9,), reduction="none"),
        },
        bad=(
            refuses(ValueError, r"input is \[4, 3\] and linear_weight \[5, 4\]", (4, 3), (5, 4), integers(4)),
            refuses(ValueError, "flatten", (2, 4, 3), (5, 3), integers(2, 4)),
            refuses(ValueError, r"linear_bias has shape \[4\]", (4, 3), (5, 3), integers(4), (4,)),
            refuses(ValueError, r"linear_cross_entropy: target has shape \[3\]", (4, 3), (5, 3), integers(3)),
            Bad(tensors((4, 3), (5, 3), integers(4), reduction="max"), ValueError, "unknown reduction 'max'"),
        ),
    ),
]
