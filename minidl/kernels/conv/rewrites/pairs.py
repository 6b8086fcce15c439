"""The "pair" rewrite: two adjacent pixels as one of twice the channels, for layers of few channels.

Channels-last, x [N, H, W, C] is also x [N, H, W / 2, 2 C], and likewise y. A convolution with S columns of taps has
(S + 1) / 2 columns over pairs, and its weights are a band [2 M, R, (S + 1) / 2, 2 C] (`bands`), of which a sixth are
zeros for S = 5. In exchange each input is read (S + 1) / 2 times rather than S times, in rows of twice the length, and
tiles of 128 columns are full. No image is copied. Backward, y is read and x is written, with the same band.

The problem of pairs has its own plan (`plan`). A non-finite input makes all outputs NaN whose pairs reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minidl.kernels.conv import bands, costs
from minidl.kernels.conv.epilogue import repeated
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import FORWARD, TRANSPOSED, Operands, Problem, Unsupported
from minidl.kernels.conv.rewrites.rewrite import Conversion, Result, Rewrite

MOST = 64  # channels: pairs of more would be wider than a tile


@dataclass(frozen=True)
class Pairing(Conversion):
    """The copy of the weights to a band."""

    band: Copy

    def run(self, problem: Problem, plans: Sequence[Any], operands: Operands) -> Result:
        x, w, bias, scale, added = operands
        if problem.direction == TRANSPOSED:
            w = w.permute(0, 2, 3, 1).contiguous()  # [C, R, S, M]
        weights = self.band.run(w)
        if problem.direction == TRANSPOSED:
            weights = weights.permute(0, 3, 1, 2)
        pairs = plans[0].problem
        x = x.view(problem.N, *pairs.read, pairs.C)
        added = None if added is None else added.view(pairs.shape)
        y, z = plans[0].run(Operands(x, weights, repeated(bias), repeated(scale), added))
        return y.view(problem.shape), None if z is None else z.view(problem.shape)


class Pairs(Rewrite):
    """Two columns as channels."""

    name, families = "pair", ("conv_band",)

    def others(self, problem: Problem) -> tuple[Problem, ...] | Unsupported:
        height, width, groups = problem.geometry
        if problem.direction not in (FORWARD, TRANSPOSED) or problem.pool or problem.dtype.itemsize == 1:
            return Unsupported("a gradient of the weight, a phase, a pool, or float8")
        if problem.dtype == torch.float64 or (problem.target == "interpreted" and problem.form != self.name):
            return Unsupported("nothing gained with float64, or by the interpreter")
        if groups > 1 or width.stride * width.dilation * height.stride > 1:
            return Unsupported("groups, a stride or a dilation")
        if width.kernel % 2 == 0 or width.kernel == 1 or width.size % 2 or width.output % 2 or width.padding % 2:
            return Unsupported("an odd number of columns, an odd padding, or a kernel width other than 3, 5, 7 ...")
        if problem.C % 16 or not 0 < max(problem.C, problem.M) <= MOST:
            return Unsupported("input channels that are not a multiple of 16, or channels that fill a tile")
        across = width._replace(
            size=width.size // 2, output=width.output // 2, kernel=(width.kernel + 1) // 2, padding=width.padding // 2
        )
        geometry, C, M = problem.geometry._replace(w=across), 2 * problem.C, 2 * problem.M
        pairs = problem._replace(C=C, M=M, geometry=geometry, form=None, w_aligned=True)
        if problem.direction == TRANSPOSED:
            row = across.kernel * M
            pairs = pairs._replace(strides=(height.kernel * row, 1, row, M))
        return (pairs,)

    def cost(self, problem: Problem, others: Sequence[Problem], times: Sequence[float]) -> float:
        """Add the band."""
        return times[0] + costs.band_time(problem, others[0].C * others[0].M * others[0].geometry.h.kernel)

    def prepare(self, problem: Problem, others: Sequence[Problem]) -> Conversion:
        forward, across = problem, others[0].geometry.w
        if problem.direction == TRANSPOSED:
            forward = problem._replace(direction=FORWARD, C=problem.M, M=problem.C)
        row = across.kernel * 2 * forward.C
        copy = bands.prepare(forward, 2, row, 2 * forward.M, transposed=True)
        shape = 2 * forward.M, problem.geometry.h.kernel, across.kernel, 2 * forward.C
        return Pairing(Copy(shape, copy.launch))
