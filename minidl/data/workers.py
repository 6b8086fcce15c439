"""Run jobs in worker processes, with the same results and in the same order as in this process.

A worker is a Python process that receives and sends JSON and bytes over pipes, without pickle. It ends when its pipe is
closed, so no worker outlives its command. Workers ignore Ctrl-C, which the command handles.
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
STOPPED, _TICK = 60.0, 0.5  # seconds until a stopped process is killed, and between two checks
_AHEAD = 2  # items per worker that are read before their results are needed
_ERRORS: dict[str, type[Exception]] = {"MemoryError": MemoryError, "OSError": OSError}
_START = "from minidl.data.workers import main; main()"


class Message(NamedTuple):
    """The request and the result of a job: JSON values, and buffers (bytes or contiguous arrays), which arrive as
    bytes."""

    values: dict[str, Any]
    buffers: Sequence[Any] = ()


Job = Callable[[Message], Message]


class WorkerError(RuntimeError):
    """A worker process could not be started, or ended before its work was complete."""


def available() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def is_stopped(process: int) -> bool:
    """Return whether a child of this process is stopped, as by SIGSTOP."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


class Workers:
    """`count` processes that run jobs, which are functions of modules; a count of 1 means this process.

    The end of the context manager kills the processes; a process that stays stopped is killed earlier. `variables` are
    the environment variables of each process; `flag` is the option for their number.
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
            # The end of the processes ends the reads of these threads.
            self._threads.shutdown(cancel_futures=True)

    def start(self) -> None:
        """Start the processes before `map` needs them. Raises WorkerError."""
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
        """Kill stopped processes, because reads from them would never end. Time is measured in checks, because this
        process may be stopped, too."""
        while not self._ended.wait(_TICK):
            for process in self._processes:
                process.check_stopped(_TICK)

    def map(self, job: Job, items: Iterable[Message]) -> Iterator[Message]:
        """Return the results of a job for each item, in order.

        Raises the error of a job: minidl's errors, MemoryError and OSError with their type, others as RuntimeError with
        their traceback; WorkerError if a process cannot be started or was killed.
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

    def submit(self, job: Job, item: Message) -> Callable[[], Message]:
        """Start a job and return a function that waits for its result, and raises as `map`."""
        self.start()
        return partial(job, item) if self._threads is None else self._threads.submit(self._call, job, item).result

    def _call(self, job: Job, item: Message) -> Message:
        process = self._idle.get()
        try:
            return process.call(job, item)
        finally:
            self._idle.put(process)


class _Process:
    """A worker process."""

    def __init__(self, variables: dict[str, str], flag: str) -> None:
        self.flag, self._stopped = flag, 0.0  # seconds
        # The worker inherits this mask: Ctrl-C in a terminal would print a traceback while it starts.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._popen = subprocess.Popen(
                import_lock.python(_START),
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def call(self, job: Job, item: Message) -> Message:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            name = f"{job.__module__}:{job.__qualname__}"
            _send(self._popen.stdin, Message({"job": name, "values": item.values}, item.buffers))
            answer = _receive(self._popen.stdout)
        except (BrokenPipeError, EOFError, ValueError):  # ValueError: the pipe was closed
            raise WorkerError(self._ending()) from None
        failure = answer.values.get("failed")
        if failure is None:
            return Message(answer.values["values"], answer.buffers)
        module, _, kind = failure["kind"].rpartition(":")
        error = getattr(importlib.import_module(module), kind) if module else _ERRORS.get(kind, RuntimeError)
        raise error(*failure["arguments"])

    def check_stopped(self, seconds: float) -> None:
        """Kill the process if it is stopped for too long; `seconds` have passed since the last check."""
        self._stopped = self._stopped + seconds if is_stopped(self._popen.pid) else 0.0
        if self._stopped >= STOPPED:
            self._popen.kill()

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # for unsent data
                pipe.close()

    def _ending(self) -> str:
        code = self._popen.wait()
        names = {number.value: number.name for number in signal.Signals}
        cause = f"by {names.get(-code, f'signal {-code}')}" if code < 0 else f"with exit code {code}"
        if self._stopped >= STOPPED:
            return f"a worker process was stopped for {STOPPED:g} s, as by SIGSTOP, and ended; run the command again"
        return (
            f"a worker process was ended {cause}, as by the system where memory runs out; run the command again, with "
            f"fewer {self.flag} if it happens again"
        )


def main() -> None:
    """Answer requests until the input ends. The main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries is not an answer
    try:
        while True:
            request = _receive(source)
            _send(target, _answer(request))
    except (EOFError, BrokenPipeError):
        # The command has ended, so no process reads an answer.
        os._exit(0)


def _answer(request: Message) -> Message:
    module, _, name = request.values["job"].partition(":")
    failure: dict[str, Any]
    try:
        job: Job = getattr(importlib.import_module(module), name)
        values, buffers = job(Message(request.values["values"], request.buffers))
        return Message({"values": values}, buffers)
    except MemoryError as error:
        failure = {"kind": "MemoryError", "arguments": [str(error)]}
    except OSError as error:
        file = None if error.filename is None else str(error.filename)
        failure = {"kind": "OSError", "arguments": [str(error)] if error.errno is None else [*error.args[:2], file]}
    except Exception as error:  # noqa: BLE001 (raised in the process of the request)
        failure = {"kind": "RuntimeError", "arguments": [traceback.format_exc()]}
        if type(error).__module__.startswith("minidl."):
            failure = {"kind": f"{type(error).__module__}:{type(error).__name__}", "arguments": [str(error)]}
    return Message({"failed": failure})


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
    """Return `size` bytes. Raises EOFError if the other end has closed the pipe."""
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
