"""Compile kernels of drawn rows in other processes while earlier rows are measured."""

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

# Rows whose kernels are requested together, and the number of such batches requested ahead: a drawn convolution has 1.7
# kernels that no earlier row has, and each takes 0.5 to 2 s.
AHEAD = 16
BATCHES = 6
# Batches compiled at the same time, so that the last kernel of one leaves no processor idle.
THREADS = 3


class Row(Protocol):
    """The interface of a drawn row for compilation."""

    @property
    def direction(self) -> str: ...

    def inputs(self, values: bool) -> tuple[Any, Any]: ...


class Compiled:
    """Compiles the kernels of rows in order, on one of `parts` shares of the processors."""

    def __init__(self, rows: Sequence[Row], regret: bool, parts: int = 1) -> None:
        self.rows, self.regret = rows, regret
        processes = max(1, len(os.sched_getaffinity(0)) // parts // THREADS)
        self._requests: queue.SimpleQueue[tuple[list[Job], threading.Event] | None] = queue.SimpleQueue()
        self._done: list[threading.Event] = []
        for _ in range(THREADS):
            threading.Thread(target=_work, args=(self._requests.get, processes), daemon=True).start()

    def wait(self, number: int) -> None:
        """Wait until the kernels of row `number` are compiled, and request the kernels of later rows."""
        batch = number // AHEAD
        while len(self._done) < batch + BATCHES and len(self._done) * AHEAD < len(self.rows):
            first = len(self._done) * AHEAD
            jobs = missing(partial(rehearsed, self.rows[first : first + AHEAD], self.regret))
            self._done.append(threading.Event())
            self._requests.put((jobs, self._done[-1]))
        for done in self._done[: batch + 1]:
            done.wait()

    def end(self) -> None:
        """End the threads after all requested batches."""
        for _ in range(THREADS):
            self._requests.put(None)


def _work(get: Callable[[], tuple[list[Job], threading.Event] | None], processes: int) -> None:
    with Compilers() as compilers:
        while (request := get()) is not None:
            jobs, done = request
            # The measurement of the row reports a kernel that cannot be compiled.
            with contextlib.suppress(Exception):
                if jobs:
                    compilers.compile(jobs, processes=processes)
            done.set()


def rehearsed(rows: Iterable[Row], regret: bool = False) -> None:
    """Call minidl's side of every row, and every form for the regret, on uninitialised tensors."""
    for row in rows:
        # A call that fails here also fails in the measurement, which reports it.
        with contextlib.suppress(Exception):
            work, layer = row.inputs(values=False)
            work.ours[0]()
            if layer is None or not regret:
                continue
            for form in layer.forms(row.direction):
                with contextlib.suppress(Exception):
                    layer.ours(row.direction, form)[0]()
