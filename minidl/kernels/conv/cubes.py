"""The boxed form of volumes: a tile of the GEMM is a box of voxels, of one volume or of several.

As `boxed`, with an axis more: the inputs of TILE_N x TILE_D x TILE_H x TILE_W neighbouring outputs at one tap and a
block of channels are one box of the tensor [N, D, H, W, channels], read through a tensor descriptor (TMA on sm_90),
with zeros outside of the volume. Depth is an outer loop over taps around those of a slice, in the sum of one tile.

Walks back have strides of 1 whatever the convolution's stride: then there is a launch for each remainder. With a stride
forward (STRIDED) a tile is of one slice, and slices of sizes that the stride divides are seen as [H / stride, stride,
W / stride, stride * channels]: what a tap reads lies side by side there, too. A slice outside is read beyond the end.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, pace
from minidl.kernels.conv.epilogue import finish
from minidl.kernels.conv.geometry import Walk
from minidl.kernels.conv.problem import Problem
from minidl.runtime import estimates, launch
from minidl.runtime.boxes import Box

FAMILY = "conv_box"
# Beyond what padding and taps reach before an image, in strides.
AHEAD = tl.constexpr(2**16)


@triton.jit
def conv_cube_tile(
    i_tile, d_x, d_w, p_bias, p_scale, p_y, p_z,
    N, D, QD, QH, QW, OD, OH, OW, M, GROUPS, in_d, in_h, in_w, out_d, out_h, out_w,
    C: tl.constexpr, JD: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    STRIDED: tl.constexpr, IN_STEP_D: tl.constexpr, IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr,
    IN_TAP_D: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_D: tl.constexpr, OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """BLOCK_M channels of a box of outputs. The weights are the left operand, as in `boxed`: [GROUPS * M, taps * C]."""
    VOXELS: tl.constexpr = TILE_N * TILE_D * TILE_H * TILE_W
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_w = tl.cdiv(QW, TILE_W)
    tiles_h = tl.cdiv(QH, TILE_H)
    tiles_d = tl.cdiv(QD, TILE_D)
    m = i_tile % tiles_m * BLOCK_M
    i_group = i_tile // tiles_m % GROUPS
    i_box = i_tile // (tiles_m * GROUPS)
    q_w = i_box % tiles_w * TILE_W
    q_h = i_box // tiles_w % tiles_h * TILE_H
    q_d = i_box // (tiles_w * tiles_h) % tiles_d * TILE_D
    n = i_box // (tiles_w * tiles_h * tiles_d) * TILE_N
    o_w = 0 * m
    c = i_group * C
    j_w = 0
    j_h = 0
    x_d = in_d + q_d * IN_STEP_D
    x_h = in_h + q_h * IN_STEP_H
    x_w = in_w + q_w * IN_STEP_W
    b_acc = tl.zeros((BLOCK_M, VOXELS), dtype=ACC)
    for _ in range(JD * JH * JW * (C // BLOCK_K)):
        b_w = d_w.load([i_group * M + m, o_w])  # [BLOCK_M, BLOCK_K]
        if STRIDED:
            i_slice = tl.where((x_d >= 0) & (x_d < D), n * D + x_d, N * D)
            # Divided so that what is below 0 is rounded down.
            h = (x_h + AHEAD * IN_STEP_H) // IN_STEP_H - AHEAD
            w = (x_w + AHEAD * IN_STEP_W) // IN_STEP_W - AHEAD
            o_c = c + (x_w - w * IN_STEP_W) * (GROUPS * C)
            b_x = d_x.load([i_slice, h, x_h - h * IN_STEP_H, w, o_c])
        else:
            b_x = d_x.load([n, x_d, x_h, x_w, c])
        b_x = tl.reshape(b_x, (VOXELS, BLOCK_K)).T  # [BLOCK_K, VOXELS]
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
        # All taps of a block of channels, then the next block, as in `boxed`.
        o_w += C
        j_w += 1
        row = j_w == JW
        x_w += IN_TAP_W - tl.where(row, JW * IN_TAP_W, 0)
        j_w = tl.where(row, 0, j_w)
        j_h += tl.where(row, 1, 0)
        plane = j_h == JH
        x_h += tl.where(row, IN_TAP_H, 0) - tl.where(plane, JH * IN_TAP_H, 0)
        j_h = tl.where(plane, 0, j_h)
        x_d += tl.where(plane, IN_TAP_D, 0)
        every = x_d == in_d + q_d * IN_STEP_D + JD * IN_TAP_D
        x_d -= tl.where(every, JD * IN_TAP_D, 0)
        o_w -= tl.where(every, JD * JH * JW * C - BLOCK_K, 0)
        c += tl.where(every, BLOCK_K, 0)
    o_v = tl.arange(0, VOXELS)
    o_n = n + o_v // (TILE_D * TILE_H * TILE_W)
    o_d = q_d + o_v // (TILE_H * TILE_W) % TILE_D
    o_h = q_h + o_v // TILE_W % TILE_H
    o_w = q_w + o_v % TILE_W
    m_row = (o_n < N) & (o_d < QD) & (o_h < QH) & (o_w < QW)
    o_row = o_n.to(tl.int64) * OD + out_d + o_d * OUT_STEP_D
    o_row = (o_row * OH + out_h + o_h * OUT_STEP_H) * OW + out_w + o_w * OUT_STEP_W
    finish(
        b_acc.T, p_bias, p_scale, p_y, p_z, o_row, m_row, m, M, i_group, GROUPS,
        HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES,
    )  # fmt: skip


@triton.jit
def conv_cube_kernel(
    d_x, d_w, p_bias, p_scale, p_y, p_z,
    N, D, QD, QH, QW, OD, OH, OW, M, GROUPS, in_d, in_h, in_w, out_d, out_h, out_w, tiles, programs,
    C: tl.constexpr, JD: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    STRIDED: tl.constexpr, IN_STEP_D: tl.constexpr, IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr,
    IN_TAP_D: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    OUT_STEP_D: tl.constexpr, OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
    PER_PROCESSOR: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """One tile per program where PER_PROCESSOR is 0, else that many programs per multiprocessor walk over all tiles."""
    if PER_PROCESSOR == 0:
        conv_cube_tile(
            tl.program_id(0), d_x, d_w, p_bias, p_scale, p_y, p_z,
            N, D, QD, QH, QW, OD, OH, OW, M, GROUPS, in_d, in_h, in_w, out_d, out_h, out_w,
            C, JD, JH, JW, STRIDED, IN_STEP_D, IN_STEP_H, IN_STEP_W, IN_TAP_D, IN_TAP_H, IN_TAP_W,
            OUT_STEP_D, OUT_STEP_H, OUT_STEP_W,
            HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, ACC, PRECISION, BLOCK_M, BLOCK_K, PIECES,
            TILE_N, TILE_D, TILE_H, TILE_W,
        )  # fmt: skip
    else:
        for i_tile in tl.range(tl.program_id(0), tiles, programs, flatten=FLATTEN):
            conv_cube_tile(
                i_tile, d_x, d_w, p_bias, p_scale, p_y, p_z,
                N, D, QD, QH, QW, OD, OH, OW, M, GROUPS, in_d, in_h, in_w, out_d, out_h, out_w,
                C, JD, JH, JW, STRIDED, IN_STEP_D, IN_STEP_H, IN_STEP_W, IN_TAP_D, IN_TAP_H, IN_TAP_W,
                OUT_STEP_D, OUT_STEP_H, OUT_STEP_W,
                HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, ACC, PRECISION, BLOCK_M, BLOCK_K, PIECES,
                TILE_N, TILE_D, TILE_H, TILE_W,
            )  # fmt: skip


class Cubes(NamedTuple):
    """One launch: three walks, down to the size `written` from `read`, [D, H, W] each; the rest as a problem has it.

    problem: of images that are the slices; only its channels, dtype, epilogue and device count.
    """

    problem: Problem
    volumes: int
    walks: tuple[Walk, Walk, Walk]
    read: tuple[int, ...]
    written: tuple[int, ...]

    @property
    def taps(self) -> int:
        return math.prod(len(walk.taps) for walk in self.walks)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of outputs, of which one alone has none."""
        return tuple(walk.in_step if walk.count > 1 else 1 for walk in self.walks)

    @property
    def counts(self) -> tuple[int, ...]:
        return (self.volumes, *(walk.count for walk in self.walks))


