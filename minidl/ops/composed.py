"""Functions with torch's names that are made of other operations, and torch's second names for operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from minidl.kernels import check
from minidl.ops import shape, unary
from minidl.ops.activation import elu, sigmoid, tanh
from minidl.ops.compare import ge, gt, isinf, isnan, le, lt, ne
from minidl.ops.conditional import clamp, where
from minidl.ops.elementwise import add, div, maximum, mul, sub
from minidl.ops.inplace import apply_in_place
from minidl.ops.join import cat
from minidl.ops.linalg import bmm, dot, matmul
from minidl.ops.rearrange import chunk, flip
from minidl.ops.resample import pad
from minidl.ops.scatter_gather import index_select
from minidl.ops.shape import clone, expand, flatten, reshape, to, transpose, unsqueeze, wide
from minidl.tensors import Scalar, Tensor

__all__ = [
    "absolute", "addcdiv", "addcmul", "baddbmm", "celu", "concat", "concatenate", "deg2rad", "diag", "divide", "fliplr",
    "flipud", "frac", "glu", "greater", "greater_equal", "hardshrink", "inner", "kron", "less", "less_equal",
    "logaddexp", "logit", "multiply", "nan_to_num", "negative", "not_equal", "rad2deg", "repeat_interleave", "rot90",
    "selu", "softshrink", "softsign", "subtract", "tanhshrink", "threshold", "true_divide", "vdot", "xlogy",
]  # fmt: skip

absolute, negative, multiply, subtract, divide, true_divide = unary.abs, unary.neg, mul, sub, div, div
concat = concatenate = cat
greater, greater_equal, less, less_equal, not_equal = gt, ge, lt, le, ne

# Klambauer et al., Self-normalizing neural networks, arXiv 1706.02515.
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def frac(input: Tensor) -> Tensor:
    """Return input less its whole part; it has the sign of input."""
    return sub(input, unary.trunc(input))


def deg2rad(input: Tensor) -> Tensor:
    """Return degrees in radians."""
    return mul(input, math.pi / 180)


def rad2deg(input: Tensor) -> Tensor:
    """Return radians in degrees."""
    return mul(input, 180 / math.pi)


def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Scalar = 1) -> Tensor:
    """Return input + value tensor1 tensor2, broadcast."""
    return _wide(lambda x, a, b: add(x, mul(a, b), alpha=value), input, tensor1, tensor2)


def addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Scalar = 1) -> Tensor:
    """Return input + value tensor1 / tensor2, broadcast."""
    return _wide(lambda x, a, b: add(x, div(a, b), alpha=value), input, tensor1, tensor2)


def _wide(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return function(*tensors), where tensors of one 16-bit dtype are computed in float32, as products overflow."""
    dtype = tensors[0].dtype
    if dtype not in (torch.float16, torch.bfloat16) or any(x.dtype != dtype for x in tensors):
        return function(*tensors)
    return to(function(*map(wide, tensors)), dtype)


def logaddexp(input: Tensor, other: Tensor) -> Tensor:
    """Return log(e^input + e^other), without overflow, broadcast."""
    # Equal infinities have no difference.
    difference = where(input == other, 0.0, sub(input, other))
    return add(maximum(input, other), unary.log1p(unary.exp(unary.neg(unary.abs(difference)))))


def xlogy(input: Tensor, other: Tensor) -> Tensor:
    """Return input log(other), and 0 where input is 0 unless other is NaN; broadcast."""
    zero = (input == 0) & (le(other, 0) | isinf(other))  # elsewhere log(other) is the gradient of input
    return where(zero, 0.0, mul(input, unary.log(where(zero, 1.0, other))))


def logit(input: Tensor, eps: float | None = None) -> Tensor:
    """Return log(input / (1 - input)), of input limited to [eps, 1 - eps] if eps is set; NaN outside [0, 1], where the
    gradient is 1 / (input (1 - input))."""
    x = input if eps is None else clamp(input, eps, 1 - eps)
    return sub(unary.log(x), unary.log1p(unary.neg(x)))


