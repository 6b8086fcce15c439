"""Work in processes of their own, with the same results as in this one and in the same order.

A worker is a Python process that this one starts and talks to over pipes: JSON and bytes, nothing is pickled. It ends
when its pipe is closed, so none outlives the command that started it, however that ended.
Ctrl-C is left to the command.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import struct
import subprocess
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import IO, Any, NamedTuple, Self

from minidl.common import import_lock

_HEAD = struct.Struct("<Q")
STOPPED, _TICK = 60.0, 0.5  # seconds after which a process that is stopped is ended; between two looks
_AHEAD = 2  # items for each worker that are taken before their results are asked for
_ERRORS: dict[str, type[Exception]] = {"MemoryError": MemoryError, "OSError": OSError}
_START = "from minidl.data.workers import main; main()"


class Message(NamedTuple):
    """What goes to a job and comes back: JSON values, and buffers: bytes and contiguous arrays, which arrive as
    bytes."""

    values: dict[str, Any]
    buffers: Sequence[Any] = ()


Job = Callable[[Message], Message]


class WorkerError(RuntimeError):
    """A worker process could not be started, or ended before its work was done."""


def available() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def is_stopped(process: int) -> bool:
    """Whether a child of this process is stopped, as by SIGSTOP."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


class Workers:
    """`count` processes that run jobs, which are functions of modules; one is this process itself.

    Used as a context manager: at its end the processes are ended, too; one that is stopped for long is ended before.
    `variables` are set in the environment of each, `flag` gives their number.
    """

    def __init__(self, count: int, variables: Sequence[dict[str, str]] = (), flag: str = "--workers") -> None:
        self.count, self.variables, self.flag = count, variables or [{}] * count, flag
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._processes: list[_Process] = []
        self._threads: ThreadPoolExecutor | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for process in self._processes:
            process.kill()
        if self._threads is not None:
            # Their reads have ended with the processes.
            self._threads.shutdown(cancel_futures=True)

    def start(self) -> None:
        """Start the processes now, so that they are ready when `map` needs them. Raises WorkerError."""
        if self.count > 1 and self._threads is None:
            for variables in self.variables:
                try:
                    process = _Process(variables, self.flag)
                except OSError as error:
                    raise WorkerError(
                        f"{self.count} worker processes cannot be started: {error.strerror or error}; run the command "
                        f"again with fewer {self.flag}"
                    ) from None
                self._processes.append(process)
                self._idle.put(process)
            self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="worker")
            threading.Thread(target=self._watch, name="watch of workers", daemon=True).start()

    def _watch(self) -> None:
        """End processes that are stopped: whoever reads from one would wait without end. The time is counted in looks,
        as this process may be stopped together with them."""
        while not self._ended.wait(_TICK):
            for process in self._processes:
                process.look(_TICK)

    def map(self, job: Job, items: Iterable[Message]) -> Iterator[Message]:
        """The results of a job for each item, in order.

        Raises what the job raised: minidl's own errors, MemoryError and OSError as such, others as RuntimeError with
        their traceback; WorkerError when a process cannot be started or was ended.
        """
        self.start()
        if self._threads is None:
            yield from map(job, items)
            return
        waiting: deque[Future[Message]] = deque()
        try:
            for item in items:
                waiting.append(self._threads.submit(self._call, job, item))
                if len(waiting) > _AHEAD * self.count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def later(self, job: Job, item: Message) -> Callable[[], Message]:
        """Begin a job; a function that waits for its result, and raises as `map`."""
        self.start()
        return partial(job, item) if self._threads is None else self._threads.submit(self._call, job, item).result

    def _call(self, job: Job, item: Message) -> Message:
        process = self._idle.get()
        try:
            return process.call(job, item)
        finally:
            self._idle.put(process)


class _Process:
    """One worker."""

    def __init__(self, variables: dict[str, str], flag: str) -> None:
        self.flag, self._still = flag, 0.0  # seconds for which it is stopped
        # Inherited: a terminal sends Ctrl-C to the worker, too, which would print a traceback while it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._popen = subprocess.Popen(
                import_lock.python(_START),
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def call(self, job: Job, item: Message) -> Message:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            name = f"{job.__module__}:{job.__qualname__}"
            _send(self._popen.stdin, Message({"job": name, "values": item.values}, item.buffers))
            answer = _receive(self._popen.stdout)
        except (BrokenPipeError, EOFError, ValueError):  # ValueError: the pipe was closed
            raise WorkerError(self._ending()) from None
        failed = answer.values.get("failed")
        if failed is None:
            return Message(answer.values["values"], answer.buffers)
        module, _, kind = failed["kind"].rpartition(":")
        error = getattr(importlib.import_module(module), kind) if module else _ERRORS.get(kind, RuntimeError)
        raise error(*failed["arguments"])

    def look(self, seconds: float) -> None:
        """Look at it after so many seconds, and end it where it is stopped for long."""
        self._still = self._still + seconds if is_stopped(self._popen.pid) else 0.0
        if self._still >= STOPPED:
            self._popen.kill()

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # for what was not yet sent
                pipe.close()

    def _ending(self) -> str:
        code = self._popen.wait()
        names = {number.value: number.name for number in signal.Signals}
        how = f"by {names.get(-code, f'signal {-code}')}" if code < 0 else f"with exit code {code}"
        if self._still >= STOPPED:
            return f"a worker process was stopped for {STOPPED:g} s, as by SIGSTOP, and ended; run the command again"
        return (
            f"a worker process was ended {how}, as by the system where memory runs out; run the command again, with "
            f"fewer {self.flag} if it happens again"
        )


def main() -> None:
    """A worker: answers until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        while True:
            asked = _receive(source)
            _send(target, _answer(asked))
    except (EOFError, BrokenPipeError):
        # The command has ended, and with it whoever could read anything.
        os._exit(0)


def _answer(asked: Message) -> Message:
    module, _, name = asked.values["job"].partition(":")
    failed: dict[str, Any]
    try:
        job: Job = getattr(importlib.import_module(module), name)
        values, buffers = job(Message(asked.values["values"], asked.buffers))
        return Message({"values": values}, buffers)
    except MemoryError as error:
        failed = {"kind": "MemoryError", "arguments": [str(error)]}
    except OSError as error:
        file = None if error.filename is None else str(error.filename)
        failed = {"kind": "OSError", "arguments": [str(error)] if error.errno is None else [*error.args[:2], file]}
    except Exception as error:  # noqa: BLE001 (raised in the process that asked)
        failed = {"kind": "RuntimeError", "arguments": [traceback.format_exc()]}
        if type(error).__module__.startswith("minidl."):
            failed = {"kind": f"{type(error).__module__}:{type(error).__name__}", "arguments": [str(error)]}
    return Message({"failed": failed})


def _send(pipe: IO[bytes], message: Message) -> None:
    parts = [memoryview(part) for part in message.buffers]
    head = json.dumps({"values": message.values, "sizes": [part.nbytes for part in parts]}).encode()
    pipe.write(_HEAD.pack(len(head)) + head)
    pipe.writelines(parts)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Message:
    head = json.loads(_exactly(pipe, _HEAD.unpack(_exactly(pipe, _HEAD.size))[0]))
    return Message(head["values"], [_exactly(pipe, size) for size in head["sizes"]])


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    """Raises EOFError where the other end has closed the pipe."""
    found = pipe.read(size)
    if len(found) < size:
        raise EOFError
    return found
