"""Maximum and average pooling of images, adaptive and global averages, and their gradients.

    x, dx  [N, C, H, W]        y, dy  [N, C, OH, OW]
    y[n, c, oh, ow] = max or mean over r, s of x[n, c, oh * stride - padding + r * dilation, ...]

Shapes are torch's, memory is channels-last inside as in `conv`: x is used as it is in `torch.channels_last` and copied
once otherwise, and results are channels-last. A block holds BLOCK_P pixels by BLOCK_C channels, and walks the window.

Padding counts as -inf for a maximum, and as 0 for a mean, which divides by the size of the window with the padding
inside its reach (`count_include_pad`), without it, or by `divisor_override`. An adaptive mean takes for output o of O
the inputs floor(o I / O) up to ceil((o + 1) I / O).

Gradients are gathered: a pixel adds up the windows that hold it in their order, so nothing depends on scheduling. For
that a maximum keeps its place in the window, the first in row-major order, or the last NaN, as torch does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import check, launch, reduce

Pair = int | tuple[int, int]

# A window of up to this many taps is unrolled, so that all of its loads are on their way together.
UNROLLED = 9
MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def pixels(P, H, W, INDEX: tl.constexpr, BLOCK_P: tl.constexpr):
    """(index, image, row, column) of this program's pixels of P = N H W."""
    o_p = tl.program_id(0).to(INDEX) * BLOCK_P + tl.arange(0, BLOCK_P)
    row = o_p // W
    return o_p, (row // H).to(tl.int64), row % H, o_p % W


@triton.jit
def window(o, size, outputs, stride, padding, K: tl.constexpr, ADAPTIVE: tl.constexpr):
    """The window of output o along one axis: its first input, and the one behind its last, padding included."""
    if ADAPTIVE:
        return (o * size) // outputs, ((o + 1) * size + (outputs - 1)) // outputs
    else:
        start = o * stride - padding
        return start, tl.minimum(start + K, size + padding)


@triton.jit
def share(h0, h1, w0, w1, H, W, DIVISOR: tl.constexpr, PADDED: tl.constexpr, ACC: tl.constexpr):
    """One over what the sum of a window is divided by; finite also where there is no such window."""
    if DIVISOR != 0:
        return tl.full(h0.shape, 1.0, ACC) / DIVISOR
    elif PADDED:
        return 1.0 / tl.maximum((h1 - h0) * (w1 - w0), 1).to(ACC)
    else:
        height = tl.minimum(h1, H) - tl.maximum(h0, 0)
        width = tl.minimum(w1, W) - tl.maximum(w0, 0)
        return 1.0 / tl.maximum(height * width, 1).to(ACC)


@triton.jit
def max_pool_kernel(
    p_x, p_y, p_i, P, C, H, W, OH, OW, s_h, s_w, pad_h, pad_w,
    R: tl.constexpr, S: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr, KEEP: tl.constexpr,
    UNROLL: tl.constexpr, INDEX: tl.constexpr, ACC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y, and with KEEP the tap r * S + s of each maximum."""
    o_p, o_n, o_h, o_w = pixels(P, OH, OW, INDEX, BLOCK_P)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_p = o_p < P
    m_c = o_c < C
    o_h = o_h * s_h - pad_h
    o_w = o_w * s_w - pad_w
    b_v = tl.full((BLOCK_P, BLOCK_C), MINUS_INF, ACC)
    if KEEP:
        # Where nothing is above -inf, the first tap inside the image has the gradient.
        first_h = (tl.maximum(-o_h, 0) + DIL_H - 1) // DIL_H
        first_w = (tl.maximum(-o_w, 0) + DIL_W - 1) // DIL_W
        b_i = tl.broadcast_to((first_h * S + first_w).to(tl.int32)[:, None], (BLOCK_P, BLOCK_C))
    for t in tl.range(0, R * S, loop_unroll_factor=UNROLL):
        h = o_h + (t // S) * DIL_H
        w = o_w + (t % S) * DIL_W
        m_t = m_p & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        p_t = p_x + ((o_n * H + h) * W + w) * C
        b_x = tl.load(p_t[:, None] + o_c[None, :], mask=m_t[:, None] & m_c[None, :], other=MINUS_INF)
        b_x = b_x.to(ACC)  # [BLOCK_P, BLOCK_C]
        if KEEP:
            better = (b_x > b_v) | (b_x != b_x)
            b_v = tl.where(better, b_x, b_v)
            b_i = tl.where(better, t, b_i)
        else:
            b_v = tl.maximum(b_v, b_x, propagate_nan=tl.PropagateNan.ALL)
    o_y = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    m_y = m_p[:, None] & m_c[None, :]
    tl.store(p_y + o_y, b_v.to(p_y.dtype.element_ty), mask=m_y)
    if KEEP:
        tl.store(p_i + o_y, b_i.to(p_i.dtype.element_ty), mask=m_y)


@triton.jit
def max_pool_grad_kernel(
    p_dy, p_i, p_dx, P, C, H, W, OH, OW, s_h, s_w, pad_h, pad_w,
    R: tl.constexpr, S: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr, NEAR_H: tl.constexpr,
    NEAR_W: tl.constexpr, UNROLL: tl.constexpr, INDEX: tl.constexpr, ACC: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx of pixels: each looks at the NEAR_H x NEAR_W windows that may hold it."""
    o_p, o_n, o_h, o_w = pixels(P, H, W, INDEX, BLOCK_P)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_p = o_p < P
    m_c = o_c < C
    o_h += pad_h
    o_w += pad_w
    first_h = o_h // s_h - (NEAR_H - 1)
    first_w = o_w // s_w - (NEAR_W - 1)
    b_dx = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    for j in tl.range(0, NEAR_H * NEAR_W, loop_unroll_factor=UNROLL):
        oh = first_h + j // NEAR_W
        ow = first_w + j % NEAR_W
        r = o_h - oh * s_h
        s = o_w - ow * s_w
        m_t = m_p & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW) & (r < R * DIL_H) & (s < S * DIL_W)
        if DIL_H > 1:
            m_t = m_t & (r % DIL_H == 0)
        if DIL_W > 1:
            m_t = m_t & (s % DIL_W == 0)
        b_tap = ((r // DIL_H) * S + s // DIL_W).to(p_i.dtype.element_ty)
        o_t = (((o_n * OH + oh) * OW + ow) * C)[:, None] + o_c[None, :]
        m_tc = m_t[:, None] & m_c[None, :]
        b_i = tl.load(p_i + o_t, mask=m_tc, other=-1)  # [BLOCK_P, BLOCK_C]
        b_dy = tl.load(p_dy + o_t, mask=m_tc, other=0).to(ACC)  # [BLOCK_P, BLOCK_C]
        b_dx += tl.where(b_i == b_tap[:, None], b_dy, 0.0)
    o_x = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_p[:, None] & m_c[None, :])


@triton.jit
def avg_pool_kernel(
    p_x, p_y, P, C, H, W, OH, OW, s_h, s_w, pad_h, pad_w,
    R: tl.constexpr, S: tl.constexpr, ADAPTIVE: tl.constexpr, DIVISOR: tl.constexpr, PADDED: tl.constexpr,
    UNROLL: tl.constexpr, INDEX: tl.constexpr, ACC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of windows of at most R x S pixels over their divisor."""
    o_p, o_n, o_h, o_w = pixels(P, OH, OW, INDEX, BLOCK_P)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_p = o_p < P
    m_c = o_c < C
    h0, h1 = window(o_h, H, OH, s_h, pad_h, R, ADAPTIVE)
    w0, w1 = window(o_w, W, OW, s_w, pad_w, S, ADAPTIVE)
    b_share = share(h0, h1, w0, w1, H, W, DIVISOR, PADDED, ACC)
    h1 = tl.where(m_p, tl.minimum(h1, H), 0)
    w1 = tl.minimum(w1, W)
    b_y = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    for t in tl.range(0, R * S, loop_unroll_factor=UNROLL):
        h = h0 + t // S
        w = w0 + t % S
        m_t = (h >= 0) & (h < h1) & (w >= 0) & (w < w1)
        p_t = p_x + ((o_n * H + h) * W + w) * C
        b_x = tl.load(p_t[:, None] + o_c[None, :], mask=m_t[:, None] & m_c[None, :], other=0)  # [BLOCK_P, BLOCK_C]
        b_y += b_x.to(ACC)
    o_y = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    tl.store(p_y + o_y, (b_y * b_share[:, None]).to(p_y.dtype.element_ty), mask=m_p[:, None] & m_c[None, :])


@triton.jit
def avg_pool_grad_kernel(
    p_dy, p_dx, P, C, H, W, OH, OW, s_h, s_w, pad_h, pad_w,
    R: tl.constexpr, S: tl.constexpr, NEAR_H: tl.constexpr, NEAR_W: tl.constexpr,
    ADAPTIVE: tl.constexpr, DIVISOR: tl.constexpr, PADDED: tl.constexpr,
    UNROLL: tl.constexpr, INDEX: tl.constexpr, ACC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx of pixels: each adds its share of the NEAR_H x NEAR_W windows that may hold it."""
    o_p, o_n, o_h, o_w = pixels(P, H, W, INDEX, BLOCK_P)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_p = o_p < P
    m_c = o_c < C
    if ADAPTIVE:
        # Pixel i is in the windows from floor(i O / I) on: the same rule with the sizes exchanged.
        first_h = (o_h * OH) // H
        first_w = (o_w * OW) // W
    else:
        first_h = (o_h + pad_h) // s_h - (NEAR_H - 1)
        first_w = (o_w + pad_w) // s_w - (NEAR_W - 1)
    b_dx = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    for j in tl.range(0, NEAR_H * NEAR_W, loop_unroll_factor=UNROLL):
        oh = first_h + j // NEAR_W
        ow = first_w + j % NEAR_W
        h0, h1 = window(oh, H, OH, s_h, pad_h, R, ADAPTIVE)
        w0, w1 = window(ow, W, OW, s_w, pad_w, S, ADAPTIVE)
        m_t = m_p & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW)
        m_t = m_t & (h0 <= o_h) & (o_h < h1) & (w0 <= o_w) & (o_w < w1)
        b_share = share(h0, h1, w0, w1, H, W, DIVISOR, PADDED, ACC)
        o_t = (((o_n * OH + oh) * OW + ow) * C)[:, None] + o_c[None, :]
        b_dy = tl.load(p_dy + o_t, mask=m_t[:, None] & m_c[None, :], other=0).to(ACC)  # [BLOCK_P, BLOCK_C]
        b_dx += b_dy * b_share[:, None]
    o_x = (o_p.to(tl.int64) * C)[:, None] + o_c[None, :]
    tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_p[:, None] & m_c[None, :])


@dataclass(frozen=True)
class Windows:
    """The windows of one pooling over images of H x W, as torch's arguments give them; all pairs are (height, width).

    size      of the image             output    of the result
    divisor   what every window is divided by, 0 for its own size, with its padding where `padded` is set
    adaptive  windows follow from size and output alone; kernel is then the largest of them
    """

    size: tuple[int, int]
    output: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    divisor: int = 0
    padded: bool = True
    adaptive: bool = False

    @property
    def near(self) -> tuple[int, int]:
        """How many windows along each axis may hold one pixel."""
        if self.adaptive:
            return largest_window(self.output[0], self.size[0]), largest_window(self.output[1], self.size[1])
        (R, S), (d_h, d_w), (s_h, s_w) = self.kernel, self.dilation, self.stride
        return triton.cdiv((R - 1) * d_h + 1, s_h), triton.cdiv((S - 1) * d_w + 1, s_w)


def pair(op: str, name: str, value: Pair, least: int) -> tuple[int, int]:
    """(height, width) from an integer or a pair. Raises ValueError below `least`, TypeError for anything else."""
    values = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    if len(values) == 1:
        values = values * 2
    if len(values) != 2 or not all(isinstance(v, int) for v in values):
        raise TypeError(f"{op}: {name} is {value!r}, expected an integer or a pair of them")
    if min(values) < least:
        raise ValueError(f"{op}: {name} is {value}, expected {least} or more")
    return values


def windows(
    op: str,
    size: tuple[int, int],
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    divisor: int | None = None,
    padded: bool = True,
) -> Windows:
    """The windows of torch's arguments. stride is kernel_size where it is None.

    With ceil_mode a last window may reach beyond the padding, as long as it starts before the padding behind the image.
    Raises ValueError where padding is above half of the kernel, or a window does not fit.
    """
    kernel = pair(op, "kernel_size", kernel_size, 1)
    step = kernel if stride is None else pair(op, "stride", stride, 1)
    pad, dil = pair(op, "padding", padding, 0), pair(op, "dilation", dilation, 1)
    if divisor == 0:
        raise ValueError(f"{op}: divisor_override is 0, expected another number, or None for the size of the window")
    output = []
    for axis, name in enumerate(("height", "width")):
        reach = (kernel[axis] - 1) * dil[axis] + 1
        if pad[axis] > kernel[axis] // 2:
            raise ValueError(
                f"{op}: padding {pad[axis]} is above half of the kernel's {name} {kernel[axis]}; "
                f"use at most {kernel[axis] // 2}"
            )
        room = size[axis] + 2 * pad[axis] - reach
        count = (room + (step[axis] - 1 if ceil_mode else 0)) // step[axis] + 1
        if ceil_mode and (count - 1) * step[axis] >= size[axis] + pad[axis]:
            count -= 1
        if count < 1 or size[axis] < 1:
            raise ValueError(
                f"{op}: a kernel of {name} {reach} does not fit into an image of {name} {size[axis]} with padding "
                f"{pad[axis]}; use a smaller kernel or a larger image"
            )
        output.append(count)
    return Windows(size, (output[0], output[1]), kernel, step, pad, dil, divisor or 0, padded)


def adaptive_windows(op: str, size: tuple[int, int], output_size: int | tuple[int | None, int | None]) -> Windows:
    """The windows of an adaptive mean; None in output_size keeps the image's. Raises ValueError for an empty image."""
    sizes = tuple(output_size) if isinstance(output_size, list | tuple) else (output_size, output_size)
    if len(sizes) != 2:
        raise TypeError(f"{op}: output_size is {output_size!r}, expected an integer or a pair")
    kept = tuple(size[axis] if value is None else value for axis, value in enumerate(sizes))
    output = pair(op, "output_size", output_size if isinstance(output_size, int) else kept, 0)
    if 0 in size:
        raise ValueError(f"{op}: the image is {size[0]} x {size[1]}, expected a height and width of 1 or more")
    kernel = largest_window(size[0], output[0]), largest_window(size[1], output[1])
    return Windows(size, output, kernel, adaptive=True)


@functools.lru_cache(maxsize=1024)
def largest_window(size: int, outputs: int) -> int:
    """Of `outputs` adaptive windows over `size` inputs, the largest."""
    return max((-(-(o + 1) * size // outputs) - o * size // outputs for o in range(outputs)), default=1)


def max_pool2d(x: torch.Tensor, at: Windows, keep: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, the place of each maximum in its window), the latter for the gradient and only with `keep`.

    x [N, C, H, W]; y [N, C, OH, OW]; the places are int8, or int32 for windows of over 127 taps, in y's shape.
    """
    image, y = _last(x), _empty(x, at.output)
    R, S = at.kernel
    places = torch.empty_like(y, dtype=torch.int8 if R * S <= 127 else torch.int32) if keep else None
    grid, meta = _plan("pool", y, at, R * S)
    launch.run(
        max_pool_kernel, grid, image, y, places, *_extents(y, at),
        R=R, S=S, DIL_H=at.dilation[0], DIL_W=at.dilation[1], KEEP=keep, **meta,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2), None if places is None else places.permute(0, 3, 1, 2)


def max_pool2d_grad(dy: torch.Tensor, places: torch.Tensor, at: Windows) -> torch.Tensor:
    """dx [N, C, H, W] from dy and the places of the maxima, both [N, C, OH, OW]."""
    dx = _empty(dy, at.size)
    R, S = at.kernel
    near_h, near_w = at.near
    grid, meta = _plan("pool_grad", dx, at, near_h * near_w)
    launch.run(
        max_pool_grad_kernel, grid, _last(dy), _last(places), dx, *_extents(dx, at),
        R=R, S=S, DIL_H=at.dilation[0], DIL_W=at.dilation[1], NEAR_H=near_h, NEAR_W=near_w, **meta,
    )  # fmt: skip
    return dx.permute(0, 3, 1, 2)


def avg_pool2d(x: torch.Tensor, at: Windows) -> torch.Tensor:
    """The means of windows, also of adaptive ones: x [N, C, H, W] -> [N, C, OH, OW].

    One adaptive window over the whole image is a reduction, which shares it out among programs.
    """
    if at.adaptive and at.output == (1, 1):
        return reduce.mean(_last(x), (1, 2), keepdim=True).permute(0, 3, 1, 2)
    y = _empty(x, at.output)
    grid, meta = _plan("pool", y, at, at.kernel[0] * at.kernel[1])
    launch.run(avg_pool_kernel, grid, _last(x), y, *_extents(y, at), **_mean_of(at), **meta)
    return y.permute(0, 3, 1, 2)


def avg_pool2d_grad(dy: torch.Tensor, at: Windows) -> torch.Tensor:
    """dx [N, C, H, W] from dy [N, C, OH, OW]."""
    dx = _empty(dy, at.size)
    near_h, near_w = at.near
    grid, meta = _plan("pool_grad", dx, at, near_h * near_w)
    launch.run(
        avg_pool_grad_kernel, grid, _last(dy), dx, *_extents(dx, at), NEAR_H=near_h, NEAR_W=near_w,
        **_mean_of(at), **meta,
    )  # fmt: skip
    return dx.permute(0, 3, 1, 2)


def checked(op: str, x: torch.Tensor) -> tuple[int, int]:
    """(H, W) of an image tensor. Raises TypeError unless it is floating, ValueError unless it is [N, C, H, W]."""
    check.floating(op, x=x)
    if x.dim() != 4:
        raise ValueError(f"{op}: x has shape {list(x.shape)}, expected [N, C, H, W]; add what is missing by unsqueeze")
    return x.shape[2], x.shape[3]


def _last(x: torch.Tensor) -> torch.Tensor:
    """x [N, C, H, W] as a contiguous [N, H, W, C]: a view where it is channels-last, else a copy."""
    return x.permute(0, 2, 3, 1).contiguous()


def _empty(like: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    return torch.empty(like.shape[0], *size, like.shape[1], dtype=like.dtype, device=like.device)


def _extents(y: torch.Tensor, at: Windows) -> tuple[int, ...]:
    """P, C, sizes, strides and padding, as all kernels take them; y [N, H, W, C] is what is written."""
    C = y.shape[3]
    return y.shape[:3].numel(), C, *at.size, *at.output, *at.stride, *at.padding


def _mean_of(at: Windows) -> dict[str, Any]:
    R, S = at.kernel
    return {"R": R, "S": S, "ADAPTIVE": at.adaptive, "DIVISOR": at.divisor, "PADDED": at.padded}


def _plan(family: str, y: torch.Tensor, at: Windows, taps: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid for writing y [N, H, W, C], and the constants that go with it."""
    P, C = y.shape[:3].numel(), y.shape[3]
    tile = launch.tile(family, y.dtype, P=P, C=C)
    # An adaptive window multiplies an index of one size by the other size.
    largest = max(P + tile["BLOCK_P"], *(2 * (a + 1) * (b + 1) for a, b in zip(at.size, at.output, strict=True)))
    index = tl.int32 if largest < 2**31 else tl.int64
    meta = {"UNROLL": taps if taps <= UNROLLED else 1, "INDEX": index, "ACC": launch.acc(y.dtype), **tile.options}
    return (triton.cdiv(P, tile["BLOCK_P"]), triton.cdiv(C, tile["BLOCK_C"])), meta
