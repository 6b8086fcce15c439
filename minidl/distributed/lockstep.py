"""The shards of a process in step with each other, for batch norms whose statistics are those of the whole batch.

Each shard runs in a thread of its own, one at a time and in their order: until it meets the others at a batch norm, on
the way to the loss or back. Once all of this process are there, their rows are exchanged with those of the other
processes, and each goes on with the rows of all. So a shard is computed with the launches that it has anywhere.

Threads are what Python can stop in the middle of a call. A thread takes over what belongs to the one that waits for it:
modes, the place of its random numbers, device and stream. What all threads share is exchanged as they take turns. All
launches go to one stream, which may be recorded for a CUDA graph whichever thread makes them.
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
from minidl.distributed.group import current
from minidl.distributed.parts import Shards
from minidl.distributed.room import UnderWay
from minidl.distributed.sums import gathered
from minidl.ops.sync_batchnorm import Part, joins
from minidl.runtime import launch
from minidl.tensors import Tensor

T = TypeVar("T")
_WHAT = "the sums of a batch norm"


class Turns:
    """The turns of a process's shards. Each has for itself what all threads share: the next stream of random numbers,
    the gradients of `trained` so far, and the data of `buffers`, for which its own of `copies` stand in."""

    def __init__(
        self, step: UnderWay, trained: Sequence[Tensor], buffers: Sequence[Tensor], copies: Sequence[Any]
    ) -> None:
        self._step, self._trained, self._buffers, self._copies = step, trained, buffers, copies
        self._streams = [random.get_state()["stream"]] * len(copies)
        self._grads: list[list[Any]] = [[None] * len(trained) for _ in copies]

    @contextlib.contextmanager
    def turn(self, place: int) -> Iterator[None]:
        """A block in which the shard at a place goes on."""
        random.skip(self._streams[place] - random.get_state()["stream"])
        for parameter, grad in zip(self._trained, self._grads[place], strict=True):
            parameter._grad = grad
        for buffer, own in zip(self._buffers, self._copies[place], strict=True):
            buffer.data = own
        with self._step.shard(place):
            yield
        self._streams[place] = random.get_state()["stream"]
        self._grads[place] = [parameter._grad for parameter in self._trained]


def in_turn(turns: Turns, works: Sequence[Callable[[], T]]) -> Iterator[tuple[int, T]]:
    """The places of this process's shards and what their works give, one after the other, each within its turn."""
    for place, work in enumerate(works):
        with turns.turn(place):
            yield place, work()


def lacks(of: Shards, rows: int) -> bool:
    """Whether a process has no example of so many rows; it is told what the others exchange."""
    return of.size > 1 and of.all[-1].start >= rows


def in_step(
    turns: Turns, works: Sequence[Callable[[], T]], of: Shards, rows: int, shares: torch.Tensor
) -> Iterator[tuple[int, T]]:
    """As `in_turn`, of works that wait for each other, of a batch of which each of all shards has a share.

    Raises what a work raises, when all have ended, and RuntimeError for works that meet at different batch norms.
    """
    settings = _as_here()

    def take_over(own: int, meet: Callable[[torch.Tensor], torch.Tensor]) -> None:
        settings()
        joins(Part(own, rows, shares, meet))

    shards = [_Shard(work, len(own), take_over) for work, own in zip(works, of.rows(rows), strict=False)]
    told = current().told if lacks(of, rows) and launch.runs() else None
    given = None
    try:
        while works or told:
            met: list[torch.Tensor | None] = []
            for place, shard in enumerate(shards):
                with turns.turn(place):
                    met.append(shard.go_on(given))
            handed = _alike(met)
            if told:
                handed = told(handed, _WHAT)
            if handed is None:
                break
            width, dtype = handed
            table = torch.zeros(len(of.own), width, dtype=getattr(torch, dtype), device=shares.device)
            for row, own in zip(table, met, strict=False):
                row.copy_(own)
            given = gathered(table, of, _WHAT)
    finally:
        for shard in shards:
            shard.end()
    yield from in_turn(turns, [shard.result for shard in shards])


def _alike(met: Sequence[torch.Tensor | None]) -> tuple[int, str] | None:
    """The width and dtype of the rows that were handed in, None where all shards have ended."""
    found = {None if row is None else (len(row), str(row.dtype).removeprefix("torch.")) for row in met}
    if len(found) > 1:
        raise RuntimeError(
            "the shards of a batch meet at different batch norms, or one ends where others wait: every shard must "
            "take the same way through the model"
        )
    return found.pop() if found else None


class _EndedError(BaseException):
    """Raised in a shard that waits, when another one has failed."""


class _Shard(Generic[T]):
    """A work in a thread of its own, which runs while `go_on` waits."""

    def __init__(self, work: Callable[[], T], rows: int, take_over: Callable[..., None]) -> None:
        self._work, self._take_over, self._rows = work, take_over, rows
        self._in: SimpleQueue[Any] = SimpleQueue()
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._found: list[T] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go_on(self, given: torch.Tensor | None) -> Any:
        """Run the work with the rows of all up to where it hands in the next one; None once it has ended."""
        self._in.put(given)
        met = self._out.get()
        if isinstance(met, BaseException):
            raise met
        return met

    def end(self) -> None:
        """Let the thread end, wherever it is."""
        self._in.put(_EndedError())
        self._thread.join()

    def result(self) -> T:
        """What the work has given."""
        return self._found[0]

    def _next(self) -> Any:
        given = self._in.get()
        if isinstance(given, _EndedError):
            raise given
        return given

    def _meet(self, row: torch.Tensor) -> Any:
        self._out.put(row)
        return self._next()

    def _run(self) -> None:
        try:
            self._next()
            self._take_over(self._rows, self._meet)
            self._found.append(self._work())
            self._out.put(None)
        except _EndedError:
            pass
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            self._out.put(error)


def _as_here() -> Callable[[], None]:
    """What gives another thread, until it ends, what this one has set for itself."""
    settings, recorded = thread_settings.take_over(), torch.is_grad_enabled()
    functions, operations = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def take_over() -> None:
        settings()
        torch.set_grad_enabled(recorded)
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
        for mode in functions:
            push_function_mode(mode)
        for mode in operations:
            _push_mode(mode)

    return take_over
