"""Plans of products: the form, copies of operands, the tile and the shares of K, cached by problem."""

from __future__ import annotations

import dataclasses

import torch

from minidl.kernels.gemm import choice, launches, parts, rows, tail, thin, vector
from minidl.kernels.gemm.operands import Copy, Operand, units
from minidl.kernels.gemm.prepared import Product, boxes, product, strided
from minidl.kernels.gemm.problem import FAMILIES, Problem
from minidl.kernels.gemm.tiled import Sizes, gemm_pointer_kernel, gemm_tma_kernel
from minidl.runtime import launch

# Splitting smaller operands into parts takes longer than it saves.
LEAST_PARTS = 1024


@launch.cached
def plan(problem: Problem) -> Product:
    """Return the plan of the requested form, or of the fastest. Raises ValueError if the operands do not allow it."""
    form = form_of(problem)
    if form == "thin":
        return thin.prepare(problem)
    if form == "vector":
        return vector.prepare(problem)
    copies = _copies(problem, form)
    a, b = (x if copy is None else copy.operand for x, copy in zip((problem.a, problem.b), copies, strict=True))
    problem = problem._replace(a=a, b=b)
    tile, split, in_tail = choice.choose(
        FAMILIES[form], problem.dtype, problem.precision, problem.shape(form == "pointer"), problem.split,
        problem.target, problem.processors, True if form == "tail" else None if problem.dtype.itemsize == 2 else False,
    )  # fmt: skip
    if in_tail and not problem.adds and launches.tiles_of(a.rows, b.columns, tile) % problem.processors:
        result: Product = tail.prepare(problem, tile, split)
    elif form == "parts":
        result = parts.prepare(problem, tile, split)
    else:
        # Without a last round, or to add to a result in place, a choice of tail shares is one share.
        result = tiled(problem, form, form != "pointer", tile, 1 if in_tail else split)
    return dataclasses.replace(result, copies=copies)


def tiled(problem: Problem, name: str, by_boxes: bool, tile: launch.Tile, split: int) -> Product:
    """Prepare a product of this tile in `split` shares of K, by boxes or by pointers."""
    (M, N, K), a, b = problem.sizes, problem.a, problem.b
    tiles = launches.tiles_of(M, N, tile) * problem.matrices
    if by_boxes:
        programs = min(tiles * split, problem.processors * launches.at_a_time(problem.dtype, tile))
        scalars = None, Sizes(M, N, K, problem.values, split, programs)
        return product(problem, name, gemm_tma_kernel, (programs,), scalars, tile, split, **boxes(problem, tile))
    narrow = problem.dtype.itemsize * min(a.at_once, b.t.at_once) < 4
    # Prefetched blocks must fit the registers. On sm_80 some do not (not measured).
    fits = tile["BLOCK_M"] >= 64 and (tile.num_warps == 8 or tile["BLOCK_N"] < 64)
    return strided(
        problem, name, gemm_pointer_kernel, tiles, tile, split, short=tiles * split, PRECISION=problem.precision,
        UNITS=units(a, b), AHEAD=narrow and fits and launch.boxes(problem.target),
    )  # fmt: skip


def form_of(problem: Problem) -> str:
    """Return the requested form, or the fastest. Raises ValueError if the operands do not allow it."""
    form = problem.form or _fastest(problem)
    (M, N, _), dtype, precision = problem.sizes, problem.dtype, problem.precision
    if form not in FAMILIES:
        raise ValueError(f"gemm: unknown form {form!r}; expected one of {', '.join(FAMILIES)}")
    if form in ("thin", "vector") and problem.batch is not None:
        raise ValueError(f"gemm: the {form} form needs two 2-D operands")
    if form == "vector" and 1 not in (M, N):
        raise ValueError(f"gemm: the vector form needs one row or one column, got {M} and {N}")
    if form == "copied" and not problem.copyable:
        raise ValueError(
            "gemm: the copied form needs two 2-D operands, not float64, with a contiguous axis, and tensor descriptors"
        )
    if form in ("tma", "tail", "parts") and not problem.boxed:
        raise ValueError(
            f"gemm: the {form} form needs two 2-D operands, not float64, with 16-byte aligned rows, "
            "and a GPU of compute capability 9.0 or the CPU"
        )
    if form == "parts" and (dtype, precision) != (torch.float32, "tf32x3"):
        raise ValueError(f"gemm: the parts form is for float32 in tf32x3, got {dtype} in {precision}")
    if form == "tail" and dtype.itemsize != 2:
        raise ValueError(f"gemm: the tail form is for float16 and bfloat16, got {dtype}")
    return "pointer" if form == "vector" and problem.adds else form  # products are added in place by pointers


def _fastest(problem: Problem) -> str:
    if vector.suits(problem):
        return "vector"
    if thin.suits(problem):
        return "thin"
    if not problem.boxed:
        return "copied" if problem.compiled and _copies_pay(problem) else "pointer"
    M, N, K = problem.sizes
    if problem.compiled and choice.in_one_block(problem.dtype, M, N, K):
        return "pointer"
    in_parts = problem.compiled and problem.dtype == torch.float32 and problem.precision == "tf32x3"
    return "parts" if in_parts and min(M, N, K) >= LEAST_PARTS else "tma"


def _copies_pay(problem: Problem) -> bool:
    """Return whether copying operands without a box takes less time than pointers; measured for 16 bits and tf32x3."""
    dtype = problem.dtype
    copied = sum(x.rows * x.columns for x in (problem.a, problem.b) if not x.has_box(dtype))
    return (
        problem.copyable
        and (dtype.itemsize == 2 or problem.precision == "tf32x3")
        and choice.copies_pay(dtype, problem.precision, problem.shape(True), copied, problem.target, problem.processors)
    )


def _copies(problem: Problem, form: str) -> tuple[Copy | None, Copy | None]:
    """Return the copies that a form reads in place of a and b: of float32 for tensor cores, contiguous along K, and in
    the copied form, with aligned rows."""
    a, b, dtype, target = problem.a, problem.b, problem.dtype, problem.target
    of_a = of_b = None
    tensor_cores = dtype == torch.float32 and problem.precision != "ieee" and problem.compiled
    if tensor_cores and form in ("tma", "pointer", "copied"):
        of_a, of_b = _along_k(problem, a), _along_k(problem, b.t)
        of_b = None if of_b is None else of_b._replace(operand=of_b.operand.t, transposed=True)
    if form == "copied":
        of_a, of_b = of_a or rows.aligned(a, dtype, target), of_b or rows.aligned(b, dtype, target)
    return of_a, of_b


def _along_k(problem: Problem, x: Operand) -> Copy | None:
    """Return a copy of x [rows, K] that is contiguous along K, or None if x is."""
    if problem.batch is None:
        return parts.along_k(x, problem.precision == "tf32", problem.target)
    contiguous = x._replace(strides=(x.columns, 1), s_batch=x.rows * x.columns)
    return None if x.strides[1] == 1 else Copy(None, (), contiguous)
