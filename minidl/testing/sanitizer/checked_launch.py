"""The state of one launch: the regions of its arguments, and the order of its programs and lanes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from minidl.testing.sanitizer.lanes import Lanes
from minidl.testing.sanitizer.order import Order
from minidl.testing.sanitizer.regions import Regions
from minidl.testing.sanitizer.unwritten import Unwritten


class Launch:
    """A run of a kernel over its grid: the regions of its arguments, and which programs see each other's writes."""

    def __init__(self, kernel: str, unwritten: Unwritten) -> None:
        self.kernel = kernel
        self.regions = Regions(unwritten)
        self.order: Order | None = None
        self._joins = 0
        self._shapes: dict[tuple[int, ...], int] = {}
        self.lanes = Lanes()
        self._names: dict[int, str] = {}
        self._numbers: dict[int, int] = {}

    def name(self, name: str, argument: Any) -> None:
        """Set the name of an argument."""
        self._names[id(argument)] = name

    def number(self, argument: Any, tensor: torch.Tensor) -> int:
        """Return the number of an argument's pointers; `tensor` is the argument or the tensor that it wraps."""
        if id(argument) not in self._numbers:
            name = self._names.get(id(argument), "an argument")
            self._numbers[id(argument)] = self.regions.add(name, tensor)
        return self._numbers[id(argument)]

    def join(self) -> None:
        """Record a barrier: all lanes of the program wait for one another."""
        self._joins += 1

    def lanes_since(self, shape: tuple[int, ...], lanes: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the lowest number of a lane since the last join, and the numbers of lanes in a block of this shape.

        Blocks whose shapes differ only in axes of length 1 have the same lanes. The lowest bits are the position, equal
        for blocks with the same number of elements, since tl.reshape keeps their order.
        """
        long = tuple(n for n in shape if n > 1)
        low = self._joins << 32
        number = self._shapes.setdefault(long, len(self._shapes)) % 128
        return low, low + (number << 25 | math.prod(long).bit_length() << 20) + lanes

    def begin(self, program: int, programs: int) -> None:
        """Start the next program; a single program has no races."""
        self.join()
        if programs > 1:
            self.order = self.order or Order(programs)
            self.order.begin(program)
