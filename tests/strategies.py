"""Drawing cases with Hypothesis.

Every decision of a case is an integer that Hypothesis draws; values come from a drawn seed. So a failing case shrinks
in structure (sizes, kinds of values, layouts), and its list of decisions repeats it without Hypothesis.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing.specs.make import KINDS, LAYOUTS, SIZES, Make

# Each size class of a GPU tile is another compilation, so few: two programs of the smallest tiles, the odd size that
# needs masks, 1 and 0.
EXTENTS = SIZES if launch.INTERPRETED else (5, 33, 16, 1, 0)


class DrawnMake(Make):
    """Decisions drawn by Hypothesis."""

    def __init__(self, draw: Callable, dtype: torch.dtype, kinds: Sequence[str], layouts: Sequence[str]) -> None:
        super().__init__(dtype, default_device(), kinds, layouts, EXTENTS)
        self._draw = draw

    def _decide(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


class Replay(Make):
    """Decisions from a list, to make a case again. Raises ValueError when the list does not match."""

    def __init__(self, decided: Sequence[int], dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__(dtype, **options)
        self._decided = list(decided)

    def _decide(self, low: int, high: int) -> int:
        position = len(self.decisions)
        if position >= len(self._decided) or not low <= self._decided[position] <= high:
            raise ValueError(f"decision {position} of {self._decided} is not an integer in [{low}, {high}]")
        return self._decided[position]


@st.composite
def made(
    draw: Callable,
    build: Callable,
    dtype: torch.dtype = torch.float32,
    kinds: Sequence[str] = KINDS,
    layouts: Sequence[str] = LAYOUTS,
):
    """What `build(make)` returns, for a Make whose decisions Hypothesis draws."""
    return build(DrawnMake(draw, dtype, kinds, layouts))
