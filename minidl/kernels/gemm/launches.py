"""What a tiled product launches, but for its tensors: made of shapes and strides alone, so that it can be kept."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from minidl.kernels import activation
from minidl.kernels.gemm.tiled import gemm_pointer_kernel, gemm_sum_kernel, gemm_tma_kernel
from minidl.runtime import dependent_launch, launch
from minidl.runtime.descriptors import Box

# Blocks of K that two programs with 128x128 of a result in 16 bits can hold: 96 KB each, and 16 to write.
PAIR_STAGES = 3


class Product(NamedTuple):
    """A product of two contiguous matrices: its launch, and the sum of its shares where K has more than one.

    partial  shape of the shares, [shares, M, N]
    """

    product: launch.Prepared
    partial: tuple[int, int, int]
    sum: launch.Prepared | None

    def run(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None, c: torch.Tensor,
        z: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Write c, and z where it is kept; the matrices are seen as `prepare` was told, whatever their shape."""
        # The kernel that reads boxes also takes the flag of a product in parts.
        more = (None,) if self.product.kernel is gemm_tma_kernel else ()
        if self.sum is None:
            self.product.run(a, b, bias, scale, c, z, *more)
            return
        partial = torch.empty(self.partial, dtype=launch.acc_torch(c.dtype), device=c.device)
        self.product.run(a, b, None, None, partial, None, *more)
        self.sum.run(partial, bias, scale, c, z)


def prepare(
    M: int, N: int, K: int, turned: tuple[bool, bool], boxed: bool, tile: launch.Tile, split: int, dtype: torch.dtype,
    precision: str, flags: dict[str, Any], target: str, processors: int, in_order: bool = False,
) -> Product:  # fmt: skip
    """The product of a [M, K] and b [K, N], each contiguous or, where it is `turned`, so in memory when transposed.

    flags     of the epilogue: HAS_BIAS, HAS_SCALE where it may have one, ACT, SLOPE and SAVE_Z
    in_order  as in `summed`
    """
    flags = {**flags, "SPLIT": split, "ACC": launch.acc(dtype)}
    inner = flags if split == 1 else bare(flags)
    (a_rows, a_row), (b_rows, b_row) = ((K, M) if turned[0] else (M, K)), ((N, K) if turned[1] else (K, N))
    tiles = tiles_of(M, N, tile)
    if boxed:
        block_a, block_b = (tile["BLOCK_M"], tile["BLOCK_K"]), (tile["BLOCK_K"], tile["BLOCK_N"])
        boxes = (
            Box.of_rows(a_rows, a_row, block_a[::-1] if turned[0] else block_a),
            Box.of_rows(b_rows, b_row, block_b[::-1] if turned[1] else block_b),
        )
        programs = min(tiles * split, processors * at_a_time(dtype, tile))
        product = by_boxes(M, N, K, turned, programs, tile, precision, inner, boxes, target)
    else:
        a, b = (1, a_row) if turned[0] else (a_row, 1), (1, b_row) if turned[1] else (b_row, 1)
        strides = 0, *a, 0, *b
        product = by_pointers(
            M, N, K, strides, M * N, tiles, tile, precision, dtype.itemsize, inner, target
        )  # fmt: skip
    total = summed(dtype, N, M * N, flags, target, in_order) if split > 1 else None
    return Product(product, (split, M, N), total)


def by_boxes(
    M: int, N: int, K: int, turned: tuple[bool, bool], programs: int, tile: launch.Tile, precision: str,
    flags: dict[str, Any], boxes: tuple[Box | None, ...] = (), target: str | None = None,
) -> launch.Prepared:  # fmt: skip
    """Of a, b, bias, scale, c, z and the flag of a product in parts; a and b are boxes already where none are given."""
    meta = {
        "A_TRANSPOSED": turned[0], "B_TRANSPOSED": turned[1], "PRECISION": precision, "UNIT_N": unit(N),
        "HAS_SCALE": False, **dependent_launch.options(target=target), **flags, **tile.options,
    }  # fmt: skip
    scalars = M, N, K, M * N, programs, meta.pop("SPLIT")
    return launch.Prepared(gemm_tma_kernel, (programs,), scalars, meta, boxes)


