"""Rotate pairs of numbers by angles: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.

x and y are contiguous rows [R, 2 H]; row r has the angles of row r mod T of cos and sin [T, H]. A pair is the numbers i
and i + H of a row, or 2 i and 2 i + 1 (interleaved). They are rounded once, from float32 (float64 for float64).
"""

import torch
import triton
import triton.language as tl

from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed


@triton.jit
def rotary_kernel(
    p_x, p_cos, p_sin, p_y, R, T, H, s_pair, s_half, SIGN: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_N pairs of BLOCK_M rows, by the opposite angles where SIGN is -1."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    m = (o_m < R) & (o_n < H)
    o_angle, o_1 = o_m % T * H + o_n, o_m * (2 * H) + o_n * s_pair
    o_2 = o_1 + s_half
    b_1 = tl.load(p_x + o_1, mask=m, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
    b_2 = tl.load(p_x + o_2, mask=m, other=0.0).to(ACC)
    b_cos = tl.load(p_cos + o_angle, mask=m, other=0.0).to(ACC)
    b_sin = tl.load(p_sin + o_angle, mask=m, other=0.0).to(ACC) * SIGN
    tl.store(p_y + o_1, (b_1 * b_cos - b_2 * b_sin).to(p_y.dtype.element_ty), mask=m)
    tl.store(p_y + o_2, (b_2 * b_cos + b_1 * b_sin).to(p_y.dtype.element_ty), mask=m)


@replayed
def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, inverse: bool = False
) -> torch.Tensor:
    """Return rotated x, contiguous; all operands are. cos and sin may have another dtype."""
    y, (T, H) = torch.empty_like(x), cos.shape
    if x.numel():
        R = x.numel() // (2 * H)
        tile = launch.tile("elementwise_tile", x.dtype, M=R, N=H)
        grid = launch.cdiv(R, tile["BLOCK_M"]), launch.cdiv(H, tile["BLOCK_N"])
        strides, how = (2, 1) if interleaved else (1, H), {"SIGN": 1 - 2 * inverse, "ACC": launch.acc(x.dtype)}
        launch.run(rotary_kernel, grid, x, cos, sin, y, R, T, H, *strides, **how, **tile.options)
    return y
