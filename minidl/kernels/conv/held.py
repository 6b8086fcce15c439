"""The banded form with the whole band held in shared memory: for one channel, or few taps of few.

All filter rows are one K: a group's inputs of every row side by side, R rows of `reach` values, in one product with a
band [R * reach, G * M] that a program reads once for all of its tiles, while the inputs of the tiles to come are on
their way. `banded` reads the band anew for every tile: 10,000 pictures of 28x28, 5x5 to 32 channels, 0.15 ms in place
of 0.19. Where a row has whole groups, and these all columns of the band, a tile is one piece of y and is written as a
box: 0.126 ms.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.kernels import early, launch
from minidl.kernels.conv.bands import bands_of, group_of, in_rows, padded, store_groups
from minidl.kernels.conv.geometry import Walk
from minidl.kernels.conv.problem import MANY, Epilogue
from minidl.kernels.early import wait

MOST = (
    2**13
)  # values of a band: beyond, reading them for every tile is faster (7x7 with one channel 0.70 ms, held 0.77)
MOST_K = 128  # inputs of a row, of which four stages lie in shared memory


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
    # The last group may reach beyond the image's row.
    INSIDE: tl.constexpr = IN_W >= 0 and IN_W + (GROUPS - 1) * G * STEP + REACH <= WC
    for i in tl.range(tl.program_id(0), tiles, PROGRAMS, num_stages=STAGES):
        i_tile = tl.full((), 0, tl.int32) + i  # the interpreter counts in Python's integers
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
    """(G, reach, KP, NP): pixels in a group, values it reads of a row, rows and columns of the band; None for none.

    The cheapest per pixel is taken: KP * NP products, and the loads of the values, which cost as much as 256 each.
    """
    best = None
    for NP in (16, 32, 64, 128):
        G = min(NP // M, width)
        if pool:
            # Whole windows, in a column for each of which a power of two stands.
            G = NP // M if NP % M == 0 and width >= NP // M and NP // M & (NP // M - 1) == 0 else 0
        reach = ((G - 1) * stride + S) * C
        KP = max(16, triton.next_power_of_2(R * reach))
        if G > 1:
            cost = (KP * NP + 256 * R * reach) / G
            if best is None or cost <= best[0]:
                best = cost, G, reach, KP, NP
    return None if best is None or best[3] > MOST_K or best[3] * best[4] > MOST else best[1:]


def takes(x: torch.Tensor, w: torch.Tensor, h: Walk, v: Walk, epilogue: Epilogue, precision: str) -> bool:
    """Whether it does what `banded` does of x [N, H, W, C] and w [M, R, S, C], and with fewer bytes."""
    # Where a product cuts its operands, it would cut the band again for every tile.
    if x.dtype == torch.float64 or (x.dtype == torch.float32 and precision != "tf32" and not launch.INTERPRETED):
        return False
    return _found(w, v, epilogue) is not None


def correlate(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, h: Walk, v: Walk, epilogue: Epilogue, precision: str
) -> None:
    """As `banded.correlate`."""
    N, H, W, C = x.shape
    M, R, _, _ = w.shape
    found = _found(w, v, epilogue)
    assert found is not None
    G, reach, KP, NP = found
    step = v.in_step * C
    band = bands_of(w, G, step, reach, NP, pool=epilogue.pool is not None)
    q_h, q_w = (h.count // 2 * 2, v.count // 2 * 2) if epilogue.pool else (h.count, v.count)
    groups = launch.cdiv(q_w, G)
    rows = N * q_h * groups
    boxes = whole(w, v, epilogue) and launch.boxes() and 0 < rows < MANY
    tile = launch.tile("conv_held", x.dtype, floor=16, precision=precision, M=rows, K=KP, N=NP, boxes=int(boxes))
    tiles = launch.cdiv(rows, tile["BLOCK_M"])
    programs = min(tiles, tile["PER_PROCESSOR"] * launch.processors() or tiles)
    out: Any = TensorDescriptor(y.view(rows, NP), [rows, NP], [NP, 1], [tile["BLOCK_M"], NP]) if boxes else y
    launch.run(
        conv_held_kernel, (programs,), x, band, epilogue.bias, epilogue.scale, out, epilogue.z,
        rows, tiles, H, h.in_start, programs,
        QH=q_h, QW=q_w, G=G, GROUPS=groups, M=M, R=R, REACH=reach, WC=W * C, IN_W=v.in_start * C, STEP=step,
        IN_STEP_H=h.in_step, IN_TAP_H=h.in_tap, PADDED_H=padded(h, H), WIDE=rows >= MANY,
        BOXES=boxes, ACC=launch.acc(x.dtype), PRECISION=precision, KP=KP, NP=NP, **early.options(), **epilogue.flags,
        BLOCK_M=tile["BLOCK_M"], STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip


def whole(w: torch.Tensor, v: Walk, epilogue: Epilogue) -> bool:
    """Whether a row has whole groups and these all columns of the band, so that a tile is one piece of y."""
    found = _found(w, v, epilogue)
    plain = epilogue.pool is None and epilogue.z is None
    return plain and found is not None and v.count % found[0] == 0 and found[0] * w.shape[0] == found[3]


def _found(w: torch.Tensor, v: Walk, epilogue: Epilogue) -> tuple[int, int, int, int] | None:
    M, R, S, C = w.shape
    return held_band(C, M, R, S, v.in_step, v.count, epilogue.pool is not None)
