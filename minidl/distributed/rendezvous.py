"""Rendezvous of processes through torch's store, with signals handled and every wait limited.

Calls of the store and the start of a process group block in C++, where Python handles no signals, and wait forever for
a stopped process. So a thread makes these calls, and the caller waits in Python.
"""

from __future__ import annotations

import datetime as dt
import os
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from minidl.distributed.started import DistributedError

_T = TypeVar("_T")
_TICK, _LATE = 0.25, 5.0  # seconds: polling interval, and what a wait may take beyond the time-out of C++
_SHORTEST, _LONGEST = 2e-5, 5e-3  # seconds, polling intervals of an exchange


def call_within(work: Callable[[], _T], seconds: float) -> _T:
    """Call `work` in a thread, and return its result or raise its exception. Raises TimeoutError after so many seconds,
    not counting time in which this process is stopped."""
    done, results, errors = threading.Event(), list[_T](), list[BaseException]()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 (raised in the calling thread)
            errors.append(error)
        done.set()

    threading.Thread(target=run, name="meeting", daemon=True).start()
    for _ in range(int(seconds / _TICK) + 1):
        if done.wait(_TICK):
            break
    else:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


def exchange(call: Callable[..., Any], *arguments: Any) -> None:
    """Run a collective of torch.distributed; with gloo, signals are handled while it waits."""
    if any(isinstance(each, torch.Tensor) and each.is_cuda for each in arguments):
        call(*arguments)  # NCCL only queues it on this stream, which may be recorded for a CUDA graph
        return
    work, pause = call(*arguments, async_op=True), _SHORTEST
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    work.wait()


class Store:
    """A store of torch with a time-out of `seconds` for each answer. Raises RuntimeError without an answer."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self.seconds, self._silent = store, seconds, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self._store, name))

    def part(self, name: str) -> Store:
        """Return the entries with a prefix."""
        return Store(PrefixStore(name, self._store), self.seconds)

    def start(self, backend: str, rank: int, size: int, seconds: float) -> None:
        """Start torch's process group with this store."""
        work = partial(dist.init_process_group, backend, store=self._store, rank=rank, world_size=size)
        call_within(partial(work, timeout=dt.timedelta(seconds=seconds)), seconds + _LATE)

    def _call(self, call: Callable[..., _T], *arguments: Any) -> _T:
        if not self._silent:
            try:
                return call_within(partial(call, *arguments), self.seconds)
            except TimeoutError:
                self._silent = True
        raise RuntimeError("the store of the processes does not answer")


def join_store(seconds: float) -> tuple[Store, int, int]:
    """Wait for all processes, and return their store, the rank of this one, and their number.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Raises DistributedError if they do not meet in so many seconds.
    """
    limit = dt.timedelta(seconds=seconds)
    try:
        store, rank, size = call_within(lambda: next(rendezvous("env://", timeout=limit)), seconds + _LATE)
        return _of_this_start(Store(store, seconds + _LATE), rank, size, seconds), rank, size
    except (RuntimeError, ValueError, TimeoutError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise DistributedError(f"the processes cannot meet at {where}: {str(error).splitlines()[0]}") from None


def _of_this_start(store: Store, rank: int, size: int, seconds: float) -> Store:
    """Return a part of the store for this start: torchrun keeps one store, with old entries, through all restarts. The
    first process chooses the name of the part, and sends it to each process under that one's random word."""
    word = secrets.token_hex(8)
    if rank:
        store.set(f"here {rank}", word)
        store.wait([f"met {word}"], dt.timedelta(seconds=seconds))
        name = store.get(f"met {word}").decode()
        store.add(f"came {name}", 1)
        return store.part(name)
    end = time.monotonic() + seconds
    while (arrived := store.add(f"came {word}", 0) + 1) < size:
        for other in range(1, size):
            if store.check([f"here {other}"]):
                store.set(f"met {store.get(f'here {other}').decode()}", word)
        if time.monotonic() > end:
            raise TimeoutError(f"{arrived} of {size} processes have come within {seconds:g} s")
        time.sleep(_TICK / 10)
    return store.part(word)