def able(cubes: Cubes) -> bool:
    """Whether strides, channels, dtype and device suit it. Weights are copied where they do not lie in order."""
    problem = cubes.problem
    return (
        problem.C % 32 == 0 and problem.M > 0 and in_boxes(cubes) and problem.boxes(cubes.taps * problem.C)
    )  # fmt: skip


def in_boxes(cubes: Cubes) -> bool:
    """Whether what a tap reads is boxes of x."""
    problem = cubes.problem
    return (
        problem.C > 0 and math.prod(cubes.counts) > 0
        and problem.boxes(problem.groups * problem.C, problem.aligned)
        and all(walk.in_step > 0 for walk in cubes.walks)
        and all(
            step == 1 or (size % step == 0 and abs(walk.in_start) < step * AHEAD.value)
            for step, size, walk in list(zip(cubes.strides, cubes.read, cubes.walks, strict=True))[1:]
        )
    )  # fmt: skip


def estimate(cubes: Cubes) -> float:
    """As that of `boxed`."""
    problem, tile = cubes.problem, _tile(cubes)
    if problem.paced:
        return costs.at_least(problem, microseconds(cubes, tile), moved(cubes))
    device = estimates.of(problem.target)
    boxes = number(cubes.counts, shape_of(cubes, tile["BLOCK_N"]))
    products = boxes * tile["BLOCK_N"] * problem.groups * cubes.taps * problem.C * costs.columns(problem)
    rate = device.products[problem.precision if problem.dtype.itemsize == 4 else str(problem.dtype)[6:]]
    return device.launch + device.forms["box"] * 2 * products / rate


