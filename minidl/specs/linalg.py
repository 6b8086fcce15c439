"""Records of matrix products.

The result of a product is off by at most gamma(d) |A| |B|, where d is the longest chain of additions of the tiled loop,
plus what float32 products on tensor cores leave out of each term. The gradients are products of the same kind, whose
|A| |B| follows from the reference at absolute values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.kernels import activation, launch
from minidl.kernels.activation import Activation
from minidl.specs import bounds
from minidl.specs.base import Bad, Case, Make, OpSpec

FAMILIES = ("gemm", "gemm_pointer", "gemm_sum")


def chain(M: int, N: int, K: int, dtype: torch.dtype) -> int:
    """Additions that one element of an [M, K] x [K, N] product goes through at most, in any form."""
    longest = 0
    for family, floor in (("gemm", 16), ("gemm_pointer", 16), ("gemm_thin", 1)):
        block = launch.tile(family, dtype, floor=floor, precision=launch.precision(dtype), M=M, N=N, K=K)["BLOCK_K"]
        # The blocks of a share are added up, then the shares; there are no more shares than blocks.
        longest = max(longest, min(K, block + 2 * math.ceil(K / block)))
    return longest + 2


def product_error(total: torch.Tensor, M: int, N: int, K: int, dtype: torch.dtype) -> torch.Tensor:
    """The error of a product before it is rounded, for total = |A| |B|; infinite where a partial sum may overflow."""
    return sum_error(total, K, chain(M, N, K, dtype), dtype)


def sum_error(total: torch.Tensor, K: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """The error of sums of K products, for the sum of their magnitudes and the longest chain of additions."""
    left_out = 0.0
    if dtype == torch.float32 and not launch.INTERPRETED:
        # The parts of a number that the products leave out, if parts are cut to 11 bits and not rounded.
        left_out = {"tf32x3": 3 * 2.0**-20, "tf32": 2 * 2.0**-10 + 2.0**-20, "ieee": 0.0}[launch.float32_precision()]
    relative = bounds.gamma(depth, bounds.dot_unit(dtype)) + left_out
    # Products of numbers near the smallest normal one may vanish, as may such numbers themselves.
    flushed = K * bounds.TINY[launch.acc_torch(dtype)] * (1 + 2 * float(total.sqrt().max()) if total.numel() else 1)
    largest = torch.finfo(launch.acc_torch(dtype)).max
    return torch.where(total > largest / 2, math.inf, total * relative + flushed)


def _numbers(shape: torch.Size) -> int:
    return math.prod(shape)


def _matmul_inputs(make: Make) -> Case:
    M, K, N = make.size(0, 40), make.size(0, 40), make.size(0, 40)
    form = make.choice(["matrices", "vector left", "vector right", "vectors", "batch left", "batches"])
    batch = [make.size(0, 3) for _ in range(make.integer(1, 2))]
    if form == "matrices":
        return Case((make.tensor(M, K), make.tensor(K, N)))
    if form == "vector left":
        return Case((make.tensor(K), make.tensor(*batch[: make.integer(0, 1)], K, N)))
    if form == "vector right":
        return Case((make.tensor(*batch[: make.integer(0, 1)], M, K), make.tensor(K)))
    if form == "vectors":
        return Case((make.tensor(K), make.tensor(K)))
    if form == "batch left":
        return Case((make.tensor(*batch, M, K), make.tensor(K, N)))
    right = [make.choice([size, 1]) for size in batch][make.integer(0, 1) :]
    return Case((make.tensor(*batch, M, K), make.tensor(*right, K, N)))


def _matmul_sizes(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    return (a.shape[-2] if a.dim() > 1 else 1), (b.shape[-1] if b.dim() > 1 else 1), a.shape[-1]


def _matmul_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    a, b = case.args
    rows, N, K = _matmul_sizes(a, b)
    if b.dim() == 2:
        rows = _numbers(a.shape[:-1])
    return bounds.rounded(result, product_error(torch.matmul(a.abs(), b.abs()), rows, N, K, dtype), dtype)


def _matmul_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    a, b = (t.abs().requires_grad_() for t in case.args)
    totals = torch.autograd.grad(torch.matmul(a, b), (a, b), dy.abs())
    rows, N, K = _matmul_sizes(a, b)
    # Batches that share an operand are multiplied one by one, rounded, and then added.
    batch = _numbers(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    if b.dim() == 2:
        rows, batch = _numbers(a.shape[:-1]), 1
    out = []
    for grad, total, (m, n, k) in zip(grads, totals, ((rows, K, N), (K, N, rows)), strict=True):
        error = product_error(total, m, n, k, dtype)
        if batch > 1 and grad.shape[:-2] != dy.shape[:-2]:
            error = error + total * (bounds.unit(dtype) + bounds.gamma(batch + 1, bounds.acc_unit(dtype)))
            error = error + batch * bounds.TINY[dtype]
            error = torch.where(total > torch.finfo(dtype).max / 2, math.inf, error)
        out.append(bounds.rounded(grad, error, dtype))
    return tuple(out)


_ACTIVATIONS: tuple[Activation, ...] = (
    None, "relu", "leaky_relu", ("leaky_relu", 0.25), "sigmoid", "tanh", "gelu", "gelu_tanh", "silu",
)  # fmt: skip
# sup |act'| and sup |act''|.
_SLOPES = {None: 1.0, "relu": 1.0, "sigmoid": 0.25, "tanh": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
_CURVATURES = {"sigmoid": 0.1, "tanh": 0.77, "gelu": 0.8, "gelu_tanh": 0.86, "silu": 0.5}


def _act(z: torch.Tensor, act: Activation) -> torch.Tensor:
    name, slope = activation.parse(act)
    if name is None:
        return z
    if name == "leaky_relu":
        return F.leaky_relu(z, slope)
    if name == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    return getattr(torch, name)(z) if name in ("sigmoid", "tanh") else getattr(F, name)(z)


def _evaluation(name: str | None, z: torch.Tensor, y: torch.Tensor, u: float) -> torch.Tensor:
    """The error of evaluating an activation at exactly z."""
    if name is None or name == "relu":
        return torch.zeros_like(z)
    if name == "leaky_relu":
        return u * y.abs()
    # An exponential of z is off by |z| u, besides a few units for each step; gelu's 1 + erf cancels for z < 0.
    size = z.abs() if name in ("gelu", "gelu_tanh", "silu") else y.abs()
    if name == "tanh" and u == bounds.UNIT[torch.float64]:
        size = torch.ones_like(y)  # 1 - e cancels near 0; only float32 has a series there
    return u * (16 * size + 2 * z.abs() * y.abs().clamp(max=1))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, act: Activation = None) -> Any:
    return _act(F.linear(x, weight, bias), act)


def _linear_inputs(make: Make) -> Case:
    shape = [make.size(0, 40) for _ in range(make.integer(1, 2))][: make.integer(0, 2)]
    K, N = make.size(1, 40), make.size(1, 40)
    bias = make.tensor(N) if make.integer(0, 1) else None
    return Case((make.tensor(*shape, K), make.tensor(N, K), bias, make.choice(_ACTIVATIONS)))


def _parts(case: Case) -> tuple[Any, ...]:
    x, weight, *rest = case.args
    bias, act = (*rest, None, None)[:2]
    return x, weight, bias, act


def _preactivation(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """z = x W^T + b and its error in the accumulate type."""
    x, weight, bias, _ = _parts(case)
    z = F.linear(x, weight, bias)
    total = F.linear(x.abs(), weight.abs())
    error = product_error(total, _numbers(x.shape[:-1]), weight.shape[0], weight.shape[1], dtype)
    return z, error if bias is None else error + bounds.acc_unit(dtype) * (z.abs() + error)


def _after(act: Activation, z: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The error of act(z) in the accumulate type for z known up to `error`."""
    name, slope = activation.parse(act)
    steepest = max(1.0, slope) if name == "leaky_relu" else _SLOPES[name]
    return steepest * error + _evaluation(name, z, _act(z, act), bounds.acc_unit(dtype))


