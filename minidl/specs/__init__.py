"""The records of every operation, by name."""

from __future__ import annotations

import importlib
import pkgutil

from minidl.specs.base import Bad, Case, Make, OpSpec

__all__ = ["Bad", "Case", "Make", "OpSpec", "all_specs"]

_NOT_RECORDS = {"base", "bounds", "make"}


def all_specs() -> dict[str, OpSpec]:
    """Every operation's record. A module of this package lists its records in SPECS."""
    found: dict[str, OpSpec] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        if module in _NOT_RECORDS:
            continue
        for spec in importlib.import_module(f"{__name__}.{module}").SPECS:
            if spec.name in found:
                raise ValueError(f"two records are named {spec.name!r}")
            found[spec.name] = spec
    return found
