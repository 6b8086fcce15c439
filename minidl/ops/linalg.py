"""Matrix products: `matmul` as torch has it, and `linear` with bias and activation in the product's epilogue."""

from __future__ import annotations

import math
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import recordable
from minidl.kernels import activation, bias_act, check, gemm
from minidl.kernels.activation import Activation
from minidl.ops import activation_grad, elementwise, reduce
from minidl.ops.shape import diagonal, expand, reshape, squeeze, unsqueeze
from minidl.tensors import Scalar, Tensor

__all__ = ["addmm", "bmm", "dot", "linear", "matmul", "mm", "mv", "outer", "trace"]


class MatMul(Function):
    # backward's kernel; MatMul.apply replaces it under create_graph, which records the products.
    product = staticmethod(gemm.gemm)

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save(a if ctx.needs[1] else None, b if ctx.needs[0] else None)
        return gemm.gemm(a, b)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        a, b = ctx.saved
        da = cls.product(dy, b.mT) if ctx.needs[0] else None
        db = cls.product(a.mT, dy) if ctx.needs[1] else None
        return da, db


recordable(product=MatMul.apply)(MatMul)


@recordable(product=MatMul.apply, epilogue_grad=activation_grad.epilogue_grad)
class Linear(Function):
    product = staticmethod(gemm.gemm)

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: Activation
    ) -> torch.Tensor:
        name, _ = activation.parse(act)
        ctx.act, ctx.from_output = act, name in activation.FROM_OUTPUT  # which includes None
        bias = None if bias is None else bias.contiguous()
        operands = x if ctx.needs[1] else None, weight if ctx.needs[0] else None
        if ctx.from_output or not any(ctx.needs):
            y = gemm.gemm(x, weight.t(), bias, act)
            ctx.save(*operands, None if name is None else y)
            return y
        y, z = gemm.gemm(x, weight.t(), bias, act, preactivation=True)
        ctx.save(*operands, z)
        return y

    @staticmethod
    def epilogue_grad(ctx: Any, dy: torch.Tensor, saved: torch.Tensor | None, want_bias: bool) -> Any:
        saved = dy if saved is None else saved  # without an activation only its shape and dtype matter
        return bias_act.bias_act_grad(dy, saved, None, ctx.act, ctx.from_output, want_bias=want_bias)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        x, weight, saved = ctx.saved
        dz, db = cls.epilogue_grad(ctx, dy, saved, ctx.needs[2])
        dx = cls.product(dz, weight) if ctx.needs[0] else None
        dw = cls.product(dz.mT, x) if ctx.needs[1] else None
        return dx, dw, db, None


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Return the matrix product of the last two dimensions, broadcasting those before them.

    Shapes: [..., M, K] and [..., K, N] -> [..., M, N]. A vector on the left counts as one row, on the right as one
    column; the result then lacks that dimension. Raises ValueError for shapes that do not fit or a scalar, TypeError
    for different dtypes.
    """
    if input.ndim == 0 or other.ndim == 0:
        raise ValueError(
            f"matmul: got shapes {list(input.shape)} and {list(other.shape)}, expected at least one dimension each"
        )
    if input.shape[-1] != other.shape[-2:][0]:
        raise ValueError(
            f"matmul: shapes {list(input.shape)} and {list(other.shape)} do not fit: the last of the left "
            f"({input.shape[-1]}) must equal the next to last, or a vector's only one, of the right "
            f"({other.shape[-2:][0]})"
        )
    if input.ndim == 1:
        # A vector times a vector is [1], a vector times matrices [..., 1, N].
        return squeeze(matmul(unsqueeze(input, 0), other), -2 if other.ndim > 1 else 0)
    if other.ndim == 1:
        return squeeze(matmul(input, unsqueeze(other, 1)), -1)
    M, K, N = input.shape[-2], input.shape[-1], other.shape[-1]
    if other.ndim == 2:
        rows = reshape(input, math.prod(input.shape[:-1]), K)
        return reshape(MatMul.apply(rows, other), *input.shape[:-1], N)
    try:
        batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    except RuntimeError as error:
        raise ValueError(f"matmul: batches of {list(input.shape)} and {list(other.shape)} do not broadcast") from error
    count = math.prod(batch)
    left = reshape(expand(input, *batch, M, K), count, M, K)
    right = reshape(expand(other, *batch, K, N), count, K, N)
    return reshape(MatMul.apply(left, right), *batch, M, N)


def mm(input: Tensor, mat2: Tensor) -> Tensor:
    """Return `matmul` of two matrices. Raises ValueError for others."""
    return matmul(*_of_rank("mm", 2, input, mat2))


def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """Return `matmul` of two equally long batches, [B, M, K] and [B, K, N] -> [B, M, N]. Raises ValueError for
    others."""
    a, b = _of_rank("bmm", 3, input, mat2)
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: got {a.shape[0]} and {b.shape[0]} matrices, expected equally many")
    return matmul(a, b)


def _of_rank(name: str, rank: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.ndim != rank or b.ndim != rank:
        raise ValueError(f"{name}: got shapes {list(a.shape)} and {list(b.shape)}, expected {rank} dimensions each")
    return a, b


def mv(input: Tensor, vec: Tensor) -> Tensor:
    """Return a matrix times a vector. Raises ValueError for others."""
    if input.ndim != 2 or vec.ndim != 1:
        raise ValueError(f"mv: got shapes {list(input.shape)} and {list(vec.shape)}, expected a matrix and a vector")
    return matmul(input, vec)


def dot(input: Tensor, tensor: Tensor) -> Tensor:
    """Return the sum of the products of two vectors. Raises ValueError for others."""
    if input.ndim != 1 or tensor.ndim != 1:
        raise ValueError(f"dot: got shapes {list(input.shape)} and {list(tensor.shape)}, expected two vectors")
    return matmul(input, tensor)


def outer(input: Tensor, vec2: Tensor) -> Tensor:
    """Return the products of each element of one vector with each of another: [N], [M] -> [N, M]. ValueError for
    others."""
    if input.ndim != 1 or vec2.ndim != 1:
        raise ValueError(f"outer: got shapes {list(input.shape)} and {list(vec2.shape)}, expected two vectors")
    return elementwise.mul(unsqueeze(input, 1), vec2)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor:
    """Return beta input + alpha mat1 mat2; input broadcasts, and is ignored with beta 0. Raises as `mm` and `add`."""
    product = matmul(*_of_rank("addmm", 2, mat1, mat2))
    product = product if alpha == 1 else elementwise.mul(product, alpha)
    if beta == 0:
        return product
    return elementwise.add(product, input if beta == 1 else elementwise.mul(input, beta))


def trace(input: Tensor) -> Tensor:
    """Return the sum of a matrix's diagonal. Raises ValueError for others."""
    if input.ndim != 2:
        raise ValueError(f"trace: input has shape {list(input.shape)}, expected a matrix")
    return reduce.sum(diagonal(input))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, act: Activation = None) -> Tensor:
    """Return act(input weight^T + bias), in one kernel.

    Shapes: input [..., in], weight [out, in], bias [out] -> [..., out], in input's dtype.
    act: None, ("leaky_relu", slope), or a name of `kernels.activation.NAMES` or `RARE`, such as "relu" or "gelu".
    Raises ValueError for shapes that do not fit or an unknown activation, TypeError for different dtypes. With
    create_graph, backward raises RuntimeError unless the name is in `kernels.activation.FROM_OUTPUT`.
    """
    if weight.ndim != 2 or input.ndim == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: input has shape {list(input.shape)}, weight {list(weight.shape)}; "
            "expected input [..., in] and weight [out, in]"
        )
    if input.dtype != weight.dtype:
        check.same("linear", input=input, weight=weight)  # raises TypeError
    if bias is not None and list(bias.shape) != [weight.shape[0]]:
        raise ValueError(f"linear: bias has shape {list(bias.shape)}, expected [{weight.shape[0]}]")
    if input.ndim == 2:
        return Linear.apply(input, weight, bias, act)
    rows = reshape(input, math.prod(input.shape[:-1]), input.shape[-1])
    y = Linear.apply(rows, weight, bias, act)
    return reshape(y, *input.shape[:-1], weight.shape[0])
