"""Autotuned kernels with one configuration: timing several configurations needs a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from triton.runtime import interpreter


class _RefusedError(AssertionError):
    """A static assertion of a kernel fails, for which a compiler rejects a configuration."""


def assert_statically(condition: Any, message: str = "") -> None:
    """Replace tl.static_assert."""
    if not condition:
        raise _RefusedError(message)


def run_first(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of Autotuner.run that launches the first configuration that the kernel accepts."""

    def launch(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        *others, last = _pruned(tuner, args, kwargs)
        for configuration in others:
            try:
                with configured(tuner, configuration):
                    return run(tuner, *args, **kwargs)
            except interpreter.InterpreterError as error:
                if not isinstance(error.__cause__, _RefusedError):
                    raise
        with configured(tuner, last):
            return run(tuner, *args, **kwargs)

    return launch


@contextlib.contextmanager
def configured(tuner: Any, configuration: Any) -> Iterator[None]:
    """Return a context in which an autotuned kernel has a single configuration."""
    configurations, tuner.configs = tuner.configs, [configuration]
    try:
        yield
    finally:
        tuner.configs = configurations


def _pruned(tuner: Any, args: Any, kwargs: Any) -> Any:
    """Return the configurations that the kernel's prune function keeps; all of them if it needs a GPU."""
    if tuner.early_config_prune is None:
        return tuner.configs
    try:
        named = dict(zip(tuner.arg_names, args, strict=False))
        return tuner.early_config_prune(tuner.configs, named, **kwargs) or tuner.configs
    except Exception:  # noqa: BLE001 (of any kind, without a GPU)
        return tuner.configs
