"""The spec of a bias with an activation."""

from __future__ import annotations

from typing import Any

import torch

from minidl import ops
from minidl.kernels import bias_act
from minidl.testing.specs import bounds
from minidl.testing.specs.activation import ACTS, apply, gradient_error, output_error
from minidl.testing.specs.base import Case, integers, of, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make


def _bias_act_inputs(make: Make) -> Case:
    shape = make.shape(1, 3)
    bias = None if make.integer(0, 4) == 0 else make.tensor(shape[-1])
    return Case((make.tensor(*shape), bias, make.choice(ACTS)))


def _z(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, b = case.args[:2]
    z = x if b is None else x + b
    return z, torch.zeros_like(z) if b is None else bounds.acc_unit(dtype) * z.abs()


def _bias_act_error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    z, z_error = _z(case, dtype)
    # If x + b overflows, the result may overflow, too.
    return bounds.or_infinite(output_error(z, z_error, case.arguments(ops.bias_act)[2], dtype), z.abs(), dtype)


def _bias_act_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    z, z_error = _z(case, dtype)
    error_x = bounds.or_infinite(gradient_error(dy, z, z_error, case.arguments(ops.bias_act)[2], dtype), z.abs(), dtype)
    dx, db = grads
    dx_bound = bounds.rounded(dx, error_x, dtype)
    if db is None:
        return dx_bound, None
    # The bias sums dx before it is rounded.
    N = dx.shape[-1]
    rows = dx.numel() // max(N, 1)
    total = (dx.abs() + error_x).reshape(rows, N).sum(0)
    chain = max(bias_act.depth(rows, N, dtype), 1)
    error = error_x.reshape(rows, N).sum(0) + bounds.gamma(chain, bounds.acc_unit(dtype)) * total
    return dx_bound, bounds.rounded(db, bounds.or_infinite(error, total, dtype), dtype)


SPECS = [
    spec_factory()(
        "bias_act",
        reference=lambda x, b, act="relu": apply(x if b is None else x + b, act),
        inputs=_bias_act_inputs,
        bound=bounds.off_by(_bias_act_error),
        grad_bound=_bias_act_grad,
        differentiable=(0, 1),
        families=("bias_act", "bias_act_grad"),
        examples={
            "relu": tensors((37, 70), (70,), extra=("relu",)),
            "gelu": tensors((70, 5), (5,), extra=("gelu",)),
            "no activation": tensors((2, 7, 40), (40,), extra=(None,)),
            "wide": tensors((3, 1030), (1030,), extra=("tanh",)),
            "padded rows": lambda make: Case((make.tensor(37, 40)[:, :33], make.tensor(33), "silu")),
            "transposed": lambda make: Case((make.tensor(33, 37).t(), make.tensor(33), "sigmoid")),
            "one bias": lambda make: Case((make.tensor(37, 40), make.tensor(1).expand(40), "gelu_tanh")),
        },
        bad=(
            refuses(ValueError, r"bias has shape \[3\], expected \[4\], the last size of x \[2, 4\]", (2, 4), (3,)),
            refuses(ValueError, "'swish'; known: relu, leaky_relu", (2, 4), (4,), extra=("swish",)),
            refuses(ValueError, "activation 'tanh' takes no slope", (2, 4), (4,), extra=(("tanh", 0.5),)),
            refuses(
                TypeError,
                "x is torch.float32 and b is torch.float64; convert one of them",
                (2, 4),
                of(torch.float64, 4),
            ),
            refuses(TypeError, "x has dtype torch.int64", integers(3), None),
        ),
    ),
]
