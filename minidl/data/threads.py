"""Work in threads, as much at a time as there are processors: numpy, scipy and Pillow leave Python's lock to others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from minidl.data.workers import available

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """The results in order. All items are taken at once."""
    with ThreadPoolExecutor(available()) as pool:
        yield from pool.map(work, items)