def _linear_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    z, error = _preactivation(case, dtype)
    return bounds.rounded(result, _after(_parts(case)[3], z, error, dtype), dtype)


def _slope_error(
    act: Activation, z: torch.Tensor, error: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """act'(z) for z known up to `error`, and its error when it is found from z or act(z) kept in `dtype`.

    The error is infinite where what is kept overflows.
    """
    name, slope = activation.parse(act)
    u = bounds.acc_unit(dtype)
    with torch.enable_grad():
        at = z.clone().requires_grad_()
        (exact,) = torch.autograd.grad(_act(at, act).sum(), at)
    if name is None:
        return exact, torch.zeros_like(z)
    if name in ("relu", "leaky_relu"):
        # The side of 0 is certain beyond the error of z.
        other = 1.0 if name == "relu" else abs(1.0 - slope)
        return exact, torch.where(z.abs() <= error + bounds.TINY[dtype], other, u * exact)
    if name in activation.FROM_OUTPUT:
        kept = bounds.rounded(_act(z, act), _after(act, z, error, dtype), dtype)
        return exact, (2 if name == "tanh" else 1) * kept + 4 * u
    kept = bounds.rounded(z, error, dtype)
    off = _CURVATURES[name] * kept + 16 * u * (1 + z.abs())
    return exact, torch.where(z.abs() + kept > torch.finfo(dtype).max, math.inf, off)


def _linear_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    x, weight, _, act = _parts(case)
    slope, off = _slope_error(act, *_preactivation(case, dtype), dtype)
    x, dy, slope, off = (t.reshape(_numbers(t.shape[:-1]), t.shape[-1]) for t in (x, dy, slope, off))
    dz = (dy * slope).abs()
    error = torch.zeros_like(dz) if act is None else bounds.rounded(dz, dy.abs() * off, dtype)
    error = torch.where(dz + error > torch.finfo(dtype).max, math.inf, error.nan_to_num(nan=math.inf, posinf=math.inf))
    rows, (N, K) = len(x), weight.shape
    known = dz + error  # an upper bound of the |dz| that the products are given
    dx = error @ weight.abs() + product_error(known @ weight.abs(), rows, K, N, dtype)
    dw = error.T @ x.abs() + product_error(known.T @ x.abs(), N, K, rows, dtype)
    db = error.sum(0) + bounds.gamma(rows + 2, bounds.acc_unit(dtype)) * known.sum(0)
    db = torch.where(known.sum(0) > torch.finfo(dtype).max / 2, math.inf, db)
    found = (dx.reshape(case.args[0].shape), dw, db)
    return tuple(
        None if g is None else bounds.rounded(g, e.nan_to_num(nan=math.inf, posinf=math.inf), dtype)
        for g, e in zip(grads, found, strict=True)
    )


def _named(*shapes: tuple[int, ...], extra: tuple[Any, ...] = ()) -> Any:
    return lambda make: Case((*(make.tensor(*shape) for shape in shapes), *extra))


MATMUL = OpSpec(
    name="matmul",
    op=ops.matmul,
    reference=torch.matmul,
    inputs=_matmul_inputs,
    bound=_matmul_bound,
    grad_bound=_matmul_grad_bound,
    differentiable=(0, 1),
    families=FAMILIES,
    examples={
        "one tile": _named((32, 32), (32, 32)),
        "tails": _named((33, 37), (37, 17)),
        "many blocks of K": _named((5, 300), (300, 3)),
        "aligned, several tiles": _named((144, 144), (144, 160)),
        "batches": _named((2, 1, 17, 9), (3, 9, 5)),
        "vectors": _named((65,), (65,)),
        "no K": _named((3, 0), (0, 4)),
    },
    bad=(
        Bad(_named((2, 3), (4, 5)), ValueError, r"shapes \[2, 3\] and \[4, 5\] do not fit"),
        Bad(_named((3,), (4, 5)), ValueError, "do not fit"),
        Bad(_named((), (4, 5)), ValueError, "expected at least one dimension"),
        Bad(_named((2, 3, 4), (3, 4, 5)), ValueError, "do not broadcast"),
        Bad(lambda make: Case((make.tensor(2, 3), make.tensor(3, 2).double())), TypeError, "convert one of them"),
        Bad(
            lambda make: Case((make.integers(2, 3, low=0, high=4), make.integers(3, 2, low=0, high=4))),
            TypeError,
            "expected a floating type",
        ),
    ),
    exact=True,
)

LINEAR = OpSpec(
    name="linear",
    op=ops.linear,
    reference=_linear,
    inputs=_linear_inputs,
    bound=_linear_bound,
    grad_bound=_linear_grad_bound,
    differentiable=(0, 1, 2),
    families=FAMILIES,
    examples={
        "no bias": _named((8, 24), (16, 24), extra=(None, None)),
        "bias": _named((33, 17), (9, 17), (9,), extra=(None,)),
        "relu": _named((33, 24), (40, 24), (40,), extra=("relu",)),
        "gelu": _named((19, 33), (17, 33), (17,), extra=("gelu",)),
        "tanh": _named((2, 3, 8), (4, 8), (4,), extra=("tanh",)),
    },
    bad=(
        Bad(_named((2, 3), (4, 5)), ValueError, r"x has shape \[2, 3\], weight \[4, 5\]"),
        Bad(_named((2, 3), (3,)), ValueError, r"expected x \[..., in\] and weight \[out, in\]"),
        Bad(_named((2, 3), (4, 3), (3,)), ValueError, r"bias has shape \[3\], expected \[4\]"),
        Bad(_named((2, 3), (4, 3), (4,), extra=("swish",)), ValueError, "unknown activation 'swish'"),
        Bad(lambda make: Case((make.tensor(2, 3), make.tensor(4, 3).half())), TypeError, "convert one of them"),
    ),
)

SPECS = [MATMUL, LINEAR]
