"""What the commands share: examples in the help, checks, and errors as one sentence with an exit code."""

from __future__ import annotations

import _thread
import errno
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer
from pydantic_core import SchemaError
from typer.core import TyperCommand, TyperGroup

from minidl.training import memory
from minidl.training.errors import ConfigError, DamagedError, Interrupted, RunError
from minidl.training.outputs import check_output, discard_output

_SOON = 0.01  # seconds


def examples(*commands: str) -> str:
    """The end of a command's help: one line per example."""
    return "\n\n".join(["Examples:", *(f"[bold]{command}[/bold]" for command in commands)])


def _without_type(option: Any) -> Any:
    """Hide the type of --help, as for the other flags."""
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
            # Ctrl-C before a command starts its work or after it.
            _fail("interrupted", 130)


def check_files(**paths: Path | None) -> None:
    """Raises ConfigError when a flag, without its dashes, names a file that cannot be written or belongs to a run."""
    from minidl.training import runs

    for name, path in paths.items():
        if path is not None:
            check_output(f"--{name}", path)
            runs.check_not_own(f"--{name}", path)


def check_plot(path: Path | None) -> None:
    """Raises ConfigError when a plot is wanted and matplotlib is missing."""
    from minidl.training import plots

    if path is not None and not plots.available():
        raise ConfigError(plots.MISSING)


def prepare_streams() -> None:
    """Make output streams that can be used: closed ones discard, characters without an encoding are escaped."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        # Else the next file that is opened would be standard output.
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def errors() -> Iterator[None]:
    """Turns errors into one sentence on standard error and an exit code; SIGTERM acts as Ctrl-C."""
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
    except SchemaError as error:
        # While pydantic builds a class of settings, it turns a Ctrl-C into an error of its own.
        if KeyboardInterrupt.__name__ not in str(error):
            raise
        _fail("interrupted", 130)
    except BrokenPipeError:
        discard_output()
        raise typer.Exit(141) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        if not where and error.errno == errno.ENOSPC:
            where = "standard output: "
            discard_output()
        _fail(f"error: {where}{error.strerror or error}", 1)
    except Exception as error:
        short = memory.read(error)
        if short is None:
            raise
        # The frames that the error came through hold what has taken the memory.
        traceback.clear_frames(error.__traceback__)
        _fail(f"error: {short}; {memory.advice(short)}", 1)


@contextmanager
def terminated() -> Iterator[None]:
    """While entered, SIGTERM raises KeyboardInterrupt as Ctrl-C does; in the main thread only.

    Python drops exceptions raised within a finaliser or a weak reference's callback; there it is raised again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            # In a thread, as here it would be dropped again; not a threading.Thread, which Python joins at exit.
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
