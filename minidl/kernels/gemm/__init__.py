"""Tiled matrix products C = act(A B + bias), with transposed operands, batches and split-K.

    A  [M, K] or [batch, M, K]     B  [K, N] or [batch, K, N]     bias  [N]     C  [M, N] or [batch, M, N]
    float16 | bfloat16 | float32 | float64, accumulated in float32 (float64 for float64)

Start with the kernels in `tiled`. Programs visit tiles in groups of GROUP_M tile rows, so that concurrent programs
share rows and columns in L2 (not in `thin` and `vector`). The forms:

    tma      persistent, loads boxes through tensor descriptors (TMA on sm_90); needs 16-byte aligned rows
    copied   copies 16-bit operands to aligned rows first (`rows`), then runs as tma
    parts    splits float32 operands into tf32 parts first
    tail     applies split-K only to the tiles of the last, incomplete round of programs
    pointer  accepts any strides and batches
    thin, vector   use no tensor cores; for small thin products and for a matrix times a vector

`choice` estimates the best tile and split of 16-bit products. Split-K writes one partial product for each share of K
and adds them in a fixed order, so results do not depend on scheduling. A transposed operand is read in place: its block
is loaded as stored and transposed in the kernel.
"""

from typing import Literal, overload

import torch

from minidl.kernels import activation, check
from minidl.kernels.activation import Activation
from minidl.kernels.gemm import choice, launches, operands, parts, tail, thin, vector
from minidl.kernels.gemm.tiled import ADDED
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

FAMILIES = {
    "tma": "gemm", "parts": "gemm_parts", "pointer": "gemm_pointer", "thin": "gemm_thin", "vector": "gemm_vector",
    "copied": "gemm", "tail": "gemm",
}  # fmt: skip
# Splitting smaller operands into parts takes longer than it saves.
LEAST_PARTS = 1024


@overload
def gemm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = ..., act: Activation = ..., *,
    preactivation: Literal[False] = ..., form: str | None = ..., split: int | None = ..., precision: str | None = ...,
    wide: bool = ..., onto: torch.Tensor | None = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def gemm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = ..., act: Activation = ..., *,
    preactivation: Literal[True], form: str | None = ..., split: int | None = ..., precision: str | None = ...,
    wide: bool = ..., onto: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@replayed
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
    wide: bool = False,
    onto: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return act(a @ b + bias), and also z = a @ b + bias if `preactivation` is set.

    a [M, K] or [batch, M, K], b [K, N] or [batch, K, N], any strides; bias [N], contiguous; one dtype and device.
    The result (and z) is [M, N] or [batch, M, N], contiguous, in the inputs' dtype, or in the accumulation dtype if
    `wide` is set. z is added in place to `onto`, an earlier result. K = 0 gives act(bias).
    `form` ("tma", "tail" for 16 bits, "parts" for float32, "pointer", "copied", "thin" or "vector"), `split` and
    `precision` override the choice made from the shape; "thin" and "vector" always have the accuracy of "ieee".
    Raises ValueError for shapes that do not match or a form that the operands do not allow, TypeError for dtypes.
    """
    batched = _check(a, b, bias)
    name, slope = activation.parse(act)
    precision = precision or launch.precision(a.dtype)
    batch = a.shape[0] if batched else 1
    if a.shape[-1] == 0:
        # The kernels tell the compiler that K has at least one block, so add a column and a row of zeros.
        a = a.new_zeros(()).expand(*a.shape[:-1], 1)
        b = b.new_zeros(()).expand(*b.shape[:-2], 1, b.shape[-1])
    form = _form(a, b, precision, form)
    if form == "vector" and onto is not None:
        form = "pointer"  # the vector form cannot add to `onto`
    if form == "copied":
        a, b, form = operands.in_rows(a), operands.in_rows(b), "tma"
    copies = form in ("tma", "pointer") and a.dtype == torch.float32 and precision != "ieee"
    if copies and not launch.INTERPRETED:
        a, b = (operands.along_k(x, precision == "tf32") for x in (a, b.mT))
        b = b.mT
    M, N = a.shape[-2], b.shape[-1]
    shape = (batch, M, N) if batched else (M, N)
    tile, tiles, split, in_tail = _tile(form, a, b, batch, precision, split)
    if onto is not None:
        c = z = onto
        split, in_tail = (1 if in_tail else split), False
    else:
        c = torch.empty(shape, dtype=launch.acc_torch(a.dtype) if wide else a.dtype, device=a.device)
        z = torch.empty_like(c) if preactivation else None
    flags = {
        "HAS_BIAS": bias is not None,
        "ACT": activation.CODES[name],
        "SLOPE": slope,
        "SAVE_Z": preactivation if onto is None else ADDED.value,
        "SPLIT": split,
        "ACC": launch.acc(a.dtype),
    }
    if in_tail:
        d_a, d_b, transposed = operands.descriptors(a, b, tile)
        del flags["SPLIT"]
        shape = M, N, a.shape[1]
        product = tail.prepare(*shape, transposed, tile, split, a.dtype, precision, flags, launch.processors())
        product.run(d_a, d_b, bias, None, c, z)
    elif split == 1:
        _product(form, a, b, bias, c, z, tile, tiles, precision, flags)
    else:
        partial = torch.empty(split, *shape, dtype=launch.acc_torch(a.dtype), device=a.device)
        _product(form, a, b, None, partial, None, tile, tiles, precision, launches.bare(flags))
        launches.summed(a.dtype, N, c.numel(), flags).run(partial, bias, None, c, z)
    return (c, z) if preactivation and z is not None else c


def sum_shares(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum [n] of contiguous partial [shares, n] over its first axis, in a fixed order, as `dtype`."""
    shares, n = partial.shape
    if shares == 1 and partial.dtype == dtype:
        return partial[0]
    total = torch.empty(n, dtype=dtype, device=partial.device)
    flags = {
        "HAS_BIAS": False, "ACT": activation.NONE, "SLOPE": 0.0, "SAVE_Z": False, "SPLIT": shares,
        "ACC": launch.acc(dtype),
    }  # fmt: skip
    launches.summed(dtype, 1, n, flags).run(partial, None, None, total, None)
    return total


