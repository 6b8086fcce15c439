"""The "product" form of a transposed convolution with adjacent patches: kernel = stride, without padding.

    y [patches, R * S * M] = act(scale x [patches, C] w [C, R * S * M] + bias)

Each patch is a row of the product, and the weights are read in place. The R rows of S pixels of a patch are stored at
their positions in the image, as the sum of an offset per row and one per column of the product, in one launch for all
phases.

    row of the product                      image of QW patches in a row
    | r=0: S*M values | r=1: S*M values |   |  ..  | r=0 |  ..  |
                                            |  ..  | r=1 |  ..  |   QW * S * M values below
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import product
from minidl.kernels.conv.problem import INT32_LIMIT, NO_BOXES, TRANSPOSED, Problem, Tensors, Unsupported
from minidl.kernels.epilogue import split_columns
from minidl.kernels.gemm import choice, launches
from minidl.kernels.gemm.tiled import GemmTile, tile_position
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "product"
DIRECTIONS = (TRANSPOSED,)
FAMILIES = ("gemm",)
# Minimum bytes of a patch's row. 2x2 53->8, 130 images of 121x121, rows of 32 bytes: 1.5 ms, sums of taps 0.54.
LEAST_ROW = 64


@triton.jit
def finish_patches(
    b_acc, p_bias, p_scale, p_y, p_z, o_row, m_row, n, N, M, below,
    WIDTH: tl.constexpr, epilogue: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Store a block [patches, columns from n on] with its epilogue, in PIECES; `below`: distance of rows of pixels."""
    if PIECES == 1:
        o_n = n + tl.arange(0, b_acc.shape[1])
        if p_scale is not None:
            b_acc *= tl.load(p_scale + o_n % M, mask=o_n < N, other=0.0).to(b_acc.dtype)[None, :]
        if p_bias is not None:
            b_acc += tl.load(p_bias + o_n % M, mask=o_n < N, other=0.0).to(b_acc.dtype)[None, :]
        m_y = m_row[:, None] & (o_n < N)[None, :]
        o_y = o_row[:, None] + (o_n // WIDTH * below + o_n % WIDTH)[None, :]
        if epilogue.SAVE_Z:
            tl.store(p_z + o_y, b_acc.to(p_z.dtype.element_ty), mask=m_y)
        tl.store(p_y + o_y, activate(b_acc, epilogue.ACT, epilogue.SLOPE).to(p_y.dtype.element_ty), mask=m_y)
    else:
        b_left, b_right = split_columns(b_acc)
        finish_patches(
            b_left, p_bias, p_scale, p_y, p_z, o_row, m_row, n, N, M, below, WIDTH, epilogue, PIECES // 2
        )  # fmt: skip
        n += b_left.shape[1]
        finish_patches(
            b_right, p_bias, p_scale, p_y, p_z, o_row, m_row, n, N, M, below, WIDTH, epilogue, PIECES // 2
        )  # fmt: skip


@triton.jit
def conv_patches_kernel(
    d_x, d_w, p_bias, p_scale, p_y, p_z, patches, N, K, M, image, programs,
    epilogue: tl.constexpr, tile: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply x [patches, K], QW patches in a row of the image, by w [K, N], R rows of WIDTH values each."""
    wait(EARLY)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    QW, R = image
    tiles = tl.cdiv(patches, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    tl.assume(steps > 0)
    for i_tile in tl.range(tl.program_id(0), tiles, programs, flatten=tile.FLATTEN):
        i_m, i_n = tile_position(i_tile, patches, N, BLOCK_M, BLOCK_N, tile.GROUP_M)
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
        for i_k in range(steps):
            b_x = d_x.load([i_m * BLOCK_M, i_k * BLOCK_K])  # [BLOCK_M, BLOCK_K]
            b_w = d_w.load([i_k * BLOCK_K, i_n * BLOCK_N])  # [BLOCK_K, BLOCK_N]
            b_acc = tl.dot(b_x, b_w, b_acc, input_precision=tile.PRECISION, out_dtype=tile.ACC)
        patch = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        o_row = (patch // QW * (R * QW) + patch % QW).to(tl.int64) * WIDTH
        finish_patches(
            b_acc, p_bias, p_scale, p_y, p_z, o_row, patch < patches, i_n * BLOCK_N, N, M, QW * WIDTH,
            WIDTH, epilogue, tile.PIECES,
        )  # fmt: skip


def able(problem: Problem) -> bool | Unsupported:
    down, across, groups = problem.geometry
    adjacent = all(
        axis.kernel == axis.stride and axis.padding == 0 and axis.dilation == 1
        and axis.size == axis.output * axis.kernel for axis in (down, across)
    )  # fmt: skip
    return (
        (problem.pool is None or Unsupported("a pool"))
        and (groups == 1 or Unsupported("more than one group"))
        and ((adjacent and down.stride * across.stride > 1) or Unsupported("patches that are not adjacent"))
        and (0 < _patches(problem) * down.kernel < INT32_LIMIT or Unsupported("no patches, or more than 32 bits count"))
        and (across.size * max(problem.C, problem.M) * down.kernel < INT32_LIMIT or Unsupported("rows over 32 bits"))
        and (min(problem.C, problem.M) > 0 or Unsupported("no channels"))
        and (_in_order(problem) or Unsupported("weights that are not contiguous along the channels"))
        and (_row(problem) % 16 == 0 or Unsupported("rows of a patch that are not a multiple of 16 bytes"))
        and (_row(problem) >= LEAST_ROW or problem.form == NAME or Unsupported("rows of a patch below 64 bytes"))
        and ((problem.boxes(problem.C, problem.aligned) and problem.boxes(_columns(problem), problem.w_aligned))
             or NO_BOXES)
        and (problem.dtype != torch.float32 or problem.target == "interpreted" or problem.precision == "ieee"
             or Unsupported("float32 that tensor cores cannot read along the rows"))
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    tile, shape = _choice(problem)
    return product.microseconds(problem, FAMILIES[0], shape, tile)


def programs(problem: Problem) -> float:
    """Return the number of programs in the interpreter; a step along K takes half as long as one."""
    tile, shape = _choice(problem)
    return launches.tiles_of(shape.M, shape.N, tile) * (1 + launch.cdiv(shape.K, tile["BLOCK_K"])) / 2


def prepare(problem: Problem) -> launch.Prepared:
    down, across, _ = problem.geometry
    tile, _ = _choice(problem)
    patches, N, K = _patches(problem), _columns(problem), problem.C
    programs = min(launches.tiles_of(patches, N, tile), problem.processors)
    meta = {
        "epilogue": problem.epilogue,
        "tile": tile.record(GemmTile, **problem.constants), "WIDTH": across.kernel * problem.M,
        **dependent_launch.options(target=problem.target), **tile.launch_options,
    }  # fmt: skip
    descriptors = (
        Box.of_rows(patches, K, (tile["BLOCK_M"], tile["BLOCK_K"])),
        Box.of_rows(K, N, (tile["BLOCK_K"], tile["BLOCK_N"])),
    )
    scalars = (patches, N, K, problem.M, (across.output, down.kernel), programs)
    return launch.Prepared(conv_patches_kernel, (programs,), scalars, meta, descriptors)


def run(prepared: launch.Prepared, t: Tensors) -> None:
    prepared.run(t.x, t.w, t.bias, t.scale, t.y, t.z)


def _patches(problem: Problem) -> int:
    down, across, _ = problem.geometry
    return problem.N * down.output * across.output


def _row(problem: Problem) -> int:
    """Return the bytes of a row of a patch."""
    return problem.geometry.w.kernel * problem.M * problem.dtype.itemsize


def _columns(problem: Problem) -> int:
    down, across, _ = problem.geometry
    return down.kernel * across.kernel * problem.M


def _in_order(problem: Problem) -> bool:
    """Return whether the weights are contiguous as [C, R, S, M]."""
    down, across, _ = problem.geometry
    sizes, M = (problem.C, problem.M, down.kernel, across.kernel), problem.M
    expected = down.kernel * across.kernel * M, 1, across.kernel * M, M
    return len(problem.strides) == 4 and all(
        size == 1 or stride == value for size, stride, value in zip(sizes, problem.strides, expected, strict=True)
    )


def _choice(problem: Problem) -> tuple[launch.Tile, choice.Shape]:
    """Return the tile and the shape of the product."""
    shape = choice.Shape(_patches(problem._replace(N=problem.images)), _columns(problem), problem.C)
    tile, _, _ = choice.choose(
        FAMILIES[0], problem.dtype, problem.precision, shape, 1, problem.target, problem.processors, tail=False
    )  # fmt: skip
    return tile, shape
