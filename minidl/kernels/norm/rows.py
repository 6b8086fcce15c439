"""Shared parts of batch norm: images as rows of channels, bands of rows, values per channel, and argument checks."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import check, reduce
from minidl.kernels.reduce import as_multiple
from minidl.runtime import dependent_launch, launch


@triton.jit
def channel(p, o_c, m_c, PRESENT: tl.constexpr, DEFAULT: tl.constexpr, ACC: tl.constexpr):
    """Load a row [1, BLOCK_C] of values per channel, or fill it with DEFAULT if there are none."""
    if PRESENT:
        return tl.load(p + o_c, mask=m_c, other=0).to(ACC)[None, :]
    else:
        return tl.full((1, o_c.shape[0]), DEFAULT, ACC)


@triton.jit
def reverse_tile(M, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return rows and channels of a tile, and their masks.

    Tiles are numbered from the last one: it reads the rows that the sums read last, while they are in the cache.
    """
    tiles_c = tl.cdiv(C, BLOCK_C)
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    o_m = (i_tile // tiles_c).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_c = (i_tile % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    return o_m, o_c, m_c, (o_m < M)[:, None] & m_c[None, :]


@triton.jit
def row_stride(s_x, C, ALIGN: tl.constexpr, APART: tl.constexpr):
    """Return the row stride of x: C, unless x is a slice of channels of a wider tensor (APART)."""
    if APART:
        return as_multiple(s_x, ALIGN)
    else:
        return C


def dense(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.contiguous()


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


def options(rows: torch.Tensor) -> dict[str, Any]:
    """Return ALIGN, the channels of rows [M, C] per vector load, up to 16 bytes, and EARLY."""
    return {
        "ALIGN": math.gcd(rows.shape[1], rows.stride(0), 16 // rows.element_size()) or 1,
        **dependent_launch.options(),
    }


def spacing(rows: torch.Tensor) -> dict[str, bool]:
    """Return APART, whether there are gaps between rows [M, C]."""
    return {"APART": rows.stride(0) != rows.shape[1]}


def in_bands(family: str, M: int, C: int, dtype: torch.dtype) -> tuple[launch.Tile, int]:
    """Return the tile, and the rows of a band."""
    tile = launch.tile(family, dtype, M=M, C=C)
    return tile, reduce.band(M, launch.cdiv(C, tile["BLOCK_C"]), tile["BLOCK_M"])


def alone_tile(M: int, C: int, dtype: torch.dtype) -> launch.Tile:
    """Return the tile of one launch for M values of each of C channels. P is the largest power of 2 that divides C."""
    return launch.tile("norm_alone", dtype, M=M, C=C, P=C & -C)


def bands(M: int, C: int, dtype: torch.dtype, family: str) -> int:
    """Return the number of bands of rows."""
    return launch.cdiv(M, in_bands(family, M, C, dtype)[1])


def depth(M: int, C: int, dtype: torch.dtype, family: str) -> int:
    """Return the longest chain of additions of a band in "norm_stats" or "norm_sums", or in one launch if longer.

    Lanes are joined in float64.
    """
    tile, band = in_bands(family, M, C, dtype)
    alone = alone_tile(M, C, dtype)["BLOCK_M"]
    chains = ((lanes, launch.cdiv(rows, lanes)) for lanes, rows in ((tile["BLOCK_M"], band), (alone, M)))
    return max(chain + (lanes if dtype == torch.float64 else 2) for lanes, chain in chains)


def check_arguments(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    eps: float,
) -> None:
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
