"""Select the constants of time estimates for the current device (`devices` reads them).

The selection depends on the device and its file alone, so it is the same in every process. `minidl tune --estimates`
measures a device and writes `estimates.json`, which is used if it is in the folder of MINIDL_TILES.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator

import torch

from minidl.runtime import launch, launch_hooks
from minidl.runtime.cost_model import devices, schema
from minidl.runtime.cost_model.schema import Constants

FLOAT8 = 1.6  # products of 8 bits in the time of one of 16 bits, in kernels of convolutions: 1.5 to 1.8


class _State:
    override: Constants | None = None


def of(target: str) -> Constants:
    """Return the constants for a target: of the current device if it has this target, else of the usual device; of the
    CPU if kernels are compiled for it.

    Raises TableError for a file of MINIDL_TILES that this version cannot use.
    """
    on_cpu = launch.COMPILED_CPU and not launch_hooks.for_other_target()
    return _State.override or _of("cpu" if on_cpu else target)


def rate(target: str, dtype: torch.dtype, precision: str) -> float:
    """Return the products of a dtype per us, counted as two operations; `precision` is that of float32."""
    products = of(target).products
    if dtype.itemsize == 1:
        return FLOAT8 * products["float16"]
    return products[precision if dtype == torch.float32 else str(dtype).removeprefix("torch.")]


@contextlib.contextmanager
def use(constants: Constants) -> Iterator[None]:
    """A context in which every target has these constants, for fitting."""
    before, _State.override = _State.override, constants
    launch.forget()
    try:
        yield
    finally:
        _State.override = before
        launch.forget()


@functools.cache
def _of(target: str) -> Constants:
    is_current = not launch.INTERPRETED and torch.cuda.is_available()
    # A device below 8.0 has no target, but kernels may be compiled for others.
    is_current = is_current and torch.cuda.get_device_capability() >= (8, 0) and launch.device_target() == target
    if not is_current:
        return devices.of_file(devices.usual(target))
    tuned = devices.tuned_file()
    if tuned is not None:
        return devices.of_file(tuned)
    properties = torch.cuda.get_device_properties("cuda")
    return devices.of_device(properties.name, devices.figures_of(properties, target), target)


def digest(target: str) -> str:
    """Return the SHA-256 of the constants for a target."""
    return hashlib.sha256(json.dumps(schema.as_json(of(target)), sort_keys=True).encode()).hexdigest()
