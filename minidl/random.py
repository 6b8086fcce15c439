"""The process's source of random numbers: a seed, and the number of the next stream.

Whatever needs random numbers and was given no seed of its own takes the next stream (`key`). Numbers depend on the
seed, the stream and the place in the tensor alone, so a state that is set again repeats everything after it.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping

_lock = threading.Lock()
_state = {"seed": 0, "stream": 0}


def manual_seed(seed: int) -> None:
    """Start again from stream 0 of `seed`. Raises TypeError unless it is an integer, ValueError outside [0, 2^63)."""
    set_state({"seed": seed, "stream": 0})


def get_state() -> dict[str, int]:
    """{"seed", "stream"}: what `set_state` takes."""
    with _lock:
        return dict(_state)


def set_state(state: Mapping[str, int]) -> None:
    """Go on from a state that `get_state` gave.

    Raises ValueError for other names, TypeError for values that are not integers, ValueError outside [0, 2^63).
    """
    if set(state) != set(_state):
        raise ValueError(f"the state of random numbers has {sorted(state)}, expected ['seed', 'stream']")
    checked = {name: _checked(name, value) for name, value in state.items()}
    with _lock:
        _state.update(checked)


def next_stream() -> int:
    """The number of a stream that nothing has used since the seed was set."""
    return key()[1]


def key(seed: int | None = None) -> tuple[int, int]:
    """(seed, stream) of one tensor of random numbers: stream 0 of a seed that is given, else the next stream.

    Raises as `manual_seed`.
    """
    if seed is not None:
        return _checked("seed", seed), 0
    with _lock:
        stream = _state["stream"]
        _state["stream"] += 1
        return _state["seed"], stream


def _checked(name: str, value: int) -> int:
    number = operator.index(value)
    if not 0 <= number < 2**63:
        raise ValueError(f"{name} is {value}, expected an integer from 0 to 2^63 - 1")
    return number
