"""Softmax and log-softmax over one dimension, and their gradients.

    y = exp(x - m) / s                 dx = y * (dy - sum(dy * y))
    y = (x - m) - log(s)               dx = dy - exp(y) * sum(dy)             m = max x,  s = sum exp(x - m)

    x   any shape and strides          y, dx   x's shape, contiguous

The shifted form neither overflows nor loses accuracy (Blanchard, D. J. Higham and N. J. Higham, IMA Journal of
Numerical Analysis 41(4), 2021). A tensor is seen as [outer, N, inner] with rows of N elements, `inner` apart, and a
program takes BLOCK_M rows. A row that fits BLOCK_N is read once; a longer one is walked twice, first for m and s
together (Milakov and Gimelshein, arXiv 1805.02867), then for y. Its last BLOCK_KEPT elements stay in registers
meanwhile, and the second walk finds the others in the cache: 4096x65536 in float16 takes 0.27 ms in place of 0.32 with
none kept. Long rows that are not contiguous are copied first: each element's address would take two registers.
NaN anywhere in a row makes the row NaN, and so do +inf and a row of nothing but -inf.
"""

import math

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import exponential
from minidl.kernels.reduce import offsets
from minidl.runtime import check, early, launch
from minidl.runtime.early import wait

MINUS_INF = tl.constexpr(float("-inf"))
# The largest block of elements that are not contiguous.
SCATTERED = 1024
# More lanes than any block of rows has.
WHOLE_ROWS = 2**20


@triton.jit
def row_max(b_x):
    """The maximum of each row; the order of NaN in it differs between machines, so NaN counts as -inf here."""
    return tl.max(tl.where(b_x == b_x, b_x, MINUS_INF), axis=1)


@triton.jit
def joined_max(b_x):
    """The maximum of each row of [pieces, rows, lanes], NaN as in `row_max`."""
    return tl.max(tl.max(tl.where(b_x == b_x, b_x, MINUS_INF), axis=0), axis=1)


@triton.jit
def joined_sum(b_x):
    """The sum of each row of [pieces, rows, lanes]."""
    return tl.sum(tl.sum(b_x, axis=0), axis=1)


