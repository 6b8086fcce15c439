"""The options --profile and --trace of the commands that launch kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from minidl.common.console import echo, one_line
from minidl.errors import ConfigError
from minidl.training.run_folder.folder import TRACES, RunFolder
from minidl.training.run_folder.outputs import check_output
from minidl.training.run_folder.provenance import TRACE
from minidl.training.settings.declaration import Settings

if TYPE_CHECKING:
    from minidl.tools.profiling import Profile


class Profiling(Settings):
    """Profiling options of a command that launches kernels."""

    profile: Annotated[
        bool, Field(description="Show the time of each kernel at the end and write a trace for Chrome or Perfetto.")
    ] = False
    trace: Annotated[
        Path | None, TRACE, Field(description="With --profile: trace file. Default: trace.json in --out.")
    ] = None


class ProfilingOfRun(Profiling):
    """The same for a command without --out."""

    trace: Annotated[
        Path | None,
        TRACE,
        Field(description="With --profile: trace file. Default: trace-COMMAND.json in the run's folder."),
    ] = None


@contextmanager
def profiled(profiling: Profiling, default: Path | None, updates: int = 1) -> Iterator[None]:
    """A context that profiles a command whose device is chosen, and then prints the table to standard error.

    The trace is written to --trace, or to `default` if its folder exists at the end. `updates` is the number of
    optimizer steps in a training step. Raises ConfigError for --trace without --profile, or an unwritable file.
    """
    trace = profiling.trace
    if not profiling.profile:
        if trace is not None:
            raise ConfigError("--trace requires --profile")
        yield
        return
    if trace is None and default is not None and default.parent.exists():
        check_output("--trace", default, TRACE)
    from minidl.tools.profiling import Profile

    recorder = Profile(updates=updates)
    try:
        with recorder:
            yield
    except BaseException:
        if recorder.events:
            # The error must be shown: it may say how to continue the run.
            with contextlib.suppress(OSError):
                _show(recorder, trace or default)
        raise
    if recorder.events:
        _show(recorder, trace or default)
    else:
        echo(str(recorder), error=True, end="")


def _show(recorder: Profile, path: Path | None) -> None:
    echo(str(recorder), error=True, end="")
    if path is None:
        echo("no trace was written; name a file with --trace", error=True)
    elif path.parent.is_dir():
        with RunFolder(path.parent).add_files(path.name) if path.name in TRACES else contextlib.nullcontext():
            recorder.save(path)
        echo(one_line(f"trace: {path} (open it in ui.perfetto.dev or chrome://tracing)"), error=True)
