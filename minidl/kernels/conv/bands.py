"""Shared by the banded kernels: band matrices of weights, groups of neighbouring outputs, and their stores."""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv.epilogue import pool_last
from minidl.kernels.conv.geometry import Phase
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import Problem
from minidl.kernels.gemm.tiled import save_or_add
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait


@triton.jit
def conv_band_kernel(
    p_w, p_band, total, M, G,
    SC: tl.constexpr, STEP: tl.constexpr, R: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr,
    TURNED: tl.constexpr, POOL: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write band [R, KP, NP] (TURNED: [NP, R, KP]) of w [M, R, SC], SC = S * C; adjacent pixels are STEP values apart.

    A column is (pixel, m), with POOL (pair of pixels, m, pixel of the pair).
    """
    wait(EARLY)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if TURNED:
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


@triton.jit
def group_of(i_first, BLOCK: tl.constexpr, QH: tl.constexpr, GROUPS: tl.constexpr, POOL: tl.constexpr):
    """Return the image, image row and group of `BLOCK` GEMM rows from i_first on.

    With POOL, eight groups of one image row alternate with the eight groups below them: in the accumulator of a matrix
    instruction one thread holds rows i and i + 8.
    """
    if POOL:
        PER_IMAGE: tl.constexpr = QH // 2 * GROUPS
        i = tl.arange(0, BLOCK)
        first = i_first // 2
        o = (first % PER_IMAGE).to(tl.int32) + i // 16 * 8 + i % 8
        n = (first // PER_IMAGE).to(tl.int64) + o // PER_IMAGE
        o = o % PER_IMAGE
        return n, o // GROUPS * 2 + i // 8 % 2, o % GROUPS
    else:
        PER_IMAGE: tl.constexpr = QH * GROUPS
        o = (i_first % PER_IMAGE).to(tl.int32) + tl.arange(0, BLOCK)
        n = (i_first // PER_IMAGE).to(tl.int64) + o // PER_IMAGE
        o = o % PER_IMAGE
        return n, o // GROUPS, o % GROUPS


@triton.jit
def in_rows(i_first, rows, BLOCK: tl.constexpr, POOL: tl.constexpr):
    """Return the mask of the rows of `group_of` that exist."""
    i = tl.arange(0, BLOCK)
    if POOL:
        return i_first // 2 + i // 16 * 8 + i % 8 < rows // 2
    else:
        return i_first + i < rows


@triton.jit
def store_groups(
    b_acc, p_bias, p_scale, p_y, p_z, i_tile, rows, m_row, n, q_h, g,
    QH: tl.constexpr, QW: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, M: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    POOL: tl.constexpr, BOXES: tl.constexpr = False,
):  # fmt: skip
    """Apply scale, bias, activation and pool to the groups b_acc [BLOCK_M, NP] of tile i_tile, and store them in y.

    With BOXES p_y is a descriptor of y [groups, NP], whose columns are all used.
    """
    BLOCK_M: tl.constexpr = b_acc.shape[0]
    NP: tl.constexpr = b_acc.shape[1]
    ACC: tl.constexpr = b_acc.dtype
    o_column = tl.arange(0, NP)
    m_column = o_column < G * M
    o_m = (o_column // 2 if POOL else o_column) % M
    if HAS_SCALE:
        b_acc *= tl.load(p_scale + o_m, mask=m_column, other=0.0).to(ACC)[None, :]
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_m, mask=m_column, other=0.0).to(ACC)[None, :]
    if POOL:
        b_y = tl.reshape(activate(b_acc, ACT, SLOPE), (BLOCK_M // 16, 2, 8, NP // 2, 2))
        b_y = pool_last(tl.permute(b_y, (0, 2, 3, 1, 4)), POOL)
        b_y = tl.reshape(b_y, (BLOCK_M // 2, NP // 2))
        i_window = i_tile.to(tl.int64) * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
        first = i_window // GROUPS * ((QW // 2) * M) + i_window % GROUPS * (G // 2 * M)
        limit = tl.minimum(G // 2, QW // 2 - (i_window % GROUPS).to(tl.int32) * (G // 2)) * M
        o_half = tl.arange(0, NP // 2)
        m_y = (i_window < rows // 2)[:, None] & (o_half[None, :] < limit[:, None])
        tl.store(p_y + first[:, None] + o_half[None, :], b_y.to(p_y.dtype.element_ty), mask=m_y)
    elif BOXES:
        p_y.store([i_tile * BLOCK_M, 0], activate(b_acc, ACT, SLOPE).to(p_y.dtype))
    else:
        o_y = ((n * QH + q_h) * QW + g * G) * M
        limit = tl.minimum(G, QW - g * G) * M
        m_y = m_row[:, None] & (o_column[None, :] < limit[:, None])
        o_y = o_y[:, None] + o_column[None, :]
        b_y = activate(save_or_add(b_acc, p_z, o_y, m_y, SAVE_Z), ACT, SLOPE)
        tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)


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
    M, C, R, S = problem.M, problem.C, len(problem.at.h.taps), len(problem.at.v.taps)
    total = R * KP * NP
    tile = problem.tile("conv_band", floor=1, total=total)
    meta = {
        "SC": S * C, "STEP": problem.at.v.in_step * C, "R": R, "KP": KP, "NP": NP, "TURNED": transposed,
        "POOL": problem.pool is not None and not transposed,
        **dependent_launch.options(target=problem.target), **tile.options,
    }  # fmt: skip
    return Copy(
        (NP, R, KP) if transposed else (R, KP, NP),
        launch.Prepared(conv_band_kernel, (launch.cdiv(total, tile["BLOCK"]),), (total, M, G), meta),
    )


def constants(problem: Problem, G: int, KP: int, NP: int) -> dict[str, Any]:
    """Return the constants of kernels on bands [R, KP, NP]; an image has QH * GROUPS groups."""
    h, v, (_, W), _ = problem.at
    q_h, q_w = (h.count // 2 * 2, v.count // 2 * 2) if problem.pool else (h.count, v.count)
    return {
        "QH": q_h, "QW": q_w, "G": G, "GROUPS": launch.cdiv(q_w, G), "M": problem.M, "R": len(h.taps),
        "WC": W * problem.C, "IN_W": v.in_start * problem.C, "STEP": v.in_step * problem.C, "IN_STEP_H": h.in_step,
        "IN_TAP_H": h.in_tap, "KP": KP, "NP": NP, **problem.constants,
        **dependent_launch.options(target=problem.target),
    }  # fmt: skip


def near(problem: Problem) -> bool:
    """Return whether 32 bits count the values of x [N, H, W, C] between the first and the last row of a filter."""
    h = problem.at.h
    return len(h.taps) * h.in_tap * problem.read[1] * problem.C < 2**31


def padded(h: Phase, H: int) -> bool:
    """Return whether a filter row of some output lies outside an image of H rows."""
    return h.in_start < 0 or h.in_start + (h.count - 1) * h.in_step + (len(h.taps) - 1) * h.in_tap >= H
