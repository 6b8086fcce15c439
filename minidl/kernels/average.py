"""Moving averages, in place.

    average += weight (value - average)

average, value  any shape, one dtype, computed in float32 for smaller ones; weight from 0 to 1
"""

import torch
import triton
import triton.language as tl

from minidl.kernels import check, launch


@triton.jit
def average_kernel(p_average, p_value, n, weight, ACC: tl.constexpr, BLOCK_N: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < n
    b_average = tl.load(p_average + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    b_value = tl.load(p_value + o, mask=m, other=0.0).to(ACC)
    b_average += weight * (b_value - b_average)
    tl.store(p_average + o, b_average.to(p_average.dtype.element_ty), mask=m)


def average_(average: torch.Tensor, value: torch.Tensor, weight: float) -> torch.Tensor:
    """Move `average` towards `value` by a share, in place, and return it.

    Raises TypeError for dtypes that are not floating or differ, ValueError for other shapes or devices, an average
    in neither contiguous nor channels-last memory, or a weight outside [0, 1].
    """
    check.floating("average_", average=average, value=value)
    check.same("average_", average=average, value=value)
    layout = torch.contiguous_format
    if not average.is_contiguous() and average.dim() == 4:
        layout = torch.channels_last
    if average.shape != value.shape or not average.is_contiguous(memory_format=layout):
        raise ValueError(
            f"average_: average has shape {list(average.shape)} and strides {average.stride()}, value "
            f"{list(value.shape)}; expected equal shapes and an average in contiguous or channels-last memory"
        )
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"average_: weight is {weight}, expected a share from 0 to 1")
    n = average.numel()
    tile = launch.tile("elementwise", average.dtype, N=n)
    launch.run(
        average_kernel, (triton.cdiv(n, tile["BLOCK_N"]),), average,
        value.contiguous(memory_format=layout), n, weight,
        ACC=launch.acc(average.dtype), enable_fp_fusion=False, **tile.options,
    )  # fmt: skip
    torch.autograd.graph.increment_version(average)
    return average
