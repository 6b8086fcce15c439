"""Sparse times dense: act(S D + bias) for a sparse matrix S in rows (CSR), and the gradient of D as rows.

    y[i] = act(sum over e in [crow[i], crow[i+1]) of val[e] * dense[col[e]] + bias)

    crow int32 [B + 1], col int32 [nnz], val [nnz], dense [V, H], bias [H]  ->  y [B, H]
    float16 | bfloat16 | float32 | float64, accumulated in float32 (float64 for float64)

With u running over the columns that S touches, the gradient of D for a gradient g of S D is, in row u, the sum of
t_val[e] * g[t_col[e]]: the same product with the transposed matrix, and only for the rows seen. Entries are added in
a fixed order, so results are reproducible. Values of S are data: they have no gradient.

Rows differ widely: a common word is in every document, most words are in one. `order` lists rows by falling length.
The longest are taken few at a time, many entries side by side; the others many at a time with few entries. After rank
nnz / SHORT no row can have more than SHORT entries, which tells the two apart. Both lie in one launch, the long rows
first, so that they run beside the many short ones. Lanes past the end of a row read zeros on both sides: an infinite
weight is only multiplied where its row names it.

The kernel reads nnz from the end of crow: `col` and `val` may have room for more entries, and `order` may name rows
without any, so that a CUDA graph with one grid takes batches of different sizes. Neither changes a bit of the others.
"""

from typing import Literal, overload

import torch
import triton
import triton.language as tl

from minidl.kernels import activation, check
from minidl.kernels.activation import Activation, activate
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

SHORT = tl.constexpr(64)


