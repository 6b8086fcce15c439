"""Drawing cases with Hypothesis.

Every decision of a case is an integer that Hypothesis draws; values come from a drawn seed. So a failing case shrinks
in structure (sizes, kinds of values, layouts), and its list of decisions repeats it without Hypothesis.
"""

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from minidl.kernels import launch
from minidl.specs.make import FEW_SIZES, KINDS, LAYOUTS, SIZES, Decisions
from minidl.tensor import default_device

# Each size class of a GPU tile is another compilation.
EXTENTS = SIZES if launch.INTERPRETED else FEW_SIZES


class DrawnMake(Decisions):
    """Decisions drawn by Hypothesis."""

    def __init__(self, draw: Callable, dtype: torch.dtype, kinds: Sequence[str], layouts: Sequence[str]) -> None:
        super().__init__(dtype, default_device(), kinds, layouts, EXTENTS)
        self._draw = draw

    def _decide(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


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
