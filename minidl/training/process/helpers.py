"""Work in the background of a command: threads that import or read, and processes that have imported the libraries of
baselines and plots when they are needed. torch and each of these libraries take a second or more."""

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
def start_processes(count: int) -> Iterator[None]:
    """A context in which `ready_processes()` returns up to `count` processes; they import libraries from its start."""
    with Workers(min(_PROCESSES, count)) as workers:
        with contextlib.suppress(WorkerError):  # the command does the work itself
            workers.start()
            for _ in range(workers.count):
                workers.submit(import_libraries, Message({"modules": _LIBRARIES}))
            _ready.append(workers)
        try:
            yield
        finally:
            _ready.clear()


def ready_processes() -> Workers | None:
    """Return the processes of the current context of `start_processes`."""
    return _ready[-1] if _ready else None


def import_libraries(message: Message) -> Message:
    """Import the installed modules in a worker, and draw: the first plot takes as long as ten later ones."""
    for module in message.values["modules"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with contextlib.suppress(Exception):  # the real plots report errors
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        figure.add_subplot().set_title("a")
        figure.savefig(io.BytesIO(), format="png")
    return Message({})


def in_thread(work: Callable[[], _T]) -> Callable[[], _T]:
    """Start `work` in a thread; return a function that waits for its end and returns its result or raises its error."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 (raised by the waiting thread)
            errors.append(error)

    # A daemon: a command that ends early does not wait for an import.
    thread = threading.Thread(target=run, name="meanwhile", daemon=True)
    thread.start()

    def wait() -> _T:
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    return wait


def one_ahead(items: Iterator[_T]) -> Iterator[_T]:
    """Yield the items, none of them None; a thread makes each while the previous one is used, the first from now on."""

    def following(wait: Callable[[], _T | None]) -> Iterator[_T]:
        while (item := wait()) is not None:
            wait = in_thread(lambda: next(items, None))
            yield item

    return following(in_thread(lambda: next(items, None)))
