"""Checks of a tile before it runs: whether it changes any launch, compiles, and stays within the device's limits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from minidl.compilation.launch_jobs import job_of
from minidl.runtime import launch
from minidl.runtime.launch import Tile
from minidl.tools.tuning.classes import ShapeClass, with_tile
from minidl.tools.tuning.kind import recorded

MOST_WORKERS = 16


@contextmanager
def under(shape_class: ShapeClass, tile: Tile) -> Iterator[None]:
    """A context in which the rule of the class has this tile."""
    table = with_tile(launch.table(shape_class.family), shape_class.target, shape_class.index, tile)
    with launch.use_tables(**{shape_class.family: table}):
        yield


def launches(shape_class: ShapeClass, tile: Tile) -> list[Any]:
    """Return (kernel, grid, arguments, constants) of each launch of the class's problems with a tile."""
    records: list[Any] = []
    for problem in shape_class.problems:
        with (
            under(shape_class, tile),
            launch.record(lambda *launched: records.append(launched), recorded(shape_class.target)),
        ):
            problem.empty()()
    return records


def signature(launched: list[Any]) -> str:
    """Return a text that is equal for equal launches. (A block larger than the shape is reduced to it.)"""
    marks = []
    for kernel, grid, args, meta in launched:
        numbers = [arg for arg in args if isinstance(arg, int | float | tuple)]
        marks.append((kernel.__name__, grid, numbers, sorted(map(str, meta.items()))))
    return str(marks)


class Check:
    """Rejects tiles by their launches; tiles are named by numbers.

    This one rejects none: a CPU has no limits.
    """

    def problems(self, shape_class: ShapeClass, launched: dict[int, list[Any]]) -> dict[int, str]:
        """Return a message for each tile that must be rejected."""
        return {}

    def close(self) -> None:
        """Release processes."""


class Compiles(Check):
    """Compiles for this device in parallel child processes, as `minidl doctor --compile` does.

    The launch then finds the compiled kernels in Triton's cache.
    """

    def __init__(self) -> None:
        from minidl.tools.doctor.compile import Worker
        from minidl.tools.doctor.jobs import SHARED_LIMITS

        arch = launch.architecture()
        # A device with unknown limits reports errors itself, at the launch.
        self.arch = arch if arch in SHARED_LIMITS else None
        self.pool = [Worker() for _ in range(min(MOST_WORKERS, len(os.sched_getaffinity(0))))]

    def problems(self, shape_class: ShapeClass, launched: dict[int, list[Any]]) -> dict[int, str]:
        """Return compiler errors, spills and exceeded limits of the device, by tile."""
        from minidl.tools.doctor.compile import compile_jobs
        from minidl.tools.doctor.jobs import problems

        if self.arch is None:
            return {}
        jobs = {index: [job_of(self.arch, *each) for each in every] for index, every in launched.items()}
        figures = compile_jobs(self.pool, {job.key: job for every in jobs.values() for job in every}.values())
        wrong = {i: [text for job in every for text in problems(*figures[job.key])] for i, every in jobs.items()}
        return {index: texts[0] for index, texts in wrong.items() if texts}

    def close(self) -> None:
        """End the child processes."""
        for worker in self.pool:
            worker.close()


def for_device() -> Check:
    """Return the check for this process's device."""
    return Check() if launch.ON_CPU else Compiles()


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` of the items, evenly spaced, including the first."""
    count = min(most, len(items))
    return [items[i * len(items) // count] for i in range(count)]
