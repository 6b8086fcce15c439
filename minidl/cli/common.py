"""What the commands share: examples in the help, checks, and errors as one sentence with an exit code."""

from __future__ import annotations

import _thread
import errno
import io
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, ClassVar, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from minidl.training import memory
from minidl.training.errors import ConfigError, DamagedError, Interrupted, RunError
from minidl.training.outputs import discard_output

_SOON, _PATIENCE = 0.01, 5.0  # seconds
# Libraries take an exception in an import of theirs for the absence of what they import; pydantic makes another of it.
# A process that is being started would be left behind, and its pipes open.
_UNINTERRUPTED = ("<frozen importlib._bootstrap>", f"{os.sep}pydantic{os.sep}", "distributed/workers.py:_One.__init__")


def examples(*commands: str) -> str:
    """The end of a command's help: one line per example."""
    return "\n\n".join(["Examples:", *(f"[bold]{command}[/bold]" for command in commands)])


def _without_type(option: Any) -> Any:
    """Hide the type of --help, as for the other flags."""
    if option is not None:
        option.metavar = ""
    return option


class Command(TyperCommand):
    """`several` are the options of two values and what these are: typer would take the next option for one of them."""

    several: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name in self.several.keys() & set(args):
            at = args.index(name) + 1
            given = list(itertools.takewhile(lambda word: not word.startswith("--"), args[at : at + 2]))
            if len(given) < 2:
                told = f"expected {self.several[name]}, got {' '.join(given) or 'none'}"
                raise typer.BadParameter(told, param_hint=f"'{name}'")
        return super().parse_args(ctx, args)

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


def check_plot(path: Path | None) -> None:
    """Raises ConfigError when a plot is wanted in another format than PNG and SVG, or matplotlib is missing."""
    from minidl.training import plots

    if path is not None and path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot is {path}, expected a name that ends with .png or .svg")
    if path is not None and not plots.available():
        raise ConfigError(plots.MISSING)


class _Errors(io.FileIO):
    """Standard error: what cannot be written is dropped, as there is nowhere to say so.

    No buffer stands before it: one would keep, and write again, what a signal's exception says nothing of.
    """

    def write(self, data: Any) -> int:
        left = memoryview(data)
        with suppress(OSError):
            while left:
                left = left[super().write(left) or len(left) :]
        return len(data)


def prepare_streams() -> None:
    """Make output streams that can be used: closed ones discard, characters without an encoding are escaped.

    Standard error never fails.
    """
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
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        raw = cast(BinaryIO, _Errors(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", line_buffering=True)


@contextmanager
def errors() -> Iterator[None]:
    """Turns errors into one sentence on standard error and an exit code; SIGTERM acts as Ctrl-C."""
    from minidl.data.records import DataError
    from minidl.data.workers import WorkerError
    from minidl.distributed.started import DistributedError

    came: list[int] = []
    try:
        with terminated(came):
            yield
    except Interrupted as stop:
        _fail(str(stop) if _leads() else None, 130)
    except DistributedError as error:
        _fail(*_ended(error, f"error: {error}", 1))
    except (ConfigError, DataError, DamagedError) as error:
        if came and isinstance(error, DamagedError):  # torch took the signal for an error of what it read
            _fail("interrupted", 130)
        _fail(*_ended(error, f"error: {error}", 2))
    except (RunError, WorkerError) as error:
        _fail(*_ended(error, f"error: {error}", 1))
    except KeyboardInterrupt as error:
        _fail(*_ended(error, "interrupted", 130))
    except OSError as error:
        if not error.filename and error.errno in (errno.EPIPE, errno.ENOSPC):
            raise typer.Exit(output_lost(error)) from None
        where = f"{error.filename}: " if error.filename else ""
        _fail(*_ended(error, f"error: {where}{error.strerror or error}", 1))
    except Exception as error:
        if came:
            _fail("interrupted", 130)
        short = memory.read(error)
        if short is None:
            _ended(error, f"error: {type(error).__name__}: {error}", 1)
            raise
        # The frames that the error came through hold what has taken the memory.
        traceback.clear_frames(error.__traceback__)
        _fail(*_ended(error, f"error: {short}; {memory.advice(short)}", 1))


def output_lost(error: OSError) -> int:
    """Tells that standard output cannot be written, unless its reader has left; returns the exit code."""
    discard_output()
    if isinstance(error, BrokenPipeError):
        return 141
    typer.echo(f"error: standard output: {error.strerror or error}", err=True)
    return 1


@contextmanager
def terminated(came: list[int] | None = None) -> Iterator[None]:
    """While entered, Ctrl-C and SIGTERM raise KeyboardInterrupt; in the main thread only. `came` gets their numbers.

    Python drops exceptions raised within a finaliser or a weak reference's callback, and some libraries take them for
    others: then it is raised again, or later. A second signal is not put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    waits = False  # whether a signal is to be raised again

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal waits
        if came is not None:
            came.append(number)
        if not waits and _is_uninterrupted(frame):
            raise_later()
            return
        waits = False
        raise KeyboardInterrupt

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            raise_later()  # here it would be dropped again
        else:
            hook(what)

    def raise_later() -> None:
        nonlocal waits
        waits = True
        _thread.start_new_thread(again, ())  # not a threading.Thread, which Python joins at exit

    def again() -> None:
        end = time.monotonic() + _PATIENCE
        time.sleep(_SOON)
        while waits and entered and _is_uninterrupted(sys._current_frames().get(main)) and time.monotonic() < end:
            time.sleep(_SOON)
        if waits and entered:
            os.kill(os.getpid(), signal.SIGTERM)

    main, entered = threading.get_ident(), [True]
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what is in the background
        numbers.remove(signal.SIGINT)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        sys.unraisablehook = hook
        entered.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_uninterrupted(frame: FrameType | None) -> bool:
    """Whether a frame, or one that called it, is of code that must not be interrupted."""
    while frame is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
        if any(part in place for part in _UNINTERRUPTED):
            return True
        frame = frame.f_back
    return False


def _leads() -> bool:
    """Whether this process is alone, or the first of several."""
    group = sys.modules.get("minidl.distributed.group")
    return group is None or bool(group.current().leads)


def _ended(error: BaseException, message: str, code: int) -> tuple[str | None, int]:
    """What is to be said of an error, and the exit code; one of several processes speaks for all."""
    group = sys.modules.get("minidl.distributed.group")
    return (message, code) if group is None else group.current().failed(error, message, code)


def _fail(message: str | None, code: int) -> NoReturn:
    if message is not None:
        typer.echo(message, err=True)
    else:
        from minidl.distributed import workers

        if workers.started_together():
            typer.echo(workers.LEFT, err=True)
    raise typer.Exit(code) from None
