"""Newton-Schulz iterations: move the singular values of matrices towards 1 with matrix products only.

    X = X / max(|X|, eps)                 |X| the root of the sum of squares
    X = a X + (b G + c G G) X,  G = X X'  repeated; with more rows than columns X (b G + c G G) with G = X' X

A singular value s becomes a s + b s^3 + c s^5. With (3.4445, -4.7750, 2.0315), steep at 0, five iterations bring all
but the smallest between 0.7 and 1.2: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
torch rounds every step to bfloat16; here all steps have the dtype of X.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels import gemm, reduce
from minidl.runtime import launch

# A matrix of this many values fills a GPU; smaller ones are multiplied as a batch.
LARGE = 2**18


@triton.jit
def scale_kernel(p_x, p_norm, each, count, EPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """x / max(norm, eps) in place, `each` values to a norm."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o_n < count
    b_norm = tl.load(p_norm + o_n // each, mask=m, other=1.0)  # [BLOCK_N]
    b_x = tl.load(p_x + o_n, mask=m, other=0.0)  # [BLOCK_N]
    b_eps = tl.full((BLOCK_N,), EPS, b_norm.dtype)
    tl.store(p_x + o_n, b_x / tl.where(b_norm < b_eps, b_eps, b_norm), mask=m)


@triton.jit
def combine_kernel(p_x, p_y, count, ALPHA: tl.constexpr, BETA: tl.constexpr, BLOCK_N: tl.constexpr):
    """alpha x + beta y, written to y."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o_n < count
    b_x = tl.load(p_x + o_n, mask=m, other=0.0)  # [BLOCK_N]
    b_y = tl.load(p_y + o_n, mask=m, other=0.0)  # [BLOCK_N]
    tl.store(p_y + o_n, ALPHA * b_x + BETA * b_y, mask=m)


def orthogonalise(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> None:
    """Apply `steps` iterations in place to each matrix of x [batch, R, C], contiguous float32 or float64."""
    batch, R, C = x.shape
    if x.numel() == 0:
        return
    if batch > 1 and R * C >= LARGE:
        for i in range(batch):
            orthogonalise(x[i : i + 1], coefficients, steps, eps)
        return
    a, b, c = coefficients
    tile = launch.tile("elementwise", x.dtype, N=x.numel())
    norms = reduce.norm(x, (1, 2))
    launch.run(
        scale_kernel, (launch.cdiv(x.numel(), tile["BLOCK_N"]),), x, norms, R * C, x.numel(), EPS=eps, **tile.options
    )
    # A single matrix uses the forms for 2-D operands.
    matrices = x[0] if batch == 1 else x
    for _ in range(steps):
        gram = gemm.gemm(matrices, matrices.mT) if R <= C else gemm.gemm(matrices.mT, matrices)
        power = gemm.gemm(gram, gram)
        _combine(gram, power, b, c)
        change = gemm.gemm(power, matrices) if R <= C else gemm.gemm(matrices, power)
        _combine(change, matrices, 1.0, a)


def _combine(x: torch.Tensor, y: torch.Tensor, alpha: float, beta: float) -> None:
    tile = launch.tile("elementwise", x.dtype, N=x.numel())
    grid = (launch.cdiv(x.numel(), tile["BLOCK_N"]),)
    launch.run(combine_kernel, grid, x, y, x.numel(), ALPHA=alpha, BETA=beta, **tile.options)
