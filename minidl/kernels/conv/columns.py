"""The "columns" rewrite: a transposed convolution whose `stride` adjacent output columns count as channels of one.

Channels-last, y [N, H, W, M] is also y [N, H, W / s, s M], and the weights [C, R, S, M] are [C, R, S / s, s M]. If the
stride s along the row divides kernel, padding and width, this is a transposed convolution with a stride of 1 along the
row and s M output channels. y is not copied; one phase along the row replaces s phases, and tiles are full.
16x16 stride 8, 21->21, 13 images of 70x70: 64 phases of 21 outputs become 8 of 168.

The new problem has its own plan (`plan`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from minidl.kernels.conv.epilogue import repeated
from minidl.kernels.conv.problem import TRANSPOSED, Problem, Unsupported

NAME = "columns"


class Columns(NamedTuple):
    """The number of adjacent columns of y that become channels."""

    count: int

    def run(
        self, problem: Problem, part: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
        scale: torch.Tensor | None, _: None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Return (y, z) by the plan `part` of the new problem."""
        rows = w.permute(0, 2, 3, 1).contiguous()  # [C, R, S, M]
        C, R, S, M = rows.shape
        weights = rows.view(C, R, S // self.count, self.count * M).permute(0, 3, 1, 2)
        y, z = part.run(x, weights, *(repeated(vector, self.count) for vector in (bias, scale)))
        return y.view(problem.shape), None if z is None else z.view(problem.shape)


def rewrite(problem: Problem) -> Problem | Unsupported:
    """Return the problem with fewer columns and more channels."""
    if problem.direction != TRANSPOSED:
        return Unsupported("not transposed")
    h, v, groups = problem.geometry
    s, M = v.stride, problem.M
    if s == 1 or groups > 1 or v.dilation > 1:
        return Unsupported("a stride of 1, groups, or a dilation")
    if v.kernel % s or v.padding % s or v.size % s:
        return Unsupported("a kernel, a padding or a width that the stride does not divide")
    across = v._replace(size=v.size // s, kernel=v.kernel // s, stride=1, padding=v.padding // s)
    S, channels = across.kernel, s * M
    strides = h.kernel * S * channels, 1, S * channels, channels
    return problem._replace(M=channels, geometry=problem.geometry._replace(w=across), strides=strides, form=None)


def prepare(problem: Problem) -> Columns:
    return Columns(problem.geometry.w.stride)
