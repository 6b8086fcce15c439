"""Which constants estimates of time count with: those of the device in use (`devices`).

A choice depends on the device and its file alone, so it is the same in every process. `minidl tune --estimates`
measures a device and writes a file, which is used where it lies as `estimates.json` in the folder of MINIDL_TILES.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator

import torch

from minidl.runtime import launch
from minidl.runtime.cost_model import devices
from minidl.runtime.cost_model.devices import Constants


class _State:
    given: Constants | None = None


def of(target: str) -> Constants:
    """The constants for a target: those of the device in use where it is of this target, else of the usual one.

    Raises TableError for a file of MINIDL_TILES that this version cannot use.
    """
    return _State.given or _of(target)


@contextlib.contextmanager
def use(constants: Constants) -> Iterator[None]:
    """A context in which every target has these constants: for fitting."""
    before, _State.given = _State.given, constants
    launch.forget()
    try:
        yield
    finally:
        _State.given = before
        launch.forget()


@functools.cache
def _of(target: str) -> Constants:
    here = not launch.INTERPRETED and torch.cuda.is_available()
    # A device that is too old is of no target: kernels are compiled beside it for others.
    here = here and torch.cuda.get_device_capability() >= (8, 0) and launch.device_target() == target
    if not here:
        return devices.of_file(devices.usual(target))
    own = devices.own_file()
    if own is not None:
        return devices.of_file(own)
    properties = torch.cuda.get_device_properties("cuda")
    return devices.of_device(properties.name, devices.figures_of(properties, target), target)


def digest(target: str) -> str:
    """SHA-256 over the constants for a target."""
    return hashlib.sha256(json.dumps(devices.as_json(of(target)), sort_keys=True).encode()).hexdigest()
