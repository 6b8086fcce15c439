"""Matrix products C = act(A B + bias), tiled: four transpositions, batches, split-K, TMA or pointers.

    A  [M, K] or [batch, M, K]     B  [K, N] or [batch, K, N]     bias  [N]     C  [M, N] or [batch, M, N]
    float16 | bfloat16 | float32 | float64, accumulated in float32 (float64 for float64)

Both forms walk tiles in groups of GROUP_M tile rows, so that programs running together share rows and columns in L2.
The persistent form loads boxes through tensor descriptors (TMA on sm_90; zeros outside the matrix), one program per
multiprocessor; it wants 16-byte aligned rows. The pointer form takes any strides and batches. Split-K gives each share
of K its own partial product; the shares are then added in order, so results do not depend on scheduling.
A transposed operand is read in place: the block is loaded as it is stored and turned on its way to the tensor cores.
"""

from typing import Literal, overload

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.kernels import activation, check, launch
from minidl.kernels.activation import Activation, activate


@triton.jit
def tile_position(i_tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of the i-th tile, walking columns within groups of GROUP_M tile rows."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = i_tile // (GROUP_M * tiles_n)
    first = group * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = i_tile % (GROUP_M * tiles_n)
    return first + within % rows, within // rows


@triton.jit
def halves(b_x):
    """The left and the right half of the columns."""
    b_x = tl.reshape(b_x, (b_x.shape[0], 2, b_x.shape[1] // 2))
    return tl.split(tl.permute(b_x, (0, 2, 1)))


@triton.jit
def finish(
    b_acc, p_bias, p_c, p_z, m, n, M, N,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
):  # fmt: skip
    """Add the bias, keep z = A B + bias where asked, apply the activation, store; the block's corner is at (m, n)."""
    o_m = m + tl.arange(0, b_acc.shape[0])
    o_n = n + tl.arange(0, b_acc.shape[1])
    m_mn = (o_m < M)[:, None] & (o_n < N)[None, :]
    o_mn = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(b_acc.dtype)[None, :]
    if SAVE_Z:
        tl.store(p_z + o_mn, b_acc.to(p_z.dtype.element_ty), mask=m_mn)
    tl.store(p_c + o_mn, activate(b_acc, ACT, SLOPE).to(p_c.dtype.element_ty), mask=m_mn)


@triton.jit
def epilogue(
    b_acc, p_bias, p_c, p_z, m, n, M, N,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """`finish` in 1, 2 or 4 pieces of columns one after another, which need less shared memory and fewer registers."""
    WIDTH: tl.constexpr = b_acc.shape[1] // PIECES
    if PIECES == 1:
        finish(b_acc, p_bias, p_c, p_z, m, n, M, N, HAS_BIAS, ACT, SLOPE, SAVE_Z)
    else:
        b_left, b_right = halves(b_acc)
        if PIECES == 2:
            finish(b_left, p_bias, p_c, p_z, m, n, M, N, HAS_BIAS, ACT, SLOPE, SAVE_Z)
            finish(b_right, p_bias, p_c, p_z, m, n + WIDTH, M, N, HAS_BIAS, ACT, SLOPE, SAVE_Z)
        else:
            b_0, b_1 = halves(b_left)
            b_2, b_3 = halves(b_right)
            finish(b_0, p_bias, p_c, p_z, m, n, M, N, HAS_BIAS, ACT, SLOPE, SAVE_Z)
            finish(b_1, p_bias, p_c, p_z, m, n + WIDTH, M, N, HAS_BIAS, ACT, SLOPE, SAVE_Z)
            finish(b_2, p_bias, p_c, p_z, m, n + 2 * WIDTH, M, N, HAS_BIAS, ACT, SLOPE, SAVE_Z)
            finish(b_3, p_bias, p_c, p_z, m, n + 3 * WIDTH, M, N, HAS_BIAS, ACT, SLOPE, SAVE_Z)


@triton.jit
def gemm_pointer_kernel(
    p_a, p_b, p_bias, p_c, p_z, M, N, K, s_ab, s_am, s_ak, s_bb, s_bk, s_bn, s_split,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr, SPLIT: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    i_batch = (tl.program_id(0) // tiles).to(tl.int64)
    i_split = tl.program_id(1)
    i_m, i_n = tile_position(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    start = i_split * share
    end = tl.minimum(K, start + share)
    o_k = start + tl.arange(0, BLOCK_K)
    p_a += i_batch * s_ab + o_m.to(tl.int64)[:, None] * s_am + o_k.to(tl.int64)[None, :] * s_ak
    p_b += i_batch * s_bb + o_k.to(tl.int64)[:, None] * s_bk + o_n.to(tl.int64)[None, :] * s_bn
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    tl.assume(start < end)  # or ptxas serialises the matrix instructions, for the sake of a loop that does not run
    for k in range(start, end, BLOCK_K):
        m_k = (k + tl.arange(0, BLOCK_K)) < end
        b_a = tl.load(p_a, mask=(o_m < M)[:, None] & m_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        b_b = tl.load(p_b, mask=m_k[:, None] & (o_n < N)[None, :], other=0.0)  # [BLOCK_K, BLOCK_N]
        b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION, out_dtype=ACC)
        p_a += tl.full((), BLOCK_K, tl.int64) * s_ak
        p_b += tl.full((), BLOCK_K, tl.int64) * s_bk
    p_c += (i_split.to(tl.int64) * s_split) + i_batch * M * N
    if SAVE_Z:
        p_z += i_batch * M * N
    epilogue(
        b_acc, p_bias, p_c, p_z, i_m * BLOCK_M, i_n * BLOCK_N, M, N, HAS_BIAS, ACT, SLOPE, SAVE_Z, PIECES
    )  # fmt: skip


@triton.jit
def gemm_tma_kernel(
    d_a, d_b, p_bias, p_c, p_z, M, N, K, s_split, PROGRAMS,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr, SPLIT: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT)
    tl.assume(share > 0)
    for i_work in tl.range(tl.program_id(0), tiles * SPLIT, PROGRAMS, flatten=FLATTEN):
        i_split = i_work // tiles
        i_m, i_n = tile_position(i_work % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        m = i_m * BLOCK_M
        n = i_n * BLOCK_N
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        # Every share walks the same number of blocks: past the end of K the boxes are zeros.
        for i_k in range(share):
            k = (i_split * share + i_k) * BLOCK_K
            if A_TRANSPOSED:
                b_a = d_a.load([k, m]).T  # [BLOCK_M, BLOCK_K]
            else:
                b_a = d_a.load([m, k])
            if B_TRANSPOSED:
                b_b = d_b.load([n, k]).T  # [BLOCK_K, BLOCK_N]
            else:
                b_b = d_b.load([k, n])
            b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION, out_dtype=ACC)
        epilogue(
            b_acc, p_bias, p_c + i_split.to(tl.int64) * s_split, p_z, m, n, M, N,
            HAS_BIAS, ACT, SLOPE, SAVE_Z, PIECES,
        )  # fmt: skip


@triton.jit
def gemm_sum_kernel(
    p_partial, p_bias, p_c, p_z, N, total,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr, SPLIT: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the SPLIT partial products in order, then the epilogue; p_partial [SPLIT, total]."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < total
    b_acc = tl.zeros((BLOCK,), dtype=ACC)
    p_partial += o
    for _ in tl.range(0, SPLIT, loop_unroll_factor=8):
        b_acc += tl.load(p_partial, mask=m, other=0.0)  # [BLOCK]
        p_partial += total
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o % N, mask=m, other=0.0).to(ACC)
    if SAVE_Z:
        tl.store(p_z + o, b_acc.to(p_z.dtype.element_ty), mask=m)
    tl.store(p_c + o, activate(b_acc, ACT, SLOPE).to(p_c.dtype.element_ty), mask=m)


@overload
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = ...,
    act: Activation = ...,
    *,
    preactivation: Literal[False] = ...,
    form: str | None = ...,
    split: int | None = ...,
    precision: str | None = ...,
) -> torch.Tensor: ...
@overload
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = ...,
    act: Activation = ...,
    *,
    preactivation: Literal[True],
    form: str | None = ...,
    split: int | None = ...,
    precision: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: Activation = None,
    *,
    preactivation: bool = False,
    form: str | None = None,
    split: int | None = None,
    precision: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """act(a @ b + bias), and also z = a @ b + bias when `preactivation` is set.

    a [M, K] or [batch, M, K], b [K, N] or [batch, K, N], any strides; bias [N] contiguous; one dtype and device.
    Returns [M, N] or [batch, M, N] (and z alike), contiguous, in the inputs' dtype. K = 0 gives act(bias).
    `form` ("tma" or "pointer"), `split` and `precision` override the choice made from the shape.
    Raises ValueError for shapes that do not match or a form the operands do not allow, TypeError for dtypes.
    """
    batched = _check(a, b, bias)
    name, slope = activation.parse(act)
    precision = precision or launch.precision(a.dtype)
    batch = a.shape[0] if batched else 1
    if a.shape[-1] == 0:
        # A column and a row of zeros: the kernels promise the compiler that K has a block.
        a = a.new_zeros(()).expand(*a.shape[:-1], 1)
        b = b.new_zeros(()).expand(*b.shape[:-2], 1, b.shape[-1])
    if a.dtype == torch.float32 and precision != "ieee" and not launch.INTERPRETED:
        a, b = _along_k(a), _along_k(b.mT).mT
    (M, K), N = a.shape[-2:], b.shape[-1]
    shape = (batch, M, N) if batched else (M, N)
    c = torch.empty(shape, dtype=a.dtype, device=a.device)
    z = torch.empty_like(c) if preactivation else None
    # A dimension of size 1 or 0 has no meaningful stride, and TMA needs a real one.
    tma = launch.boxes() and not batched and min(M, N, K) > 0 and _has_box(a) and _has_box(b)
    if form == "tma" and not tma:
        raise ValueError(
            "gemm: the TMA form needs two 2-D operands, not float64, with 16-byte aligned rows, "
            "and a GPU of compute capability 9.0 or the CPU"
        )
    use_tma = tma if form is None else form == "tma"
    family = "gemm" if use_tma else "gemm_pointer"
    tile = launch.tile(family, a.dtype, floor=16, precision=precision, M=M, N=N, K=K)
    tiles = triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"]) * batch
    blocks_k = triton.cdiv(K, tile["BLOCK_K"])
    split = split or _split(tiles, blocks_k)
    split = triton.cdiv(blocks_k, triton.cdiv(blocks_k, split))  # no share is empty
    flags = {
        "HAS_BIAS": bias is not None,
        "ACT": activation.CODES[name],
        "SLOPE": slope,
        "SAVE_Z": preactivation,
        "SPLIT": split,
        "ACC": launch.acc(a.dtype),
    }
    if split == 1:
        _product(use_tma, a, b, bias, c, z, tile, tiles, precision, flags)
    else:
        partial = torch.empty(split, *shape, dtype=launch.acc_torch(a.dtype), device=a.device)
        plain = {**flags, "HAS_BIAS": False, "ACT": activation.NONE, "SAVE_Z": False}
        _product(use_tma, a, b, None, partial, None, tile, tiles, precision, plain)
        sum_tile = launch.tile("gemm_sum", a.dtype, total=c.numel())
        grid = (triton.cdiv(c.numel(), sum_tile["BLOCK"]),)
        launch.run(gemm_sum_kernel, grid, partial, bias, c, z, N, c.numel(), **flags, **sum_tile.options)
    return (c, z) if z is not None else c


def sum_shares(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum [n] over the first axis of partial [shares, n], contiguous, in order and rounded once to `dtype`."""
    shares, n = partial.shape
    total = torch.empty(n, dtype=dtype, device=partial.device)
    tile = launch.tile("gemm_sum", dtype, total=n)
    launch.run(
        gemm_sum_kernel, (triton.cdiv(n, tile["BLOCK"]),), partial, None, total, None, 1, n,
        HAS_BIAS=False, ACT=activation.NONE, SLOPE=0.0, SAVE_Z=False, SPLIT=shares, ACC=launch.acc(dtype),
        **tile.options,
    )  # fmt: skip
    return total


def _product(use_tma, a, b, bias, c, z, tile, tiles, precision, flags) -> None:
    (M, K), N = a.shape[-2:], b.shape[-1]
    s_split = c.numel() // flags["SPLIT"]
    if use_tma:
        d_a, a_transposed = _box(a, tile["BLOCK_M"], tile["BLOCK_K"])
        d_b, b_transposed = _box(b, tile["BLOCK_K"], tile["BLOCK_N"])
        programs = min(tiles * flags["SPLIT"], launch.processors())
        launch.run(
            gemm_tma_kernel, (programs,), d_a, d_b, bias, c, z, M, N, K, s_split, programs,
            A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed, PRECISION=precision, **flags, **tile.options,
        )  # fmt: skip
        return
    s_ab = a.stride(0) if a.dim() == 3 else 0
    s_bb = b.stride(0) if b.dim() == 3 else 0
    launch.run(
        gemm_pointer_kernel, (tiles, flags["SPLIT"]), a, b, bias, c, z, M, N, K,
        s_ab, a.stride(-2), a.stride(-1), s_bb, b.stride(-2), b.stride(-1), s_split,
        PRECISION=precision, **flags, **tile.options,
    )  # fmt: skip


def _along_k(x: torch.Tensor) -> torch.Tensor:
    """x with its last axis contiguous, copied where it is not.

    The tf32 matrix instructions read shared memory along K only, and turning a block on its way there costs far more
    than a copy of the operand: at 8192 in tf32 12.6 ms where both need it, 2.7 ms where none does (H200).
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def _split(tiles: int, blocks_k: int) -> int:
    """Shares of K: enough to fill the device, but at least 8 blocks each (below, adding the shares costs more)."""
    return max(1, min(launch.processors() // max(tiles, 1), blocks_k // 8))


def _has_box(x: torch.Tensor) -> bool:
    """Whether x can be read in boxes: one axis contiguous, the other with rows 16-byte aligned."""
    if x.dtype == torch.float64 or x.data_ptr() % 16:
        return False
    rows = _stored(x)[0]
    return rows is not None and rows.stride(0) * x.element_size() % 16 == 0 and rows.stride(0) >= rows.shape[1]


def _stored(x: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
    """x as it lies in memory, rows contiguous, and whether that is x transposed."""
    if x.stride(1) == 1 and (x.stride(0) != 1 or x.shape[0] == 1 or x.shape[1] == 1):
        return x, False
    if x.stride(0) == 1:
        return x.t(), True
    return None, False


def _box(x: torch.Tensor, block_0: int, block_1: int) -> tuple[TensorDescriptor, bool]:
    stored, transposed = _stored(x)
    assert stored is not None
    block = [block_1, block_0] if transposed else [block_0, block_1]
    return TensorDescriptor(stored, list(stored.shape), list(stored.stride()), block), transposed


def _check(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the product is batched. Raises for operands that do not fit together."""
    check.floating("gemm", a=a)
    check.same("gemm", a=a, b=b, **({} if bias is None else {"bias": bias}))
    if a.dim() not in (2, 3) or a.dim() != b.dim():
        raise ValueError(f"gemm: got shapes {list(a.shape)} and {list(b.shape)}, expected two matrices or two batches")
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"gemm: shapes {list(a.shape)} and {list(b.shape)} do not fit: "
            f"the columns of a ({a.shape[-1]}) must be the rows of b ({b.shape[-2]}), and batches equal"
        )
    if bias is not None and (bias.shape != b.shape[-1:] or not bias.is_contiguous()):
        raise ValueError(f"gemm: bias has shape {list(bias.shape)}, expected [{b.shape[-1]}], contiguous")
    return a.dim() == 3
