"""Spec of running sums.

The error of an element is at most gamma(d) times the sum of magnitudes up to it; d is the longest chain of additions
(`kernels.scan.depth`).
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import scan
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case, OpSpec, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make


def _running(x: torch.Tensor, dim: int, dtype: torch.dtype, result: torch.Tensor) -> torch.Tensor:
    total = x.abs().cumsum(dim)
    length = x.shape[dim] if x.dim() else 1
    depth = scan.depth(x.numel() // length, length, dtype) if x.numel() else 0
    error = bounds.gamma(depth, bounds.acc_unit(dtype)) * total
    return torch.where(result.isfinite(), bounds.rounded(result, bounds.or_infinite(error, total, dtype), dtype), 0.0)


def _cumsum_grad(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    x, dim = case.args
    if not x.dim():
        return (torch.zeros_like(dy),)
    return (_running(dy.flip(dim), dim, dtype, grads[0].flip(dim)).flip(dim),)


def _cumsum_inputs(make: Make) -> Case:
    shape = make.shape(1, 3)
    return Case((make.tensor(*shape), make.integer(-len(shape), len(shape) - 1)))


_cumsum = spec_factory(differentiable=(0,), families=("elementwise_tile",))

SPECS: list[OpSpec] = [
    _cumsum(
        "cumsum",
        inputs=_cumsum_inputs,
        bound=lambda case, y, dtype: _running(case.args[0], case.args[1], dtype, y),
        grad_bound=_cumsum_grad,
        examples={
            "rows": tensors((37, 65), extra=(1,)),
            "columns": tensors((65, 37), extra=(0,)),
            "middle": tensors((3, 70, 5), extra=(1,)),
            "long": tensors((2, 9001), extra=(-1,)),
            "long columns": tensors((9001, 2), extra=(0,)),
        },
        bad=(refuses(IndexError, "dim 2 is out of range for a tensor of 2", (2, 3), extra=(2,)),),
    ),
]
