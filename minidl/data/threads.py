"""Work in as many threads as there are processors: numpy, scipy and Pillow release Python's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from minidl.data.workers import available

if TYPE_CHECKING:  # a process that decodes pictures has no numpy
    import numpy as np

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_SLICE = 2**20  # bytes of an array per call, which fit in the cache of a processor


def in_threads(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Return the results in order. All items are read at once."""
    with ThreadPoolExecutor(available()) as pool:
        yield from pool.map(work, items)


def in_slices(work: Callable[[int, np.ndarray], object], rows: np.ndarray) -> None:
    """Call work(first, rows[first:...]) for slices of rows. Raises the error of the first slice that fails."""
    step = max(1, _SLICE // max(1, rows[:1].nbytes))
    for _ in in_threads(lambda first: work(first, rows[first : first + step]), range(0, len(rows), step)):
        pass
