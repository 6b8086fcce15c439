"""Hooks that receive launches in place of the device: a recorder for its own thread, watchers for all threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from minidl.common import thread_settings

_thread = thread_settings.settings()  # fields: recorder, target
active: list[Callable[..., None]] = []  # recorders of all threads, and watchers
_watchers: list[Callable[..., None]] = []
_settlers: list[Callable[[], None]] = []


def before_changes(settle: Callable[[], None]) -> None:
    """Register `settle`, which runs delayed launches, to be called before a setting of launches changes."""
    _settlers.append(settle)


@contextlib.contextmanager
def settled_by(settle: Callable[[], None]) -> Iterator[None]:
    """A context in which `settle` is registered, as the last one."""
    _settlers.append(settle)
    try:
        yield
    finally:
        _settlers.remove(settle)


def settle() -> None:
    """Run all delayed launches."""
    for run in tuple(_settlers):
        run()


@contextlib.contextmanager
def record(recorder: Callable[..., None], target_: str | None = None) -> Iterator[None]:
    """A context that passes this thread's launches to `recorder(kernel, grid, args, meta)` instead of running them.

    Launchers choose tiles of `target_` (default: the target of this process). For compiling offline: launchers run as
    usual on tensors of any device, and nothing is computed.
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
    """A context that passes launches of all threads to `watcher(kernel, grid, args, meta, go)`; `go()` launches.

    Recorded launches are not watched. Only the newest watcher is called.
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
    """Return the recorder of this thread's launches."""
    return getattr(_thread, "recorder", None) if active else None


def watcher() -> Callable[..., None] | None:
    """Return the newest watcher."""
    newest = _watchers[-1:]  # another thread may remove the last one at any time
    return newest[0] if newest else None


def target() -> str | None:
    """Return the target that this thread's launches are recorded for, if `record` was given one."""
    return getattr(_thread, "target", None) if active else None


def handed_over() -> bool:
    """Return whether this thread's launches go to a recorder or a watcher."""
    return bool(active) and (recorder() is not None or watcher() is not None)


def runs() -> bool:
    """Return whether this thread's launches run instead of being recorded."""
    return recorder() is None


def for_other_target() -> bool:
    """Return whether this thread's launches are recorded for another target."""
    return target() is not None
