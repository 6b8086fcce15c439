"""Sparse times dense: act(S D + bias) for a sparse matrix S in CSR format, and the gradient of D as rows.

    y[i] = act(sum over e in [crow[i], crow[i+1]) of val[e] * dense[col[e]] + bias)

    crow int32 [B + 1], col int32 [nnz], val [nnz], dense [V, H], bias [H]  ->  y [B, H]
    float16 | bfloat16 | float32 | float64, accumulated in float32 (float64 for float64)

For a gradient g of S D, row u of the gradient of D is the sum of t_val[e] * g[t_col[e]], for the columns u that occur
in S: the same product with the transposed matrix, only for these rows. Entries are added in a fixed order, so results
are reproducible. Values of S are data: they have no gradient.

Row lengths differ widely: a common word is in every document, most words are in one. `order` lists rows by descending
length. A program takes few long rows with many entries in parallel, or many short rows with few. After rank nnz / SHORT
no row has more than SHORT entries, which separates the two. Both run in one launch, long rows first, so that they
overlap with the many short ones. Lanes past the end of a row read zeros on both sides, so an infinite weight is
multiplied only for rows that contain its column.

The kernel reads nnz from the end of crow: `col` and `val` may have unused capacity, and `order` may list rows without
entries, so that a CUDA graph with one grid takes batches of different sizes. Neither changes the results.
"""

from typing import Literal, NamedTuple, overload

import torch
import triton
import triton.language as tl

from minidl.kernels import activation, check
from minidl.kernels.activation import Activation, activate
from minidl.kernels.epilogue import Epilogue
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

SHORT = tl.constexpr(64)


class SparseTile(NamedTuple):
    """BLOCK_N columns of BLOCK_M short rows, BLOCK_J entries of each at a time, or of BLOCK_M_LONG long rows."""

    BLOCK_N: int
    BLOCK_M_LONG: int
    BLOCK_J_LONG: int
    BLOCK_M: int
    BLOCK_J: int


@triton.jit
def rows_product(
    matrix, p_dense, p_bias, p_y, p_z, first, rows, s_dense, N,
    epilogue: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of the BLOCK_M rows at ranks from `first` on, BLOCK_J entries of each at a time."""
    p_crow, p_col, p_val, p_order = matrix
    o_rank = first + tl.arange(0, BLOCK_M)
    m_m = o_rank < rows
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
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
    # Lane j accumulates entries j, j + BLOCK_J, ...; the lanes are added once, at the end.
    b_acc = tl.sum(b_sum, axis=1)
    m_mn = m_m[:, None] & m_n[None, :]
    o_mn = b_row.to(tl.int64)[:, None] * N + o_n[None, :]
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(ACC)[None, :]
    if p_z is not None:
        tl.store(p_z + o_mn, b_acc.to(p_z.dtype.element_ty), mask=m_mn)
    tl.store(p_y + o_mn, activate(b_acc, epilogue.ACT, epilogue.SLOPE).to(p_y.dtype.element_ty), mask=m_mn)


# The number of rows changes between batches, so the kernel is not specialised for 1 or multiples of 16.
@triton.jit(do_not_specialize=["rows"])
def csr_matmul_kernel(
    p_crow, p_col, p_val, p_order, p_dense, p_bias, p_y, p_z, rows, s_dense, N,
    epilogue: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    matrix = (p_crow, p_col, p_val, p_order)
    i_tile = tl.program_id(0)
    long_tiles = tl.cdiv(tl.minimum(rows, tl.load(p_crow + rows) // SHORT), tile.BLOCK_M_LONG)
    if i_tile < long_tiles:
        rows_product(
            matrix, p_dense, p_bias, p_y, p_z, i_tile * tile.BLOCK_M_LONG, rows, s_dense, N,
            epilogue, ACC, tile.BLOCK_M_LONG, tile.BLOCK_N, tile.BLOCK_J_LONG,
        )  # fmt: skip
    else:
        first = long_tiles * tile.BLOCK_M_LONG + (i_tile - long_tiles) * tile.BLOCK_M
        rows_product(
            matrix, p_dense, p_bias, p_y, p_z, first, rows, s_dense, N,
            epilogue, ACC, tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_J,
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
    """Return act(S dense + bias), and also z = S dense + bias if `preactivation` is set.

    crow int32 [B + 1] from 0, col int32 [nnz] with values in [0, V), val [nnz], order int32 [B] (rows by descending
    number of entries), dense [V, H] with any strides, bias [H]; val, dense and bias have one floating dtype, and all
    are on one device. The result (and z) is [B, H], contiguous. A row without entries gives act(bias). `CSR.from_torch`
    checks the columns; this function does not.
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
        epilogue=Epilogue(activation.CODES[name], slope), tile=tile.record(SparseTile), ACC=launch.acc(val.dtype),
        **dependent_launch.options(), **tile.launch_options,
    )  # fmt: skip
    return (y, z) if z is not None else y


def _most_tiles(rows: int, capacity: int, tile: launch.Tile) -> int:
    """Return the most tiles of rows for up to `capacity` entries: with as many long rows as possible, or with none."""
    most = launch.cdiv(min(rows, capacity // SHORT.value), tile["BLOCK_M_LONG"])
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
