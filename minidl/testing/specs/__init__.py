"""The spec of every operation, by name, in modules by subject.

Read `base` first (what a spec has), then `make` (inputs), `bounds` (error bounds) and `elementwise` (simple specs).
"""

from __future__ import annotations

import importlib
import pkgutil

from minidl.testing.specs.base import Bad, Case, OpSpec
from minidl.testing.specs.make import Make

__all__ = ["Bad", "Case", "Make", "OpSpec", "all_specs"]


def all_specs() -> dict[str, OpSpec]:
    """Return the specs of all operations: the SPECS of the modules of this package."""
    specs: dict[str, OpSpec] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        for spec in getattr(importlib.import_module(f"{__name__}.{module}"), "SPECS", ()):
            if spec.name in specs:
                raise ValueError(f"two specs are named {spec.name!r}")
            specs[spec.name] = spec
    return specs
