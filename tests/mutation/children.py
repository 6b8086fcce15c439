"""Tests in forked children of a process that has imported and collected everything once.

A child runs some of the tests that the parent has collected and writes a line for each event into a pipe. It dies of
too much time (of the processor, so that a busy machine changes nothing), of too much memory and of wild addresses; the
parent sees of what.
"""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings, strategies

from minidl.testing import SanitizerError

MEMORY = 40 << 30  # bytes of address space beyond those of the parent; some tests map 16 GiB that they never touch
SLOWER, SPARE = 8, 3.0  # a test may take so many times its usual seconds, and these
BLOCKED = 60.0  # seconds of the clock beyond the expected ones until a child that says nothing is killed
# A child that had another one's end of a pipe would keep it open.
_starting = threading.Lock()


class Plugin:
    """Keeps what pytest collects, hands it to `work` in place of running it, and hears how each test went."""

    def __init__(self, work: Callable[[Any], None]) -> None:
        self.work = work
        self.reports: list[Any] = []

    def pytest_sessionstart(self, session):
        manager = session.config.pluginmanager
        manager.unregister(manager.get_plugin("terminalreporter"))

    def pytest_runtestloop(self, session):
        self.work(session)
        return True

    def pytest_runtest_logreport(self, report):
        self.reports.append(report)

    def outcome(self, item: Any, guard: Callable[[], Any], following: Any = None) -> str:
        """What became of one test run now under a context: "passed", "skipped", "failed" or "sanitizer".

        Fixtures that `following` uses as well are kept for it.
        """
        self.reports.clear()
        try:
            with guard():
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        except SanitizerError:
            return "sanitizer"
        if any(report.failed for report in self.reports):
            return "failed"
        return "skipped" if any(report.skipped for report in self.reports) else "passed"


def warm_up() -> None:
    """Import now, in the parent, what tests import when they first compare or draw something."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    settings(max_examples=1)(given(strategies.integers())(lambda number: None))()


def child(
    work: Callable[[Callable[..., None]], None], expected: float, heard: Callable[[list[Any]], None] | None = None
) -> tuple[list[list[Any]], str | None]:
    """The events that `work(tell)` tells in a forked process, and what killed it, if anything did.

    expected  seconds that it usually takes from one event to the next
    heard     called with each event at once
    """
    with _starting, warnings.catch_warnings():
        reading, writing = os.pipe()
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads do not survive; none of ours matters here
        number = os.fork()
        if number == 0:
            _work(work, reading, writing)
        os.close(writing)
    events: list[list[Any]] = []
    silent = False
    for line in _lines(reading, 2 * SLOWER * expected + BLOCKED):
        if line is None:
            silent = True
            break
        events.append(json.loads(line))
        if events[-1][0] == "wrong":
            raise RuntimeError(events[-1][1])
        if heard is not None:
            heard(events[-1])
    os.close(reading)
    if silent:
        os.kill(number, signal.SIGKILL)
    _, status = os.waitpid(number, 0)
    if silent or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF):
        return events, "timed out"
    return events, "crashed" if status else None


def _lines(reading: int, patience: float) -> Iterator[bytes | None]:
    """The whole lines of a pipe until its end, then nothing more; None when none comes for `patience` seconds."""
    rest = b""
    while True:
        ready, _, _ = select.select([reading], [], [], patience)
        if not ready:
            yield None
            return
        more = os.read(reading, 1 << 16)
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        yield from lines


def _work(work: Callable[[Callable[..., None]], None], reading: int, writing: int) -> None:
    """The life of a child, which never returns."""
    code = 1
    try:
        os.close(reading)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        gc.freeze()
        work(lambda *event: os.write(writing, (json.dumps(event) + "\n").encode()))
        code = 0
    except Exception:  # noqa: BLE001 (the tool is wrong, not a kernel; the parent says so)
        os.write(writing, (json.dumps(["wrong", traceback.format_exc()]) + "\n").encode())
    finally:
        os._exit(code)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Dies when what is inside takes far longer than `seconds` of the processor."""
    signal.setitimer(signal.ITIMER_PROF, SLOWER * seconds + SPARE)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
