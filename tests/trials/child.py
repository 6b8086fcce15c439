"""Commands and functions in forked children of this process, which has imported what they need.

A child costs no imports, may die, and leaves nothing behind in this process. What it says is in its log.
"""

import importlib
import io
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import typer

import minidl.cli
from tests.trials.warm import MODULES

# What no user should read in an error.
INTERNALS = ("Traceback", "torch.", "numpy", "Errno", "<class", "object at 0x", "safetensors_rust", "MemoryError")
MORE = (
    "minidl.generation.generate", "minidl.generation.evaluate", "minidl.training.prediction.predict",
    "minidl.generation.output",
    "minidl.tools.tuning.files", "minidl.tools.bench.results", "minidl.tools.drawing",
)  # fmt: skip
MOST_SECONDS = 300


@dataclass
class Ended:
    """`code` is the exit status, -n for signal n; `out` and `err` what was said."""

    code: int
    out: str
    err: str


def warm():
    """Import what commands import when they need it."""
    for name in (*MODULES, *MORE):
        importlib.import_module(name)


def command(argv, log, failpoints=None, send=()):
    """`minidl argv`. `send` are pairs (seconds after the start, signal)."""

    def run():
        sys.argv = ["minidl", *map(str, argv)]
        minidl.cli.main()

    return call(run, log, failpoints, send)


def call(run, log, failpoints=None, send=()):
    """`run()` in a child; one that returns has code 0."""
    pid = begin(run, log, failpoints)
    start = time.monotonic()
    for after, number in send:
        while time.monotonic() < start + after:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return ended(status, log)
            time.sleep(0.001)
        os.kill(pid, number)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return ended(status, log)
        if time.monotonic() > start + MOST_SECONDS:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Ended(-signal.SIGALRM, "", f"it hangs: no end after {MOST_SECONDS} s")
        time.sleep(0.002)


def begin(run, log, failpoints=None):
    """The number of a child that has begun `run()`; it is to be waited for, and `ended` tells how it went."""
    ready, begun = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ready)
        _live(run, log, failpoints, begun)
    os.close(begun)
    os.read(ready, 1)
    os.close(ready)
    return pid


def _live(run, log, failpoints, begun):
    code = 70
    try:
        out, err = (os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err"))
        null = os.open(os.devnull, os.O_RDONLY)
        for number, stream in ((0, null), (1, out), (2, err)):
            os.dup2(stream, number)
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w"), write_through=True) for number in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(begun, b"!")
        if failpoints is not None:
            failpoints.__enter__()
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except typer.Exit as end:  # where no command is around
        code = end.exit_code
    except BaseException:  # noqa: BLE001 (nothing may go on into the parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if failpoints is not None:
            Path(f"{log}.points").write_text("\n".join([str(failpoints.struck), *failpoints.points]))
        os._exit(code)


def ended(status, log):
    """How a child ended, by the status that waiting for it gave."""
    texts = (Path(f"{log}.{name}").read_text(errors="replace") for name in ("out", "err"))
    return Ended(os.waitstatus_to_exitcode(status), *texts)


def wrongs(ended, codes):
    """What is wrong with an end, besides its code being none of `codes`: the words of its errors."""
    found = []
    if ended.code not in codes:
        found.append(f"exit status {ended.code}, expected one of {codes}: {ended.err[-600:]}")
    found += [f"{word!r} is said: {ended.err[-600:]}" for word in INTERNALS if word in ended.err]
    if ended.code in (1, 2) and not ended.err.strip().splitlines()[-1:]:
        found.append("it fails without a word")
    if ended.code in (1, 2) and "error: " not in ended.err:
        found.append(f"an error that is not told as one: {ended.err[-300:]}")
    return found
