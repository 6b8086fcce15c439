"""Moving averages of all tensors of a model, in place, in one launch per pair of dtypes.

    average += weight * (value - average)

average, value  any shape, computed in float32 for smaller dtypes; weight from 0 to 1

The kernel reads a table of addresses: one launch for each of ResNet-50's 267 tensors would take 0.5 ms of a step.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import check
from minidl.runtime import launch

_COLUMNS = tl.constexpr(4)  # of the table: average, value, number of elements, and one that keeps rows at 32 bytes
_ALIGNED = 16  # bytes


@triton.jit
def average_kernel(
    p_average, p_value, p_table, p_blocks, p_weight, ALIGN: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Update one block, tensor << 32 | block; only the types of p_average and p_value are used."""
    i_packed = tl.load(p_blocks + tl.program_id(0))
    p_slot = p_table + (i_packed >> 32) * _COLUMNS
    p_a = tl.multiple_of(tl.load(p_slot).to(tl.pointer_type(p_average.dtype.element_ty)), ALIGN)
    p_v = tl.multiple_of(tl.load(p_slot + 1).to(tl.pointer_type(p_value.dtype.element_ty)), ALIGN)
    o_n = (i_packed & 0xFFFFFFFF) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_end = tl.load(p_slot + 2)
    m = o_n < i_end
    weight = tl.load(p_weight).to(ACC)
    b_average = tl.load(p_a + o_n, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    b_average += weight * (tl.load(p_v + o_n, mask=m, other=0.0).to(ACC) - b_average)
    tl.store(p_a + o_n, b_average.to(p_average.dtype.element_ty), mask=m)


class Averages:
    """Moving averages of many tensors: a launch for each pair of dtypes.

    `averages`, all distinct, and `values` are pairs of floating tensors on one device, of equal shapes and the same
    memory order, at addresses that stay. Raises ValueError for other shapes, strides or devices, TypeError for dtypes
    that are not floating.
    """

    def __init__(self, averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self._pairs = list(zip(averages, values, strict=True))  # keeps the memory of the addresses alive
        by_kind: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for average, value in self._pairs:
            check.floating("Averages", average=average, value=value)
            order = check.memory_order(average)
            same = (
                average.shape == value.shape and average.device == value.device and average.device == averages[0].device
            )
            if not same or order is None or check.memory_order(value) != order:
                raise ValueError(
                    f"Averages: an average has shape {list(average.shape)} and strides {average.stride()} on "
                    f"{average.device}, its value {list(value.shape)} and {value.stride()} on {value.device}; expected "
                    "equal ones, contiguous or channels-last, on one device"
                )
            if average.numel():
                by_kind.setdefault((average.dtype, value.dtype), []).append((average, value))
        self._launches: list[tuple[Any, ...]] = []
        for (dtype, _), pairs in by_kind.items():
            tile = launch.tile("elementwise", dtype, N=max(average.numel() for average, _ in pairs))
            table = [[a.data_ptr(), v.data_ptr(), a.numel(), 0] for a, v in pairs]
            blocks = [
                i << 32 | block
                for i, (a, _) in enumerate(pairs)
                for block in range(launch.cdiv(a.numel(), tile["BLOCK_N"]))
            ]
            align = all(address % _ALIGNED == 0 for row in table for address in row[:2])
            on_device = [torch.tensor(numbers, dtype=torch.int64).to(averages[0].device) for numbers in (table, blocks)]
            self._launches.append((*pairs[0], *on_device, tile, _ALIGNED if align else 1))

    def __call__(self, weight: torch.Tensor) -> None:
        """Move every average towards its value by `weight`, one floating number on the device."""
        for average, value, table, blocks, tile, align in self._launches:
            launch.run(
                average_kernel, (len(blocks),), average, value, table, blocks, weight,
                ALIGN=align, ACC=launch.acc(average.dtype), enable_fp_fusion=False, **tile.options,
            )  # fmt: skip
        launch.note_indirect(lambda: (tensor for pair in self._pairs for tensor in pair))
        torch.autograd.graph.increment_version([average for average, _ in self._pairs])
