"""Record the launches of a thread while they run: a `Tape`, and the tensors that kernels read by addresses."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Tape:
    """A context that records this thread's launches, which run as usual; `indirect` if one reads addresses."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        self.indirect = False

    def __enter__(self) -> "Tape":
        tapes[threading.get_ident()] = self
        return self

    def __exit__(self, *_: object) -> None:
        del tapes[threading.get_ident()]


tapes: dict[int, Tape] = {}  # by thread
indirect_keepers: list[Callable[[Iterable[torch.Tensor]], None]] = []  # receive what delayed launches must keep


def current() -> Tape | None:
    """Return the tape of this thread."""
    return tapes.get(threading.get_ident())


def note_indirect(tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Declare that the last launch reads these tensors through addresses in memory, so delayed launches keep them."""
    for keep in indirect_keepers:
        keep(tensors())
    if (tape := current()) is not None:
        tape.indirect = True
