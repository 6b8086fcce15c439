"""The processes that train together: who they are, what their hosts tell each other, and how they end together.

torch.distributed starts and connects them: NCCL moves tensors of GPUs, gloo those of the CPU and messages, which are
JSON. A process that fails leaves a note in the store they have met at; the others end when they read it, or when a
collective fails since a process is gone. One of them says why.
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
from minidl.distributed.meeting import exchanged, met
from minidl.distributed.started import TIMEOUT, DistributedError, LostError, is_started
from minidl.runtime import launch

_EACH = 0.25  # seconds between looks at the store
_ANSWER = 1.5  # seconds in which processes that are there say so
_GRACE = 5.0  # seconds in which a process ends by itself after another one has failed
_PATIENCE = 10.0  # seconds that it waits on in a captured step after SIGTERM
_FAILED, _ASKED, _SEEN, _TOLD = "failed", "asked", "seen", "told"


class Group:
    """The processes of a training: `size` of them, this one of number `rank`. Without `init`, it is alone.

    `last` is the name of the last exchange that it took part in, `waited` the seconds that it has spent in exchanges,
    `starters` what has started the processes (`workers.starter`).
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None, timeout: float = TIMEOUT) -> None:
        self.rank, self.size, self.last, self.waited = rank, size, "the start", 0.0
        self.starters: list[str] = []
        self._store, self._timeout = store, timeout
        self._place = "after the start"
        self._since: float | None = None  # when it began to wait
        self._endless = False  # whether no error ends the wait
        self._left: int | None = None  # the exit code once an exchange was left, as by a signal
        self._ends = threading.Event()
        if store is not None:
            self._stopped = _Stopped()
            self._watcher = threading.Thread(target=self._attend, name="watch of other processes", daemon=True)
            self._watcher.start()
            # A thread that needs Python when Python has ended is unwound through C++, which aborts the process.
            atexit.register(self._end_threads)

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and shows."""
        return self.rank == 0

    @contextlib.contextmanager
    def waiting(self, what: str, endless: bool = True) -> Iterator[None]:
        """A block that waits for the others, in `what`. Where it does not end, this process does, see `_watch`.

        `endless` says that nothing raises an error in the block when another one is gone: a recorded step has its
        exchanges inside.
        """
        self.last, self._place, self._endless, self._since = what, f"in {what}", endless, time.monotonic()
        try:
            yield
            self._place = f"after {what}"
        finally:
            self._since = None

    @contextlib.contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """`waiting`, counted as such. Raises LostError when one of the others is gone."""
        begun = time.monotonic()
        try:
            with self.waiting(what, endless=False):
                yield
        except (RuntimeError, TimeoutError) as error:
            why = str(error).splitlines()[0].rpartition("] ")[2]  # gloo begins with the line of its source
            raise LostError(f"{what}: {why}") from None
        except BaseException:
            self._left = 130
            raise
        self.waited += time.monotonic() - begun

    def gathered(self, value: Any, what: str) -> list[Any]:
        """The JSON value of each process, by rank."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        with self.exchanging(what):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            exchanged(dist.all_gather, sizes, torch.tensor([len(text)]))
            lengths = [int(size) for size in sizes]
            own = torch.zeros(max(lengths), dtype=torch.uint8)
            own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            parts = [torch.zeros_like(own) for _ in range(self.size)]
            exchanged(dist.all_gather, parts, own)
        return [json.loads(bytes(part[:length].tolist())) for part, length in zip(parts, lengths, strict=True)]

    def told(self, value: Any, what: str) -> Any:
        """The JSON value of the leading process."""
        return self.gathered(value if self.leads else None, what)[0]

    def check_same(self, **values: str) -> None:
        """Raises DistributedError, naming the first thing and the first process, where processes differ."""
        for rank, others in enumerate(self.gathered(values, "the comparison of the processes")):
            for name, value in values.items():
                if others[name] != value:
                    there, here = (rank, self.rank) if rank > self.rank else (self.rank, rank)
                    raise DistributedError(
                        f"process {there} has another {name} than process {here}: start all processes with the same "
                        "version of minidl, command and data"
                    )

    def failed(self, error: BaseException, message: str, code: int) -> tuple[str | None, int]:
        """What this process is to say before it ends with an error, None if another one says it, and its exit code.

        Leaves a note for the others, or reads theirs where they failed first.
        """
        if self._store is None:
            return message, code
        own, text = {"rank": self.rank, "message": message, "code": code}, None
        self._store.seconds = min(self._store.seconds, _GRACE)
        try:
            if isinstance(error, LostError) and not self._store.check([_FAILED]):
                own = {"rank": None, "message": f"error: {self._lost(str(error))}", "code": 1}
            note = json.loads(self._store.compare_set(_FAILED, "", json.dumps(own)))
            # What the first process finds as well is of all, and so is a bad command.
            same = note["message"] == message and (self.leads or code == 2)
            text, code = message if same else self._text(note), note["code"]
            self._store.add(_SEEN, 1)
            if self.leads:  # the store may go with it
                first = self._store.add(_TOLD, 1) == 1
                self._wait(lambda: self._store.add(_SEEN, 0) == self.size)
            else:
                self._wait(lambda: self._store.check([_TOLD]))
                first = self._store.add(_TOLD, 1) == 1
            self._left = self._left and code
            return (text if first else None), code
        except RuntimeError:  # the store has gone with the first process
            return (self._gone if isinstance(error, LostError) else message) if text is None else None, code

    @property
    def _gone(self) -> str:
        return f"error: no answer from process 0 of {self.size} (killed or stopped?), the others were in {self.last}"

    def _wait(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + _ANSWER
        while not ready() and time.monotonic() < end:
            time.sleep(_EACH / 5)

    def _text(self, note: dict[str, Any]) -> str:
        rank, message = note["rank"], str(note["message"])
        if rank in (None, 0) or not message.startswith("error: "):
            return message
        return f"error: process {rank}: {message.removeprefix('error: ')}"

    def _lost(self, what: str) -> str:
        """Which processes are gone, or where they are."""
        self._store.set(_ASKED, "1")
        self._store.set(f"at {self.rank}", self._place)
        time.sleep(_ANSWER)
        places = {
            rank: self._store.get(f"at {rank}").decode() if self._store.check([f"at {rank}"]) else None
            for rank in range(self.size)
        }
        gone = [rank for rank, at in places.items() if at is None]
        if gone:
            names = ", ".join(map(str, gone))
            return f"no answer from process {names} of {self.size} (killed or stopped?), the others were in {self.last}"
        there = "; ".join(f"process {rank} {at}" for rank, at in places.items())
        return f"the processes wait for each other: {there} ({what})"

    def _attend(self) -> None:
        """Watches until Python ends; then ends gloo's threads, which let go of tensors some time after an exchange has
        ended or failed. On GPUs they stay: NCCL, of the same group, would wait for recorded steps and for processes
        that are gone."""
        self._watch()
        self._ends.wait()
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()

    def _watch(self) -> None:
        """Answers who asks where this process is, and ends it after another one has failed, or when it waits in an
        exchange that no time-out ends: that of a captured step, in which no signal is heard either."""
        answered, stopped = False, math.inf
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._store.check([_FAILED]):
                if not answered and self._store.check([_ASKED]):
                    self._store.set(f"at {self.rank}", self._place)
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
                if self._ends.wait(_EACH):
                    return
            note = json.loads(self._store.get(_FAILED))
            if self._ends.wait(_GRACE):
                return
            # Still here: it waits in an exchange that no error ends.
            if self.leads and self._store.add(_TOLD, 1) == 1:
                os.write(2, (self._text(note) + "\n").encode())
            os._exit(note["code"])
        # The store has gone with the first process, or does not answer.
        while not self._ends.wait(_GRACE):
            since = self._since
            if since is not None and time.monotonic() > since + _GRACE:
                os.write(2, f"{self._gone}\n".encode())
                os._exit(1)

    def _end_threads(self) -> None:
        if self._left is not None:  # gloo would wait for the end of what was left
            sys.stdout.flush()
            os._exit(self._left)
        self._ends.set()
        self._watcher.join(_GRACE)  # an exchange that is still open is waited for no longer


class _Stopped:
    """Whether SIGTERM or SIGINT has come since it was last called, also while the main thread does not run Python."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(writing, False)
        with contextlib.suppress(ValueError):  # not the main thread
            before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            if before != -1:  # a loop of events has it
                signal.set_wakeup_fd(before)

    def __call__(self) -> bool:
        try:
            return not {signal.SIGINT, signal.SIGTERM}.isdisjoint(os.read(self._reading, 1024))
        except BlockingIOError:
            return False


_alone = Group()
_joined: list[Group] = []


def current() -> Group:
    """The group of this process."""
    return _joined[-1] if _joined else _alone


def init(timeout: float = TIMEOUT) -> Group:
    """Join the processes that torchrun has started, once; a process that it has not started stays alone.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. On GPUs, each process uses the one of its number
    on its host. `timeout` is how many seconds a process waits for others. Raises DistributedError when they cannot meet
    or a host has fewer GPUs than processes.
    """
    if not is_started() or _joined:
        return current()
    if lacking := workers.nowhere_to_meet():
        raise DistributedError(lacking)
    store, rank, size = met(timeout)
    _joined.append(Group(rank, size, store.part("minidl"), timeout))
    backend = "gloo" if launch.INTERPRETED else _on_gpu()
    with current().exchanging("the start"):
        store.start(backend, rank, size, timeout)
    return current()


def _on_gpu() -> str:
    """The backends of a process that uses a GPU, which is chosen. Raises DistributedError."""
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count == 1:
        local = 0  # the one that this process is shown; NCCL refuses one that several have
    elif local >= count:
        raise DistributedError(f"there is no GPU {local} for this process: this host has {count}")
    if not dist.is_nccl_available():
        raise DistributedError("this torch has no NCCL, which moves the tensors of GPUs")
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"
