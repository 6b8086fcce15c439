"""Shared parts of batch norm: the plan of a launch, and argument checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import activation, check, reduce
from minidl.kernels.activation import Activation
from minidl.kernels.epilogue import Epilogue
from minidl.kernels.norm.layout import Sizes, Tile
from minidl.kernels.plan import LaunchPlan
from minidl.runtime import dependent_launch, launch


@triton.jit
def channel(p, o_c, m_c, DEFAULT: tl.constexpr, ACC: tl.constexpr):
    """Load a row [1, BLOCK_C] of values per channel, or fill it with DEFAULT if p is None."""
    if p is not None:
        return tl.load(p + o_c, mask=m_c, other=0).to(ACC)[None, :]
    else:
        return tl.full((1, o_c.shape[0]), DEFAULT, ACC)


def copy_back(running: Sequence[torch.Tensor | None], updated: Sequence[torch.Tensor | None]) -> None:
    """Copy updated statistics back to running buffers that are not contiguous."""
    for buffer, new in zip(running, updated, strict=True):
        if buffer is not None and new is not None and new is not buffer:
            buffer.copy_(new)


class Statistics(NamedTuple):
    """The mean and rstd [C] of each channel, in the accumulation dtype."""

    mean: torch.Tensor
    rstd: torch.Tensor


class Buffers(NamedTuple):
    """running_mean and running_var [C], and the batch counter [] int64 (or None); training updates all in place."""

    mean: torch.Tensor
    var: torch.Tensor
    batches: torch.Tensor | None = None


class Problem(NamedTuple):
    """A launch for rows [M, C] with the stride s_x, or planes [M / S, C, S]; `family` is that of its tile."""

    family: str
    M: int
    C: int
    s_x: int
    S: int
    dtype: torch.dtype
    target: str
    processors: int


BANDS = "norm_stats", "norm_sums"


@launch.cached
def plan(problem: Problem) -> LaunchPlan:
    """Programs have a tile ("norm", "norm_grad"), a band ("norm_stats", "norm_sums"), or all rows ("norm_alone")."""
    if problem.S:
        return _plane_plan(problem)
    family, M, C, s_x, _, dtype, target, _ = problem
    sizes = Sizes(M, C, s_x)
    # P is the largest power of 2 that divides C.
    tile = launch.tile(family, dtype, M=M, C=C, P=C & -C)
    align = math.gcd(C, s_x, 16 // dtype.itemsize) or 1
    record = tile.record(Tile, ALIGN=align, APART=s_x != C, ACC=launch.acc(dtype))
    tiles_c = launch.cdiv(C, record.BLOCK_C)
    if family == "norm_alone":
        record = record._replace(STEPS=triton.next_power_of_2(launch.cdiv(M, record.BLOCK_M)))
        grid: tuple[int, ...] = (tiles_c,)
    elif family in BANDS:
        sizes = sizes._replace(band=reduce.band(M, tiles_c, record.BLOCK_M))
        grid = tiles_c, launch.cdiv(M, sizes.band)
    else:
        grid = (launch.cdiv(M, record.BLOCK_M) * tiles_c,)
    return LaunchPlan(grid, sizes, record, {**dependent_launch.options(target=target), **tile.launch_options})


def _plane_plan(problem: Problem) -> LaunchPlan:
    family, M, C, _, S, dtype, target, processors = problem
    tile = launch.tile("norm_planes", dtype)
    align = math.gcd(S, 16 // dtype.itemsize)
    record = tile.record(Tile, ALIGN=align, APART=False, ACC=launch.acc(dtype))
    record = record._replace(PIXELS=min(record.BLOCK_M, triton.next_power_of_2(S)))
    images, tiles_c = M // S, launch.cdiv(C, record.BLOCK_C)
    images_of_block = record.BLOCK_M // record.PIXELS
    sizes = Sizes(M, C, 1, S)
    if family in BANDS:
        # A band has several images, or one of 2**k equal parts of an image.
        bands = max(1, 8 * processors // tiles_c)
        parts = 1
        while 2 * parts * images <= bands and S % (2 * parts * align) == 0 and S // (2 * parts) >= record.BLOCK_M:
            parts *= 2
        group = launch.cdiv(launch.cdiv(images, bands), images_of_block) * images_of_block
        sizes = sizes._replace(band=S // parts if parts > 1 else S * group)
        grid: tuple[int, ...] = tiles_c, launch.cdiv(M, sizes.band)
    else:
        grid = (launch.cdiv(images, images_of_block) * tiles_c * launch.cdiv(S, record.PIXELS),)
    return LaunchPlan(grid, sizes, record, {**dependent_launch.options(target=target), **tile.launch_options})


def plan_of(family: str, x: torch.Tensor) -> LaunchPlan:
    """Return the plan of a launch for rows [M, C] or planes [N, C, S]."""
    if x.dim() == 3:
        N, C, S = x.shape
        M, s_x = N * S, 1
    else:
        (M, C), S, s_x = x.shape, 0, x.stride(0)
    return plan(Problem(family, M, C, s_x, S, x.dtype, launch.target(), launch.processors()))


def epilogue_of(act: Activation) -> Epilogue:
    name, slope = activation.parse(act)
    return Epilogue(activation.CODES[name], slope)


def bands(shape: torch.Size, dtype: torch.dtype, family: str) -> int:
    """Return the largest number of bands of a tensor [N, C, ...], in rows or in planes."""
    return max(plan.grid[1] for plan in _dense_plans(shape, dtype, family))


def depth(shape: torch.Size, dtype: torch.dtype, family: str) -> int:
    """Return the longest chain of additions of a band in "norm_stats" or "norm_sums", or in one launch if longer, of a
    tensor [N, C, ...] in rows or in planes.

    Lanes are joined in float64.
    """
    values_of_lane = []
    for plan in (*_dense_plans(shape, dtype, family), *_dense_plans(shape[:1] + shape[1:2], dtype, "norm_alone")):
        sizes, lanes = plan.sizes, plan.tile.BLOCK_M
        values = sizes.band if len(plan.grid) > 1 else shape.numel() // shape[1]
        count = launch.cdiv(values, lanes)
        if plan.tile.PIXELS:
            images = launch.cdiv(launch.cdiv(values, sizes.S), lanes // plan.tile.PIXELS)
            count = images * launch.cdiv(min(values, sizes.S), plan.tile.PIXELS)
        values_of_lane.append(count + (lanes if dtype == torch.float64 else 2))
    return max(values_of_lane)


def _dense_plans(shape: torch.Size, dtype: torch.dtype, family: str) -> list[LaunchPlan]:
    """Return the plans of dense rows and, of a tensor with pixels, of planes."""
    C, S = shape[1], shape[2:].numel() if len(shape) > 2 else 0
    sizes = shape.numel() // C, C
    problems = [(*sizes, C, 0), (*sizes, 1, S)] if S > 1 else [(*sizes, C, 0)]
    return [plan(Problem(family, *one, dtype, launch.target(), launch.processors())) for one in problems]


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
    check.floating(op, x=x, **vectors)
    if not check.real(op, "eps", eps) >= 0:
        raise ValueError(f"{op}: eps is {eps}, expected 0 or more")
    for name, vector in vectors.items():
        if vector is None:
            continue
        if vector.shape != (C,):
            raise ValueError(f"{op}: {name} has shape {list(vector.shape)}, expected [{C}] for {what}")
        if vector.device != x.device:
            raise ValueError(f"{op}: {name} is on {vector.device}, expected {x.device}; move it with .to()")
