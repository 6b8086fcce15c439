"""Calls by name, and calls that are skipped if the form cannot compute the problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from minidl.kernels import conv

Calls = Iterator[tuple[str, Callable[[], Any]]]


def in_form(form: str | None, call: Callable[..., Any]) -> Callable[[], None]:
    """Return the call in a form, without the error of a form that cannot compute the problem."""

    def call_in_form() -> None:
        with contextlib.suppress(conv.UnableError):
            call(form=form)

    return call_in_form
