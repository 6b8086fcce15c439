"""The spec of rows looked up by index, which are exact; the gradient is a sum for each row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case, OpSpec, integers, outside, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make


def _inputs(make: Make) -> Case:
    V, shape = make.size(1, 20), make.shape(0, 3, 0, 9)
    padding = make.choice([None, 0, -1])
    return Case((make.integers(*shape, low=0, high=V - 1), make.tensor(V, make.size(1, 40))), {"padding_idx": padding})


def _grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    index, _ = case.args
    (dw,) = grads
    at, rows = index.reshape(-1), dy.reshape(-1, dy.shape[-1]).abs()
    total = torch.zeros_like(dw).index_add_(0, at, rows)
    most = int(torch.bincount(at, minlength=1).max()) if at.numel() else 0
    error = bounds.gamma(most, bounds.acc_unit(dtype)) * total + most * bounds.TINY[launch.acc_torch(dtype)]
    return (bounds.rounded(dw, bounds.or_infinite(error, total, dtype), dtype),)


SPECS: list[OpSpec] = [
    spec_factory()(
        "embedding",
        reference=F.embedding,
        inputs=_inputs,
        bound=lambda case, y, dtype: torch.zeros_like(y),
        grad_bound=_grad_bound,
        differentiable=(1,),
        families=("elementwise_tile",),
        examples={
            "words": tensors(integers(7, 60, high=36), (37, 70), padding_idx=0),
            "one word": tensors(integers(300, high=0), (5, 33)),
        },
        bad=(
            refuses(TypeError, "input has dtype torch.float32, expected int64 or int32 indices", (3,), (4, 5)),
            refuses(ValueError, r"weight has shape \[4\], expected \[V, H\]", integers(3, high=3), (4,)),
            refuses(ValueError, "padding_idx is 4, expected a row of the 4", integers(3), (4, 5), padding_idx=4),
            refuses(ValueError, "max_norm is not supported", integers(3, high=3), (4, 5), max_norm=1.0),
            outside("input holds 4, expected indices from 0 to 3", tensors(integers(3, low=4, high=4), (4, 5))),
        ),
    ),
]
