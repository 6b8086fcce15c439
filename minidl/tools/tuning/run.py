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
from minidl.tools.tuning.search import Searcher, SearchResult, noise
from minidl.tools.tuning.space import describe

# Candidates of one step: as many as compile side by side; the interpreter compiles nothing.
WIDTH, WIDTH_INTERPRETED = 8, 2


def chosen(words: Sequence[str], only: Sequence[str]) -> list[ShapeClass]:
    """Return the classes with one of `only` in their name, of families with one of `words` in their name.

    Raises ValueError for a word that matches none.
    """
    for word in words:
        if not word or not any(word in family for family in launch.families()):
            raise ValueError(f"no kernel family's name contains {word!r}; known: {', '.join(launch.families())}")
    families = [f for f in launch.families() if not words or any(word in f for word in words)]
    selected = [shapes for family in families for shapes in classes.of_family(family, launch.target())]
    for word in only:
        if not word or not any(word in shapes.name for shapes in selected):
            raise ValueError(f"no class of these families has {word!r} in its name; `minidl tune --list` shows them")
    return [shapes for shapes in selected if not only or any(word in shapes.name for word in only)]


def run(
    selected: Sequence[ShapeClass],
    tables: dict[str, Table],
    budget: float,
    check: Check,
    console: Console,
    keep: Callable[[str, Table], None],
    results: list[SearchResult],
) -> None:
    """Tune the classes, which share `budget` seconds; new tiles are written into `tables` (by family).

    After each class whose tile changes, `keep` is called with its family's table. The result of each class is appended
    to `results`, also if the search is interrupted. A class whose current tile cannot be measured has an `error`.
    """
    ends = time.monotonic() + budget
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar, ExitStack() as stack:
        stack.callback(check.close)
        overall = bar.add_task("classes", total=len(selected), status="")
        current = bar.add_task("", total=1, status="")
        for index, shapes in enumerate(selected):
            left = ends - time.monotonic()
            if left <= 0 and results:
                console.print(f"time limit reached; {len(selected) - index} classes keep their tiles", markup=False)
                break
            share = max(0.0, left) / (len(selected) - index)
            bar.update(current, description=shapes.name, completed=0, total=share, status="")
            started = time.monotonic()

            def report(so_far: SearchResult, started: float = started) -> None:
                best = max(trial.ratio for trial in so_far.trials)
                shown = f"{len(so_far.trials)} tiles tried" + (f", best {best:.2f}x" if best else "")
                bar.update(current, completed=time.monotonic() - started, status=shown)

            with launch.use_tables(**tables):
                result = _search(shapes, check, started + share, report)
                results.append(result)
                if result.chosen is not None:
                    now = launch.table(shapes.family)
                    tables[shapes.family] = classes.with_tile(now, shapes.target, shapes.index, result.chosen)
                    keep(shapes.family, tables[shapes.family])
            console.print(line(result), markup=False, highlight=False, soft_wrap=True)
            bar.update(overall, advance=1)
            if not launch.INTERPRETED:
                torch.cuda.empty_cache()


def _search(shapes: ShapeClass, check: Check, deadline: float, report: Callable[[SearchResult], None]) -> SearchResult:
    if not shapes.problems:
        return SearchResult(shapes)
    try:
        width = WIDTH_INTERPRETED if launch.INTERPRETED else WIDTH
        return Searcher(shapes, check, default_device()).search(deadline, report, width)
    except (AssertionError, RuntimeError) as error:
        # Out of memory, or the current tile is wrong: the other classes can still be tuned.
        return SearchResult(shapes, error=first_line(error))


def line(result: SearchResult) -> str:
    """Return a line of text with the result of a class."""
    shapes = result.shapes
    if not shapes.problems:
        return f"{shapes.name}: no benchmark problem uses this rule, so it keeps its tile"
    if result.error:
        return f"{shapes.name}: could not be measured, so it keeps its tile ({result.error})"
    tried = f"{len(result.trials)} of {result.candidates} tried"
    dropped = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.dropped.items()))
    tried += f"; {dropped}" if dropped else ""
    if result.chosen is None or result.confirmed is None:
        return f"{shapes.name}: keeps {describe(shapes.tile)} ({tried}; none faster by more than {noise():.0%})"
    return f"{shapes.name}: {result.confirmed.ratio:.2f}x with {describe(result.chosen)} ({tried})"
