"""Moving averages, in place.

    average += weight (value - average)

average, value  any shape, one dtype, in float32 for smaller ones while computing; weight from 0 to 1
"""

import torch
import triton
import triton.language as tl

from minidl.runtime import check, launch


@triton.jit
def average_kernel(p_average, p_value, p_weight, n, ACC: tl.constexpr, BLOCK_N: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < n
    b_average = tl.load(p_average + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    b_value = tl.load(p_value + o, mask=m, other=0.0).to(ACC)
    b_average += tl.load(p_weight).to(ACC) * (b_value - b_average)
    tl.store(p_average + o, b_average.to(p_average.dtype.element_ty), mask=m)


def average_(average: torch.Tensor, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Move `average` towards `value` by the share in `weight` (one floating number on the device), in place.

    Returns `average`. Raises TypeError for dtypes that are not floating or differ, ValueError for other shapes, devices
    or strides.
    """
    check.floating("average_", average=average, value=value)
    check.same("average_", average=average, value=value)
    order = check.memory_order(average)
    if average.shape != value.shape or order is None:
        raise ValueError(
            f"average_: average has shape {list(average.shape)} and strides {average.stride()}, value "
            f"{list(value.shape)}; expected equal shapes and an average that is contiguous or channels-last"
        )
    check.floating("average_", weight=weight)
    if weight.numel() != 1 or weight.device != average.device:
        raise ValueError(
            f"average_: weight has shape {list(weight.shape)} on {weight.device}, expected one number on "
            f"{average.device}"
        )
    if check.memory_order(value) != order:
        value = torch.empty_like(average, memory_format=order).copy_(value)
    n = average.numel()
    tile = launch.tile("elementwise", average.dtype, N=n)
    launch.run(
        average_kernel, (launch.cdiv(n, tile["BLOCK_N"]),), average,
        value, weight, n,
        ACC=launch.acc(average.dtype), enable_fp_fusion=False, **tile.options,
    )  # fmt: skip
    torch.autograd.graph.increment_version(average)
    return average
