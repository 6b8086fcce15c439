"""Drawn convolutions of volumes, like `drawn_conv` for images."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.bench import drawn_conv
from minidl.kernels import conv
from minidl.kernels.conv import slices, volume
from minidl.kernels.conv.geometry import Axis, Geometry, Volume
from minidl.kernels.conv.problem import GRAD_WEIGHT
from minidl.kernels.conv.stacks import is_identity
from minidl.tools.bench import sides
from minidl.tools.tuning.drawn_conv import kind_of


class Layer(drawn_conv.Layer):
    """The tensors of a drawn convolution of volumes, which is never transposed."""

    geometry: Volume

    def of_axes(self, *axes: Axis) -> Volume:
        d, h, w = axes
        return Volume(d, Geometry(h, w, self.shape.groups))

    def ours(self, direction: str, form: str | None = None) -> list[sides.Call]:
        kind = kind_of(self.shape, direction)
        if kind == "weight":
            return [
                partial(volume.grad_weight, x, dy, self.geometry) for x, dy in zip(self.large, self.small, strict=True)
            ]
        if kind == "up":
            return [partial(volume.grad_input, dy, self.w, self.geometry, form=form) for dy in self.small]
        return [partial(_first, x, self.w, self.geometry, form) for x in self.large]

    def forms(self, direction: str) -> tuple[str, ...]:
        named = () if kind_of(self.shape, direction) == "weight" else self._forms(direction)
        return tuple(form for form in named if form in ("cube", "stack"))

    def choice(self, direction: str) -> dict[str, Any]:
        """Return the form of the plan."""
        weight = kind_of(self.shape, direction) == "weight"
        return {"plan": self._of_weight() if weight else self._forms(direction)[0]}

    def _of_weight(self) -> str:
        at = self.geometry
        if at.flat or at.dense is not None:
            return "columns"
        x, dy = (conv.channels_last(images[0]) for images in (self.large, self.small))
        C, M = (t.shape[-1] // at.groups for t in (x, dy))
        problem = volume._problem(x, dy, at, C, M)._replace(direction=GRAD_WEIGHT)
        if volume._chosen_weight(problem, x.shape[0], at.d, None) is not None:
            return "cube"
        if slices.grad_weight(problem, x.shape[0], at) is not None:
            return "depthwise"
        return "slices" if is_identity(at.d.forward(), at.d.size) else "stack"

    def _forms(self, direction: str) -> tuple[str, ...]:
        back = kind_of(self.shape, direction) == "up"
        return volume.forms((self.small if back else self.large)[0], self.w, self.geometry, back)


def _first(x: torch.Tensor, w: torch.Tensor, at: Volume, form: str | None) -> torch.Tensor:
    return volume.forward(x, w, at, form=form)[0]
