"""The output of training: a progress bar in a terminal, plain lines elsewhere, only the scores when quiet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from minidl.common import console
from minidl.compilation.compiler_processes import Progress
from minidl.training.run_folder.outputs import discard_output


class Display:
    """A context for training. `note`, `show` and `epoch` print lines unless it is quiet, `summary` prints one if it is;
    `step` moves the bar of an epoch.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Display:
        if not self.quiet and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def note(self, *texts: str | None) -> None:
        """Print a line for each text that is not None or empty."""
        for text in filter(None, texts):
            self.show(console.one_line(text))

    def show(self, text: str) -> None:
        """Print a text of several lines."""
        if self._bar is not None:
            self._bar.console.print(console.escaped(text), markup=False, highlight=False, soft_wrap=True)
        elif not self.quiet:
            self._print(text)

    def summary(self, text: str) -> None:
        """Print the only line of a quiet run, unless it is empty."""
        if self.quiet and text:
            self._print(console.one_line(text))

    def _print(self, text: str) -> None:
        try:
            console.echo(text)
        except OSError as error:
            # The run matters more than its output.
            self.quiet = True
            discard_output()
            if not isinstance(error, BrokenPipeError):
                console.note(f"standard output cannot be written ({error.strerror}); the command continues")

    @contextmanager
    def counted(self, title: str) -> Iterator[Progress]:
        """A context with a progress bar; the work calls its value with the number of items done and their total."""
        if self.quiet or self._bar is not None or not sys.stdout.isatty():
            yield lambda done, of: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, of: bar.update(task, completed=done, total=of)

    def begin(self, epoch: int, epochs: int, done: int, steps: int) -> None:
        """Start the bar of an epoch, of whose steps `done` were taken before."""
        if self._bar is None:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        name = f"{epoch:>{len(str(epochs))}}/{epochs}"
        self._task = self._bar.add_task("", total=steps, completed=done, epoch=name, figures="...")

    def step(self, done: int, figures: str | None) -> None:
        """Move the bar to `done` steps; `figures` are their means so far, None if they were not fetched."""
        if self._bar is None:
            return
        if figures is None:
            self._bar.update(self._task, completed=done)
        else:
            self._bar.update(self._task, completed=done, figures=figures)

    def epoch(self, epoch: int, epochs: int, figures: str, seconds: float, star: bool = False) -> None:
        """Print one line for a finished epoch; a star marks the best validation score so far."""
        self.note(f"epoch {epoch:>{len(str(epochs))}}/{epochs}  {figures}  {seconds:.1f} s{'  *' if star else ''}")
