"""The process's source of random numbers: a seed, and the number of the next stream.

Each use of random numbers without a seed takes the next stream (`key`). Numbers depend only on the seed, the stream and
the position in the tensor, so restoring a state repeats everything after it.

A CUDA graph replays its kernels with the recorded arguments. While a step is recorded, stream numbers are therefore
read from the device (`numbered_by`), so that the graph draws the same numbers as the step itself.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from minidl.common import locks, thread_settings

if TYPE_CHECKING:
    import torch

    from minidl.kernels.random import DeviceStream

_lock = locks.lock()
_state = {"seed": 0, "stream": 0}
# Per thread: `key`, the device tensor that numbers streams; `first`, its first stream; `forked`, a copied state.
_thread = thread_settings.settings()


def manual_seed(seed: int) -> torch.Generator:
    """Restart from stream 0 of `seed`, seed torch, and return its generator, which loaders use to shuffle.

    Raises TypeError unless the seed is an integer, ValueError outside [0, 2^63).
    """
    import torch

    set_state({"seed": seed, "stream": 0})
    return torch.manual_seed(_state["seed"])


def get_state() -> dict[str, int]:
    """Return {"seed", "stream"} for `set_state`."""
    with _lock:
        return dict(_current())


def _current() -> dict[str, int]:
    return getattr(_thread, "forked", None) or _state


def set_state(state: Mapping[str, int]) -> None:
    """Continue from a state of `get_state`.

    Raises ValueError for other names, TypeError for values that are not integers, ValueError outside [0, 2^63), and
    RuntimeError in a captured step, which would otherwise begin with the same numbers at every call.
    """
    if getattr(_thread, "key", None) is not None:
        raise RuntimeError("the random state cannot be set inside a captured step; set it outside the step")
    if set(state) != set(_state):
        raise ValueError(f"the random state has {sorted(state)}, expected ['seed', 'stream']")
    checked = {name: _checked(name, value) for name, value in state.items()}
    with _lock:
        _current().update(checked)


def key(seed: int | None = None) -> tuple[int, int | DeviceStream]:
    """Return (seed, stream) for one tensor of random numbers: stream 0 of `seed`, else the next stream.

    Raises the errors of `manual_seed`.
    """
    if seed is not None:
        return _checked("seed", seed), 0
    with _lock:
        state = _current()
        seed, stream = state["seed"], state["stream"]
        state["stream"] += 1
    on_device = getattr(_thread, "key", None)
    if on_device is None:
        return seed, stream
    from minidl.kernels.random import DeviceStream

    return seed, DeviceStream(on_device, stream - _thread.first)


def skip(count: int) -> dict[str, int]:
    """Advance by `count` streams, which a graph has used. Returns the state before."""
    with _lock:
        before = get_state()
        _current()["stream"] += count
        return before


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """A context in which this thread draws from a copy of the state, which does not change."""
    before, _thread.forked = getattr(_thread, "forked", None), get_state()
    try:
        yield
    finally:
        _thread.forked = before


@contextlib.contextmanager
def numbered_by(key: torch.Tensor, first: int | None = None) -> Iterator[None]:
    """A context in which this thread's streams are numbered from `key`: int64 [2] on the device, seed and next stream.

    Kernels read `key` when they run. With the state in `key`, whose stream is `first` (default: that of now), they draw
    the same numbers as without it.
    """
    _thread.key, _thread.first = key, get_state()["stream"] if first is None else first
    try:
        yield
    finally:
        _thread.key = None


@contextlib.contextmanager
def rows(first: int, count: int) -> Iterator[None]:
    """A context in which this thread works on `count` rows of a batch, from row `first` on: tensors with as many
    rows, or a multiple, get the numbers of these rows of the complete batch."""
    before, _thread.rows = getattr(_thread, "rows", None), (first, count)
    try:
        yield
    finally:
        _thread.rows = before


def in_part() -> bool:
    """Return whether this thread works on part of a batch, see `rows`."""
    return getattr(_thread, "rows", None) is not None


def first_index(shape: Sequence[int]) -> int:
    """Return the number of elements of the complete batch before a tensor of this shape, see `rows`; 0 outside."""
    first, count = getattr(_thread, "rows", None) or (0, 1)
    return first * (math.prod(shape) // count) if shape and shape[0] % count == 0 else 0


def _checked(name: str, value: int) -> int:
    number = operator.index(value)
    if not 0 <= number < 2**63:
        raise ValueError(f"{name} is {value}, expected an integer from 0 to 2^63 - 1")
    return number
