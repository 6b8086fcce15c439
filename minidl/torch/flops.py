"""Formulas for torch.utils.flop_counter, equal to those of torch's convolutions and products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from minidl.torch import conv_norm as conv_norm  # an operator
from minidl.torch.registry import NAMESPACE


def _convolution(x: Any, weight: Any, *more: Any, out_shape: Any = None, **_: Any) -> int:
    out = out_shape if isinstance(out_shape[0], int) else out_shape[0]
    return conv_flop_count(x, weight, out, transposed=more[8])


def _conv_norm(x: Any, weight: Any, *more: Any, out_shape: Any = None, **_: Any) -> int:
    return conv_flop_count(x, weight, out_shape[0], transposed=more[14])


def _convolution_backward(dy: Any, x: Any, weight: Any, *more: Any, **_: Any) -> int:
    return sum(more[-1][:2]) * conv_flop_count(x, weight, dy, transposed=more[6])


def _linear(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * int(weight[0])


def _linear_backward(dy: Any, x: Any, weight: Any, *more: Any, **_: Any) -> int:
    return sum(more[-1][:2]) * 2 * math.prod(x) * int(weight[0])


def register() -> None:
    """Register the formulas with torch."""
    formulas = {
        "convolution": _convolution, "convolution_backward": _convolution_backward, "conv_norm": _conv_norm,
        "linear": _linear, "linear_backward": _linear_backward,
        "attention": lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        "attention_backward": lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(dy, q, k, v),
    }  # fmt: skip
    for name, formula in formulas.items():
        formula_of: Any = register_flop_formula(getattr(getattr(torch.ops, NAMESPACE), name))
        formula_of(formula)
