"""Tune shape classes one after another within a time limit, with a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from minidl.runtime import launch
from minidl.runtime.tile_tables import Table
from minidl.tensors import default_device
from minidl.tools.first_line import first_line
from minidl.tools.tuning import classes
from minidl.tools.tuning.check import Check
from minidl.tools.tuning.classes import ShapeClass
from minidl.tools.tuning.search import Found, Searcher, noise
from minidl.tools.tuning.space import describe

# Candidates of one step: as many as compile side by side; the interpreter compiles nothing.
WIDTH, WIDTH_INTERPRETED = 8, 2


def chosen(words: Sequence[str], only: Sequence[str]) -> list[ShapeClass]:
    """The classes of the families whose name contains one of `words`, with one of `only` in their own name.

    Raises ValueError for a word that fits none.
    """
    for word in words:
        if not word or not any(word in family for family in launch.families()):
            raise ValueError(f"no kernel family's name contains {word!r}; known: {', '.join(launch.families())}")
    families = [f for f in launch.families() if not words or any(word in f for word in words)]
    found = [shapes for family in families for shapes in classes.of_family(family, launch.target())]
    for word in only:
        if not word or not any(word in shapes.name for shapes in found):
            raise ValueError(f"no class of these families has {word!r} in its name; `minidl tune --list` shows them")
    return [shapes for shapes in found if not only or any(word in shapes.name for word in only)]


def run(
    wanted: Sequence[ShapeClass],
    tables: dict[str, Table],
    budget: float,
    check: Check,
    console: Console,
    keep: Callable[[str, Table], None],
    found: list[Found],
) -> None:
    """Tune the classes, which share `budget` seconds; new tiles are written into `tables` (by family).

    After each class whose tile changes, `keep` is called with its family's table. The result of each class is appended
    to `found`, also when the work is interrupted. A class whose present tile cannot be measured has an `error`.
    """
    ends = time.monotonic() + budget
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar, ExitStack() as stack:
        stack.callback(check.close)
        whole = bar.add_task("classes", total=len(wanted), said="")
        part = bar.add_task("", total=1, said="")
        for index, shapes in enumerate(wanted):
            left = ends - time.monotonic()
            if left <= 0 and found:
                console.print(f"time limit reached; {len(wanted) - index} classes keep their tiles", markup=False)
                break
            share = max(0.0, left) / (len(wanted) - index)
            bar.update(part, description=shapes.name, completed=0, total=share, said="")
            started = time.monotonic()

            def told(so_far: Found, started: float = started) -> None:
                best = max(trial.ratio for trial in so_far.trials)
                shown = f"{len(so_far.trials)} tiles tried" + (f", best {best:.2f}x" if best else "")
                bar.update(part, completed=time.monotonic() - started, said=shown)

            with launch.use_tables(**tables):
                result = _search(shapes, check, started + share, told)
                found.append(result)
                if result.chosen is not None:
                    now = launch.table(shapes.family)
                    tables[shapes.family] = classes.with_tile(now, shapes.target, shapes.index, result.chosen)
                    keep(shapes.family, tables[shapes.family])
            console.print(line(result), markup=False, highlight=False, soft_wrap=True)
            bar.update(whole, advance=1)
            if not launch.INTERPRETED:
                torch.cuda.empty_cache()


def _search(shapes: ShapeClass, check: Check, deadline: float, told: Callable[[Found], None]) -> Found:
    if not shapes.problems:
        return Found(shapes)
    try:
        width = WIDTH_INTERPRETED if launch.INTERPRETED else WIDTH
        return Searcher(shapes, check, default_device()).search(deadline, told, width)
    except (AssertionError, RuntimeError) as error:
        # Out of memory, or the present tile is wrong: the other classes can still be tuned.
        return Found(shapes, error=first_line(error))


def line(found: Found) -> str:
    """The result for a class, as a sentence."""
    shapes = found.shapes
    if not shapes.problems:
        return f"{shapes.name}: no benchmark problem uses this rule, so it keeps its tile"
    if found.error:
        return f"{shapes.name}: could not be measured, so it keeps its tile ({found.error})"
    tried = f"{len(found.trials)} of {found.candidates} tried"
    dropped = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.dropped.items()))
    tried += f"; {dropped}" if dropped else ""
    if found.chosen is None or found.confirmed is None:
        return f"{shapes.name}: keeps {describe(shapes.tile)} ({tried}; none faster by more than {noise():.0%})"
    return f"{shapes.name}: {found.confirmed.ratio:.2f}x with {describe(found.chosen)} ({tried})"
