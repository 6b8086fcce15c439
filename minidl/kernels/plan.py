"""Plans: how a problem is computed, prepared once and run for any tensors of its shape.

call -> Problem, a named tuple of all that choices depend on (shapes, strides, dtypes, alignment, the target)
     -> plan(problem), cached by `launch.cached`: the form, its tiles and prepared launches
     -> plan.run(tensors), which allocates what launches need between them and launches
"""

import abc
from typing import Any


class Plan(abc.ABC):
    """The launches of a problem. A plan holds no tensors, so that all calls of its problem share it."""

    @abc.abstractmethod
    def run(self, *tensors: Any, **options: Any) -> Any:
        """Launch on these tensors."""
