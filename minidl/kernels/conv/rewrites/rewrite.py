"""`Rewrite`: the interface of the rewrites."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from minidl.kernels.conv.problem import Operands, Problem, Unsupported

Result = tuple[torch.Tensor, torch.Tensor | None]


class Conversion(abc.ABC):
    """What a rewrite does to tensors: prepared copies, views and launches, without addresses."""

    @abc.abstractmethod
    def run(self, problem: Problem, plans: Sequence[Any], operands: Operands) -> Result:
        """Return (y, z) of the problem, computed by the plans of the other problems."""


class Rewrite(abc.ABC):
    """A way to compute a problem by others, each with a plan of its own.

    name      accepted by `form=`; "" for a rewrite that is considered for every form
    families  the tile tables of its own kernels
    """

    name: ClassVar[str] = ""
    families: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def others(self, problem: Problem) -> tuple[Problem, ...] | Unsupported:
        """Return the other problems, or why there are none."""

    @abc.abstractmethod
    def cost(self, problem: Problem, others: Sequence[Problem], times: Sequence[float]) -> float:
        """Return the microseconds of the problem, from the times of the others.

        `Problem.images` stands for the number of images N."""

    @abc.abstractmethod
    def prepare(self, problem: Problem, others: Sequence[Problem]) -> Conversion:
        """Return the conversion of the problem's tensors."""

    def is_measured(self, problem: Problem) -> bool:
        """Return whether tiles are measured for the problem's dtype and target, or the caller names this rewrite."""
        return problem.has_measured_tiles or problem.on_tf32_cores or problem.form == self.name

    def label(self, parts: Sequence[str]) -> str:
        """Return the chain of steps, from the labels of the other problems' plans."""
        return f"{self.name}, {parts[0]}"


class DirectRewrite(Rewrite, Conversion):
    """A rewrite with nothing to prepare, which converts the tensors itself."""

    def prepare(self, problem: Problem, others: Sequence[Problem]) -> Conversion:
        return self
