"""Settings of each thread: whether operations are recorded, and whether backward() looks for NaN."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from minidl.common import thread_settings

_mode = thread_settings.settings()


def is_grad_enabled() -> bool:
    """Return whether operations are being recorded in this thread: the setting is torch's own."""
    return torch.is_grad_enabled()


def is_anomaly_enabled() -> bool:
    """Return whether backward() looks for NaN: in this thread, or by torch's setting, which holds for all."""
    return _looks_for_nan() or (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled())


def _looks_for_nan() -> bool:
    return getattr(_mode, "anomaly", False)


class _Setting(contextlib.ContextDecorator):
    """A setting during a block or a decorated function, or between two yields of a decorated generator.

    `_get` reads it, and `_set` changes it.
    """

    _get: Callable[[], bool]
    _set: Callable[[bool], None]
    _value: bool
    _before: tuple[bool, ...] = ()

    def __enter__(self) -> None:
        self._before += (self._get(),)
        self._set(self._value)

    def __exit__(self, *exc: object) -> None:
        *before, last = self._before
        self._before = tuple(before)
        self._set(last)

    def _recreate_cm(self) -> _Setting:
        # A decorated function may run in several threads at once, each with its own previous mode.
        copy = type(self).__new__(type(self))
        copy._value = self._value
        return copy

    def __call__(self, function: Callable[..., Any]) -> Any:
        if not inspect.isgeneratorfunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Any:
            running, sent = function(*args, **kwargs), None
            while True:
                try:
                    with self._recreate_cm():
                        value = running.send(sent)
                except StopIteration as stop:
                    return stop.value
                sent = yield value

        return generator


class _Recording(_Setting):
    _get = staticmethod(torch.is_grad_enabled)
    _set = staticmethod(torch._C._set_grad_enabled)


class _GradMode(_Recording):
    """Without arguments, of a class, or as a bare decorator: `@no_grad` and `@no_grad()` are the same."""

    def __new__(cls, function: Callable[..., Any] | None = None) -> Any:
        return super().__new__(cls) if function is None else cls()(function)


class no_grad(_GradMode):  # noqa: N801 (torch's name)
    """Context manager and decorator under which operations are not recorded."""

    _value = False


class enable_grad(_GradMode):  # noqa: N801 (torch's name)
    """Context manager and decorator that records operations again inside `no_grad`."""

    _value = True


class set_grad_enabled(_Recording):  # noqa: N801 (torch's name)
    """Whether operations are recorded: from now on, or within `with set_grad_enabled(False):`; or a decorator."""

    def __init__(self, mode: bool) -> None:
        self._first, self._value = self._get(), bool(mode)
        self._set(self._value)

    def __enter__(self) -> None:
        self._set(self._value)
        self._before += (self._first,)

    def __call__(self, function: Callable[..., Any]) -> Any:
        self._set(self._first)
        return super().__call__(function)

    def _recreate_cm(self) -> Any:
        return no_grad() if not self._value else enable_grad()


def _set_anomaly(value: bool) -> None:
    _mode.anomaly = value


class detect_anomaly(_Setting):  # noqa: N801 (torch's name)
    """Context manager in which backward() raises RuntimeError at the first operation whose gradient has NaN."""

    _get = staticmethod(_looks_for_nan)
    _set = staticmethod(_set_anomaly)

    def __init__(self, check_nan: bool = True) -> None:
        self._value = bool(check_nan)
