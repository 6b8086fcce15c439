"""What the commands share: examples in the help, checks, and errors as one sentence with an exit code."""

from __future__ import annotations

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

from minidl.cli.help import PlainHelp
from minidl.cli.libraries import failed_import
from minidl.common.console import echo, one_line
from minidl.errors import ConfigError, DamagedError, Interrupted, RunError
from minidl.training.process import out_of_memory
from minidl.training.run_folder.outputs import discard_output

_SOON, _PATIENCE = 0.01, 5.0  # seconds
# Libraries take an exception in an import of theirs for the absence of what they import; pydantic makes another of it.
# A process that is being started would be left behind, and its pipes open.
_UNINTERRUPTED = ("<frozen importlib._bootstrap>", f"{os.sep}pydantic{os.sep}", "distributed/workers.py:_One.__init__")


def examples(*commands: str) -> str:
    """Return the end of a command's help: one line per example."""
    return "\n\n".join(["Examples:", *commands])


class Command(PlainHelp, TyperCommand):
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


@contextmanager
def _usage() -> Iterator[None]:
    """What typer says of a wrong usage has words of the command line in it."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = one_line(message)  # type: ignore[attr-defined]
        raise


class Group(PlainHelp, TyperGroup):
    def make_context(self, *args: Any, **more: Any) -> Any:
        with _usage():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _usage():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            # Ctrl-C before a command starts its work or after it.
            _fail("interrupted", 130)


def check_folder() -> None:
    """Exits when the working folder was deleted: libraries then end the process as they are imported."""
    try:
        Path.cwd()
    except OSError as error:
        _fail(f"error: the working folder cannot be read: {error.strerror}; change to another folder with cd", 2)


def check_plot(path: Path | None) -> None:
    """Raises ConfigError when a plot is wanted in another format than PNG and SVG, or matplotlib is missing."""
    from minidl.training.report import plot_processes

    if path is not None and path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot is {path}, expected a name that ends with .png or .svg")
    if path is not None and not plot_processes.available():
        raise ConfigError(plot_processes.MISSING)


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
        _fail(*_ended(error, f"error: {one_line(str(error))}", 1))
    except (ConfigError, DataError, DamagedError) as error:
        if came and isinstance(error, DamagedError):  # torch took the signal for an error of what it read
            _fail("interrupted", 130)
        _fail(*_ended(error, f"error: {one_line(str(error))}", 2))
    except (RunError, WorkerError) as error:
        _fail(*_ended(error, f"error: {one_line(str(error))}", 1))
    except KeyboardInterrupt as error:
        _fail(*_ended(error, "interrupted", 130))
    except OSError as error:
        if not error.filename and error.errno in (errno.EPIPE, errno.ENOSPC):
            raise typer.Exit(output_lost(error)) from None
        if (told := _read(error)) is not None:
            _fail(*_ended(error, *told))
        where = f"{error.filename}: " if error.filename else ""
        _fail(*_ended(error, f"error: {one_line(f'{where}{error.strerror or error}')}", 1))
    except Exception as error:
        if came:
            _fail("interrupted", 130)
        if (told := _read(error)) is None:
            _ended(error, f"error: {type(error).__name__}: {error}", 1)
            raise
        _fail(*_ended(error, *told))


def _read(error: Exception) -> tuple[str, int] | None:
    """What is said of memory or threads that have run out and of a library that cannot be imported; the exit code."""
    if (short := out_of_memory.read(error)) is not None:
        # The frames that the error came through hold what has taken the memory.
        traceback.clear_frames(error.__traceback__)
        return f"error: {short}; {out_of_memory.advice(short)}", 1
    told = failed_import(error)
    return None if told is None else (f"error: {one_line(told)}", 2)


def output_lost(error: OSError) -> int:
    """Tells that standard output cannot be written, unless its reader has left; returns the exit code."""
    discard_output()
    if isinstance(error, BrokenPipeError):
        return 141
    echo(f"error: standard output: {error.strerror or error}", error=True)
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

    waits, end = False, 0.0  # whether a signal is to be raised again, and until when it may wait

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
        nonlocal waits, end
        waits, end = True, time.monotonic() + _PATIENCE
        # By a timer: a thread cannot be started where their number is limited.
        before.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, again))
        signal.setitimer(signal.ITIMER_REAL, _SOON)

    def again(number: int, frame: FrameType | None) -> None:
        nonlocal waits
        if waits and _is_uninterrupted(frame) and time.monotonic() < end:
            signal.setitimer(signal.ITIMER_REAL, _SOON)
        elif waits:
            waits = False
            raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what is in the background
        numbers.remove(signal.SIGINT)
    before: dict[int, Any] = {number: signal.signal(number, interrupt) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if signal.SIGALRM in before:
            waits = False
            signal.setitimer(signal.ITIMER_REAL, 0)
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
    group = _group()
    return group is None or bool(group.leads)


def _ended(error: BaseException, message: str, code: int) -> tuple[str | None, int]:
    """What is to be said of an error, and the exit code; one of several processes speaks for all."""
    group = _group()
    return (message, code) if group is None else group.failed(error, message, code)


def _group() -> Any:
    """The processes that this one is of, None where it is alone, or has not got so far."""
    current = getattr(sys.modules.get("minidl.distributed.group"), "current", None)  # a thread may still import it
    return None if current is None else current()


def _fail(message: str | None, code: int) -> NoReturn:
    if message is not None:
        echo(message, error=True)
    else:
        from minidl.distributed import workers

        if workers.started_together():
            echo(workers.LEFT, error=True)
    raise typer.Exit(code) from None
