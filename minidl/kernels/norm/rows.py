"""Shared parts of batch norm: images as rows of channels, the plan of a launch, and argument checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import activation, check, reduce
from minidl.kernels.activation import Activation
from minidl.kernels.epilogue import Epilogue
from minidl.kernels.plan import LaunchPlan
from minidl.kernels.reduce import as_multiple
from minidl.runtime import dependent_launch, launch


class Sizes(NamedTuple):
    """Rows [M, C], with strides of x and of a tensor that is added to dx; band: the rows of a band. 1 if not used."""

    M: int
    C: int
    s_x: int
    band: int = 1
    s_so_far: int = 1


class Tile(NamedTuple):
    """Constants: a block of BLOCK_M rows of BLOCK_C channels, or of STEPS such blocks.

    ALIGN  the channels per vector load, up to 16 bytes
    APART  whether there are gaps between rows of x, a slice of channels of a wider tensor
    """

    ALIGN: int
    APART: bool
    ACC: Any
    BLOCK_M: int
    BLOCK_C: int
    STEPS: int = 1


@triton.jit
def channel(p, o_c, m_c, DEFAULT: tl.constexpr, ACC: tl.constexpr):
    """Load a row [1, BLOCK_C] of values per channel, or fill it with DEFAULT if p is None."""
    if p is not None:
        return tl.load(p + o_c, mask=m_c, other=0).to(ACC)[None, :]
    else:
        return tl.full((1, o_c.shape[0]), DEFAULT, ACC)


@triton.jit
def reverse_tile(M, C, tile: tl.constexpr):
    """Return rows and channels of a tile, and their masks.

    Tiles are numbered from the last one: it reads the rows that the sums read last, while they are in the cache.
    """
    tiles_c = tl.cdiv(C, tile.BLOCK_C)
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    o_m = (i_tile // tiles_c).to(tl.int64) * tile.BLOCK_M + tl.arange(0, tile.BLOCK_M)
    o_c = (i_tile % tiles_c) * tile.BLOCK_C + tl.arange(0, tile.BLOCK_C)
    m_c = o_c < C
    return o_m, o_c, m_c, (o_m < M)[:, None] & m_c[None, :]


@triton.jit
def row_stride(s_x, C, tile: tl.constexpr):
    """Return the row stride of x."""
    if tile.APART:
        return as_multiple(s_x, tile.ALIGN)
    else:
        return C


def copy_back(running: Sequence[torch.Tensor | None], updated: Sequence[torch.Tensor | None]) -> None:
    """Copy updated statistics back to running buffers that are not contiguous."""
    for buffer, new in zip(running, updated, strict=True):
        if buffer is not None and new is not None and new is not buffer:
            buffer.copy_(new)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, C, ...] as a contiguous [M, C]: a view if x is channels-last, else a copy."""
    return strided_rows(x).contiguous()


