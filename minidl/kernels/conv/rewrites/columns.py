"""The "columns" rewrite: a transposed convolution whose `stride` adjacent output columns count as channels of one.

Channels-last, y [N, H, W, M] is also y [N, H, W / s, s M], and the weights [C, R, S, M] are [C, R, S / s, s M]. If the
stride s along the row divides kernel, padding and width, this is a transposed convolution with a stride of 1 along the
row and s M output channels. y is not copied; one phase along the row replaces s phases, and tiles are full.
16x16 stride 8, 21->21, 13 images of 70x70: 64 phases of 21 outputs become 8 of 168.

The new problem has its own plan (`plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidl.kernels.conv.epilogue import repeated
from minidl.kernels.conv.problem import TRANSPOSED, Operands, Problem, Unsupported
from minidl.kernels.conv.rewrites.rewrite import DirectRewrite, Result


class Columns(DirectRewrite):
    """`stride` columns of y as channels."""

    name = "columns"

    def others(self, problem: Problem) -> tuple[Problem, ...] | Unsupported:
        if problem.direction != TRANSPOSED:
            return Unsupported("not transposed")
        height, width, groups = problem.geometry
        s = width.stride
        if s == 1 or groups > 1 or width.dilation > 1:
            return Unsupported("a stride of 1, groups, or a dilation")
        if width.kernel % s or width.padding % s or width.size % s:
            return Unsupported("a kernel, a padding or a width that the stride does not divide")
        across = width._replace(size=width.size // s, kernel=width.kernel // s, stride=1, padding=width.padding // s)
        S, M = across.kernel, s * problem.M
        geometry, strides = problem.geometry._replace(w=across), (height.kernel * S * M, 1, S * M, M)
        return (problem._replace(M=M, geometry=geometry, strides=strides, form=None),)

    def cost(self, problem: Problem, others: Sequence[Problem], times: Sequence[float]) -> float:
        return times[0]

    def run(self, problem: Problem, plans: Sequence[Any], operands: Operands) -> Result:
        count = problem.geometry.w.stride
        x, w, bias, scale, _ = operands
        rows = w.permute(0, 2, 3, 1).contiguous()  # [C, R, S, M]
        C, R, S, M = rows.shape
        weights = rows.view(C, R, S // count, count * M).permute(0, 3, 1, 2)
        y, z = plans[0].run(Operands(x, weights, repeated(bias, count), repeated(scale, count)))
        return y.view(problem.shape), None if z is None else z.view(problem.shape)
