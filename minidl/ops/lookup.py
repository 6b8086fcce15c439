"""Rows of a table looked up by index, and one-hot vectors."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import linear
from minidl.kernels import check
from minidl.kernels import lookup as kernels
from minidl.ops.conditional import where
from minidl.tensors import Tensor

__all__ = ["embedding", "one_hot"]


def _look_up(ctx: Any, weight: Tensor) -> Tensor:
    (index,) = ctx.saved
    rows: Tensor = Embedding.apply(index, weight, ctx.padding)
    return rows if ctx.padding < 0 else where(Tensor((index == ctx.padding).unsqueeze(-1)), 0, rows)


@linear(_look_up, argument=1)
class Embedding(Function):
    @staticmethod
    def forward(ctx: Any, index: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
        ctx.save(index)
        ctx.rows, ctx.padding = len(weight), padding
        return kernels.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (index,) = ctx.saved
        return None, kernels.embedding_grad(dy, index, ctx.rows, ctx.padding), None


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return weight[input] for int64 or int32 indices; the row `padding_idx` gets no gradient.

    Shapes: input of any shape, weight [V, H] -> [*, H]. The gradient is dense, and adds equal indices in their order.
    Raises TypeError for dtypes, ValueError for other shapes, and for max_norm, scale_grad_by_freq and sparse, which are
    not supported. An index out of range raises IndexError on the CPU; on a GPU its row is NaN.
    """
    for name, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if value:
            raise ValueError(f"embedding: {name} is not supported; leave it out")
    if weight.ndim != 2:
        raise ValueError(f"embedding: weight has shape {list(weight.shape)}, expected [V, H]")
    V = weight.shape[0]
    if padding_idx is not None and not -V <= check.integer("embedding", "padding_idx", padding_idx) < V:
        raise ValueError(f"embedding: padding_idx is {padding_idx}, expected a row of the {V}")
    return Embedding.apply(input, weight, -1 if padding_idx is None else padding_idx % V)


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return a 1 at the index of each class, int64: [*] -> [*, num_classes]; -1 means the largest class plus one.

    Raises TypeError unless the classes are int64, ValueError for a negative one or one too large.
    """
    if tensor.dtype != torch.int64:
        raise TypeError(f"one_hot: tensor has dtype {tensor.dtype}, expected int64")
    try:
        return Tensor(torch.nn.functional.one_hot(tensor.data, num_classes))
    except RuntimeError as error:
        raise ValueError(f"one_hot: {error}") from error