def by_pointers(
    M: int, N: int, K: int, strides: tuple[int, ...], share: int, tiles: int, tile: launch.Tile, precision: str,
    itemsize: int, flags: dict[str, Any], target: str | None = None,
) -> launch.Prepared:  # fmt: skip
    """Of a, b, bias, scale, c and z. strides: of batch, M and K of a, of batch, K and N of b; share: values of one."""
    _, *of_a, _, s_bk, s_bn = strides
    units = tuple(map(unit, (M, N, K, *of_a, s_bk, s_bn)))
    narrow = itemsize * min(at_once(M, K, *of_a), at_once(N, K, s_bn, s_bk)) < 4
    # Blocks that wait must fit the registers. On sm_80 some do not, and it was not measured there.
    fits = tile["BLOCK_M"] >= 64 and (tile.num_warps == 8 or tile["BLOCK_N"] < 64)
    meta = {
        "AHEAD": narrow and fits and launch.boxes(target), "UNITS": units, "PRECISION": precision, "HAS_SCALE": False,
        **dependent_launch.options(tiles * flags["SPLIT"], target), **flags, **tile.options,
    }  # fmt: skip
    split = meta.pop("SPLIT")
    return launch.Prepared(gemm_pointer_kernel, (tiles, split), (M, N, K, *strides, share, split), meta)


def summed(
    dtype: torch.dtype, N: int, total: int, flags: dict[str, Any], target: str | None = None, in_order: bool = False
) -> launch.Prepared:  # fmt: skip
    """Of partial products [shares, total], bias, scale [N], c and z: the sum in a fixed order, and more. The order is
    that of the shares whatever the total is, if it is to be (`in_order`)."""
    tile = launch.tile("gemm_sum", dtype, target_=target, total=total, S=1 if in_order else flags["SPLIT"])
    meta = {"HAS_SCALE": False, **flags, **dependent_launch.options(target=target), **tile.options}
    return launch.Prepared(gemm_sum_kernel, (launch.cdiv(total, tile["BLOCK"]),), (N, total), meta)


def bare(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of a share: without an epilogue, which follows the sum."""
    kept = {name: value for name, value in flags.items() if name != "HAS_SCALE"}
    return {**kept, "HAS_BIAS": False, "ACT": activation.NONE, "SAVE_Z": False}


def unit(extent: int) -> int:
    """The largest of 1, 2, 4 and 8 of which an extent is a multiple; with 8 values, 16 bytes are read or written."""
    return math.gcd(extent, 8)


def at_once(M: int, K: int, s_m: int, s_k: int) -> int:
    """Values of an operand [M, K] that are read at once: of its axis that lies in memory as one run after another."""
    if s_k == 1:
        return unit(K) if M == 1 else math.gcd(unit(K), s_m)
    if s_m == 1:
        return unit(M) if K == 1 else math.gcd(unit(M), s_k)
    return 1


def at_a_time(dtype: torch.dtype, tile: launch.Tile) -> int:
    """Programs of a multiprocessor: two of four warps where their blocks fit its shared memory together.

    One reads while the other writes: of 802816x256x64 with a sum in float16 they take 362 us, one program 479. Of
    float8 one waits to add to float32 while the other multiplies: 4096 x 4096 x 4096 takes 127 us, 157 with one (H100).
    """
    pair = dtype.itemsize == 1 or (dtype.itemsize == 2 and tile["BLOCK_M"] == 128 and tile.num_stages <= PAIR_STAGES)
    return 2 if pair and tile.num_warps == 4 else 1


def tiles_of(M: int, N: int, tile: launch.Tile) -> int:
    return launch.cdiv(M, tile["BLOCK_M"]) * launch.cdiv(N, tile["BLOCK_N"])


def shares_of(
    tiles: int, K: int, tile: launch.Tile, processors: int, split: int | None = None, least: int = 8
) -> int:  # fmt: skip
    """Shares of K, none of them empty: `split`, or enough to fill the device with at least `least` blocks each (below,
    adding the shares costs more)."""
    blocks = launch.cdiv(K, tile["BLOCK_K"])
    return filled(blocks, split or max(1, min(processors // max(tiles, 1), blocks // least)))


def filled(blocks: int, split: int) -> int:
    """At most `split` shares of equally many blocks, none of them empty."""
    return launch.cdiv(blocks, launch.cdiv(blocks, split))
