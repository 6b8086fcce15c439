"""Kernels of drawn rows are compiled in other processes, while the rows before them are measured."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from minidl.compilation.compiler_processes import Compilers
from minidl.compilation.job import Job
from minidl.compilation.rehearsal import missing

# Rows whose kernels are asked for together, and how many such batches are asked for ahead: a drawn convolution has 1.7
# kernels that no row before it has, each of which takes half a second to two.
AHEAD = 16
BATCHES = 6
# Batches under way at a time, so that the last kernel of one leaves no processor idle.
THREADS = 3


class Row(Protocol):
    """What of a drawn row is called to be compiled."""

    @property
    def direction(self) -> str: ...

    def made(self, values: bool) -> tuple[Any, Any]: ...


class Compiled:
    """The kernels of rows, compiled in their order by this process's share of the processors: one of `parts`."""

    def __init__(self, rows: Sequence[Row], regret: bool, parts: int = 1) -> None:
        self.rows, self.regret = rows, regret
        processes = max(1, len(os.sched_getaffinity(0)) // parts // THREADS)
        self._asked: queue.SimpleQueue[tuple[list[Job], threading.Event] | None] = queue.SimpleQueue()
        self._done: list[threading.Event] = []
        for _ in range(THREADS):
            threading.Thread(target=_work, args=(self._asked.get, processes), daemon=True).start()

    def wait(self, number: int) -> None:
        """Return once the kernels of the row of this number are compiled; those of later rows are asked for."""
        batch = number // AHEAD
        while len(self._done) < batch + BATCHES and len(self._done) * AHEAD < len(self.rows):
            first = len(self._done) * AHEAD
            jobs = missing(partial(rehearsed, self.rows[first : first + AHEAD], self.regret))
            self._done.append(threading.Event())
            self._asked.put((jobs, self._done[-1]))
        for done in self._done[: batch + 1]:
            done.wait()

    def end(self) -> None:
        """End the threads, once they have done what is asked for."""
        for _ in range(THREADS):
            self._asked.put(None)


def _work(get: Callable[[], tuple[list[Job], threading.Event] | None], processes: int) -> None:
    with Compilers() as compilers:
        while (asked := get()) is not None:
            jobs, done = asked
            # A kernel that cannot be compiled is told where its row is measured.
            with contextlib.suppress(Exception):
                if jobs:
                    compilers.compile(jobs, processes=processes)
            done.set()


def rehearsed(rows: Iterable[Row], regret: bool = False) -> None:
    """Call ours of every row, and every form of it for the regret, on tensors without values: to be compiled ahead."""
    for row in rows:
        # What fails here fails again where it is measured, and is told there.
        with contextlib.suppress(Exception):
            work, layer = row.made(values=False)
            work.ours[0]()
            if layer is None or not regret:
                continue
            for form in layer.forms(row.direction):
                with contextlib.suppress(Exception):
                    layer.ours(row.direction, form)[0]()
