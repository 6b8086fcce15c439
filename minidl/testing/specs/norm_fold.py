"""The spec of a batch norm folded into the layer before it."""

from __future__ import annotations

import math
from typing import Any

import torch

from minidl import ops
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case, OpSpec, refuses
from minidl.testing.specs.make import Make
from minidl.testing.specs.norm import DOUBLE


def _fold_reference(conv_weight: Any, conv_bias: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> Any:
    scale = (1 if weight is None else weight) / torch.sqrt(var + eps)
    return scale, (0 if bias is None else bias) + ((0 if conv_bias is None else conv_bias) - mean) * scale


def _fold_bound(case: Case, result: Any, dtype: torch.dtype) -> Any:
    (_, conv_bias, mean, _, _, bias, _), (scale, shift) = case.args, result
    size = (mean.abs() if conv_bias is None else mean.abs() + conv_bias.abs()) * scale.abs()
    size = size if bias is None else size + bias.abs()
    tiny = bounds.TINY[torch.float64]
    error = torch.where(size < torch.finfo(torch.float64).max / 4, DOUBLE * size + tiny, math.inf)
    return (
        bounds.rounded(scale, DOUBLE * scale.abs() + tiny, dtype),
        bounds.rounded(shift, error.nan_to_num(nan=math.inf, posinf=math.inf), dtype),
    )


def _fold_inputs(make: Make) -> Case:
    M = make.size(1, 70)
    optional = [make.tensor(M) if make.integer(0, 2) else None for _ in range(3)]
    vectors = optional[0], make.tensor(M), make.tensor(M, low=0.0), optional[1], optional[2]
    return Case((make.tensor(M, 3, 2, 2), *vectors, make.choice([1e-5, 1e-3])))


def _fold_of(make: Make) -> Case:
    vectors = make.tensor(300), make.tensor(300), make.tensor(300, low=0.0), make.tensor(300), make.tensor(300)
    return Case((make.tensor(300, 3, 1, 1), *vectors, 1e-5))


SPECS = [
    OpSpec(
        name="fold_batch_norm",
        op=ops.fold_batch_norm,
        reference=_fold_reference,
        inputs=_fold_inputs,
        bound=_fold_bound,
        families=("norm_fold",),
        examples={"all": _fold_of},
        bad=(
            refuses(
                ValueError, r"running_mean has shape \[4\], expected \[3\] for conv_weight's outputs",
                (3, 2, 1, 1), None, (4,), (4,),
            ),
        ),
    ),
]  # fmt: skip