def microseconds(cubes: Cubes, tile: launch.Tile) -> float:
    """Where tiles' times are known."""
    problem, known = cubes.problem, estimates.of(pace.TARGET)
    block = min(tile["BLOCK_K"], problem.C & -problem.C)
    tiles = (
        number(cubes.counts, shape_of(cubes, tile["BLOCK_N"]))
        * launch.cdiv(problem.M, tile["BLOCK_M"])
        * problem.groups
    )
    steps = pace.steps(cubes.taps * problem.C / block, block, known.steps.apart_boxes)
    tempo = pace.of_boxed(tile, problem.groups * problem.C)
    return pace.microseconds(tiles, steps, tempo, problem.processors, known.steps.rounds["box"])


@launch.cached
def prepare(cubes: Cubes) -> launch.Prepared:
    """The launch, on x, w [groups * M, taps, C], bias, scale, y and z."""
    problem, N = cubes.problem, cubes.volumes
    M, C, groups = problem.M, problem.C, problem.groups
    tile = _tile(cubes)
    options = tile.options
    box = shape_of(cubes, tile["BLOCK_N"])
    del options["BLOCK_N"]
    options["BLOCK_K"] = block = min(tile["BLOCK_K"], C & -C)  # boxes end where a group's channels end
    tiles = number(cubes.counts, box) * launch.cdiv(M, tile["BLOCK_M"]) * groups
    # As in `boxed`: programs that walk over one tile begin later.
    walking = tile["PER_PROCESSOR"] * problem.processors
    if tiles <= walking:
        walking = options["PER_PROCESSOR"] = options["FLATTEN"] = 0
    programs = walking or tiles
    scalars = (
        N, cubes.read[0], *cubes.counts[1:], *cubes.written, M, groups, *(walk.in_start for walk in cubes.walks),
        *(walk.out_start for walk in cubes.walks), tiles, programs,
    )  # fmt: skip
    meta = {
        **taps_read(cubes, box), **problem.constants, **problem.flags("POOL"), **options,
        **{f"OUT_STEP_{name}": walk.out_step for name, walk in zip("DHW", cubes.walks, strict=True)},
    }  # fmt: skip
    boxes = (
        box_of(cubes, box, block),
        Box.of_rows(groups * M, cubes.taps * C, (tile["BLOCK_M"], block)),
    )
    return launch.Prepared(conv_cube_kernel, (programs,), scalars, meta, boxes)