@triton.jit
def pieces(BLOCK_N: tl.constexpr, LANES: tl.constexpr):
    """Positions of a row [pieces, 1, lanes]: LANES of them are those of one warp, which so takes rows alone."""
    if LANES < BLOCK_N:
        return (tl.arange(0, BLOCK_N // LANES) * LANES)[:, None, None] + tl.arange(0, LANES)[None, None, :]
    else:
        return tl.arange(0, BLOCK_N)[None, None, :]


@triton.jit
def by_rows(p, o, BLOCK_N: tl.constexpr, LANES: tl.constexpr):
    """Pointers p + o [pieces, rows, lanes], of which warps take rows.

    Triton deals dimensions out to threads by their contiguity, and pieces and rows are alike in that: version 3.6 gave
    warps pieces, and rows of 197 took 3 times as long.
    """
    p += o
    if LANES < BLOCK_N:
        p = tl.max_contiguous(p, [1, 2, LANES])
    return p


@triton.jit
def whole(o, ALIGN: tl.constexpr):
    """o, a multiple of ALIGN, such that the compiler knows it."""
    return o // ALIGN * ALIGN


@triton.jit
def shift(b_m):
    """What to subtract from a row whose maximum so far is b_m: 0 instead of -inf, which would turn x - m into NaN."""
    return tl.where(b_m == MINUS_INF, 0.0, b_m)


@triton.jit
def online(b_x, b_m, b_s):
    """(m, s) of rows after one more block of them; lanes beyond a row hold -inf."""
    b_new = tl.maximum(b_m, row_max(b_x))
    b_shift = shift(b_new)
    b_s = b_s * exponential(b_m - b_shift) + tl.sum(exponential(b_x - b_shift[:, None]), axis=1)
    return b_new, b_s


@triton.jit
def again(b_x, OPAQUE: tl.constexpr):
    """b_x, hidden from the compiler, which would otherwise also keep float32 copies of 16-bit numbers."""
    if OPAQUE:
        b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2)
    return b_x


@triton.jit
def softmax_kernel(
    p_x, p_y, R, N, INNER, s_x1, s_x2, s_xn, s_y1, s_y2, s_yn,
    LOG: tl.constexpr, LEVELS: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of at most BLOCK_N elements."""
    wait(EARLY)
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = pieces(BLOCK_N, LANES)
    m_mn = (o_m < R)[None, :, None] & (o_n < whole(N, ALIGN))
    p_x += whole(offsets(o_m, INNER, s_x1, s_x2, LEVELS), ALIGN)[None, :, None]
    p_y += whole(offsets(o_m, INNER, s_y1, s_y2, LEVELS), ALIGN)[None, :, None]
    p_x = by_rows(p_x, o_n.to(tl.int64) * s_xn, BLOCK_N, LANES)
    b_x = tl.load(p_x, mask=m_mn, other=MINUS_INF)  # [pieces, BLOCK_M, LANES]
    b_m = joined_max(b_x).to(ACC)  # before the conversion: half of the registers
    b_z = b_x.to(ACC) - b_m[None, :, None]
    b_e = exponential(b_z)
    b_s = joined_sum(b_e)
    if LOG:
        b_y = b_z - tl.log(b_s)[None, :, None]
    else:
        b_y = b_e * (1.0 / b_s)[None, :, None]
    p_y = by_rows(p_y, o_n.to(tl.int64) * s_yn, BLOCK_N, LANES)
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=m_mn)


@triton.jit
def scaled(b_x, b_m, b_s, LOG: tl.constexpr):
    """y of a block of rows with maxima b_m and sums b_s [rows, 1]."""
    if LOG:
        return (b_x - b_m) - tl.log(b_s)
    else:
        return exponential(b_x - b_m) * (1.0 / b_s)


@triton.jit
def ends(o_x, N, ALIGN: tl.constexpr):
    """The head of rows that begin at o_x, up to the first multiple of ALIGN, and the length of their bodies from there.

    A body has a multiple of ALIGN elements; what is behind it is the tail.
    """
    b_head = (ALIGN - o_x % ALIGN) % ALIGN
    return b_head, whole(N - b_head, ALIGN)


@triton.jit
def end_columns(b_head, b_body, N, ALIGN: tl.constexpr):
    """Positions of head and tail of each row, and which of these lanes [rows, 2 ALIGN] there are."""
    o_e = tl.arange(0, 2 * ALIGN)[None, :]
    o_n = o_e + tl.where(o_e < b_head[:, None], 0, b_body[:, None])
    return o_n, o_n < N


@triton.jit
def read_block(p_x, o_m, o_n, R, b_body, WHOLE: tl.constexpr, KEEP: tl.constexpr):
    """Elements o_n of rows from p_x [rows, 1], to stay in the cache (KEEP) or not; -inf outside (WHOLE: none is)."""
    p_x += o_n[None, :]
    # Not evict_first, though it is not read again: 2048x131072 takes 0.299 ms, and 0.306 so.
    EVICTION: tl.constexpr = "evict_last" if KEEP else ""
    if WHOLE:
        return tl.load(p_x, eviction_policy=EVICTION)
    else:
        m_mn = (o_m < R)[:, None] & (o_n[None, :] < b_body[:, None])
        return tl.load(p_x, mask=m_mn, other=MINUS_INF, eviction_policy=EVICTION)


@triton.jit
def write_block(p_y, b_y, o_m, o_n, R, b_body, WHOLE: tl.constexpr):
    """Write y with a streaming store, which leaves the inputs in the cache."""
    p_y += o_n[None, :]
    if WHOLE:
        tl.store(p_y, b_y.to(p_y.dtype.element_ty), cache_modifier=".cs")
    else:
        m_mn = (o_m < R)[:, None] & (o_n[None, :] < b_body[:, None])
        tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=m_mn, cache_modifier=".cs")


@triton.jit
def softmax_loop_kernel(
    p_x, p_y, R, N, s_x,
    LOG: tl.constexpr, ACC: tl.constexpr, OPAQUE: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr,
    ENDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_KEPT: tl.constexpr,
):  # fmt: skip
    """Rows of any length, s_x apart and of neighbours. WHOLE: blocks end where the rows and their kept parts end.

    With ENDS, blocks begin at the first multiple of ALIGN in a row; what is before and behind them is read by itself.
    """
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_m = tl.full((BLOCK_M,), MINUS_INF, ACC)
    b_s = tl.zeros((BLOCK_M,), ACC)
    o_x, o_y = o_m * s_x, o_m * N
    b_head, b_body = ends(o_x, N, ALIGN)
    if ENDS:
        o_e, m_e = end_columns(b_head, b_body, N, ALIGN)
        m_e = m_e & (o_m < R)[:, None]
        b_ends = tl.load(p_x + o_x[:, None] + o_e, mask=m_e, other=MINUS_INF).to(ACC)  # [BLOCK_M, 2 ALIGN]
        b_m, b_s = online(b_ends, b_m, b_s)
        p_ends = p_y + o_y[:, None] + o_e
        o_x += b_head
        o_y += b_head
    N = whole(N, ALIGN)
    p_x += whole(o_x, ALIGN)[:, None]
    p_y += whole(o_y, ALIGN)[:, None]
    first = tl.cdiv(tl.maximum(N - BLOCK_KEPT, 0), BLOCK_N) * BLOCK_N
    o_n = tl.arange(0, BLOCK_N)
    for n in range(0, first, BLOCK_N):
        b_x = read_block(p_x, o_m, n + o_n, R, b_body, WHOLE, True)  # [BLOCK_M, BLOCK_N]
        b_m, b_s = online(b_x.to(ACC), b_m, b_s)
    o_kept = first + tl.arange(0, BLOCK_KEPT)
    b_kept = read_block(p_x, o_m, o_kept, R, b_body, WHOLE, False)  # [BLOCK_M, BLOCK_KEPT]
    b_before, b_m = b_m, tl.maximum(b_m, row_max(b_kept).to(ACC))
    b_shift = shift(b_m)
    b_kept = again(b_kept, OPAQUE)
    b_s = b_s * exponential(b_before - b_shift) + tl.sum(exponential(b_kept.to(ACC) - b_shift[:, None]), axis=1)
    b_m = b_shift[:, None]
    b_s = b_s[:, None]
    b_kept = again(b_kept, OPAQUE)
    write_block(p_y, scaled(b_kept.to(ACC), b_m, b_s, LOG), o_m, o_kept, R, b_body, WHOLE)
    for n in range(0, first, BLOCK_N):
        b_x = read_block(p_x, o_m, n + o_n, R, b_body, WHOLE, False).to(ACC)
        write_block(p_y, scaled(b_x, b_m, b_s, LOG), o_m, n + o_n, R, b_body, WHOLE)
    if ENDS:
        tl.store(p_ends, scaled(b_ends, b_m, b_s, LOG).to(p_y.dtype.element_ty), mask=m_e)


@triton.jit
def softmax_grad_kernel(
    p_dy, p_y, p_dx, R, N, INNER, s_d1, s_d2, s_dn, s_y1, s_y2, s_yn,
    LOG: tl.constexpr, LEVELS: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of at most BLOCK_N elements; y and dx have the same strides."""
    wait(EARLY)
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = pieces(BLOCK_N, LANES)
    m_mn = (o_m < R)[None, :, None] & (o_n < whole(N, ALIGN))
    p_dy += whole(offsets(o_m, INNER, s_d1, s_d2, LEVELS), ALIGN)[None, :, None]
    o_y = whole(offsets(o_m, INNER, s_y1, s_y2, LEVELS), ALIGN)[None, :, None] + o_n.to(tl.int64) * s_yn
    p_dy = by_rows(p_dy, o_n.to(tl.int64) * s_dn, BLOCK_N, LANES)
    b_dy = tl.load(p_dy, mask=m_mn, other=0.0).to(ACC)  # [pieces, BLOCK_M, LANES]
    b_y = tl.load(by_rows(p_y, o_y, BLOCK_N, LANES), mask=m_mn, other=0.0).to(ACC)  # [pieces, BLOCK_M, LANES]
    if LOG:
        b_dx = b_dy - tl.exp(b_y) * joined_sum(b_dy)[None, :, None]
    else:
        b_dx = b_y * (b_dy - joined_sum(b_dy * b_y)[None, :, None])
    tl.store(by_rows(p_dx, o_y, BLOCK_N, LANES), b_dx.to(p_dx.dtype.element_ty), mask=m_mn)


@triton.jit
def grad_of(b_dy, b_y, b_sum, LOG: tl.constexpr):
    """dx of a block, from the sums [rows, 1]."""
    if LOG:
        return b_dy - tl.exp(b_y) * b_sum
    else:
        return b_y * (b_dy - b_sum)


@triton.jit
def softmax_grad_loop_kernel(
    p_dy, p_y, p_dx, R, N, s_d, LOG: tl.constexpr, ALIGN: tl.constexpr, ENDS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of any length and of neighbours, those of dy s_d apart. ENDS as in `softmax_loop_kernel`."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = (o_m < R)[:, None]
    o_d, o_y = o_m * s_d, o_m * N
    b_head, b_body = ends(o_y, N, ALIGN)
    b_sum = tl.zeros((BLOCK_M,), ACC)
    if ENDS:
        o_e, m_e = end_columns(b_head, b_body, N, ALIGN)
        m_e = m_e & m_m
        b_dy_ends = tl.load(p_dy + o_d[:, None] + o_e, mask=m_e, other=0.0).to(ACC)  # [BLOCK_M, 2 ALIGN]
        b_y_ends = tl.load(p_y + o_y[:, None] + o_e, mask=m_e, other=0.0).to(ACC)  # [BLOCK_M, 2 ALIGN]
        p_ends = p_dx + o_y[:, None] + o_e
        b_sum = tl.sum(b_dy_ends if LOG else b_dy_ends * b_y_ends, axis=1)
        o_d += b_head
        o_y += b_head
    p_dy += whole(o_d, ALIGN)[:, None]
    p_y += whole(o_y, ALIGN)[:, None]
    p_dx += whole(o_y, ALIGN)[:, None]
    N = whole(N, ALIGN)
    for n in range(0, N, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)[None, :]
        m_mn = m_m & (o_n < b_body[:, None])
        b_dy = tl.load(p_dy + o_n, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        if LOG:
            b_sum += tl.sum(b_dy, axis=1)
        else:
            b_y = tl.load(p_y + o_n, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
            b_sum += tl.sum(b_dy * b_y, axis=1)
    for n in range(0, N, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)[None, :]
        m_mn = m_m & (o_n < b_body[:, None])
        b_dy = tl.load(p_dy + o_n, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        b_y = tl.load(p_y + o_n, mask=m_mn, other=0.0).to(ACC)  # [BLOCK_M, BLOCK_N]
        tl.store(p_dx + o_n, grad_of(b_dy, b_y, b_sum[:, None], LOG).to(p_dx.dtype.element_ty), mask=m_mn)
    if ENDS:
        tl.store(p_ends, grad_of(b_dy_ends, b_y_ends, b_sum[:, None], LOG).to(p_dx.dtype.element_ty), mask=m_e)


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """exp(x) over its sum along `dim`; a scalar counts as one row of one element.

    Raises TypeError for an integer tensor, IndexError for a dimension out of range.
    """
    return _forward("softmax", x, dim, log=False)


def log_softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The logarithm of `softmax(x, dim)`, without its underflow. Raises as `softmax`."""
    return _forward("log_softmax", x, dim, log=True)


def softmax_grad(dy: torch.Tensor, y: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """dx of y = softmax(x, dim), from dy (any strides) and y. Raises ValueError when their shapes differ."""
    return _backward("softmax_grad", dy, y, dim, log=False)


def log_softmax_grad(dy: torch.Tensor, y: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """dx of y = log_softmax(x, dim), from dy (any strides) and y. Raises as `softmax_grad`."""
    return _backward("log_softmax_grad", dy, y, dim, log=True)


def rows_of(family: str, loop: str, axis: int, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], launch.Tile, bool]:
    """Tensors of one shape as [outer, N, inner] with rows along `axis`, the tile, and whether rows fit it.

    The tile is `family`'s if rows fit it, else `loop`'s. Tensors are views where possible; where contiguous rows are
    needed, all are copied to [R, N, 1].
    """
    shape = tensors[0].shape
    outer, N, inner = shape[:axis].numel(), shape[axis], shape[axis + 1 :].numel()
    rows = [t.reshape(outer, N, inner) for t in tensors]
    tile = launch.tile(family, tensors[0].dtype, M=outer * inner, N=N)
    fits = tile["BLOCK_N"] >= N
    if (not fits or tile["BLOCK_N"] > SCATTERED) and (inner > 1 or any(t.stride(1) != 1 for t in rows)):
        rows = [t.transpose(1, 2).reshape(outer * inner, N, 1).contiguous() for t in rows]
    if not fits:
        step = math.gcd(*(t.stride(0) for t in rows)) if outer > 1 else N
        tile = loop_tile(loop, tensors[0].dtype, outer * inner, N, step)
    return rows, tile, fits


def loop_tile(family: str, dtype: torch.dtype, rows: int, N: int, step: int) -> launch.Tile:
    """The tile for walks along rows of N elements, `step` apart. P is the largest power of two that divides both."""
    return launch.tile(family, dtype, M=rows, N=N, P=(N | step) & -(N | step))


def vectors(*tensors: torch.Tensor) -> int:
    """How many elements a load may take at once, up to 16 bytes: what divides rows [outer, N, inner] and their strides.

    1 where neighbours in a row are not neighbours in memory.
    """
    N = tensors[0].shape[1]
    steps = [N, 16 // tensors[0].element_size()]
    for rows in tensors:
        outer, _, inner = rows.shape
        if N > 1 and rows.stride(1) != 1:
            return 1
        steps += [rows.stride(0)] * (outer > 1) + [rows.stride(2)] * (inner > 1)
    step = math.gcd(*steps)
    return step & -step


def lanes(align: int, tile: launch.Tile, *tensors: torch.Tensor) -> int:
    """LANES of rows [outer, N, inner]: what a warp loads at once, so that it has rows of its own.

    All of a row where there are more warps than rows, or where neighbours in a row are not neighbours in memory.
    """
    scattered = any(rows.stride(1) != 1 for rows in tensors)
    return WHOLE_ROWS if launch.INTERPRETED or scattered or tile.num_warps > tile["BLOCK_M"] else 32 * align


def ended(align: int, *tensors: torch.Tensor) -> tuple[int, bool]:
    """(ALIGN, ENDS) of walks along rows [R, N, 1] whose loads take `align` elements at once as they are.

    Where it is less than 16 bytes but the same in all tensors, rows are walked from their first multiple of 16 bytes.
    """
    R, N, _ = tensors[0].shape
    most = 16 // tensors[0].element_size()
    if align == most or 2 * most > N or (R > 1 and any((rows.stride(0) - N) % most for rows in tensors)):
        return align, False
    return most, True


def row_strides(rows: torch.Tensor) -> tuple[int, int, int]:
    """Strides of rows [outer, N, inner] for `reduce.offsets`: two of the row index, one along the row."""
    outer, along, inner = rows.stride()
    return outer, inner if rows.shape[2] > 1 else outer, along


def levels(rows: torch.Tensor) -> int:
    """How many strides the row index of rows [outer, N, inner] needs."""
    return 2 if rows.shape[0] > 1 and rows.shape[2] > 1 else 1


def in_shape(rows: torch.Tensor, shape: torch.Size, axis: int) -> torch.Tensor:
    """Contiguous rows [outer, N, inner] or [R, N, 1] as a contiguous tensor of `shape`."""
    if rows.shape[2] == 1:
        rest = shape[:axis].numel(), shape[axis + 1 :].numel(), shape[axis]
        rows = rows.view(rest).transpose(1, 2).contiguous()
    return rows.view(shape)


def _forward(op: str, x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    check.floating(op, x=x)
    axis = check.axis(op, dim, max(x.dim(), 1))
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x if x.dim() else x.view(1)
    (rows,), tile, fits = rows_of("softmax", "softmax_loop", axis, flat)
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    outer, N, inner = rows.shape
    R = outer * inner
    grid = (launch.cdiv(R, tile["BLOCK_M"]),)
    align = vectors(rows, y)
    meta = {"LOG": log, "ACC": launch.acc(x.dtype), **tile.options}
    if fits:
        strides = *row_strides(rows), *row_strides(y)
        launch.run(
            softmax_kernel, grid, rows, y, R, N, inner, *strides, LEVELS=levels(rows), ALIGN=align,
            LANES=lanes(align, tile, rows, y), **early.options(grid[0]), **meta,
        )  # fmt: skip
    else:
        opaque = x.element_size() == 2 and not launch.INTERPRETED
        rest = N - tile["BLOCK_KEPT"]
        align, with_ends = ended(align, rows, y)
        whole = not with_ends and R % tile["BLOCK_M"] == 0 and rest >= 0 and rest % tile["BLOCK_N"] == 0
        launch.run(
            softmax_loop_kernel, grid, rows, y, R, N, rows.stride(0), OPAQUE=opaque, WHOLE=whole, ALIGN=align,
            ENDS=with_ends, **meta,
        )  # fmt: skip
    return in_shape(y, flat.shape, axis).view(x.shape)


def _backward(op: str, dy: torch.Tensor, y: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    check.floating(op, dy=dy, y=y)
    check.same(op, dy=dy, y=y)
    if dy.shape != y.shape:
        raise ValueError(f"{op}: dy has shape {list(dy.shape)}, expected y's shape {list(y.shape)}")
    axis = check.axis(op, dim, max(y.dim(), 1))
    if y.numel() == 0:
        return torch.empty(y.shape, dtype=y.dtype, device=y.device)
    flat = y.contiguous() if y.dim() else y.view(1)
    (dy_rows, y_rows), tile, fits = rows_of("softmax_grad", "softmax_grad_loop", axis, dy.reshape(flat.shape), flat)
    dx = torch.empty_like(y_rows)
    outer, N, inner = y_rows.shape
    R = outer * inner
    grid = (launch.cdiv(R, tile["BLOCK_M"]),)
    meta = {"LOG": log, "ACC": launch.acc(y.dtype), **tile.options}
    align = vectors(dy_rows, y_rows)
    if fits:
        strides = *row_strides(dy_rows), *row_strides(y_rows)
        launch.run(
            softmax_grad_kernel, grid, dy_rows, y_rows, dx, R, N, inner, *strides, LEVELS=levels(y_rows), ALIGN=align,
            LANES=lanes(align, tile, dy_rows, y_rows), **early.options(grid[0]), **meta,
        )  # fmt: skip
    else:
        align, with_ends = ended(align, dy_rows, y_rows)
        launch.run(
            softmax_grad_loop_kernel, grid, dy_rows, y_rows, dx, R, N, dy_rows.stride(0), ALIGN=align, ENDS=with_ends,
            **meta,
        )  # fmt: skip
    return in_shape(dx, flat.shape, axis).view(y.shape)
