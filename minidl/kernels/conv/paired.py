"""The paired form: two neighbouring pixels count as one of twice the channels, for few channels and many images.

Channels-last, x [N, H, W, C] is also x [N, H, W / 2, 2 C], and y alike; a convolution with S taps across is one of
(S + 1) / 2 taps over pairs, whose weights are a band: a sixth of them are zeros with S = 5. For that each input is read
(S + 1) / 2 times in place of S, in rows of twice the length; reading them is what limits `batch_tiled`, which does the
rest. An input that is not finite makes all outputs NaN whose pairs it is in reach of.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels import early, launch
from minidl.kernels.activation import activate
from minidl.kernels.conv import batch_tiled
from minidl.kernels.conv.bands import bands_of
from minidl.kernels.conv.geometry import Walk
from minidl.kernels.conv.problem import Epilogue, affine, pool_four
from minidl.kernels.early import wait
from minidl.kernels.gemm.tiled import halves


@triton.jit
def conv_paired_pool_kernel(
    d_x, d_w, p_bias, p_scale, p_y, N, W, QH, QW, M, in_h, in_w, steps, reach,
    ROW: tl.constexpr, IN_STEP_H: tl.constexpr, IN_TAP_H: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, POOL: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    NP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [N, QH, QW, M]: a run of images at a pair of outputs and the pair below it, whose pool is one pixel.

    x is seen as [N, H * W * ROW], W pairs of ROW values in a row, and the bands as [2 * M, steps * BLOCK_K], `reach`
    values for each filter row; every tap is inside. Columns M on are those of the right of each pair.
    """
    wait(EARLY)
    runs = tl.cdiv(N, BLOCK_M)
    n = tl.program_id(0) % runs * BLOCK_M
    q = tl.program_id(0) // runs
    q_w = q % QW
    q_h = q // QW
    first = ((in_h + 2 * q_h * IN_STEP_H) * W + in_w + q_w) * ROW
    below = IN_STEP_H * W * ROW
    b_up = tl.zeros((BLOCK_M, NP), dtype=ACC)
    b_down = tl.zeros((BLOCK_M, NP), dtype=ACC)
    tl.assume(steps > 0)
    for i in range(steps):
        k = i * BLOCK_K
        o_x = first + k // reach * (IN_TAP_H * W * ROW) + k % reach
        b_w = d_w.load([0, k]).T  # [BLOCK_K, NP]
        b_x = d_x.load([n, o_x])  # [BLOCK_M, BLOCK_K]
        b_up = tl.dot(b_x, b_w, b_up, input_precision=PRECISION, out_dtype=ACC)
        b_x = d_x.load([n, o_x + below])
        b_down = tl.dot(b_x, b_w, b_down, input_precision=PRECISION, out_dtype=ACC)
    b_up = affine(b_up, p_bias, p_scale, 0, 2 * M, 0, HAS_BIAS, HAS_SCALE)
    b_down = affine(b_down, p_bias, p_scale, 0, 2 * M, 0, HAS_BIAS, HAS_SCALE)
    b_0, b_1 = halves(activate(b_up, ACT, SLOPE))
    b_2, b_3 = halves(activate(b_down, ACT, SLOPE))
    b_y = pool_four(b_0, b_1, b_2, b_3, POOL)
    o_n = n + tl.arange(0, BLOCK_M)
    o_m = tl.arange(0, NP // 2)
    o_y = (o_n.to(tl.int64) * (QH * QW) + q_h * QW + q_w) * M
    tl.store(p_y + o_y[:, None] + o_m[None, :], b_y.to(p_y.dtype.element_ty), mask=(o_n < N)[:, None] & (o_m < M))


def takes(x: torch.Tensor, w: torch.Tensor, h: Walk, v: Walk, groups: int) -> bool:
    """Whether the form can correlate x [N, H, W, C] with w [M, R, S, C] on these walks."""
    plain = groups == 1 and (v.in_step, v.in_tap, v.out_step, v.out_start) == (1, 1, 1, 0)
    even = x.shape[2] % 2 == v.count % 2 == v.in_start % 2 == 0 and len(v.taps) % 2 == 1 < len(v.taps)
    if not (plain and even and h.out_step == 1 and x.shape[3] % 16 == 0 and x.shape[3] > 0 and w.numel() > 0):
        return False
    return batch_tiled.has_boxes(x) and 2 * w[0].numel() * w.element_size() % 16 == 0 and x.shape[0] > 0


def takes_pool(x: torch.Tensor, w: torch.Tensor, h: Walk, v: Walk, groups: int) -> bool:
    """The same with a pool in the kernel: both pixels of a pair in one tile, and no tap outside."""
    M = w.shape[0]
    whole = M >= 16 and M & (M - 1) == 0 and M <= 64 and 2 * x.shape[3] & -2 * x.shape[3] >= 32
    inside = batch_tiled.all_inside(h, x.shape[1]) and batch_tiled.all_inside(v, x.shape[2])
    return whole and inside and h.out_start == 0 and min(h.count, v.count) > 1 and takes(x, w, h, v, groups)


def pays(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether it is faster than `batch_tiled` for x [N, H, W, C] and w [M, R, S, C] that both take.

    So it is where a pixel has 64 bytes or less, or few outputs let every input be read often (an H200, 5x5, 10,000
    images of 12x12: 32 to 64 channels 0.139 ms in place of 0.172, 64 to 32 0.198 in place of 0.316).
    """
    return x.shape[3] * x.element_size() <= 64 or w.shape[0] <= 32


def correlate(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, h: Walk, v: Walk, epilogue: Epilogue, precision: str
) -> None:
    """Write the outputs of one pair of walks into y [N, OH, OW, M], or [N, OH / 2, OW / 2, M] with a pool."""
    M, R, S, C = w.shape
    taps = (S + 1) // 2
    bands = bands_of(w, 2, C, taps * 2 * C, 2 * M, turned=True)
    pairs = Walk(0, 1, v.count // 2, v.in_start // 2, 1, 1, tuple(range(taps)))
    twice = epilogue.of_pairs()
    if epilogue.pool:
        _pooled(_paired(x), bands, y, h, pairs, twice, precision)
    else:
        weights = bands.view(2 * M, R, taps, 2 * C)
        batch_tiled.correlate(_paired(x), weights, _paired(y), h, pairs, 1, twice, precision)


def _pooled(
    x: torch.Tensor, bands: torch.Tensor, y: torch.Tensor, h: Walk, v: Walk, epilogue: Epilogue, precision: str
) -> None:
    """y [N, H', W', M] pooled, of pairs x [N, H, W, 2 * C] and bands [2 * M, R, reach]."""
    N, _, W, row = x.shape
    _, QH, QW, M = y.shape
    rows, R, reach = bands.shape
    tile = launch.tile("conv_pair_pool", x.dtype, floor=16, precision=precision, M=N, K=row & -row)
    sizes = {**tile.options, "BLOCK_K": min(tile["BLOCK_K"], row & -row)}  # boxes end where a pair's channels end
    flags = {name: value for name, value in epilogue.flags.items() if name != "SAVE_Z"}
    launch.run(
        conv_paired_pool_kernel, (launch.cdiv(N, tile["BLOCK_M"]) * QH * QW,),
        batch_tiled.boxes_of(x, tile["BLOCK_M"], sizes["BLOCK_K"]), batch_tiled.boxes_of(bands, rows, sizes["BLOCK_K"]),
        epilogue.bias, epilogue.scale, y, N, W, QH, QW, M, h.in_start, v.in_start, R * reach // sizes["BLOCK_K"], reach,
        ROW=row, IN_STEP_H=h.in_step, IN_TAP_H=h.in_tap, ACC=launch.acc(x.dtype), PRECISION=precision, NP=rows,
        **flags, **early.options(), **sizes,
    )  # fmt: skip


def _paired(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], x.shape[2] // 2, 2 * x.shape[3])