def taps_read(cubes: Cubes, box: tuple[int, ...]) -> dict[str, int | bool]:
    """The constants by which a kernel finds the inputs of a box of outputs."""
    found: dict[str, int | bool] = {"C": cubes.problem.C, "STRIDED": max(cubes.strides) > 1}
    for name, walk, step in zip("DHW", cubes.walks, cubes.strides, strict=True):
        found |= {f"J{name}": len(walk.taps), f"IN_STEP_{name}": step, f"IN_TAP_{name}": walk.in_tap}
    return found | dict(zip(("TILE_N", "TILE_D", "TILE_H", "TILE_W"), box, strict=True))


def box_of(cubes: Cubes, box: tuple[int, ...], channels: int) -> Box:
    """Boxes of x, of so many channels."""
    N, (D, H, W), width = cubes.volumes, cubes.read, cubes.problem.groups * cubes.problem.C
    sizes: tuple[int, ...] = (N, D, H, W, width)
    if max(cubes.strides) > 1:
        _, h, w = cubes.strides
        sizes, box = (N * D, H // h, h, W // w, w * width), (1, box[2], 1, box[3])
    return Box(sizes, [math.prod(sizes[i + 1 :]) for i in range(5)], [*box, channels])


def weights(w: torch.Tensor, walks: tuple[Walk, Walk, Walk], groups: int, back: bool) -> torch.Tensor:
    """[groups * M, taps, C] of w [groups * M, C, Q, R, S]; back: [groups * C, taps, M] of the walks' taps."""
    if not back:
        return w.permute(0, 2, 3, 4, 1).contiguous()
    d, h, v = (slice(walk.taps[0], walk.taps[-1] + 1, max(1, walk.tap_step)) for walk in walks)
    return w[:, :, d, h, v].unflatten(0, (groups, -1)).permute(0, 2, 3, 4, 5, 1).contiguous()


def _tile(cubes: Cubes) -> launch.Tile:
    problem = cubes.problem
    tiles = problem.tiles(FAMILY, M=problem.M, N=math.prod(cubes.counts), K=problem.C & -problem.C)
    return min(tiles, key=lambda tile: microseconds(cubes, tile)) if len(tiles) > 1 else tiles[0]


def shape_of(cubes: Cubes, voxels: int) -> tuple[int, ...]:
    """Of the boxes of so many voxels that cover the outputs."""
    return shape_of_cube(cubes.counts, voxels, max(cubes.strides) > 1)


def moved(cubes: Cubes) -> int:
    """Bytes that are read and written."""
    problem = cubes.problem
    values = cubes.volumes * math.prod(cubes.read) * problem.C + math.prod(cubes.counts) * problem.M
    return values * problem.groups * problem.dtype.itemsize


def number(sizes: tuple[int, ...], box: tuple[int, ...]) -> int:
    """Of boxes that cover so many outputs."""
    return math.prod(launch.cdiv(size, extent) for size, extent in zip(sizes, box, strict=True))


def shape_of_cube(sizes: tuple[int, ...], voxels: int, one_slice: bool = False) -> tuple[int, ...]:
    """Volumes, slices, rows and columns, powers of two of product `voxels`, whose boxes cover `sizes` with least waste.

    Of equals the one of fewest volumes, and of those the nearest to a cube.
    """
    sides = [2**i for i in range(9) if 2**i <= voxels]  # a side of a box is 256 at most
    whole = [
        (voxels // math.prod(inner), *inner)
        for inner in itertools.product(sides, repeat=3)
        if math.prod(inner) <= voxels <= (1 if one_slice else 256) * math.prod(inner)
        and (inner[0] == 1 or not one_slice)
    ]
    return min(whole, key=lambda box: (number(sizes, box), box[0], max(box)))
