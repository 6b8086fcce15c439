"""The least work of a launch: bytes to move, and operations of matrix products.

Bytes are those of the kernel's tensors and descriptors, counted once, whether read or written. Operations are a
multiplication and an addition for each product, including taps outside the image. Both are None if they do not follow
from the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from minidl.runtime import records
from minidl.runtime.launch import Tile

Arguments = Mapping[str, Any]

# These kernels read addresses from a table, or rows by an index.
BYTES_UNKNOWN = ("measure_kernel", "prepare_kernel", "update_kernel", "csr_matmul_kernel", "pick_kernel")


def _taps(a: Arguments) -> int:
    return a["GROUPS"] * a["M"] * a["C"] * a["JH"] * a["JW"]


# The number of products, for kernels whose arguments determine it.
PRODUCTS: dict[str, Callable[[Arguments], int]] = {
    "gemm_tma_kernel": lambda a: a["M"] * a["N"] * a["K"],
    "gemm_tail_kernel": lambda a: a["M"] * a["N"] * a["K"],
    "gemm_parts_kernel": lambda a: a["M"] * a["N"] * a["K"],
    "gemm_thin_kernel": lambda a: a["M"] * a["N"] * a["K"],
    "gemm_vector_kernel": lambda a: a["M"] * a["K"],
    "gemm_pointer_kernel": lambda a: a["p_c"].numel() // a["SPLIT"] * a["K"],
    "conv_patches_kernel": lambda a: a["patches"] * a["N"] * a["K"],
    "conv_pixel_kernel": lambda a: a["pixels"] * _taps(a),
    "conv_pixel_back_kernel": lambda a: a["N"] * a["H"] * a["W"] * a["CHANNELS"] * a["M"] * a["R"] * a["S"],
    "conv_pixel_grad_weight_kernel": lambda a: a["pixels"] * _taps(a),
    "conv_batch_kernel": lambda a: a["N"] * a["QH"] * a["QW"] * _taps(a),
    "conv_box_kernel": lambda a: a["N"] * a["QH"] * a["QW"] * _taps(a),
    "conv_batch_grad_weight_kernel": lambda a: a["N"] * a["QH"] * a["QW"] * _taps(a),
    "conv_unfolded_grad_weight_kernel": lambda a: a["pixels"] * _taps(a),
    "conv_back_kernel": lambda a: a["N"] * a["H"] * a["W"] * a["GROUPS"] * a["M"] * a["C"] * a["taps_h"] * a["taps_w"],
}


class Work(NamedTuple):
    """One kind of launch. `rate` names the matrix rate: a dtype, or the precision of float32 products."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    tile: str
    bytes: int | None
    flop: int | None
    rate: str | None


def work_of(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> Work:
    """Return the work of a launch with the arguments of `runtime.launch.run`."""
    name = kernel.__name__
    meta = records.fields(meta)
    warps = meta.get("num_warps", 4)
    sizes = {key: value for key, value in meta.items() if key.startswith("BLOCK")}
    tensors = [value for value in args if isinstance(getattr(value, "base", value), torch.Tensor)]
    arguments = {**records.fields(dict(zip(kernel.arg_names, args, strict=False))), **meta}
    # A fallback for products in parts, which usually has nothing to do.
    idle = name == "gemm_tma_kernel" and arguments["p_wild"] is not None
    flop = 2 * PRODUCTS[name](arguments) if name in PRODUCTS and not idle else None
    x, y, z = (*grid, 1, 1)[:3]
    return Work(
        kernel=name,
        grid=(x, y, z),
        threads=32 * warps,
        tile=str(Tile(sizes, warps, meta.get("num_stages", 3))),
        bytes=None if idle or name in BYTES_UNKNOWN else _bytes(tensors),
        flop=flop,
        rate=None if flop is None else _rate(name, tensors[0], meta),
    )


def _bytes(tensors: list[Any]) -> int:
    """Return the bytes of all tensors; of tensors at one address, the largest counts."""
    extents: dict[int, int] = {}
    for value in tensors:
        base = getattr(value, "base", value)
        allocated = base.untyped_storage().nbytes()
        extent = min(math.prod(value.shape) * base.element_size(), allocated)
        extents[base.data_ptr()] = max(extents.get(base.data_ptr(), 0), extent)
    return sum(extents.values())


def _rate(name: str, operand: Any, meta: dict[str, Any]) -> str:
    dtype = getattr(operand, "base", operand).dtype
    if name in ("gemm_thin_kernel", "gemm_vector_kernel") and dtype != torch.float64:
        return "ieee"  # multiply-adds in float32, whatever the operands
    return meta.get("PRECISION", "tf32x3") if dtype == torch.float32 else str(dtype).removeprefix("torch.")
