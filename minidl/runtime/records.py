"""Argument records: named tuples that kernels take in place of long lists of numbers and constants.

A record of run-time numbers is passed by position and specialised field by field; a record of constants is passed as
one `tl.constexpr`. Tensors and numbers that change from call to call (a seed, a step) stay parameters of their own.
"""

from collections.abc import Mapping
from typing import Any


def fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name, with the fields of records, nested ones included, in place of the records."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        flat |= fields(value._asdict()) if hasattr(value, "_fields") else {name: value}
    return flat
