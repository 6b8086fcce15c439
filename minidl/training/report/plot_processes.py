"""How plots are drawn: with settings of their own, some at a time in the processes of `helpers`, and never at the cost
of the run. They need the plots extra."""

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
    """What is yet to be written, and why plots were not drawn."""

    pending: list[Callable[[], None]] = field(default_factory=list)
    failed: dict[str, None] = field(default_factory=dict)  # in order, each once


_blocks: list[_Block] = []


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """A block, or a function, that draws with matplotlib's defaults, whatever a matplotlibrc or MPLBACKEND says."""
    # matplotlib cannot be imported with a backend that it does not know; pictures need none.
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
def elsewhere() -> Iterator[dict[str, None]]:
    """A block whose plots are drawn by the processes at hand, if there are some, and written at its end.

    A plot that cannot be drawn is left out: at the end, the block's value says why.
    """
    block = _Block()
    _blocks.append(block)
    try:
        yield block.failed
        for write in block.pending:
            write()
    finally:
        _blocks.clear()


def plot(draw: Callable[..., Files]) -> Callable[..., None]:
    """A function that draws as one that writes what it has drawn to the folder that comes first."""

    @functools.wraps(draw)
    def write_plot(folder: Path, *args: Any) -> None:
        workers = helpers.ready_processes()
        if not _blocks or workers is None:
            save(folder, _attempt(draw, args))
            return
        arrays = [np.ascontiguousarray(value) for value in args if isinstance(value, np.ndarray)]
        values = {
            "module": draw.__module__,
            "name": draw.__name__,
            "args": [None if isinstance(value, np.ndarray) else value for value in args],
            "arrays": [place for place, value in enumerate(args) if isinstance(value, np.ndarray)],
            "kinds": [(array.dtype.str, array.shape) for array in arrays],
        }
        result = workers.later(drawn, Message(values, arrays))

        def write() -> None:
            try:
                found = result()
            except (RuntimeError, OSError, MemoryError):  # the processes are gone, or cannot draw it
                save(folder, _attempt(draw, args))
            else:
                save(folder, dict(zip(found.values["names"], found.buffers, strict=True)))

        _blocks[-1].pending.append(write)

    return write_plot


def drawn(message: Message) -> Message:
    """A worker's job: the files of a plot."""
    values, args = message.values, message.values["args"]
    for place, (dtype, shape), raw in zip(values["arrays"], values["kinds"], message.buffers, strict=True):
        args[place] = np.frombuffer(raw, dtype).reshape(shape)
    draw = getattr(importlib.import_module(values["module"]), values["name"]).__wrapped__
    with own_settings():
        found: Files = draw(*args)
    return Message({"names": list(found)}, list(found.values()))


def save(folder: Path, found: Files) -> None:
    """Write the pictures by their names."""
    for name, picture in found.items():
        files.write_bytes(folder / name, picture)


def _attempt(draw: Callable[..., Files], args: tuple[Any, ...]) -> Files:
    """What a plot draws; nothing in a block of `elsewhere` where it cannot be drawn."""
    try:
        with own_settings():
            return draw(*args)
    except Exception as error:
        if not _blocks or out_of_memory.read(error) is not None:
            raise
        why = cut(" ".join(str(error).split()), 200)
        _blocks[-1].failed[f"note: a plot cannot be drawn ({type(error).__name__}: {why})"] = None
        return {}
