"""Code that the commands share: examples in the help, checks, signals, and errors as one sentence with an exit code."""

from __future__ import annotations

import errno
import io
import itertools
import math
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

_RETRY, _PATIENCE = 0.01, 5.0  # seconds until a deferred signal is tried again, and until it is no longer deferred
# Libraries treat an exception in an import as a missing module, and pydantic turns it into another one; an interrupted
# start of a process would leave the process running.
_UNINTERRUPTED = (
    "<frozen importlib._bootstrap>", f"{os.sep}pydantic{os.sep}", "distributed/workers.py:_Process.__init__"
)  # fmt: skip


def examples(*commands: str) -> str:
    """Return the end of a command's help: one line per example."""
    return "\n\n".join(["Examples:", *commands])


class Command(PlainHelp, TyperCommand):
    """`pairs` are the options with two values, and descriptions of these: typer would accept the next option as one."""

    pairs: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name in self.pairs.keys() & set(args):
            start = args.index(name) + 1
            values = list(itertools.takewhile(lambda word: not word.startswith("--"), args[start : start + 2]))
            if len(values) < 2:
                message = f"expected {self.pairs[name]}, got {' '.join(values) or 'none'}"
                raise typer.BadParameter(message, param_hint=f"'{name}'")
        return super().parse_args(ctx, args)


@contextmanager
def _usage() -> Iterator[None]:
    """A context that escapes typer's messages on wrong usage, because they quote the command line."""
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
            # Ctrl-C before or after the work of a command.
            _fail("interrupted", 130)


def check_folder() -> None:
    """Exit if the working folder was deleted: libraries would end the process during their import."""
    try:
        Path.cwd()
    except OSError as error:
        _fail(f"error: the working folder cannot be read: {error.strerror}; change to another folder with cd", 2)


def check_plot(path: Path | None) -> None:
    """Raise ConfigError for a plot in another format than PNG and SVG, or if matplotlib is missing."""
    from minidl.training.report import plot_processes

    if path is not None and path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot is {path}, expected a name that ends with .png or .svg")
    if path is not None and not plot_processes.available():
        raise ConfigError(plot_processes.MISSING)


class _Errors(io.FileIO):
    """Standard error that drops data it cannot write, because nothing can report the failure.

    It is unbuffered: after an exception from a signal handler, a buffer would write its data a second time.
    """

    def write(self, data: Any) -> int:
        left = memoryview(data)
        with suppress(OSError):
            while left:
                left = left[super().write(left) or len(left) :]
        return len(data)


def prepare_streams() -> None:
    """Make the output streams usable: closed streams discard, characters that cannot be encoded are escaped, and
    standard error never fails."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        # Otherwise the next opened file would become standard output.
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
    """A context that turns errors into one sentence on standard error and an exit code; SIGTERM acts as Ctrl-C."""
    from minidl.data.records import DataError
    from minidl.data.workers import WorkerError
    from minidl.distributed.started import DistributedError

    signals: list[int] = []
    try:
        with terminated(signals):
            yield
    except Interrupted as stop:
        _fail(str(stop) if _leads() else None, 130)
    except DistributedError as error:
        _fail(*_ended(error, f"error: {one_line(str(error))}", 1))
    except (ConfigError, DataError, DamagedError) as error:
        if signals and isinstance(error, DamagedError):  # torch turned the KeyboardInterrupt into a read error
            _fail("interrupted", 130)
        _fail(*_ended(error, f"error: {one_line(str(error))}", 2))
    except (RunError, WorkerError) as error:
        _fail(*_ended(error, f"error: {one_line(str(error))}", 1))
    except KeyboardInterrupt as error:
        _fail(*_ended(error, "interrupted", 130))
    except OSError as error:
        if not error.filename and error.errno in (errno.EPIPE, errno.ENOSPC):
            raise typer.Exit(output_lost(error)) from None
        if (failure := _read(error)) is not None:
            _fail(*_ended(error, *failure))
        where = f"{error.filename}: " if error.filename else ""
        _fail(*_ended(error, f"error: {one_line(f'{where}{error.strerror or error}')}", 1))
    except Exception as error:
        if signals:
            _fail("interrupted", 130)
        if (failure := _read(error)) is None:
            _ended(error, f"error: {type(error).__name__}: {error}", 1)
            raise
        _fail(*_ended(error, *failure))


def _read(error: Exception) -> tuple[str, int] | None:
    """Return the message and exit code for lack of memory or threads, or a failed import; None for other errors."""
    if (short := out_of_memory.read(error)) is not None:
        # The frames of the traceback hold the memory.
        traceback.clear_frames(error.__traceback__)
        return f"error: {short}; {out_of_memory.advice(short)}", 1
    message = failed_import(error)
    return None if message is None else (f"error: {one_line(message)}", 2)


def output_lost(error: OSError) -> int:
    """Report that standard output cannot be written, unless its reader closed the pipe, and return the exit code."""
    discard_output()
    if isinstance(error, BrokenPipeError):
        return 141
    echo(f"error: standard output: {error.strerror or error}", error=True)
    return 1


@contextmanager
def terminated(signals: list[int] | None = None) -> Iterator[None]:
    """A context in which Ctrl-C and SIGTERM raise KeyboardInterrupt, in the main thread only; `signals` gets their
    numbers.

    Python drops an exception in a finaliser or a weak reference's callback, and some libraries turn it into another
    error. So a signal at such a point is raised later, but a second signal is not deferred.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    deadline = 0.0  # until when the deferred signal may wait, 0 without one

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal deadline
        is_retry = number == signal.SIGALRM
        if is_retry and not deadline:
            return
        if signals is not None and not is_retry:
            signals.append(number)
        is_second = deadline and not is_retry
        if not is_second and time.monotonic() < (deadline or math.inf) and _is_uninterrupted(frame):
            defer()
            return
        deadline = 0.0
        raise KeyboardInterrupt

    def defer() -> None:
        nonlocal deadline
        deadline = deadline or time.monotonic() + _PATIENCE
        # By a timer: a thread cannot be started if their number is limited.
        before.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
        signal.setitimer(signal.ITIMER_REAL, _RETRY)

    def unraisable(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            defer()
        else:
            hook(dropped)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by a shell for background commands
        numbers.remove(signal.SIGINT)
    before: dict[int, Any] = {number: signal.signal(number, interrupt) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if signal.SIGALRM in before:
            deadline = 0.0
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_uninterrupted(frame: FrameType | None) -> bool:
    """Return whether a frame or one of its callers runs code that must not be interrupted."""
    while frame is not None:
        name = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
        if any(part in name for part in _UNINTERRUPTED):
            return True
        frame = frame.f_back
    return False


def _leads() -> bool:
    """Return whether this process is the only one, or the first of several."""
    group = _group()
    return group is None or bool(group.leads)


def _ended(error: BaseException, message: str, code: int) -> tuple[str | None, int]:
    """Return the message for an error, None if another process prints it, and the exit code."""
    group = _group()
    return (message, code) if group is None else group.failed(error, message, code)


def _group() -> Any:
    """Return the group of this process, None if it has not joined one."""
    current = getattr(sys.modules.get("minidl.distributed.group"), "current", None)  # may be partly imported
    return None if current is None else current()


def _fail(message: str | None, code: int) -> NoReturn:
    if message is not None:
        echo(message, error=True)
    else:
        from minidl.distributed import workers

        if workers.started_together():
            echo(workers.LEFT, error=True)
    raise typer.Exit(code) from None
