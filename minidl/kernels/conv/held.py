"""The "banded" form with the complete band in shared memory: for one channel, or few taps of few channels.

All filter rows form one K: a group's inputs in R rows of `reach` values, in a single product with a band
[R * reach, G * M] that a persistent program reads once, while inputs of later tiles are prefetched. `banded` reads the
band again for every tile: 10,000 pictures of 28x28, 5x5 to 32 channels, 0.15 ms in place of 0.19. If groups fill a row
and all columns of the band, a tile is contiguous in y and is stored by a descriptor: 0.126 ms.
"""

import functools

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import banded, bands, costs
from minidl.kernels.conv.bands import group_of, in_rows, padded, store_groups
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import CORRELATIONS, INT32_LIMIT, Problem, Tensors, Unsupported
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "banded"
MANY_OUTPUTS = 32
ADDED = 8
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_held", "conv_band")

# Maximum values of a band; reading larger ones for every tile is faster (7x7 with one channel 0.70 ms, here 0.77).
MOST = 2**13
MOST_K = 128  # maximum inputs of a row, with four stages in shared memory


@triton.jit
def conv_held_kernel(
    p_x, p_band, p_bias, p_scale, p_y, p_z, rows, tiles, H, in_h, PROGRAMS,
    QH: tl.constexpr, QW: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, REACH: tl.constexpr, WC: tl.constexpr, IN_W: tl.constexpr, STEP: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_TAP_H: tl.constexpr, PADDED_H: tl.constexpr, WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    POOL: tl.constexpr, BOXES: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    KP: tl.constexpr, NP: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    o_k = tl.arange(0, KP)
    m_k = o_k < R * REACH
    r = o_k // REACH
    o_reach = o_k % REACH
    o_tap = r * (IN_TAP_H * WC) + o_reach
    o_band = o_k[:, None] * NP + tl.arange(0, NP)[None, :]
    b_band = tl.load(p_band + o_band, mask=m_k[:, None], other=0.0)  # [KP, NP]
    # The last group may exceed the image row.
    INSIDE: tl.constexpr = IN_W >= 0 and IN_W + (GROUPS - 1) * G * STEP + REACH <= WC
    for i in tl.range(tl.program_id(0), tiles, PROGRAMS, num_stages=STAGES):
        i_tile = tl.full((), 0, tl.int32) + i  # a Python int in the interpreter
        i_first = i_tile * BLOCK_M
        if WIDE:
            i_first = i_tile.to(tl.int64) * BLOCK_M
        n, q_h, g = group_of(i_first, BLOCK_M, QH, GROUPS, POOL)
        m_row = in_rows(i_first, rows, BLOCK_M, POOL)
        start = IN_W + g * (G * STEP)
        x_h = in_h + q_h * IN_STEP_H
        o_x = (n * H + x_h) * WC + start
        m_x = m_row[:, None] & m_k[None, :]
        if PADDED_H:
            h = x_h[:, None] + (r * IN_TAP_H)[None, :]
            m_x = m_x & (h >= 0) & (h < H)
        if not INSIDE:
            at = start[:, None] + o_reach[None, :]
            m_x = m_x & (at < WC)
            if IN_W < 0:
                m_x = m_x & (at >= 0)
        b_x = tl.load(p_x + o_x[:, None] + o_tap[None, :], mask=m_x, other=0.0)  # [BLOCK_M, KP]
        b_acc = tl.dot(b_x, b_band, input_precision=PRECISION, out_dtype=ACC)
        store_groups(
            b_acc, p_bias, p_scale, p_y, p_z, i_tile, rows, m_row, n, q_h, g,
            QH, QW, G, GROUPS, M, HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, POOL, BOXES,
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def held_band(C: int, M: int, R: int, S: int, stride: int, width: int, pool: bool) -> tuple[int, int, int, int] | None:
    """Return (G, reach, KP, NP): pixels in a group, values it reads per row, rows and columns of the band; or None.

    They have the lowest cost per pixel: KP * NP products, and R * reach loads, each as expensive as 256 products.
    """
    best = None
    for NP in (16, 32, 64, 128):
        G = min(NP // M, width)
        if pool:
            # Complete pooling windows, in a power of two of columns.
            G = NP // M if NP % M == 0 and width >= NP // M and NP // M & (NP // M - 1) == 0 else 0
        reach = ((G - 1) * stride + S) * C
        KP = max(16, triton.next_power_of_2(R * reach))
        if G > 1:
            cost = (KP * NP + 256 * R * reach) / G
            if best is None or cost <= best[0]:
                best = cost, G, reach, KP, NP
    return None if best is None or best[3] > MOST_K or best[3] * best[4] > MOST else best[1:]


def able(problem: Problem) -> bool | Unsupported:
    # A split-precision product would split the band again for every tile.
    split = problem.dtype == torch.float32 and problem.precision != "tf32" and problem.target != "interpreted"
    return (
        banded.able(problem)
        and ((problem.dtype != torch.float64 and not split) or Unsupported("float64, or operands that are split"))
        and (_band(problem) is not None or Unsupported("a band too large for shared memory"))
    )


def estimate(problem: Problem) -> float:
    """Estimate microseconds relative to `banded`.

    1->32 5x5: 0.15 ms in place of 0.19, with a descriptor 0.126, with 2x2 average pool 0.100 in place of 0.148.
    3->64 3x3 at 224x224, 57 images: 0.38 ms, twice the products' time, as rows are stored value by value.
    3->32 3x3 stride 2 at 224x224, 256 images: 257 us, with `pixel` 108.
    """
    name = "held, few channels" if problem.C < 16 else "held"
    time = costs.relative(problem, name) * banded.estimate(problem)
    if banded.two_bytes_apart(problem):
        time *= costs.relative(problem, "held, odd channels")
    wide = problem.M > MANY_OUTPUTS or not (problem.pool or fills_tiles(problem))
    return costs.tile_time(problem, "held, many outputs", time) if wide else time


def prepare(problem: Problem) -> Product:
    h, H = problem.at.h, problem.read[0]
    G, reach, KP, NP = _band(problem)
    constants = bands.constants(problem, G, KP, NP)
    per_image = constants["QH"] * constants["GROUPS"]
    rows = problem.N * per_image
    use_descriptor = fills_tiles(problem) and launch.boxes(problem.target) and 0 < rows < INT32_LIMIT
    tile = problem.tile("conv_held", M=problem.images * per_image, K=KP, N=NP, boxes=int(use_descriptor))
    tiles = launch.cdiv(rows, tile["BLOCK_M"])
    programs = min(tiles, tile["PER_PROCESSOR"] * problem.processors or tiles)
    meta = {
        **constants, "REACH": reach, "PADDED_H": padded(h, H), "WIDE": rows >= INT32_LIMIT, "BOXES": use_descriptor,
        **problem.flags(), "BLOCK_M": tile["BLOCK_M"], "STAGES": tile.num_stages, "num_warps": tile.num_warps,
    }  # fmt: skip
    scalars = (rows, tiles, H, h.in_start, programs)
    y = Box.of_rows(rows, NP, (tile["BLOCK_M"], NP)) if use_descriptor else None
    return Product(
        bands.prepare(problem, G, reach, NP),
        launch.Prepared(conv_held_kernel, (programs,), scalars, meta, (None, None, None, None, y)),
    )


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t)


def fills_tiles(problem: Problem) -> bool:
    """Return whether groups fill a row and all columns of the band, so that a tile is contiguous in y."""
    band = _band(problem)
    bare = problem.pool is None and not problem.beside
    return bare and band is not None and problem.at.v.count % band[0] == 0 and band[0] * problem.M == band[3]


def _band(problem: Problem) -> tuple[int, int, int, int] | None:
    h, v = problem.at.h, problem.at.v
    pool = problem.pool is not None
    return held_band(problem.C, problem.M, len(h.taps), len(v.taps), v.in_step, v.count, pool)
