"""Where processes meet: torch's store, asked so that signals are heard and that no wait is without end.

Calls of the store and the start of a group wait in C++, where Python hears no signal, and for a process that is stopped
without end. So a thread makes them, and the caller waits in Python.
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
_TICK, _LATE = 0.25, 5.0  # seconds: between two looks, and more than those after which C++ gives up by itself
_SHORTEST, _LONGEST = 2e-5, 5e-3  # seconds between two looks at an exchange


def answered(work: Callable[[], _T], seconds: float) -> _T:
    """What `work` gives or raises in a thread. Raises TimeoutError after so many seconds: those in which this process
    runs, as one that is stopped hears no answer."""
    done, found, raised = threading.Event(), list[_T](), list[BaseException]()

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 (raised by who waits)
            raised.append(error)
        done.set()

    threading.Thread(target=run, name="meeting", daemon=True).start()
    for _ in range(int(seconds / _TICK) + 1):
        if done.wait(_TICK):
            break
    else:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if raised:
        raise raised[0]
    return found[0]


def exchanged(call: Callable[..., Any], *arguments: Any) -> None:
    """Take part in an exchange of torch.distributed. Signals are heard meanwhile where gloo moves the tensors."""
    if any(isinstance(each, torch.Tensor) and each.is_cuda for each in arguments):
        call(*arguments)  # NCCL's only begins here, on this stream, and may be recorded for a CUDA graph
        return
    work, pause = call(*arguments, async_op=True), _SHORTEST
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    work.wait()


class Store:
    """A store of torch whose answers have a limit of `seconds`. Raises RuntimeError where none comes."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self.seconds, self._silent = store, seconds, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._answered, getattr(self._store, name))

    def part(self, name: str) -> Store:
        """The entries under a name."""
        return Store(PrefixStore(name, self._store), self.seconds)

    def start(self, backend: str, rank: int, size: int, seconds: float) -> None:
        """Start torch's group of the processes of this store."""
        work = partial(dist.init_process_group, backend, store=self._store, rank=rank, world_size=size)
        answered(partial(work, timeout=dt.timedelta(seconds=seconds)), seconds + _LATE)

    def _answered(self, call: Callable[..., _T], *arguments: Any) -> _T:
        if not self._silent:
            try:
                return answered(partial(call, *arguments), self.seconds)
            except TimeoutError:
                self._silent = True
        raise RuntimeError("the store of the processes does not answer")


def met(seconds: float) -> tuple[Store, int, int]:
    """The store of this start's processes, once all have come, the number of this one, and how many there are.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Raises DistributedError where they cannot meet in so many
    seconds.
    """
    limit = dt.timedelta(seconds=seconds)
    try:
        found, rank, size = answered(lambda: next(rendezvous("env://", timeout=limit)), seconds + _LATE)
        return _of_start(Store(found, seconds + _LATE), rank, size, seconds), rank, size
    except (RuntimeError, ValueError, TimeoutError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise DistributedError(f"the processes cannot meet at {where}: {str(error).splitlines()[0]}") from None


def _of_start(store: Store, rank: int, size: int, seconds: float) -> Store:
    """A part of the store for this start alone: torchrun keeps one store through all restarts, with what processes that
    have ended left in it. The first process names the part, to each that asks by a word of its own."""
    word = secrets.token_hex(8)
    if rank:
        store.set(f"here {rank}", word)
        store.wait([f"met {word}"], dt.timedelta(seconds=seconds))
        name = store.get(f"met {word}").decode()
        store.add(f"came {name}", 1)
        return store.part(name)
    end = time.monotonic() + seconds
    while (came := store.add(f"came {word}", 0) + 1) < size:
        for other in range(1, size):
            if store.check([f"here {other}"]):
                store.set(f"met {store.get(f'here {other}').decode()}", word)
        if time.monotonic() > end:
            raise TimeoutError(f"{came} of {size} processes have come within {seconds:g} s")
        time.sleep(_TICK / 10)
    return store.part(word)
