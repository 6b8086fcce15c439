"""How batch norm sees images: rows of channels in bands, values per channel; checks of its arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import check, reduce
from minidl.kernels.reduce import whole
from minidl.runtime import dependent_launch, launch


@triton.jit
def channel(p, o_c, m_c, GIVEN: tl.constexpr, ELSE: tl.constexpr, ACC: tl.constexpr):
    """A row [1, BLOCK_C] of values per channel, ELSE where there are none."""
    if GIVEN:
        return tl.load(p + o_c, mask=m_c, other=0).to(ACC)[None, :]
    else:
        return tl.full((1, o_c.shape[0]), ELSE, ACC)


@triton.jit
def backwards(M, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows and channels of a tile, and their masks.

    Tiles are numbered from the last one: what the sums read at the end is read first, while the cache has it.
    """
    tiles_c = tl.cdiv(C, BLOCK_C)
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    o_m = (i_tile // tiles_c).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_c = (i_tile % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    return o_m, o_c, m_c, (o_m < M)[:, None] & m_c[None, :]


@triton.jit
def apart(s_x, C, ALIGN: tl.constexpr, APART: tl.constexpr):
    """The distance of rows of x: C, unless they are of some channels of a wider tensor."""
    if APART:
        return whole(s_x, ALIGN)
    else:
        return C


def dense(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.contiguous()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [N, C, ...] as a contiguous [M, C]: a view where x is channels-last, else a copy."""
    return apart_rows(x).contiguous()


def apart_rows(x: torch.Tensor) -> torch.Tensor:
    """x [N, C, ...] as [M, C] with contiguous rows, at any distance: a view where x is channels-last or channels of
    such a tensor, else a copy."""
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
    """ALIGN, how many channels of rows [M, C] a load may take at once, up to 16 bytes, and EARLY."""
    return {
        "ALIGN": math.gcd(rows.shape[1], rows.stride(0), 16 // rows.element_size()) or 1,
        **dependent_launch.options(),
    }


def lying(rows: torch.Tensor) -> dict[str, bool]:
    """APART, whether rows [M, C] lie further apart than one after another."""
    return {"APART": rows.stride(0) != rows.shape[1]}


def in_bands(family: str, M: int, C: int, dtype: torch.dtype) -> tuple[launch.Tile, int]:
    """The tile, and the rows of a band."""
    tile = launch.tile(family, dtype, M=M, C=C)
    return tile, reduce.band(M, launch.cdiv(C, tile["BLOCK_C"]), tile["BLOCK_M"])


def alone_tile(M: int, C: int, dtype: torch.dtype) -> launch.Tile:
    """The tile of one launch for M values of each of C channels. P is the largest power of two that divides C."""
    return launch.tile("norm_alone", dtype, M=M, C=C, P=C & -C)


def bands(M: int, C: int, dtype: torch.dtype, family: str) -> int:
    """How many bands of rows there are."""
    return launch.cdiv(M, in_bands(family, M, C, dtype)[1])


def depth(M: int, C: int, dtype: torch.dtype, family: str) -> int:
    """The longest chain of additions of a band: "norm_stats" or "norm_sums", or the same in one launch.

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
    """Raise ValueError or TypeError for arguments of a batch norm that do not fit together."""
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
        raise ValueError("batch_norm: expected running_mean and running_var to be given when training=False")
    if training and x.numel() <= x.shape[1] and x.shape[1]:
        raise ValueError(
            f"batch_norm: expected more than 1 value per channel when training, got input size {list(x.shape)}; "
            "take a larger batch, or call .eval() to use the running statistics"
        )
    if training and eps == 0:
        raise ValueError("batch_norm: eps is 0, expected a positive number in training")


def check_vectors(op: str, what: str, x: torch.Tensor, C: int, eps: float, **vectors: torch.Tensor | None) -> None:
    """Raise TypeError or ValueError, with the name of the operation, for what its kernels do not take."""
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
