"""Drawn convolutions of volumes, like `drawn_conv` for images."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.bench import drawn_conv
from minidl.kernels import conv
from minidl.kernels.conv import volume
from minidl.kernels.conv.geometry import Axis, Geometry, Volume
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED
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
        if kind_of(self.shape, direction) == "weight":
            return ()
        return tuple(form for form in self._names(direction) if form in ("cube", "stack"))

    def choice(self, direction: str) -> dict[str, Any]:
        """Return the form of the plan."""
        return {"plan": self._names(direction)[0]}

    def _names(self, direction: str) -> tuple[str, ...]:
        """Return the forms among which a plan chooses, the chosen one first."""
        at, kind = self.geometry, kind_of(self.shape, direction)
        if at.dense is not None:
            return ("columns",)  # or, forward, a cube if the voxels can be read in place
        x, dy = (conv.channels_last(images[0]) for images in (self.large, self.small))
        operands = {"down": (FORWARD, x, self.w), "up": (TRANSPOSED, dy, self.w), "weight": (GRAD_WEIGHT, x, dy)}
        return volume.forms(volume.problem_of(*operands[kind], at))


def _first(x: torch.Tensor, w: torch.Tensor, at: Volume, form: str | None) -> torch.Tensor:
    return volume.forward(x, w, at, form=form)[0]