def strided_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, C, ...] as [M, C] with contiguous rows and any row stride: a view if x is channels-last or a slice
    of channels of such a tensor, else a copy."""
    last = x.permute(0, *range(2, x.dim()), 1)
    rows = last.reshape(last.shape[:-1].numel(), x.shape[1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def in_rows(x: torch.Tensor) -> bool:
    """Whether `rows_of` x is a view."""
    return x.permute(0, *range(2, x.dim()), 1).is_contiguous()


def shaped(rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    last = rows.view(shape[0], *shape[2:], shape[1])
    return last.permute(0, last.dim() - 1, *range(1, last.dim() - 1))


class Problem(NamedTuple):
    """A launch for rows [M, C] with the stride s_x; `family` is that of its tile."""

    family: str
    M: int
    C: int
    s_x: int
    dtype: torch.dtype
    target: str
    processors: int


@launch.cached
def plan(problem: Problem) -> LaunchPlan:
    """Programs have a tile ("norm", "norm_grad"), a band ("norm_stats", "norm_sums"), or all rows ("norm_alone")."""
    family, M, C, s_x, dtype, target, _ = problem
    sizes = Sizes(M, C, s_x)
    # P is the largest power of 2 that divides C.
    tile = launch.tile(family, dtype, M=M, C=C, P=C & -C)
    align = math.gcd(C, s_x, 16 // dtype.itemsize) or 1
    record = tile.record(Tile, ALIGN=align, APART=s_x != C, ACC=launch.acc(dtype))
    tiles_c = launch.cdiv(C, record.BLOCK_C)
    if family == "norm_alone":
        record = record._replace(STEPS=triton.next_power_of_2(launch.cdiv(M, record.BLOCK_M)))
        grid: tuple[int, ...] = (tiles_c,)
    elif family in ("norm_stats", "norm_sums"):
        sizes = sizes._replace(band=reduce.band(M, tiles_c, record.BLOCK_M))
        grid = tiles_c, launch.cdiv(M, sizes.band)
    else:
        grid = (launch.cdiv(M, record.BLOCK_M) * tiles_c,)
    return LaunchPlan(grid, sizes, record, {**dependent_launch.options(target=target), **tile.launch_options})


def plan_of(family: str, rows: torch.Tensor) -> LaunchPlan:
    """Return the plan of a launch for rows [M, C]."""
    M, C = rows.shape
    return plan(Problem(family, M, C, rows.stride(0), rows.dtype, launch.target(), launch.processors()))


def epilogue_of(act: Activation) -> Epilogue:
    name, slope = activation.parse(act)
    return Epilogue(activation.CODES[name], slope)


def bands(M: int, C: int, dtype: torch.dtype, family: str) -> int:
    """Return the number of bands of rows."""
    return _dense_plan(M, C, dtype, family).grid[1]


def depth(M: int, C: int, dtype: torch.dtype, family: str) -> int:
    """Return the longest chain of additions of a band in "norm_stats" or "norm_sums", or in one launch if longer.

    Lanes are joined in float64.
    """
    in_bands, alone = (_dense_plan(M, C, dtype, name) for name in (family, "norm_alone"))
    pairs = (in_bands.tile.BLOCK_M, in_bands.sizes.band), (alone.tile.BLOCK_M, M)
    return max(launch.cdiv(rows, lanes) + (lanes if dtype == torch.float64 else 2) for lanes, rows in pairs)


def _dense_plan(M: int, C: int, dtype: torch.dtype, family: str) -> LaunchPlan:
    return plan(Problem(family, M, C, C, dtype, launch.target(), launch.processors()))


def check_arguments(
    x: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None, weight: torch.Tensor | None,
    bias: torch.Tensor | None, training: bool, eps: float,
) -> None:  # fmt: skip
    """Raise ValueError or TypeError for batch norm arguments that do not fit together."""
    check.floating("batch_norm", x=x)
    if x.dim() < 2:
        raise ValueError(f"batch_norm: input has shape {list(x.shape)}, expected [N, C] or [N, C, ...]")
    check_vectors(
        "batch_norm", "x's channels", x, x.shape[1], eps, running_mean=running_mean, running_var=running_var,
        weight=weight, bias=bias,
    )  # fmt: skip
    if (running_mean is None) != (running_var is None):
        raise ValueError("batch_norm: got one of running_mean and running_var, expected both or none")
    if not training and running_mean is None:
        raise ValueError("batch_norm: running_mean and running_var are None, expected tensors with training=False")
    if training and x.numel() <= x.shape[1] and x.shape[1]:
        raise ValueError(
            f"batch_norm: expected more than 1 value per channel when training, got input size {list(x.shape)}; "
            "take a larger batch, or call .eval() to use the running statistics"
        )
    if training and eps == 0:
        raise ValueError("batch_norm: eps is 0, expected a positive number in training")


def check_vectors(op: str, what: str, x: torch.Tensor, C: int, eps: float, **vectors: torch.Tensor | None) -> None:
    """Raise TypeError or ValueError, naming the operation, for arguments that its kernels do not accept."""
    check.floating(op, x=x)
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps}, expected 0 or more")
    for name, vector in vectors.items():
        check.floating(op, **{name: vector})
        if vector is None:
            continue
        if vector.shape != (C,):
            raise ValueError(f"{op}: {name} has shape {list(vector.shape)}, expected [{C}] for {what}")
        if vector.device != x.device:
            raise ValueError(f"{op}: {name} is on {vector.device}, expected {x.device}; move it with .to()")