def nan_to_num(
    input: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """Return input with numbers for NaN (default: 0) and for infinities (default: the largest and smallest of the
    dtype). Their gradient is 0."""
    if not input.dtype.is_floating_point:
        return clone(input)
    limits = torch.finfo(input.dtype)
    infinite = isinf(input)
    x = where(isnan(input), 0.0 if nan is None else nan, input)
    x = where(infinite & (input > 0), limits.max if posinf is None else posinf, x)
    return where(infinite & (input < 0), limits.min if neginf is None else neginf, x)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """Return input where it is above 0, else alpha (exp(input / alpha) - 1). Raises ValueError for an alpha of 0."""
    if alpha == 0:
        raise ValueError("celu: alpha is 0, expected another number")
    # Only what is below 0 is divided: a large number over a small alpha is infinite.
    return apply_in_place(
        lambda x: where(x > 0, x, mul(unary.expm1(div(where(x > 0, 0.0, x), alpha)), alpha)), input, inplace
    )


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """Return 1.0507 elu(input) with an alpha of 1.6733 (Klambauer et al., arXiv 1706.02515)."""
    return apply_in_place(lambda x: mul(elu(x, SELU_ALPHA), SELU_SCALE), input, inplace)


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """Return a sigmoid(b) of the two halves a and b of input along `dim`. Raises ValueError for an odd size."""
    if input.ndim == 0 or input.shape[dim] % 2:
        raise ValueError(f"glu: input has shape {list(input.shape)}, expected an even size of dimension {dim}")
    a, b = chunk(input, 2, dim)
    return mul(a, sigmoid(b))


def softsign(input: Tensor) -> Tensor:
    """Return input / (1 + |input|)."""
    return div(input, add(unary.abs(input), 1))


def tanhshrink(input: Tensor) -> Tensor:
    """Return input - tanh(input)."""
    return sub(input, tanh(input))


def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """Return input where |input| is above lambd, else 0; NaN stays NaN."""
    return where(le(unary.abs(input), lambd), 0.0, input)


def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """Return input moved by lambd towards 0, at most to 0. Raises ValueError for a lambd below 0."""
    if lambd < 0:
        raise ValueError(f"softshrink: lambd is {lambd}, expected at least 0")
    return where(le(unary.abs(input), lambd), 0.0, sub(input, mul(unary.sign(input), lambd)))


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """Return input where it is above the threshold, else `value`; NaN stays NaN."""
    return apply_in_place(lambda x: where(le(x, threshold), value, x), input, inplace)


def inner(input: Tensor, other: Tensor) -> Tensor:
    """Return the sums of products along the last dimensions: [..., K], [..., K] -> [..., ...]. A scalar multiplies.

    Raises ValueError for different last sizes.
    """
    if input.ndim == 0 or other.ndim == 0:
        return mul(input, other)
    K = input.shape[-1]
    if other.shape[-1] != K:
        raise ValueError(f"inner: input has shape {list(input.shape)}, other {list(other.shape)}: last sizes differ")
    rows, columns = (reshape(x, math.prod(x.shape[:-1]), K) for x in (input, other))
    product = matmul(rows, transpose(columns, 0, 1))
    return reshape(product, *input.shape[:-1], *other.shape[:-1])


def vdot(input: Tensor, other: Tensor) -> Tensor:
    """Return `dot` of real vectors."""
    return dot(input, other)


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor:
    """Return beta input + alpha batch1 batch2 of [B, N, K] and [B, K, M]; without input if beta is 0."""
    product = bmm(batch1 if alpha == 1 else mul(batch1, alpha), batch2)  # the product alone may overflow
    return product if beta == 0 else add(product, input if beta == 1 else mul(input, beta))


def kron(input: Tensor, other: Tensor) -> Tensor:
    """Return the Kronecker product: blocks of `other`, each times one element of input."""
    rank = max(input.ndim, other.ndim)
    a_shape, b_shape = ([1] * (rank - x.ndim) + list(x.shape) for x in (input, other))
    left = [size for n in a_shape for size in (n, 1)]
    right = [size for n in b_shape for size in (1, n)]
    product = mul(reshape(input, *left), reshape(other, *right)) if rank else mul(input, other)
    return reshape(product, *(m * n for m, n in zip(a_shape, b_shape, strict=True)))


def diag(input: Tensor, diagonal: int = 0) -> Tensor:
    """Return the matrix with a vector on its diagonal, zeros elsewhere, or the diagonal of a matrix.

    Raises ValueError for another number of dimensions.
    """
    if input.ndim == 2:
        return shape.diagonal(input, diagonal)
    if input.ndim != 1:
        raise ValueError(f"diag: input has shape {list(input.shape)}, expected a vector or a matrix")
    # Each number with N zeros after it: N + 1 numbers later, in a row of N, it is one row down and one column right.
    N = len(input)
    rows = flatten(pad(unsqueeze(input, 1), (0, N)))[: N * N]
    up, right = max(-diagonal, 0), max(diagonal, 0)
    return pad(reshape(rows, N, N), (right, up, up, right))


def fliplr(input: Tensor) -> Tensor:
    """Return the columns (dimension 1) in reverse order. Raises IndexError for fewer than two dimensions."""
    return flip(input, 1)


def flipud(input: Tensor) -> Tensor:
    """Return the rows (dimension 0) in reverse order. Raises IndexError for a scalar."""
    return flip(input, 0)


def rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Return input turned k times by 90 degrees, from the first of `dims` towards the second.

    Raises ValueError unless `dims` are two different dimensions.
    """
    first, second = dims if len(dims) == 2 else (0, 0)
    if input.ndim < 2 or first % input.ndim == second % input.ndim:
        raise ValueError(f"rot90: dims are {dims}, expected two different dimensions")
    turns = k % 4
    if turns == 2:
        return flip(input, first, second)
    if turns == 1:
        return transpose(flip(input, second), first, second)
    return flip(transpose(input, first, second), second) if turns else clone(input)


def repeat_interleave(
    input: Tensor, repeats: int | Tensor, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Return each element `repeats` times, one after another, along `dim` (default: of the flattened input).

    repeats: a number, or a vector of integers with one for each element along `dim`. output_size, the sum of these, is
    not needed. Raises TypeError for another type, ValueError for a negative number or another length.
    """
    x, dim = (flatten(input), 0) if dim is None else (input, check.axis("repeat_interleave", dim, input.ndim))
    if isinstance(repeats, Tensor) and (repeats.numel() != 1 or repeats.dtype.is_floating_point):
        if repeats.ndim != 1 or len(repeats) != x.shape[dim] or repeats.dtype not in (torch.int32, torch.int64):
            expected = f"expected [{x.shape[dim]}] integers"
            raise ValueError(f"repeat_interleave: repeats is {repeats.dtype} {list(repeats.shape)}, {expected}")
        return index_select(x, dim, Tensor(torch.repeat_interleave(repeats.data)))
    repeats = int(repeats.data) if isinstance(repeats, Tensor) else repeats
    if isinstance(repeats, bool) or not isinstance(repeats, int):
        raise TypeError(f"repeat_interleave: repeats is of type {type(repeats).__name__}, expected an int or a Tensor")
    if repeats < 0:
        raise ValueError(f"repeat_interleave: repeats is {repeats}, expected at least 0")
    sizes = list(x.shape)
    copies = expand(unsqueeze(x, dim + 1), *sizes[: dim + 1], repeats, *sizes[dim + 1 :])
    return reshape(copies, *sizes[:dim], sizes[dim] * repeats, *sizes[dim + 1 :])
