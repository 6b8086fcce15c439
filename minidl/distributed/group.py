"""The group of processes that train together: ranks, messages, and how all of them end after a failure.

torch.distributed connects them: NCCL moves tensors on GPUs, gloo tensors on the CPU and JSON messages. A process that
fails writes a note to the store; the others end when they read it, or when a collective fails because a process is
missing. One of them reports the error.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from minidl.distributed import workers
from minidl.distributed.rendezvous import exchange, join_store
from minidl.distributed.started import TIMEOUT, DistributedError, LostError, is_started
from minidl.runtime import launch

_INTERVAL = 0.25  # seconds between checks of the store
_ANSWER = 1.5  # seconds in which live processes answer
_GRACE = 5.0  # seconds in which a process ends by itself after another one has failed
_PATIENCE = 10.0  # seconds that it keeps waiting in a captured step after SIGTERM
_FAILED, _REQUEST, _SEEN, _REPORTED = "failed", "request", "seen", "reported"  # keys of the store


class Group:
    """The processes of a training: this one has number `rank` of `size`. Without `init`, it is the only one.

    `last` is the name of its last exchange, `waited` the seconds it has spent in exchanges, and `starters` identifies
    the launchers of the processes (`workers.starter`).
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None, timeout: float = TIMEOUT) -> None:
        self.rank, self.size, self.last, self.waited = rank, size, "the start", 0.0
        self.starters: list[str] = []
        self._store, self._timeout = store, timeout
        self._position = "after the start"
        self._since: float | None = None  # when it began to wait
        self._endless = False  # whether no error can end the wait
        self._left: int | None = None  # the exit code after an exchange was interrupted, as by a signal
        self._ends = threading.Event()
        if store is not None:
            self._stopped = _Stopped()
            self._watcher = threading.Thread(target=self._attend, name="watch of other processes", daemon=True)
            self._watcher.start()
            # A thread that still runs Python when the interpreter exits would abort the process.
            atexit.register(self._end_threads)

    @property
    def leads(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @contextlib.contextmanager
    def waiting(self, what: str, endless: bool = True) -> Iterator[None]:
        """A context that waits for the others in `what`; if it never ends, `_watch` ends this process.

        `endless`: nothing in it raises an error when a process is missing, such as the exchanges of a recorded step.
        """
        self.last, self._position, self._endless, self._since = what, f"in {what}", endless, time.monotonic()
        try:
            yield
            self._position = f"after {what}"
        finally:
            self._since = None

    @contextlib.contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """As `waiting`, with its time counted. Raises LostError if another process is missing."""
        begun = time.monotonic()
        try:
            with self.waiting(what, endless=False):
                yield
        except (RuntimeError, TimeoutError) as error:
            why = str(error).splitlines()[0].rpartition("] ")[2]  # gloo puts its source line first
            raise LostError(f"{what}: {why}") from None
        except BaseException:
            self._left = 130
            raise
        self.waited += time.monotonic() - begun

    def gathered(self, value: Any, what: str) -> list[Any]:
        """Return the JSON value of each process, by rank."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        with self.exchanging(what):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            exchange(dist.all_gather, sizes, torch.tensor([len(text)]))
            lengths = [int(size) for size in sizes]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            parts = [torch.zeros_like(padded) for _ in range(self.size)]
            exchange(dist.all_gather, parts, padded)
        return [json.loads(bytes(part[:length].tolist())) for part, length in zip(parts, lengths, strict=True)]

    def from_leader(self, value: Any, what: str) -> Any:
        """Return the JSON value of the process with rank 0."""
        return self.gathered(value if self.leads else None, what)[0]

    def check_same(self, **values: str) -> None:
        """Raise DistributedError with the first value and process that differ."""
        for rank, others in enumerate(self.gathered(values, "the comparison of the processes")):
            for name, value in values.items():
                if others[name] != value:
                    second, first = (rank, self.rank) if rank > self.rank else (self.rank, rank)
                    raise DistributedError(
                        f"process {second} has another {name} than process {first}: start all processes with the same "
                        "version of minidl, command and data"
                    )

    def failed(self, error: BaseException, message: str, code: int) -> tuple[str | None, int]:
        """Return the message to print before this process ends, None if another one prints it, and the exit code.

        Writes a note for the others, or reads their note if they failed first.
        """
        if self._store is None:
            return message, code
        report, text = {"rank": self.rank, "message": message, "code": code}, None
        self._store.seconds = min(self._store.seconds, _GRACE)
        try:
            if isinstance(error, LostError) and not self._store.check([_FAILED]):
                report = {"rank": None, "message": f"error: {self._lost(str(error))}", "code": 1}
            note = json.loads(self._store.compare_set(_FAILED, "", json.dumps(report)))
            # An error that rank 0 has too, or a bad command, concerns all processes.
            same = note["message"] == message and (self.leads or code == 2)
            text, code = message if same else self._text(note), note["code"]
            self._store.add(_SEEN, 1)
            if self.leads:  # the store may end with it
                first = self._store.add(_REPORTED, 1) == 1
                self._wait(lambda: self._store.add(_SEEN, 0) == self.size)
            else:
                self._wait(lambda: self._store.check([_REPORTED]))
                first = self._store.add(_REPORTED, 1) == 1
            self._left = self._left and code
            return (text if first else None), code
        except RuntimeError:  # the store ended with rank 0
            return (self._gone if isinstance(error, LostError) else message) if text is None else None, code

    @property
    def _gone(self) -> str:
        return f"error: no answer from process 0 of {self.size} (killed or stopped?), the others were in {self.last}"

    def _wait(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + _ANSWER
        while not ready() and time.monotonic() < end:
            time.sleep(_INTERVAL / 5)

    def _text(self, note: dict[str, Any]) -> str:
        rank, message = note["rank"], str(note["message"])
        if rank in (None, 0) or not message.startswith("error: "):
            return message
        return f"error: process {rank}: {message.removeprefix('error: ')}"

    def _lost(self, what: str) -> str:
        """Return a message with the missing processes, or with what each is waiting in."""
        self._store.set(_REQUEST, "1")
        self._store.set(f"at {self.rank}", self._position)
        time.sleep(_ANSWER)
        positions = {
            rank: self._store.get(f"at {rank}").decode() if self._store.check([f"at {rank}"]) else None
            for rank in range(self.size)
        }
        gone = [rank for rank, at in positions.items() if at is None]
        if gone:
            names = ", ".join(map(str, gone))
            return f"no answer from process {names} of {self.size} (killed or stopped?), the others were in {self.last}"
        listed = "; ".join(f"process {rank} {at}" for rank, at in positions.items())
        return f"the processes wait for each other: {listed} ({what})"

    def _attend(self) -> None:
        """Watch until Python exits; then end gloo's threads, which release tensors some time after an exchange. On GPUs
        they stay, because NCCL, in the same group, would wait for recorded steps and missing processes."""
        self._watch()
        self._ends.wait()
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()

    def _watch(self) -> None:
        """Report this process's position on request, and end it after another one has failed, or when it waits too long
        in an exchange without time-out: in a captured step, where signals are not handled either."""
        answered, stopped = False, math.inf
        with contextlib.suppress(RuntimeError):  # the store has ended
            while not self._store.check([_FAILED]):
                if not answered and self._store.check([_REQUEST]):
                    self._store.set(f"at {self.rank}", self._position)
                    answered = True
                since = self._since
                if since is not None and time.monotonic() > since + self._timeout + 2 * _GRACE:
                    text, code = self.failed(LostError(f"{self.last}: no end after {self._timeout:g} s"), "", 1)
                    os.write(2, f"{text}\n".encode() if text else b"")
                    os._exit(code)
                if self._stopped():
                    stopped = time.monotonic()
                # torchrun sends SIGTERM when another process has died, and SIGKILL half a minute later.
                if since is not None and self._endless and time.monotonic() > max(stopped, since) + _PATIENCE:
                    os.write(2, f"error: process {self.rank}: stopped while it waited in {self.last}\n".encode())
                    os._exit(130)
                if self._ends.wait(_INTERVAL):
                    return
            note = json.loads(self._store.get(_FAILED))
            if self._ends.wait(_GRACE):
                return
            # This process still waits in an exchange that no error ends.
            if self.leads and self._store.add(_REPORTED, 1) == 1:
                os.write(2, (self._text(note) + "\n").encode())
            os._exit(note["code"])
        # The store ended with rank 0, or does not answer.
        while not self._ends.wait(_GRACE):
            since = self._since
            if since is not None and time.monotonic() > since + _GRACE:
                os.write(2, f"{self._gone}\n".encode())
                os._exit(1)

    def _end_threads(self) -> None:
        if self._left is not None:  # gloo would wait for the interrupted exchange
            sys.stdout.flush()
            os._exit(self._left)
        self._ends.set()
        self._watcher.join(_GRACE)  # does not wait longer for an open exchange


class _Stopped:
    """Return whether SIGTERM or SIGINT arrived since the last call, even while the main thread is in C++."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(writing, False)
        with contextlib.suppress(ValueError):  # not the main thread
            before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            if before != -1:  # an event loop uses it
                signal.set_wakeup_fd(before)

    def __call__(self) -> bool:
        try:
            return not {signal.SIGINT, signal.SIGTERM}.isdisjoint(os.read(self._reading, 1024))
        except BlockingIOError:
            return False


_alone = Group()
_joined: list[Group] = []


def current() -> Group:
    """Return the group of this process."""
    return _joined[-1] if _joined else _alone


def init(timeout: float = TIMEOUT) -> Group:
    """Join the processes that torchrun has started; without torchrun, the group has this process only.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Each process uses the GPU of its local rank.
    `timeout` is the number of seconds to wait for the others. Raises DistributedError if they do not meet or a host has
    fewer GPUs than processes.
    """
    if not is_started() or _joined:
        return current()
    if message := workers.missing_address():
        raise DistributedError(message)
    store, rank, size = join_store(timeout)
    _joined.append(Group(rank, size, store.part("minidl"), timeout))
    backend = "gloo" if launch.ON_CPU else _on_gpu()
    with current().exchanging("the start"):
        store.start(backend, rank, size, timeout)
    return current()


def _on_gpu() -> str:
    """Select this process's GPU, and return the backends. Raises DistributedError."""
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count == 1:
        local = 0  # the only visible one; NCCL refuses a GPU shared by processes
    elif local >= count:
        raise DistributedError(f"GPU {local} of this process does not exist: this host has {count}")
    if not dist.is_nccl_available():
        raise DistributedError("this torch has no NCCL, which moves the tensors of GPUs")
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"
