"""What to compile for one architecture, found by calling everything and recording the launches.

The first pass makes every call with the tiles that its shape gets, the second with every tile of the architecture's
tables forced in turn. `shorten` and `heaviest` then choose, since most launches differ in what matters little.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from minidl.doctor.jobs import Figures, Job, target_name


@dataclass
class Plan:
    """Launches of the first and the second pass by key.

    tile_names  parameters that tile tables set
    failed      calls that raised, with the first line of the error
    uncovered   kernels that no call launches
    """

    first: dict[str, Job] = field(default_factory=dict)
    forced: dict[str, Job] = field(default_factory=dict)
    tile_names: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    uncovered: list[str] = field(default_factory=list)


def make(arch: int, only: str = "", work: str = "", every_tile: bool = True) -> Plan:
    """Make every call of the workloads with `work` in their name; keep kernels with `only` in theirs.

    Imports torch and Triton.
    """
    from minidl.doctor.workloads import precisions, workloads
    from minidl.kernels import launch

    plan = Plan(tile_names=_tile_names())
    for load in workloads(work):
        for dtype in load.dtypes:
            for precision in precisions(dtype):
                with _float32_in(precision):
                    _record(plan.first, plan, load, dtype, arch)
                    for family in load.families if every_tile else ():
                        for tile in launch.tiles(family, target_name(arch), dtype):
                            with launch.force(**{family: tile}):
                                _record(plan.forced, plan, load, dtype, arch)
    launched = {job.kernel for job in plan.first.values()}
    plan.uncovered = sorted(kernel for kernel in _kernels() - launched if only in kernel and not work)
    plan.first = {key: job for key, job in plan.first.items() if only in job.name}
    plan.forced = {key: job for key, job in plan.forced.items() if only in job.name}
    return plan


def shorten(plan: Plan, brief: bool = False) -> list[Job]:
    """Of the first pass, jobs such that each kernel meets every dtype and every combination of its flags.

    Flags are the constants that no tile table sets: operation, epilogue, layout, accumulating type. `brief` asks for
    each value of a flag in place of every combination: about a third of the jobs. Tiles are the matter of `heaviest`.
    """
    chosen: list[Job] = []
    seen: set[tuple[str, ...]] = set()
    for job in sorted(plan.first.values(), key=lambda job: -_volume(job, plan.tile_names)):
        flags = _flags(job, plan.tile_names)
        new: set[tuple[str, ...]] = {(job.kernel, job.dtype, job.precision)}
        new |= (
            {(job.kernel, name, str(value)) for name, value in flags.items()} if brief else {(job.kernel, str(flags))}
        )
        if new - seen:
            chosen.append(job)
            seen |= new
    return chosen


def heaviest(plan: Plan, figures: Mapping[str, Figures]) -> list[Job]:
    """Of both passes, per kernel, tile, dtype and precision: the longest code and the most shared memory.

    Which launches these are is judged by `figures`, known by key for some of the first pass: the launch there that has
    most in common stands for one with another tile. Jobs in `figures` are left out.
    """
    known: dict[tuple[str, ...], list[tuple[set[str], Figures]]] = {}
    for key, job in plan.first.items():
        if key in figures:
            known.setdefault((job.kernel, job.dtype, job.precision), []).append((_traits(job, plan), figures[key]))
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in {**plan.forced, **plan.first}.values():
        groups.setdefault((job.kernel, job.dtype, job.precision, _sizes(job, plan.tile_names)), []).append(job)
    chosen = {}
    for group in groups.values():
        like = known.get((group[0].kernel, group[0].dtype, group[0].precision), [])
        guesses = [(job, _most_like(_traits(job, plan), like)) for job in group]
        longest = max(guesses, key=lambda pair: pair[1].lines)[0]
        largest = max(guesses, key=lambda pair: pair[1].shared)[0]
        chosen.update({job.key: job for job in (longest, largest)})
    return [job for key, job in chosen.items() if key not in figures]


def _most_like(traits: set[str], known: list[tuple[set[str], Figures]]) -> Figures:
    return max(known, key=lambda pair: len(traits & pair[0]) - len(traits ^ pair[0]), default=(set(), Figures()))[1]


def _traits(job: Job, plan: Plan) -> set[str]:
    """What is known about a launch, tile aside."""
    flags = {f"{name}={value}" for name, value in job.constant.items() if name not in plan.tile_names}
    return flags | {f"{n}:{kind}" for n, kind in job.signature.items()} | {str(known) for known in job.attributes}


def _flags(job: Job, tile_names: list[str]) -> dict[str, Any]:
    return {name: value for name, value in job.constant.items() if name not in tile_names}


def _sizes(job: Job, tile_names: list[str]) -> str:
    return str({name: value for name, value in job.constant.items() if name in tile_names} | job.options)


def _volume(job: Job, tile_names: list[str]) -> int:
    product = 1
    for name, value in job.constant.items():
        if name.startswith("BLOCK") and name in tile_names:
            product *= value
    return product


@contextlib.contextmanager
def _float32_in(precision: str) -> Iterator[None]:
    from minidl.kernels import launch

    before = launch.float32_precision()
    launch.set_float32_precision(precision)
    try:
        yield
    finally:
        launch.set_float32_precision(before)


def _record(jobs: dict[str, Job], plan: Plan, load: Any, dtype: Any, arch: int) -> None:
    from minidl.doctor import offline

    for name, call in load.calls(dtype):
        with offline.recording(arch) as found:
            try:
                call()
            except Exception as error:  # noqa: BLE001 (named in the report; the other calls still count)
                plan.failed[f"{load.name}: {name}, {dtype}"] = offline.first_line(error)
        jobs.update({job.key: job for job in found})


def _tile_names() -> list[str]:
    from minidl.kernels import launch

    tables = [launch.table(family) for family in launch.families()]
    return sorted({name for table in tables for rules in table.values() for rule in rules for name in rule["tile"]})


def _kernels() -> set[str]:
    """Every kernel of the package: the Triton functions whose names end in _kernel."""
    from triton.runtime.jit import JITFunction

    from minidl import kernels

    found = set()
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel") and value.__module__ == module.__name__:
                found.add(f"{module.__name__}:{name}")
    return found


def failures(plans: Iterable[Plan]) -> dict[str, str]:
    """What plans for several architectures could not do: calls that raised, and kernels that none of them launches."""
    plans = list(plans)
    found = {name: error for plan in plans for name, error in plan.failed.items()}
    for kernel in sorted(set.intersection(*(set(plan.uncovered) for plan in plans))) if plans else ():
        found[kernel] = "no operation's examples and no workload of the doctor launches this kernel"
    return found
