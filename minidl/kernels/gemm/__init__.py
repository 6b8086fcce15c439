"""Tiled matrix products C = act(A B + bias), with transposed operands, batches and split-K.

    A  [M, K] or [batch, M, K]     B  [K, N] or [batch, K, N]     bias  [N]     C  [M, N] or [batch, M, N]
    float16 | bfloat16 | float32 | float64, accumulated in float32 (float64 for float64)

Start with the kernels in `tiled`. `gemm` describes a call as a `Problem`, `plan.plan` chooses form, tile and number of
shares and prepares the launches, once per problem, and `prepared.Product.run` launches. Programs visit tiles in groups
of GROUP_M tile rows, so that concurrent programs share rows and columns in L2 (not in `thin` and `vector`). The forms:

    tma      persistent, loads boxes through tensor descriptors (TMA on sm_90); needs 16-byte aligned rows
    copied   copies 16-bit operands to aligned rows first (`rows`), then runs as tma
    parts    splits float32 operands into tf32 parts first
    tail     applies split-K only to the tiles of the last, incomplete round of programs
    pointer  accepts any strides and batches
    thin, vector   use no tensor cores; for small thin products and for a matrix times a vector

`choice` estimates the best tile and split. Split-K writes one partial product for each share of K and adds them in a
fixed order, so results do not depend on scheduling. A transposed operand is read in place: its block
is loaded as stored and transposed in the kernel.
"""

from typing import Literal, overload

import torch

from minidl.kernels import activation, check
from minidl.kernels.activation import Activation
from minidl.kernels.epilogue import ADDED, Epilogue
from minidl.kernels.gemm import launches
from minidl.kernels.gemm.operands import Operand
from minidl.kernels.gemm.plan import LEAST_PARTS as LEAST_PARTS
from minidl.kernels.gemm.plan import plan as plan
from minidl.kernels.gemm.problem import FAMILIES as FAMILIES
from minidl.kernels.gemm.problem import Problem as Problem
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed


@overload
def gemm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = ..., act: Activation = ..., *,
    preactivation: Literal[False] = ..., form: str | None = ..., split: int | None = ..., precision: str | None = ...,
    wide: bool = ..., onto: torch.Tensor | None = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def gemm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = ..., act: Activation = ..., *,
    preactivation: Literal[True], form: str | None = ..., split: int | None = ..., precision: str | None = ...,
    wide: bool = ..., onto: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@replayed
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: Activation = None,
    *,
    preactivation: bool = False,
    form: str | None = None,
    split: int | None = None,
    precision: str | None = None,
    wide: bool = False,
    onto: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return act(a @ b + bias), and also z = a @ b + bias if `preactivation` is set.

    a [M, K] or [batch, M, K], b [K, N] or [batch, K, N], any strides; bias [N], contiguous; one dtype and device.
    The result (and z) is [M, N] or [batch, M, N], contiguous, in the inputs' dtype, or in the accumulation dtype if
    `wide` is set. z is added in place to `onto`, an earlier result. K = 0 gives act(bias).
    `form` ("tma", "tail" for 16 bits, "parts" for float32, "pointer", "copied", "thin" or "vector"), `split` and
    `precision` override the choice made from the shape; "thin" and "vector" always have the accuracy of "ieee".
    Raises ValueError for shapes that do not match or a form that the operands do not allow, TypeError for dtypes.
    """
    _check(a, b, bias)
    if a.shape[-1] == 0:
        # The kernels tell the compiler that K has at least one block, so add a column and a row of zeros.
        a = a.new_zeros(()).expand(*a.shape[:-1], 1)
        b = b.new_zeros(()).expand(*b.shape[:-2], 1, b.shape[-1])
    name, slope = activation.parse(act)
    problem = Problem(
        Operand.of(a), Operand.of(b), a.dtype, precision or launch.precision(a.dtype),
        Epilogue(activation.CODES[name], slope, int(preactivation) if onto is None else ADDED.value),
        None if a.dim() == 2 else len(a), form, split, target=launch.target(), processors=launch.processors(),
    )  # fmt: skip
    product = plan(problem)
    dtype = launch.acc_torch(a.dtype) if wide else a.dtype
    c = torch.empty(*a.shape[:-1], b.shape[-1], dtype=dtype, device=a.device) if onto is None else onto
    z = torch.empty_like(c) if preactivation and onto is None else onto
    product.run(a, b, bias, None, c, z)
    return (c, z) if preactivation and z is not None else c


def sum_shares(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum [n] of contiguous partial [shares, n] over its first axis, in a fixed order, as `dtype`."""
    shares, n = partial.shape
    if shares == 1 and partial.dtype == dtype:
        return partial[0]
    total = torch.empty(n, dtype=dtype, device=partial.device)
    launches.sum_of_shares(dtype, 1, n, shares, Epilogue(), launch.target()).run(partial, None, None, total, None)
    return total


def _check(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError or TypeError for operands that do not match."""
    check.floating("gemm", a=a)
    check.same("gemm", a=a, b=b, bias=bias)
    if a.dim() not in (2, 3) or a.dim() != b.dim():
        raise ValueError(f"gemm: got shapes {list(a.shape)} and {list(b.shape)}, expected two matrices or two batches")
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"gemm: shapes {list(a.shape)} and {list(b.shape)} do not match: "
            f"a has {a.shape[-1]} columns and b {b.shape[-2]} rows; these and the batch sizes must be equal"
        )
    if bias is not None and (bias.shape != b.shape[-1:] or not bias.is_contiguous()):
        raise ValueError(f"gemm: bias has shape {list(bias.shape)}, expected [{b.shape[-1]}], contiguous")
