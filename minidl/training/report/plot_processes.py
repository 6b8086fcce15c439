"""Draw plots with matplotlib's default settings, in the processes of `helpers`; a plot that fails does not end the run.

Needs the plots extra.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from minidl.common.console import cut
from minidl.data.workers import Message
from minidl.training.process import helpers, out_of_memory
from minidl.training.run_folder import files

MISSING = "no plots: matplotlib is not installed; install it with pip install matplotlib"
Files = dict[str, bytes]


@dataclass
class _Block:
    """The functions that write plots in progress, and notes on plots that could not be drawn."""

    pending: list[Callable[[], None]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)  # an ordered set


_blocks: list[_Block] = []


def available() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Draw with matplotlib's defaults inside this context, without matplotlibrc or MPLBACKEND."""
    # An unknown backend prevents the import of matplotlib; files need no backend.
    backend = None if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib as mpl
        from matplotlib import style
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend is not None:
        with contextlib.suppress(ValueError):
            mpl.rcParams["backend"] = backend
    with style.context("default"):
        yield


@contextlib.contextmanager
def in_processes() -> Iterator[dict[str, None]]:
    """Draw the plots of this context in running processes, if there are any, and write them at its end.

    Yields the notes on plots that could not be drawn.
    """
    block = _Block()
    _blocks.append(block)
    try:
        yield block.notes
        for write in block.pending:
            write()
    finally:
        _blocks.clear()


def plot(draw: Callable[..., Files]) -> Callable[..., None]:
    """Decorate a function that draws, so that it writes its files to the folder in the first argument."""

    @functools.wraps(draw)
    def write_plot(folder: Path, *args: Any) -> None:
        workers = helpers.ready_processes()
        if not _blocks or workers is None:
            save(folder, _draw(draw, args))
            return
        arrays = [np.ascontiguousarray(value) for value in args if isinstance(value, np.ndarray)]
        values = {
            "module": draw.__module__,
            "name": draw.__name__,
            "args": [None if isinstance(value, np.ndarray) else value for value in args],
            "arrays": [index for index, value in enumerate(args) if isinstance(value, np.ndarray)],
            "kinds": [(array.dtype.str, array.shape) for array in arrays],
        }
        result = workers.submit(draw_message, Message(values, arrays))

        def write() -> None:
            try:
                message = result()
            except (RuntimeError, OSError, MemoryError):  # the process has ended, or cannot draw the plot
                save(folder, _draw(draw, args))
            else:
                save(folder, dict(zip(message.values["names"], message.buffers, strict=True)))

        _blocks[-1].pending.append(write)

    return write_plot


def draw_message(message: Message) -> Message:
    """Draw a plot, as a worker's job; return its files."""
    values, args = message.values, message.values["args"]
    for index, (dtype, shape), raw in zip(values["arrays"], values["kinds"], message.buffers, strict=True):
        args[index] = np.frombuffer(raw, dtype).reshape(shape)
    draw = getattr(importlib.import_module(values["module"]), values["name"]).__wrapped__
    with own_settings():
        pictures: Files = draw(*args)
    return Message({"names": list(pictures)}, list(pictures.values()))


def save(folder: Path, pictures: Files) -> None:
    """Write pictures by their names."""
    for name, picture in pictures.items():
        files.write_bytes(folder / name, picture)


def _draw(draw: Callable[..., Files], args: tuple[Any, ...]) -> Files:
    """Return the files of a plot; note an error and return no files inside of `in_processes`."""
    try:
        with own_settings():
            return draw(*args)
    except Exception as error:
        if not _blocks or out_of_memory.read(error) is not None:
            raise
        reason = cut(" ".join(str(error).split()), 200)
        _blocks[-1].notes[f"note: a plot cannot be drawn ({type(error).__name__}: {reason})"] = None
        return {}
