"""Find the kernels to compile for an architecture: call every operation and record its launches.

The first pass makes every call with the tiles of its shape, the second forces each tile of the architecture's tables in
turn. Most launches differ little, so `shorten` and `heaviest` select some of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minidl.common.architecture import Arch
from minidl.compilation.job import Job
from minidl.tools.doctor.jobs import PRECISIONS, Figures, kernels, target_name
from minidl.tools.first_line import first_line


@dataclass
class CompilePlan:
    """What to compile for an architecture: the launches of the first and the second pass, by key.

    tile_names  parameters that tile tables set
    failed      calls that raised, with the first line of the error
    uncovered   kernels that no call launches
    newest      whether every kernel should be launched; the tables of older GPUs do not use some
    """

    first: dict[str, Job] = field(default_factory=dict)
    forced: dict[str, Job] = field(default_factory=dict)
    tile_names: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    uncovered: list[str] = field(default_factory=list)
    newest: bool = True


def make(arch: Arch, only: str = "", workload: str = "", every_tile: bool = True) -> CompilePlan:
    """Make every call of the workloads with `workload` in their name; keep kernels with `only` in theirs.

    Imports torch and Triton.
    """
    from minidl.runtime import launch
    from minidl.tools.doctor.workloads import precisions, workloads

    tables = [launch.table(family) for family in launch.families()]
    names = {name for table in tables for rules in table.values() for rule in rules for name in rule["tile"]}
    plan = CompilePlan(tile_names=sorted(names), newest=target_name(arch) == launch.TARGETS[-1])
    for load in workloads(workload):
        for dtype in load.dtypes:
            possible = PRECISIONS.get(arch, precisions(dtype))
            for precision in [each for each in precisions(dtype) if each in possible]:
                with launch.in_precision(precision):
                    recorded = _record(plan, load, dtype, arch)
                    plan.first |= recorded
                    # Calls that launch no such kernel need no other tiles.
                    tiled = every_tile and any(only in job.name for job in recorded.values())
                    for family in load.families if tiled else ():
                        for tile in launch.tiles(family, target_name(arch), dtype):
                            with launch.force(**{family: tile}):
                                plan.forced |= _record(plan, load, dtype, arch)
    launched = {job.kernel for job in plan.first.values()}
    plan.uncovered = sorted(kernel for kernel in set(kernels()) - launched if only in kernel and not workload)
    plan.first = {key: job for key, job in plan.first.items() if only in job.name}
    plan.forced = {key: job for key, job in plan.forced.items() if only in job.name}
    return plan


def shorten(plan: CompilePlan, brief: bool = False) -> list[Job]:
    """Return jobs of the first pass that cover every dtype and every pair of values of two flags of each kernel.

    Flags are the constants that no tile table sets: operation, epilogue, layout, accumulator type. `brief` covers each
    value of a flag instead of every pair, with about half of the jobs. Tiles are covered by `heaviest`.
    """
    by_kernel: dict[str, list[Job]] = {}
    for job in plan.first.values():
        by_kernel.setdefault(job.kernel, []).append(job)
    chosen: list[Job] = []
    for jobs in by_kernel.values():
        covers = {job.key: _covers(job, plan, brief) for job in jobs}
        size = {job.key: math.prod(_blocks(job, plan)) for job in jobs}
        missing = set().union(*covers.values())
        while missing:
            best = max(jobs, key=lambda job: (len(covers[job.key] & missing), size[job.key]))
            chosen.append(best)
            missing -= covers[best.key]
    return chosen


def _covers(job: Job, plan: CompilePlan, brief: bool) -> set[Any]:
    values = sorted((name, str(value)) for name, value in _flags(job, plan).items())
    return {(job.dtype, job.precision), *values, *(() if brief else itertools.combinations(values, 2))}


def heaviest(plan: CompilePlan, figures: Mapping[str, Figures]) -> list[Job]:
    """Return, by kernel, tile, width of dtype and precision, the jobs with the longest code and the most shared memory.

    `figures` (by key, for some jobs of the first pass) estimates them: a job is judged by the most similar job with
    figures, tile aside. Jobs in `figures` are left out.
    """
    measured: dict[tuple[str, ...], list[tuple[set[str], Figures]]] = {}
    for key, job in plan.first.items():
        if key in figures:
            measured.setdefault((job.kernel, job.dtype, job.precision), []).append((_traits(job, plan), figures[key]))
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in {**plan.forced, **plan.first}.values():
        sizes = {name: value for name, value in job.constant.items() if name in plan.tile_names}
        # float16 and bfloat16 differ only in conversions, which the first pass covers.
        width = job.dtype.removeprefix("b")
        groups.setdefault((job.kernel, width, job.precision, str(sizes | job.options)), []).append(job)
    chosen = {}
    for group in groups.values():
        guesses = []
        for job in group:
            like = measured.get((job.kernel, job.dtype, job.precision), [])
            traits = _traits(job, plan)
            near = max(like, key=lambda pair: len(traits & pair[0]) - len(traits ^ pair[0]), default=(set(), Figures()))
            guesses.append((job, near[1]))
        # Both are one job if no other has more shared memory than the job with the longest code.
        longest = max(guesses, key=lambda pair: (pair[1].lines, pair[1].shared))[0]
        largest = max(guesses, key=lambda pair: (pair[1].shared, pair[0] is longest))[0]
        chosen.update({job.key: job for job in (longest, largest)})
    return [job for key, job in chosen.items() if key not in figures]


def _traits(job: Job, plan: CompilePlan) -> set[str]:
    """Return everything about a launch except its tile."""
    flags = {f"{name}={value}" for name, value in _flags(job, plan).items()}
    return flags | {f"{n}:{kind}" for n, kind in job.signature.items()} | {str(value) for value in job.attributes}


def _flags(job: Job, plan: CompilePlan) -> dict[str, Any]:
    return {name: value for name, value in job.constant.items() if name not in plan.tile_names}


def _blocks(job: Job, plan: CompilePlan) -> list[int]:
    return [size for name, size in job.constant.items() if name.startswith("BLOCK") and name in plan.tile_names]


def _record(plan: CompilePlan, load: Any, dtype: Any, arch: Arch) -> dict[str, Job]:
    from minidl.tools.doctor import offline

    jobs: dict[str, Job] = {}
    for name, call in load.calls(dtype):
        with offline.recording(arch) as recorded:
            try:
                call()
            except Exception as error:  # noqa: BLE001 (named in the report; the other calls still count)
                plan.failed[f"{load.name}: {name}, {dtype}"] = first_line(error)
        jobs.update({job.key: job for job in recorded})
    return jobs


def failures(plans: Iterable[CompilePlan]) -> dict[str, str]:
    """Return the calls that raised, and the kernels that no plan launches, with the reason."""
    plans = list(plans)
    reasons = {name: error for plan in plans for name, error in plan.failed.items()}
    is_complete = any(plan.newest for plan in plans)
    for kernel in sorted(set.intersection(*(set(plan.uncovered) for plan in plans))) if is_complete else ():
        reasons[kernel] = "no operation's examples and no workload of the doctor launches this kernel"
    return reasons