def _form(a: torch.Tensor, b: torch.Tensor, precision: str, form: str | None) -> str:
    """Return `form`, or the best one if it is None. Raises ValueError if the operands do not allow it."""
    if form is None and vector.suits(a, b):
        return "vector"
    if form is None and thin.suits(a, b):
        return "thin"
    # A dimension of size 1 or 0 has no meaningful stride, and TMA needs a real one.
    flat = launch.boxes() and a.dim() == 2 and min(*a.shape, *b.shape) > 0
    boxed = flat and operands.has_box(a) and operands.has_box(b)
    if form is None:
        if not boxed:
            return "copied" if flat and not launch.INTERPRETED and operands.copies_pay(a, b) else "pointer"
        if not launch.INTERPRETED and choice.in_one_block(a.dtype, a.shape[0], b.shape[1], a.shape[1]):
            return "pointer"
        compiled = a.dtype == torch.float32 and precision == "tf32x3" and not launch.INTERPRETED
        return "parts" if compiled and min(*a.shape, *b.shape) >= LEAST_PARTS else "tma"
    if form not in FAMILIES:
        raise ValueError(f"gemm: unknown form {form!r}; expected one of {', '.join(FAMILIES)}")
    if form in ("thin", "vector") and a.dim() != 2:
        raise ValueError(f"gemm: the {form} form needs two 2-D operands")
    if form == "vector" and 1 not in (a.shape[0], b.shape[1]):
        raise ValueError(f"gemm: the vector form needs one row or one column, got {a.shape[0]} and {b.shape[1]}")
    if form == "copied" and not (flat and operands.can_copy(a) and operands.can_copy(b)):
        raise ValueError(
            "gemm: the copied form needs two 2-D operands, not float64, with a contiguous axis, and tensor descriptors"
        )
    if form in ("tma", "tail", "parts") and not boxed:
        raise ValueError(
            f"gemm: the {form} form needs two 2-D operands, not float64, with 16-byte aligned rows, "
            "and a GPU of compute capability 9.0 or the CPU"
        )
    if form == "parts" and (a.dtype, precision) != (torch.float32, "tf32x3"):
        raise ValueError(f"gemm: the parts form is for float32 in tf32x3, got {a.dtype} in {precision}")
    if form == "tail" and a.dtype.itemsize != 2:
        raise ValueError(f"gemm: the tail form is for float16 and bfloat16, got {a.dtype}")
    return form


