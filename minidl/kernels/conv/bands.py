"""Band matrices of weights, for groups of G neighbouring pixels: `banded` and `paired_box` multiply by them.

band[r, k, (p, m)] = w[m, r, k - p STEP]     for 0 <= k - p STEP < S C, else 0     STEP: values from pixel to pixel

     (0, m) (1, m) (2, m)
k    w[0]
|    w[1]   w[0]                 each column is the filter's row r, shifted by the pixel p
v    w[2]   w[1]   w[0]
            w[2]   w[1]
                   w[2]
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import Problem
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait


@triton.jit
def conv_band_kernel(
    p_w, p_band, total, M, G,
    SC: tl.constexpr, STEP: tl.constexpr, R: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr,
    TRANSPOSED_BAND: tl.constexpr, POOL: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write band [R, KP, NP], or with TRANSPOSED_BAND [NP, R, KP], of w [M, R, SC], SC = S * C.

    Adjacent pixels are STEP values apart.

    A column is (pixel, m), with POOL (pair of pixels, m, pixel of the pair).
    """
    wait(EARLY)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if TRANSPOSED_BAND:
        k = o % KP
        r = o // KP % R
        column = o // (KP * R)
    else:
        column = o % NP
        k = o // NP % KP
        r = o // (NP * KP)
    if POOL:
        p = column // (2 * M) * 2 + column % 2
        column = column // 2
    else:
        p = column // M
    sc = k - p * STEP
    m_w = (o < total) & (p < G) & (sc >= 0) & (sc < SC)
    b_w = tl.load(p_w + (column % M * R + r) * SC + sc, mask=m_w, other=0.0)  # [BLOCK]
    tl.store(p_band + o, b_w, mask=o < total)


@functools.lru_cache(maxsize=4096)
def band(C: int, M: int, S: int, stride: int, width: int, pool: bool) -> tuple[int, int, int] | None:
    """Return (G, KP, NP): pixels in a group, rows and columns of the band; None if no group has two pixels.

    KP and NP are powers of two from 16 to 128, chosen for the lowest cost per pixel: KP * NP products and KP loads,
    each as expensive as 64 products.
    """
    best = None
    for KP in (16, 32, 64, 128):
        for NP in (16, 32, 64, 128):
            room = (KP // C - S) // stride + 1 if S <= KP // C else 0
            G = min(room, NP // M, width)
            if pool:
                # Complete pooling windows, in a power of two of columns.
                G = min(NP // M, 1 << max(G, 0).bit_length() - 1) if G > 1 and NP % M == 0 and room >= NP // M else 0
            if G > 1:
                cost = KP * (NP + 64) / G
                if best is None or cost <= best[0]:
                    best = cost, G, KP, NP
    return None if best is None else best[1:]


def prepare(problem: Problem, G: int, KP: int, NP: int, *, transposed: bool = False) -> Copy:
    """Return the copy that writes the bands [R, KP, NP], or transposed [NP, R, KP], for groups of G pixels.

    If the problem has a pool, columns are in pairs of pixels.
    """
    M, C, R, S = problem.M, problem.C, len(problem.at.down.taps), len(problem.at.across.taps)
    total = R * KP * NP
    tile = problem.tile("conv_band", floor=1, total=total)
    meta = {
        "SC": S * C, "STEP": problem.at.across.in_step * C, "R": R, "KP": KP, "NP": NP, "TRANSPOSED_BAND": transposed,
        "POOL": problem.pool is not None and not transposed,
        **dependent_launch.options(target=problem.target), **tile.options,
    }  # fmt: skip
    return Copy(
        (NP, R, KP) if transposed else (R, KP, NP),
        launch.Prepared(conv_band_kernel, (launch.cdiv(total, tile["BLOCK"]),), (total, M, G), meta),
    )
