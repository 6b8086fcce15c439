"""Plans: how a problem is computed, prepared once and run for any tensors of its shape.

call -> Problem, a named tuple of all that choices depend on (shapes, strides, dtypes, alignment, the target)
     -> plan(problem), cached by `launch.cached`: the form, its tiles and prepared launches
     -> plan.run(tensors), which allocates what launches need between them and launches
"""

import abc
from dataclasses import dataclass
from typing import Any

from minidl.runtime import launch


class Plan(abc.ABC):
    """The launches of a problem. A plan holds no tensors, so that all calls of its problem share it."""

    @abc.abstractmethod
    def run(self, *tensors: Any, **options: Any) -> Any:
        """Launch on these tensors."""


@dataclass(frozen=True, slots=True)
class LaunchPlan(Plan):
    """One launch of any kernel with these argument records: its grid, its sizes and tile, and launch options."""

    grid: tuple[int, ...]
    sizes: Any
    tile: Any
    options: dict[str, Any]

    def run(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel with these arguments, `sizes` among them, and the tile. Raises the errors of `launch.run`."""
        launch.run(kernel, self.grid, *arguments, tile=self.tile, **constants, **self.options)
