"""Run the shards of a process in lockstep, for batch norms with statistics over the complete batch.

Each shard runs in its own thread, one at a time and in order, until it reaches a batch norm, in the forward or the
backward pass. When all shards of this process have reached it, their sums are exchanged with the other processes, and
each shard continues with the sums of all. So a shard has the same launches on any number of processes.

Threads are used because Python cannot suspend a call otherwise. A shard's thread takes over the state of the waiting
thread: modes, random state, device and stream. State shared by all threads is swapped at each turn. All launches go to
one stream, which may be recorded for a CUDA graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode

from minidl import random
from minidl.common import thread_settings
from minidl.distributed.buckets import ShardedStep
from minidl.distributed.group import current
from minidl.distributed.parts import Shards
from minidl.distributed.sums import gathered
from minidl.ops.sync_batchnorm import Part, joins
from minidl.runtime import launch
from minidl.tensors import Tensor

T = TypeVar("T")
_WHAT = "the sums of a batch norm"


class Turns:
    """Switch between a process's shards, each with its own version of shared state: the next random stream, the
    gradients of `trained`, and the data of `buffers`, replaced by one of `copies`."""

    def __init__(
        self, step: ShardedStep, trained: Sequence[Tensor], buffers: Sequence[Tensor], copies: Sequence[Any]
    ) -> None:
        self._step, self._trained, self._buffers, self._copies = step, trained, buffers, copies
        self._streams = [random.get_state()["stream"]] * len(copies)
        self._grads: list[list[Any]] = [[None] * len(trained) for _ in copies]

    @contextlib.contextmanager
    def turn(self, shard: int) -> Iterator[None]:
        """A context in which a shard, by index, runs."""
        random.skip(self._streams[shard] - random.get_state()["stream"])
        for parameter, grad in zip(self._trained, self._grads[shard], strict=True):
            parameter._grad = grad
        for buffer, copy in zip(self._buffers, self._copies[shard], strict=True):
            buffer.data = copy
        with self._step.shard(shard):
            yield
        self._streams[shard] = random.get_state()["stream"]
        self._grads[shard] = [parameter._grad for parameter in self._trained]


def in_turn(turns: Turns, works: Sequence[Callable[[], T]]) -> Iterator[tuple[int, T]]:
    """Yield the index of each shard and the result of its work, one after the other, each within its turn."""
    for shard, work in enumerate(works):
        with turns.turn(shard):
            yield shard, work()


def has_idle_process(of: Shards, rows: int) -> bool:
    """Return whether a process has no example of a batch; rank 0 tells it the shape of exchanged rows."""
    return of.size > 1 and of.all[-1].start >= rows


def in_step(
    turns: Turns, works: Sequence[Callable[[], T]], of: Shards, rows: int, shares: torch.Tensor
) -> Iterator[tuple[int, T]]:
    """Run works that wait for each other at batch norms, and yield as `in_turn` does.

    shares: the share of the batch that each shard of all processes has. Raises the exception of a work once all have
    ended, and RuntimeError for works that wait at different batch norms.
    """
    settings = _state_of_this_thread()

    def take_over(count: int, meet: Callable[[torch.Tensor], torch.Tensor]) -> None:
        settings()
        joins(Part(count, rows, shares, meet))

    shards = [_Shard(work, len(part), take_over) for work, part in zip(works, of.rows(rows), strict=False)]
    agree = current().from_leader if has_idle_process(of, rows) and launch.runs() else None
    table = None
    try:
        while works or agree:
            sums: list[torch.Tensor | None] = []
            for index, shard in enumerate(shards):
                with turns.turn(index):
                    sums.append(shard.resume(table))
            kind = _common_kind(sums)
            if agree:
                kind = agree(kind, _WHAT)
            if kind is None:
                break
            width, dtype = kind
            rows_ = torch.zeros(len(of.local), width, dtype=getattr(torch, dtype), device=shares.device)
            for row, sum_ in zip(rows_, sums, strict=False):
                row.copy_(sum_)
            table = gathered(rows_, of, _WHAT)
    finally:
        for shard in shards:
            shard.end()
    yield from in_turn(turns, [shard.result for shard in shards])


def _common_kind(sums: Sequence[torch.Tensor | None]) -> tuple[int, str] | None:
    """Return the width and dtype of the shards' rows, None if all shards have ended."""
    kinds = {None if row is None else (len(row), str(row.dtype).removeprefix("torch.")) for row in sums}
    if len(kinds) > 1:
        raise RuntimeError(
            "the shards of a batch wait at different batch norms, or one ended while others wait: every shard must "
            "run the same layers of the model"
        )
    return kinds.pop() if kinds else None


class _EndedError(BaseException):
    """Raised in a waiting shard when another one has failed."""


class _Shard(Generic[T]):
    """Work in a thread that runs only while `resume` waits."""

    def __init__(self, work: Callable[[], T], rows: int, take_over: Callable[..., None]) -> None:
        self._work, self._take_over, self._rows = work, take_over, rows
        self._in: SimpleQueue[Any] = SimpleQueue()
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._results: list[T] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self, table: torch.Tensor | None) -> Any:
        """Continue the work with the rows of all shards, and return its next row, None when it has ended."""
        self._in.put(table)
        row = self._out.get()
        if isinstance(row, BaseException):
            raise row
        return row

    def end(self) -> None:
        """End the thread at any point."""
        self._in.put(_EndedError())
        self._thread.join()

    def result(self) -> T:
        """Return the result of the work."""
        return self._results[0]

    def _next(self) -> Any:
        table = self._in.get()
        if isinstance(table, _EndedError):
            raise table
        return table

    def _meet(self, row: torch.Tensor) -> Any:
        self._out.put(row)
        return self._next()

    def _run(self) -> None:
        try:
            self._next()
            self._take_over(self._rows, self._meet)
            self._results.append(self._work())
            self._out.put(None)
        except _EndedError:
            pass
        except BaseException as error:  # noqa: BLE001 (raised by `resume`)
            self._out.put(error)


def _state_of_this_thread() -> Callable[[], None]:
    """Return a function that gives its thread the settings, modes, device and stream of this one."""
    settings, grad_enabled = thread_settings.take_over(), torch.is_grad_enabled()
    functions, operations = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def take_over() -> None:
        settings()
        torch.set_grad_enabled(grad_enabled)
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
        for mode in functions:
            push_function_mode(mode)
        for mode in operations:
            _push_mode(mode)

    return take_over
