"""Work in threads, as much at a time as there are processors: numpy, scipy and Pillow leave Python's lock to others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from minidl.data.workers import available

if TYPE_CHECKING:  # a process that decodes pictures has no numpy
    import numpy as np

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_SLICE = 2**20  # bytes of an array that a thread is given, which stay in its cache


def in_threads(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """The results in order. All items are taken at once."""
    with ThreadPoolExecutor(available()) as pool:
        yield from pool.map(work, items)


def in_slices(work: Callable[[int, np.ndarray], object], rows: np.ndarray) -> None:
    """Call work(first, rows[first:...]) for slices of rows. Raises what the first slice that fails raises."""
    together = max(1, _SLICE // max(1, rows[:1].nbytes))
    for _ in in_threads(lambda first: work(first, rows[first : first + together]), range(0, len(rows), together)):
        pass
