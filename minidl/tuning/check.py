"""What is known of a tile before it runs: whether it changes anything, compiles, and keeps within limits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from minidl.kernels import launch
from minidl.kernels.launch import Tile
from minidl.tuning.classes import ShapeClass, with_tile

MOST_WORKERS = 16


@contextmanager
def under(shapes: ShapeClass, tile: Tile) -> Iterator[None]:
    """The class's rule with this tile, all else as it is."""
    table = with_tile(launch.table(shapes.family), shapes.target, shapes.index, tile)
    with launch.use_tables(**{shapes.family: table}):
        yield


def launches(shapes: ShapeClass, tile: Tile) -> list[Any]:
    """(kernel, grid, arguments, constants) of everything that the class's problems launch with a tile."""
    found: list[Any] = []
    for problem in shapes.problems:
        with under(shapes, tile), launch.record(lambda *launched: found.append(launched), shapes.target):
            problem.empty()()
    return found


def signature(launched: list[Any]) -> str:
    """Equal for launches that do the same: a size beyond the shape's is cut to it."""
    return str(
        [
            (
                kernel.__name__,
                grid,
                [arg for arg in args if isinstance(arg, int | float)],
                sorted(map(str, meta.items())),
            )
            for kernel, grid, args, meta in launched
        ]
    )


class Check(Protocol):
    """Judges tiles, which have numbers here, by their launches."""

    def problems(self, shapes: ShapeClass, launched: dict[int, list[Any]]) -> dict[int, str]:
        """What is wrong with each tile that has something wrong, in words."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class Nothing:
    """The interpreter compiles nothing and has no limits."""

    def problems(self, shapes: ShapeClass, launched: dict[int, list[Any]]) -> dict[int, str]:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing."""


class Compiles:
    """Compiles for this device in child processes, as `minidl doctor --compile` does, side by side.

    What they compile lies in Triton's cache, where the launch finds it.
    """

    def __init__(self) -> None:
        from minidl.doctor.compile import Worker
        from minidl.doctor.jobs import SHARED_LIMITS

        major, minor = torch.cuda.get_device_capability()
        # A device whose limits are not known is left to say itself what it cannot run.
        self.arch = 10 * major + minor if 10 * major + minor in SHARED_LIMITS else None
        self.pool = [Worker() for _ in range(min(MOST_WORKERS, len(os.sched_getaffinity(0))))]

    def problems(self, shapes: ShapeClass, launched: dict[int, list[Any]]) -> dict[int, str]:
        """Errors of the compiler, spills, and what exceeds the device's limits."""
        from minidl.doctor.compile import compile_jobs
        from minidl.doctor.jobs import problems
        from minidl.doctor.offline import job_of

        if self.arch is None:
            return {}
        jobs = {index: [job_of(self.arch, *each) for each in every] for index, every in launched.items()}
        figures = compile_jobs(self.pool, {job.key: job for every in jobs.values() for job in every}.values())
        found = {}
        for index, every in jobs.items():
            wrong = [text for job in every for text in problems(*figures[job.key])]
            if wrong:
                found[index] = wrong[0]
        return found

    def close(self) -> None:
        """End the child processes."""
        for worker in self.pool:
            worker.close()


def for_device() -> Check:
    """The check for where kernels run."""
    return Nothing() if launch.INTERPRETED else Compiles()


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly chosen, the first among them."""
    if len(items) <= most:
        return list(items)
    return [items[i * len(items) // most] for i in range(most)]
