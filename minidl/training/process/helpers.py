"""What a command has done elsewhere meanwhile: imports or readings in a thread, and processes that have imported the
libraries of baselines and plots when these are needed. torch and each of those libraries take a second or more."""

from __future__ import annotations

import contextlib
import importlib
import io
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from minidl.data.workers import Message, WorkerError, Workers

_PROCESSES = 3  # two linear machines learn at a time, and a command has three plots
_LIBRARIES = ["sklearn.linear_model", "sklearn.svm", "scipy.sparse", "matplotlib.figure"]
_ready: list[Workers] = []
_T = TypeVar("_T")


@contextlib.contextmanager
def ready(count: int) -> Iterator[None]:
    """A block in which `at_hand()` has up to `count` processes; they import libraries from its beginning on."""
    with Workers(min(_PROCESSES, count)) as workers:
        with contextlib.suppress(WorkerError):  # the command does the work itself
            workers.start()
            for _ in range(workers.count):
                workers.later(imported, Message({"modules": _LIBRARIES}))
            _ready.append(workers)
        try:
            yield
        finally:
            _ready.clear()


def at_hand() -> Workers | None:
    """The processes of the block under way."""
    return _ready[-1] if _ready else None


def imported(message: Message) -> Message:
    """A worker's job: import modules, those that are there, and draw: a first plot takes as long as ten later ones."""
    for module in message.values["modules"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with contextlib.suppress(Exception):  # of the plots themselves it is told
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        figure.add_subplot().set_title("a")
        figure.savefig(io.BytesIO(), format="png")
    return Message({})


def in_thread(work: Callable[[], _T]) -> Callable[[], _T]:
    """Begin `work` in a thread; a function that waits for its end, and returns or raises what it did."""
    found: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 (raised by who waits)
            raised.append(error)

    # A daemon: a command that ends early does not wait for an import.
    thread = threading.Thread(target=run, name="meanwhile", daemon=True)
    thread.start()

    def wait() -> _T:
        thread.join()
        if raised:
            raise raised[0]
        return found[0]

    return wait


def one_ahead(items: Iterator[_T]) -> Iterator[_T]:
    """The items, none of them None, each made in a thread while the one before is used; the first from now on."""

    def following(wait: Callable[[], _T | None]) -> Iterator[_T]:
        while (item := wait()) is not None:
            wait = in_thread(lambda: next(items, None))
            yield item

    return following(in_thread(lambda: next(items, None)))
