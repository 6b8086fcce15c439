"""`minidl doctor`: what this machine can run and what is missing, and the kernels compiled for GPUs it has not.

Importing this package is cheap: what needs torch or rich is imported by the command.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

ARCHITECTURES = (80, 90)
SECONDS_BETWEEN_LINES = 30


def doctor() -> int:
    """Print what this machine can run and what is missing; 1 when something needed is missing, else 0."""
    from rich.console import Console
    from rich.markup import escape

    from minidl import __version__
    from minidl.doctor import machine

    colours = {machine.GOOD: "green", machine.NOTE: "yellow", machine.BAD: "red"}
    console = Console()
    with console.status("looking") as status:
        found = []
        for check in machine.checks():
            found.append(check)
            status.update(f"looking: {check.name}")
    console.print(f"minidl {__version__} on this machine\n", highlight=False)
    width = max(len(check.name) for check in found)
    # Lines and no table: a path that is longer than the terminal is wide stays in one piece.
    for check in found:
        colour = colours[check.status]
        line = f"{escape(check.name.ljust(width))}  [{colour}]{check.status}[/]  {escape(check.found)}"
        console.print(line, soft_wrap=True, highlight=False)
        if check.advice:
            console.print(f"{'':{width + 8}}[{colour}]{escape(check.advice)}[/]", soft_wrap=True, highlight=False)
    console.print()
    bad = [check.name for check in found if check.status == machine.BAD]
    if bad:
        console.print(f"[red]Needs attention:[/] {escape(', '.join(bad))}")
        return 1
    console.print("[green]Everything needed is there.[/]")
    return 0


def doctor_compile(
    arch: Sequence[int] = ARCHITECTURES,
    *,
    json: Path | None = None,
    only: str = "",
    work: str = "",
    every_tile: bool = True,
    brief: Collection[int] = (),
    details: bool = False,
    workers: int | None = None,
    python: str = sys.executable,
) -> int:
    """Compile every kernel offline for the given architectures, print the table; 1 when something is wrong, else 0.

    only        a part of the names of the kernels to compile
    work        a part of the names of the operations that are called to launch them
    every_tile  every tile of the tables; else those that the shapes of the examples get
    brief       architectures for which each value of a kernel's flags counts once, not every combination
    details     a row per tile in the table; `json` has them in any case
    python      the interpreter of the compiling processes: to try another version of Triton

    Raises ValueError for an unknown architecture and when no kernel has `only` in its name, OSError when the JSON file
    cannot be written.
    """
    from rich.console import Console

    from minidl.doctor import compile, report

    kernels = kernel_names()
    if not any(only in name for name in kernels):
        known = ", ".join(name.removesuffix("_kernel") for name in kernels)
        raise ValueError(f"no kernel has {only!r} in its name; the kernels are: {known}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    with _Progress(console) as progress:
        try:
            verdict = compile.run(
                arch,
                only=only,
                work=work,
                every_tile=every_tile,
                brief=brief,
                workers=workers,
                python=python,
                progress=progress.tell,
            )
        except compile.WorkerError as error:
            console.print("[red]failed[/] ", end="")
            console.print(str(error), markup=False, highlight=False)
            return 1
    if not verdict.figures and not verdict.failures:
        console.print(f"no operation with {work!r} in its name launches such a kernel", markup=False, highlight=False)
        return 1
    report.show(verdict, console, details)
    if json is not None:
        from minidl.training.files import write_json

        write_json(json, report.as_json(verdict))
    return 0 if verdict.fine else 1


def kernel_names() -> list[str]:
    """The names of the package's kernels, read from their source: nothing is imported for it."""
    folder = Path(__file__).parents[1] / "kernels"
    sources = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    return sorted({name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)})


class _Progress:
    """A bar per stage in a terminal, a line now and then elsewhere."""

    def __init__(self, console: object) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        assert isinstance(console, Console)
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, object] = {}
        self._told = time.monotonic()

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def tell(self, stage: str, done: int, of: int) -> None:
        """`done` of a stage's jobs are done."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=of)
            self._line(f"{stage}: {of} to do")
        elif time.monotonic() - self._told > SECONDS_BETWEEN_LINES:
            self._line(f"{stage}: {done} of {of}")
        self._bar.update(self._tasks[stage], completed=done, total=of)  # type: ignore[arg-type]

    def _line(self, text: str) -> None:
        self._told = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(text, highlight=False)
