"""Tune shape classes one after another within a time limit, with a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

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
from minidl.tools.tuning.kind import target
from minidl.tools.tuning.search import Searcher, SearchResult, noise
from minidl.tools.tuning.space import describe

# More candidates compile in parallel; with fewer, the search follows the best tile sooner. Interpreting compiles none.
CANDIDATES_PER_STEP, CANDIDATES_PER_STEP_ON_CPU = 8, 2


def select(family_words: Sequence[str], class_words: Sequence[str]) -> list[ShapeClass]:
    """Return the classes with one of `class_words` in their name, of families with one of `family_words` in theirs.

    No words select all. Raises ValueError for a word that matches none.
    """
    for word in family_words:
        if not word or not any(word in family for family in launch.families()):
            raise ValueError(f"no kernel family's name contains {word!r}; known: {', '.join(launch.families())}")
    families = [f for f in launch.families() if not family_words or any(word in f for word in family_words)]
    in_families = [each for family in families for each in classes.of_family(family, target())]
    for word in class_words:
        if not word or not any(word in each.name for each in in_families):
            raise ValueError(f"no class of these families has {word!r} in its name; `minidl tune --list` shows them")
    return [each for each in in_families if not class_words or any(word in each.name for word in class_words)]


def run(
    selected: Sequence[ShapeClass],
    tables: dict[str, Table],
    budget: float,
    check: Check,
    console: Console,
    save: Callable[[str, Table], None],
    results: list[SearchResult],
) -> None:
    """Tune the classes within `budget` seconds; new tiles are written into `tables` (by family).

    `save` is called with the family and table of each class whose tile changes. Each result is appended to `results`
    as soon as it is known, so Ctrl-C (KeyboardInterrupt) loses only that of the current class. The result of a class
    whose current tile cannot be measured has an `error`.
    """
    deadline = time.monotonic() + budget
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar, closing(check):
        overall = bar.add_task("classes", total=len(selected), status="")
        current = bar.add_task("", total=1, status="")
        for index, shape_class in enumerate(selected):
            left = deadline - time.monotonic()
            if left <= 0 and results:  # at least one class has a result, however small the limit
                console.print(f"time limit reached; {len(selected) - index} classes keep their tiles", markup=False)
                break
            seconds = max(0.0, left) / (len(selected) - index)
            bar.update(current, description=shape_class.name, completed=0, total=seconds, status="")
            started = time.monotonic()

            def report(so_far: SearchResult, started: float = started) -> None:
                best = max(trial.ratio for trial in so_far.trials)
                status = f"{len(so_far.trials)} tiles tried" + (f", best {best:.2f}x the current speed" if best else "")
                bar.update(current, completed=time.monotonic() - started, status=status)

            with launch.use_tables(**tables):
                result = _search(shape_class, check, started + seconds, report)
                results.append(result)
                if result.chosen is not None:
                    family, table = shape_class.family, launch.table(shape_class.family)
                    tables[family] = classes.with_tile(table, shape_class.target, shape_class.index, result.chosen)
                    save(family, tables[family])
            console.print(line(result), markup=False, highlight=False, soft_wrap=True)
            bar.update(overall, advance=1)
            if not launch.ON_CPU:
                torch.cuda.empty_cache()


def _search(
    shape_class: ShapeClass, check: Check, deadline: float, report: Callable[[SearchResult], None]
) -> SearchResult:
    if not shape_class.problems:
        return SearchResult(shape_class)
    try:
        step = CANDIDATES_PER_STEP_ON_CPU if launch.ON_CPU else CANDIDATES_PER_STEP
        return Searcher(shape_class, check, default_device()).search(deadline, report, step)
    except (AssertionError, RuntimeError) as error:
        # Out of memory, or the current tile is wrong: the other classes can still be tuned.
        return SearchResult(shape_class, error=first_line(error))


def line(result: SearchResult) -> str:
    """Return a line of text with the result of a class."""
    name = result.shape_class.name
    if not result.shape_class.problems:
        return f"{name}: no benchmark problem uses this rule, so it keeps its tile"
    if result.error:
        return f"{name}: could not be measured, so it keeps its tile ({result.error})"
    tried = f"{len(result.trials)} of {result.candidates} tried"
    dropped = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.dropped.items()))
    tried += f"; {dropped}" if dropped else ""
    if result.chosen is None or result.confirmed is None:
        return f"{name}: keeps {describe(result.shape_class.tile)} ({tried}; none faster by more than {noise():.0%})"
    return f"{name}: {result.confirmed.ratio:.2f}x the current speed with {describe(result.chosen)} ({tried})"