@triton.jit
def rows_product(
    p_crow, p_col, p_val, p_order, p_dense, p_bias, p_y, p_z, first, rows, s_dense, N, i_n,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of the BLOCK_M rows at ranks from `first` on, BLOCK_J entries of each at a time."""
    o_rank = first + tl.arange(0, BLOCK_M)
    m_m = o_rank < rows
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_row = tl.load(p_order + o_rank, mask=m_m, other=0)  # [BLOCK_M]
    b_start = tl.load(p_crow + b_row, mask=m_m, other=0)
    b_end = tl.load(p_crow + b_row + 1, mask=m_m, other=0)
    b_count = (b_end - b_start)[:, None]
    o_j = tl.arange(0, BLOCK_J)[None, :]
    o_first = b_start[:, None] + o_j
    o_jn = o_n[None, None, :]
    m_jn = m_n[None, None, :]
    b_sum = tl.zeros((BLOCK_M, BLOCK_J, BLOCK_N), dtype=ACC)
    for j in range(0, tl.max(b_end - b_start), BLOCK_J):
        m_j = o_j < b_count - j
        b_col = tl.load(p_col + j + o_first, mask=m_j, other=0)  # [BLOCK_M, BLOCK_J]
        b_val = tl.load(p_val + j + o_first, mask=m_j, other=0.0).to(ACC)
        p_rows = p_dense + b_col.to(tl.int64) * s_dense
        b_dense = tl.load(p_rows[:, :, None] + o_jn, mask=m_j[:, :, None] & m_jn, other=0.0)  # [.., BLOCK_J, BLOCK_N]
        b_sum += b_val[:, :, None] * b_dense.to(ACC)
    # Entries BLOCK_J apart share a lane; the lanes are added once, at the end.
    b_acc = tl.sum(b_sum, axis=1)
    m_mn = m_m[:, None] & m_n[None, :]
    o_mn = b_row.to(tl.int64)[:, None] * N + o_n[None, :]
    if HAS_BIAS:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(ACC)[None, :]
    if SAVE_Z:
        tl.store(p_z + o_mn, b_acc.to(p_z.dtype.element_ty), mask=m_mn)
    tl.store(p_y + o_mn, activate(b_acc, ACT, SLOPE).to(p_y.dtype.element_ty), mask=m_mn)


# The number of rows changes from batch to batch: the kernel is not compiled again for 1 or for multiples of 16.
@triton.jit(do_not_specialize=["rows"])
def csr_matmul_kernel(
    p_crow, p_col, p_val, p_order, p_dense, p_bias, p_y, p_z, rows, s_dense, N,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr, EARLY: tl.constexpr,
    ACC: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M_LONG: tl.constexpr, BLOCK_J_LONG: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    i_tile = tl.program_id(0)
    long_tiles = tl.cdiv(tl.minimum(rows, tl.load(p_crow + rows) // SHORT), BLOCK_M_LONG)
    if i_tile < long_tiles:
        rows_product(
            p_crow, p_col, p_val, p_order, p_dense, p_bias, p_y, p_z,
            i_tile * BLOCK_M_LONG, rows, s_dense, N, tl.program_id(1),
            HAS_BIAS, ACT, SLOPE, SAVE_Z, ACC, BLOCK_M_LONG, BLOCK_N, BLOCK_J_LONG,
        )  # fmt: skip
    else:
        rows_product(
            p_crow, p_col, p_val, p_order, p_dense, p_bias, p_y, p_z,
            long_tiles * BLOCK_M_LONG + (i_tile - long_tiles) * BLOCK_M, rows, s_dense, N, tl.program_id(1),
            HAS_BIAS, ACT, SLOPE, SAVE_Z, ACC, BLOCK_M, BLOCK_N, BLOCK_J,
        )  # fmt: skip


@overload
def csr_matmul(
    crow: torch.Tensor, col: torch.Tensor, val: torch.Tensor, order: torch.Tensor, dense: torch.Tensor,
    bias: torch.Tensor | None = ..., act: Activation = ..., preactivation: Literal[False] = ...,
) -> torch.Tensor: ...  # fmt: skip


@overload
def csr_matmul(
    crow: torch.Tensor, col: torch.Tensor, val: torch.Tensor, order: torch.Tensor, dense: torch.Tensor,
    bias: torch.Tensor | None = ..., act: Activation = ..., *, preactivation: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def csr_matmul(
    crow: torch.Tensor,
    col: torch.Tensor,
    val: torch.Tensor,
    order: torch.Tensor,
    dense: torch.Tensor,
    bias: torch.Tensor | None = None,
    act: Activation = None,
    preactivation: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """act(S dense + bias), and also z = S dense + bias when `preactivation` is set.

    crow int32 [B + 1] from 0, col int32 [nnz] with values in [0, V), val [nnz], order int32 [B] (rows by falling number
    of entries), dense [V, H] of any strides, bias [H]; val, dense and bias of one floating dtype, all on one
    device. Returns [B, H] (and z alike), contiguous. A row without entries gives act(bias). Columns are not checked
    here: a `CSR` checks them when it is made.
    Raises ValueError for shapes that do not fit or index tensors that are not int32, TypeError for dtypes.
    """
    _check(crow, col, val, order, dense, bias)
    name, slope = activation.parse(act)
    if dense.stride(1) != 1:
        dense = dense.contiguous()
    rows, N = len(order), dense.shape[1]
    y = torch.empty(rows, N, dtype=val.dtype, device=val.device)
    z = torch.empty_like(y) if preactivation else None
    entries = max(1, dense.shape[0])
    tile = launch.tile("sparse", val.dtype, M=rows, M_LONG=rows, N=N, J=entries, J_LONG=entries)
    grid = (_most_tiles(rows, col.numel(), tile), launch.cdiv(N, tile["BLOCK_N"]))
    launch.run(
        csr_matmul_kernel, grid, crow.contiguous(), col.contiguous(), val.contiguous(), order.contiguous(), dense,
        None if bias is None else bias.contiguous(), y, z, rows, dense.stride(0), N,
        HAS_BIAS=bias is not None, ACT=activation.CODES[name], SLOPE=slope, SAVE_Z=preactivation,
        ACC=launch.acc(val.dtype), **dependent_launch.options(), **tile.options,
    )  # fmt: skip
    return (y, z) if z is not None else y


def _most_tiles(rows: int, room: int, tile: launch.Tile) -> int:
    """Tiles of rows for up to `room` entries. The fewer rows are long, the fewer tiles, or the more: by their sizes."""
    most = launch.cdiv(min(rows, room // SHORT.value), tile["BLOCK_M_LONG"])
    short = max(0, rows - most * tile["BLOCK_M_LONG"])
    return max(most + launch.cdiv(short, tile["BLOCK_M"]), launch.cdiv(rows, tile["BLOCK_M"]))


def _check(
    crow: torch.Tensor,
    col: torch.Tensor,
    val: torch.Tensor,
    order: torch.Tensor,
    dense: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    check.floating("csr_matmul", val=val)
    check.same("csr_matmul", val=val, dense=dense, bias=bias)
    for name, index in (("crow", crow), ("col", col), ("order", order)):
        if index.dim() != 1 or index.dtype != torch.int32:
            raise ValueError(
                f"csr_matmul: {name} is {index.dtype} of shape {list(index.shape)}, expected a vector of int32; "
                "make a CSR with CSR.from_torch"
            )
        if index.device != val.device:
            raise ValueError(f"csr_matmul: {name} is on {index.device} and val on {val.device}; move one with .to()")
    if val.shape != col.shape or len(crow) != len(order) + 1:
        raise ValueError(
            f"csr_matmul: crow, col, val and order have {len(crow)}, {len(col)}, {list(val.shape)} and {len(order)} "
            "entries, expected B + 1, nnz, nnz and B"
        )
    if dense.dim() != 2:
        raise ValueError(f"csr_matmul: dense has shape {list(dense.shape)}, expected [V, H]")
    if bias is not None and bias.shape != dense.shape[1:]:
        raise ValueError(f"csr_matmul: bias has shape {list(bias.shape)}, expected [{dense.shape[1]}]")
