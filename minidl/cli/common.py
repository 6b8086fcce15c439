"""What the commands share: options, examples in the help, errors as one sentence with an exit code."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from minidl.data.files import LABEL_NAMES, TEXT_NAMES
from minidl.training import runs
from minidl.training.config import check_output
from minidl.training.errors import ConfigError, DamagedError, Interrupted, RunError

if TYPE_CHECKING:
    from minidl.profiling import Profile as Recorder


_SOON = 0.01  # seconds


def examples(*commands: str) -> str:
    """The end of a command's help: a line for each example, as it is typed."""
    return "\n\n".join(["Examples:", *(f"[bold]{command}[/bold]" for command in commands)])


def _without_type(option: Any) -> Any:
    """--help shows no type, as the other flags."""
    if option is not None:
        option.metavar = ""
    return option


class Command(TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))


class Group(TyperGroup):
    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Before a command has begun its work, or when it has ended.
            _fail("interrupted", 130)


def switch(name: str, text: str) -> Any:
    """A flag without a value."""
    return typer.Option(name, help=text, metavar="")


def _column(name: str, usual: tuple[str, ...]) -> Any:
    """The column of a file for `name`, which is guessed where it is not given."""
    guess = f"{', '.join(usual[:-1])} or {usual[-1]}"
    text = f"Column of your file with the {name}. Default: a guess, the one named {guess}, or the other one of two."
    return typer.Option(f"--{name}-column", help=text)


Out = Annotated[Path, typer.Option("--out", help="Folder of the run; made if it is missing.")]
ValSplit = Annotated[float | None, typer.Option("--val-split", help="Share of your file for validation. Default: 0.1.")]
TestSplit = Annotated[float | None, typer.Option("--test-split", help="Share of your file for the test. Default: 0.2.")]
Device = Annotated[str, typer.Option("--device", help="auto, cuda or cpu (Triton's interpreter).")]
Resume = Annotated[bool, switch("--resume", "Continue the run in --out with its settings.")]
Overwrite = Annotated[bool, switch("--overwrite", "Replace the run in --out when this one is done.")]
Quiet = Annotated[bool, switch("--quiet", "Show errors only.")]
NoPlots = Annotated[bool, switch("--no-plots", "Make no pictures.")]
TextColumn = Annotated[str | None, _column("text", TEXT_NAMES)]
LabelColumn = Annotated[str | None, _column("label", LABEL_NAMES)]
Profile = Annotated[
    bool, switch("--profile", "At the end, show what each kernel took, and write a trace that Chrome shows.")
]
Trace = Annotated[
    Path | None, typer.Option("--trace", help="With --profile: file of the trace. Default: trace.json in --out.")
]
TraceOfRun = Annotated[
    Path | None,
    typer.Option("--trace", help="With --profile: file of the trace. Default: trace-COMMAND.json in the run's folder."),
]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="With --profile: file of the trace. Default: none.")]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)]


def check_file(flag: str, path: Path) -> None:
    """Raises ConfigError, before the work, when a flag names a file that cannot be written or is one of a run."""
    check_output(flag, path)
    runs.check_not_own(flag, path)


def check_alone(flag: str, given: bool, **others: Any) -> None:
    """Raises ConfigError when a flag that is given would leave another without effect; those without their dashes."""
    for name, value in others.items() if given else ():
        if value:
            raise ConfigError(f"{flag} only shows what there is: leave out --{name.replace('_', '-')}")


def choose_device(device: str) -> None:
    """Raises ConfigError, see `training.device`."""
    from minidl.training.device import choose

    choose(device)


@contextmanager
def profiled(wanted: bool, trace: Path | None, usual: Path | None, updates: int = 1) -> Iterator[None]:
    """Around the work of a command, once its device is chosen: --profile shows the table on standard error.

    The trace goes to `trace`, else to `usual`, where its folder is there at the end. `updates` are those of weights in
    a training step. Raises ConfigError for a trace without a profile, or one that cannot be written.
    """
    if not wanted:
        if trace is not None:
            raise ConfigError("--trace goes with --profile")
        yield
        return
    if trace is not None:
        if usual is not None and trace.resolve() == usual.parent.resolve():
            raise ConfigError(f"--trace {trace} is the folder of the run: give the name of a file")
        new = usual is not None and trace.parent.resolve() == usual.parent.resolve()
        if not (new and not trace.parent.exists()):
            check_output("--trace", trace)
        runs.check_not_own("--trace", trace, new)
    from minidl.profiling import Profile as Recorder

    recorder = Recorder(updates=updates)
    try:
        with recorder:
            yield
    except BaseException:
        if recorder.events:
            # What stopped the work is what is to be said: how a run is continued, for one.
            with contextlib.suppress(OSError):
                _show(recorder, trace or usual)
        raise
    if recorder.events:
        _show(recorder, trace or usual)
    else:
        typer.echo(str(recorder), err=True, nl=False)


def _show(recorder: Recorder, path: Path | None) -> None:
    typer.echo(str(recorder), err=True, nl=False)
    if path is None:
        typer.echo("no trace is written: name a file with --trace", err=True)
    elif path.parent.is_dir():
        recorder.save(path)
        typer.echo(f"trace: {path}, to be opened in ui.perfetto.dev or chrome://tracing", err=True)


@contextmanager
def errors() -> Iterator[None]:
    """Turns what can go wrong into one sentence on standard error and an exit code, SIGTERM as Ctrl-C."""
    from minidl.data.records import DataError

    try:
        with terminated():
            yield
    except Interrupted as stop:
        _fail(str(stop), 130)
    except (ConfigError, DataError, DamagedError) as error:
        _fail(f"error: {error}", 2)
    except RunError as error:
        _fail(f"error: {error}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        # Whoever read the answers has gone; Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"error: {where}{error.strerror or error}", 1)
    except Exception as error:
        message = _memory(error)
        if message is None:
            raise
        _fail(f"error: {message}", 1)


def _memory(error: Exception) -> str | None:
    """What to say where memory has run out, None for another error."""
    if isinstance(error, typer.Exit):
        return None
    if not isinstance(error, MemoryError) and "torch" not in sys.modules:
        return None
    from minidl.training import memory

    short = memory.read(error)
    return None if short is None else f"{short}; {memory.advice(short, 1)}"


@contextmanager
def terminated() -> Iterator[None]:
    """While entered, SIGTERM raises KeyboardInterrupt, so that a command ends as by Ctrl-C; in the main thread only.

    Either is raised again where Python drops it, in the middle of a finaliser or of a callback of a weak reference.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            # Soon, and not here, where it would be dropped, too.
            # By a thread that is not waited for: the signal may come at once.
            _thread.start_new_thread(again, ())
        else:
            hook(what)

    def again() -> None:
        time.sleep(_SOON)
        if entered:
            os.kill(os.getpid(), signal.SIGTERM)

    entered = [True]
    before = signal.signal(signal.SIGTERM, interrupt)
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        sys.unraisablehook = hook
        entered.clear()
        signal.signal(signal.SIGTERM, before)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code) from None