def _tile(
    form: str, a: torch.Tensor, b: torch.Tensor, batch: int, precision: str, split: int | None
) -> tuple[launch.Tile, int, int, bool]:  # fmt: skip
    """Return the tile, the number of tiles, the shares of K, and whether only the last round's tiles have shares."""
    (M, K), N = a.shape[-2:], b.shape[-1]
    if form == "vector":
        return *vector.tile(a, b, split), False
    if form == "thin":
        tile = launch.tile(FAMILIES[form], a.dtype, precision=precision, M=M, N=N, K=K)
        tiles = launches.tiles_of(M, N, tile)
        least = 8 if a.dtype.itemsize == 4 else 2
        return tile, tiles, launches.shares_of(tiles, K, tile, launch.processors(), split, least), False
    shape = operands.shape_of(a, b, form == "pointer")
    tile, split, in_tail = choice.choose(
        FAMILIES[form], a.dtype, precision, shape, split, launch.target(), launch.processors(),
        True if form == "tail" else None if a.dtype.itemsize == 2 else False,
    )  # fmt: skip
    tiles = launches.tiles_of(M, N, tile) * batch
    if in_tail and tiles % launch.processors() == 0:  # every round is full
        return tile, tiles, 1, False
    return tile, tiles, split, in_tail


def _product(form, a, b, bias, c, z, tile, tiles, precision, flags) -> None:
    (M, K), N = a.shape[-2:], b.shape[-1]
    if form in ("thin", "vector"):
        (thin if form == "thin" else vector).product(a, b, bias, c, z, tile, tiles, flags)
        return
    at_a_time = launches.at_a_time(a.dtype, tile) if a.dtype.itemsize == 2 else 1
    programs = min(tiles * flags["SPLIT"], launch.processors() * at_a_time)
    wild = None
    if form == "parts":
        wild = parts.product(a, b, bias, c, z, tile, programs, flags)
        tile = launch.tile("gemm", a.dtype, floor=16, precision=precision, M=M, N=N, K=K)
        programs = launch.processors()
    if form != "pointer":
        d_a, d_b, transposed = operands.descriptors(a, b, tile)
        launches.by_boxes(M, N, K, transposed, programs, tile, precision, flags).run(d_a, d_b, bias, None, c, z, wild)
        return
    s_ab = a.stride(0) if a.dim() == 3 else 0
    s_bb = b.stride(0) if b.dim() == 3 else 0
    strides = s_ab, *a.stride()[-2:], s_bb, *b.stride()[-2:]
    s_split = c.numel() // flags["SPLIT"]
    launches.by_pointers(M, N, K, strides, s_split, tiles, tile, precision, a.element_size(), flags).run(
        a, b, bias, None, c, z
    )


def _check(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether the product is batched. Raises ValueError or TypeError for operands that do not match."""
    check.floating("gemm", a=a)
    check.same("gemm", a=a, b=b, bias=bias)
    if a.dim() not in (2, 3) or a.dim() != b.dim():
        raise ValueError(f"gemm: got shapes {list(a.shape)} and {list(b.shape)}, expected two matrices or two batches")
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"gemm: shapes {list(a.shape)} and {list(b.shape)} do not match: "
            f"a has {a.shape[-1]} columns and b {b.shape[-2]} rows; these and the batch sizes must be equal"
        )
    if bias is not None and (bias.shape != b.shape[-1:] or not bias.is_contiguous()):
        raise ValueError(f"gemm: bias has shape {list(bias.shape)}, expected [{b.shape[-1]}], contiguous")
    return a.dim() == 3
