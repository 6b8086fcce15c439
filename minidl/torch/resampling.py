"""Interpolation as a torch operator."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import resample as kernels
from minidl.ops import resample as of_tensors
from minidl.torch.pooling import adaptive_avg_pool2d, adaptive_avg_pool3d
from minidl.torch.registry import last, operator, save_linear


def _gradients(ctx: Any, dy: torch.Tensor) -> Any:
    return _resample(dy, ctx.size, *ctx.settings), *[None] * 5


@operator(
    "resample(Tensor x, SymInt[] size, SymInt[] output, str mode, float[] scales, bool flag) -> Tensor",
    lambda x, size, output, *_: last([*x.shape[:2], *(size or output)], x), save=save_linear, backward=_gradients,
    replay=True,
)  # fmt: skip
def _resample(x: torch.Tensor, size: Any, output: Any, mode: str, scales: Any, flag: bool) -> Any:
    """Arguments as of `kernels.taps_of`; a scale of 0 is the ratio of the sizes."""
    axes = zip(size or x.shape[2:], output, scales, strict=True)
    rows, columns = (kernels.taps_of(mode, n, o, scale or None, flag) for n, o, scale in axes)
    if size:
        rows, columns = rows.back, columns.back
    return kernels.resample(x, rows, columns, last=True)


def _along(x: torch.Tensor, rows: Any, columns: Any) -> Any:
    output, scales = zip(rows[2:4], columns[2:4], strict=True)
    return _resample(x, [], output, rows[0], [float(scale or 0) for scale in scales], rows[4])


_AREA: dict[int, Any] = {
    3: lambda x, size: adaptive_avg_pool2d(x.unsqueeze(2), (1, *size)).squeeze(2), 4: adaptive_avg_pool2d,
    5: adaptive_avg_pool3d,
}  # fmt: skip


def interpolate(
    input: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.interpolate without antialias; gradients have the same bits in every run. The result of
    images is channels-last. Raises as `minidl.ops.interpolate`."""
    options = size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    y: torch.Tensor = of_tensors.resampled(_AREA, _along, input, *options)
    return y
