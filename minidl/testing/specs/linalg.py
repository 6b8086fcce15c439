"""Specs of matrix products.

The error of a product is at most gamma(d) |A| |B|, where d is the longest chain of additions of the tiled loop, plus
the part of each term that float32 products on tensor cores drop. The gradients are products of the same kind, whose
|A| |B| follows from the reference at absolute values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.runtime import launch
from minidl.testing.specs import bounds, products
from minidl.testing.specs.activation import apply
from minidl.testing.specs.base import Bad, Case, of, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make


def chain(M: int, N: int, K: int, dtype: torch.dtype) -> int:
    """Return the longest chain of additions for an element of an [M, K] x [K, N] product, in any form."""
    if launch.COMPILED_CPU:  # a product goes on with the sum of the one before
        return K + 2
    tiles = [*launch.tiles("gemm_vector", dtype=dtype)]
    families = (("gemm", 16), ("gemm_pointer", 16), ("gemm_thin", 1))
    for family, floor in [each for each in families if launch.tiles(each[0])]:
        tiles += launch.tiles_for(family, dtype, floor=floor, precision=launch.precision(dtype), M=M, N=N, K=K)
    longest = 0
    for block in {tile["BLOCK_K"] for tile in tiles}:
        # The blocks of a share are added, then the shares; there are at most as many shares as blocks.
        longest = max(longest, min(K, block + 2 * math.ceil(K / block)))
    return longest + 2


def product_error(a: torch.Tensor, b: torch.Tensor, M: int, N: int, K: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of a product A B before it is rounded; infinite if a partial sum may overflow."""
    a, b = a.abs(), b.abs()
    return products.sum_error(a @ b, (a + 1) @ (b + 1), chain(M, N, K, dtype), dtype)


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
    """Return M, N and K of each product; a matrix on the right is multiplied by all rows at once."""
    rows = a.shape[:-1] if b.dim() == 2 else a.shape[-2:-1]
    return math.prod(rows), (b.shape[-1] if b.dim() > 1 else 1), a.shape[-1]


def _matmul_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    a, b = case.args
    return bounds.rounded(result, product_error(a, b, *_matmul_sizes(a, b), dtype), dtype)


def _matmul_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    a, b = (t.abs().requires_grad_() for t in case.args)
    totals = torch.autograd.grad(torch.matmul(a, b), (a, b), dy.abs())
    tiny = torch.autograd.grad(torch.matmul(a + 1, b + 1), (a, b), dy.abs() + 1)
    rows, N, K = _matmul_sizes(a, b)
    # Batches that share an operand are multiplied one by one, rounded, and then added.
    batch = 1 if b.dim() == 2 else math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    out = []
    for grad, total, near_zero, sizes in zip(grads, totals, tiny, ((rows, K, N), (K, N, rows)), strict=True):
        error = products.sum_error(total, near_zero, chain(*sizes, dtype), dtype)
        if batch > 1 and grad.shape[:-2] != dy.shape[:-2]:
            error = error + total * (bounds.UNIT[dtype] + bounds.gamma(batch + 1, bounds.acc_unit(dtype)))
            error = error + batch * bounds.TINY[dtype]
            error = torch.where(total > torch.finfo(dtype).max / 2, math.inf, error)
        out.append(bounds.rounded(grad, error, dtype))
    return tuple(out)


def _linear_inputs(make: Make) -> Case:
    shape = [make.size(0, 40) for _ in range(make.integer(1, 2))][: make.integer(0, 2)]
    K, N = make.size(1, 40), make.size(1, 40)
    bias = make.tensor(N) if make.integer(0, 1) else None
    return Case((make.tensor(*shape, K), make.tensor(N, K), bias, make.choice(products.ACTIVATIONS)))


def _preactivation(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return z = x W^T + b and its error in the accumulate type."""
    x, weight, bias, _ = case.arguments(ops.linear)
    z = F.linear(x, weight, bias)
    error = product_error(x, weight.T, math.prod(x.shape[:-1]), weight.shape[0], weight.shape[1], dtype)
    return z, products.with_bias(z, error, bias, dtype)


def _linear_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    x, weight, _, act = case.arguments(ops.linear)
    magnitude, error = products.incoming(act, dy, *_preactivation(case, dtype), dtype)
    x, magnitude, error = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (x, magnitude, error))
    rows, (N, K) = len(x), weight.shape
    dx = error @ weight.abs() + product_error(magnitude, weight, rows, K, N, dtype)
    dw = error.T @ x.abs() + product_error(magnitude.T, x, N, K, rows, dtype)
    errors = (dx.reshape(case.args[0].shape), dw, products.bias_error(magnitude, error, (0,), dtype))
    return products.gradient_bounds(grads, errors, dtype)


_product = spec_factory(families=("gemm", "gemm_pointer", "gemm_sum"))
MATMUL = _product(
    "matmul",
    inputs=_matmul_inputs,
    bound=_matmul_bound,
    grad_bound=_matmul_grad_bound,
    differentiable=(0, 1),
    examples={
        "one tile": tensors((32, 32), (32, 32)),
        "tails": tensors((33, 37), (37, 17)),
        "many blocks of K": tensors((5, 300), (300, 3)),
        "aligned, several tiles": tensors((144, 144), (144, 160)),
        "batches": tensors((2, 1, 17, 9), (3, 9, 5)),
        "vectors": tensors((65,), (65,)),
        "no K": tensors((3, 0), (0, 4)),
    },
    bad=(
        refuses(ValueError, r"shapes \[2, 3\] and \[4, 5\] do not fit", (2, 3), (4, 5)),
        refuses(ValueError, r"shapes \[3\] and \[4, 5\] do not fit", (3,), (4, 5)),
        refuses(ValueError, "expected at least one dimension", (), (4, 5)),
        refuses(ValueError, "do not broadcast", (2, 3, 4), (3, 4, 5)),
        refuses(TypeError, "convert one of them", (2, 3), of(torch.float64, 3, 2)),
        Bad(lambda make: Case((make.integers(2, 2, low=0, high=4),) * 2), TypeError, "expected a floating type"),
    ),
    exact=True,
)

LINEAR = _product(
    "linear",
    reference=lambda x, weight, bias=None, act=None: apply(F.linear(x, weight, bias), act),
    inputs=_linear_inputs,
    bound=products.output_bound(ops.linear, _preactivation),
    grad_bound=_linear_grad_bound,
    differentiable=(0, 1, 2),
    examples={
        "no bias": tensors((8, 24), (16, 24), extra=(None, None)),
        "bias": tensors((33, 17), (9, 17), (9,), extra=(None,)),
        "relu": tensors((33, 24), (40, 24), (40,), extra=("relu",)),
        "gelu": tensors((19, 33), (17, 33), (17,), extra=("gelu",)),
        "tanh": tensors((2, 3, 8), (4, 8), (4,), extra=("tanh",)),
    },
    bad=(
        refuses(ValueError, r"input has shape \[2, 3\], weight \[4, 5\]", (2, 3), (4, 5)),
        refuses(ValueError, r"expected input \[..., in\] and weight \[out, in\]", (2, 3), (3,)),
        refuses(ValueError, r"bias has shape \[3\], expected \[4\]", (2, 3), (4, 3), (3,)),
        refuses(ValueError, "unknown activation 'swish'", (2, 3), (4, 3), (4,), extra=("swish",)),
        refuses(TypeError, "convert one of them", (2, 3), of(torch.float16, 4, 3)),
    ),
)

SPECS = [MATMUL, LINEAR]
