"""Who gets launches in place of the device: a recorder those of its thread, else a watcher those of all threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from minidl.common import thread_settings

_thread = thread_settings.settings()  # the recorder of this thread's launches, and the target of these
active: list[Callable[..., None]] = []  # recorders of all threads, and watchers
_watchers: list[Callable[..., None]] = []
_settlers: list[Callable[[], None]] = []


def before_changes(settle: Callable[[], None]) -> None:
    """Have `settle` called before a setting of launches changes: it launches what is still to be launched by it."""
    _settlers.append(settle)


@contextlib.contextmanager
def settled_by(settle: Callable[[], None]) -> Iterator[None]:
    """A context in which `settle` is called before changes, after the others."""
    _settlers.append(settle)
    try:
        yield
    finally:
        _settlers.remove(settle)


def settle() -> None:
    """Launch all that is still to be launched."""
    for each in tuple(_settlers):
        each()


@contextlib.contextmanager
def record(recorder: Callable[..., None], target_: str | None = None) -> Iterator[None]:
    """A context that hands this thread's launches, with tiles of `target_`, to `recorder(kernel, grid, args, meta)` and
    runs none of them.

    For compiling offline: launchers run as usual on tensors of any device, and nothing is computed. Without a target,
    launches are those of this process.
    """
    settle()
    before = getattr(_thread, "recorder", None), getattr(_thread, "target", None)
    active.append(recorder)
    _thread.recorder, _thread.target = recorder, target_
    try:
        yield
        settle()
    finally:
        _thread.recorder, _thread.target = before
        active.remove(recorder)


@contextlib.contextmanager
def watch(watcher: Callable[..., None]) -> Iterator[None]:
    """A context that hands launches of all threads to `watcher(kernel, grid, args, meta, go)`, where `go()` launches.

    Recorded launches are not watched. Of several watchers the newest gets them.
    """
    settle()
    _watchers.append(watcher)
    active.append(watcher)
    try:
        yield
        settle()
    finally:
        active.remove(watcher)
        _watchers.remove(watcher)


def recorder() -> Callable[..., None] | None:
    """The recorder of this thread's launches."""
    return getattr(_thread, "recorder", None) if active else None


def watcher() -> Callable[..., None] | None:
    """The newest watcher."""
    newest = _watchers[-1:]  # another thread may take away the last one at any time
    return newest[0] if newest else None


def target() -> str | None:
    """The target that this thread's launches are recorded for, where it is one of their own."""
    return getattr(_thread, "target", None) if active else None


def handed_over() -> bool:
    """Whether this thread's launches go to a recorder or a watcher."""
    return bool(active) and (recorder() is not None or watcher() is not None)


def runs() -> bool:
    """Whether this thread's launches run, and are not only recorded."""
    return recorder() is None


def recording() -> bool:
    """Whether this thread's launches are recorded for a target of their own, and not run."""
    return target() is not None
