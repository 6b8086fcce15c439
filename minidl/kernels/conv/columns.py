"""A transposed convolution whose outputs side by side are one: the columns that a stride writes count as channels.

Channels-last, y [N, H, W, M] is also y [N, H, W / s, s M], and the weights [C, R, S, M] are [C, R, S / s, s M]. With a
stride of s along the row, and a kernel, a padding and a width that it divides, the transposed convolution is one with a
stride of 1 along the row and s M outputs. Nothing is copied; of s walks one is left, tiles are full of columns, and
whole pieces of rows are written. 16x16 stride 8, 21->21, 13 images of 70x70: 64 walks of 21 outputs are 8 of 168.

What is then computed is a problem with a plan of its own (`plan`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from minidl.kernels.conv.epilogue import repeated
from minidl.kernels.conv.problem import TRANSPOSED, Problem, Unsupported

NAME = "columns"


class Columns(NamedTuple):
    """How many columns of y are one."""

    count: int

    def run(
        self, problem: Problem, part: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
        scale: torch.Tensor | None, _: None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(y, z) by the plan `part` of the problem that was made."""
        rows = w.permute(0, 2, 3, 1).contiguous()  # [C, R, S, M]
        C, R, S, M = rows.shape
        joined = rows.view(C, R, S // self.count, self.count * M).permute(0, 3, 1, 2)
        y, z = part.run(x, joined, *(repeated(vector, self.count) for vector in (bias, scale)))
        return y.view(problem.shape), None if z is None else z.view(problem.shape)


def joined(problem: Problem) -> Problem | Unsupported:
    """The problem of fewer columns and more channels."""
    if problem.direction != TRANSPOSED:
        return Unsupported("no way back")
    h, v, groups = problem.geometry
    s, M = v.stride, problem.M
    if s == 1 or groups > 1 or v.dilation > 1:
        return Unsupported("a stride of 1, groups, or a dilation")
    if v.kernel % s or v.padding % s or v.size % s:
        return Unsupported("a kernel, a padding or a width that the stride does not divide")
    across = v._replace(size=v.size // s, kernel=v.kernel // s, stride=1, padding=v.padding // s)
    S, made = across.kernel, s * M
    strides = h.kernel * S * made, 1, S * made, made
    return problem._replace(M=made, geometry=problem.geometry._replace(w=across), strides=strides, form=None)


def prepare(problem: Problem) -> Columns:
    return Columns(problem.geometry.w.stride)
