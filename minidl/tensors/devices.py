"""The device of new tensors."""

from __future__ import annotations

import torch
from torch.utils._device import DeviceContext

from minidl.runtime import launch


def default_device() -> torch.device:
    """Return the device of new tensors: the current CUDA device if kernels are compiled and run, else the CPU."""
    if launch.ON_CPU or launch.for_other_target():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def device_of(device: torch.device | str | None) -> torch.device:
    """Return a device by name; None for torch's default device if one is set, else `default_device()`.

    Raises RuntimeError for CUDA if torch sees no GPU.
    """
    if device is None:
        default = _of_context()
        return default_device() if default is None else device_of(default)
    named = torch.device(device)
    if named.type == "cuda" and not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        raise RuntimeError(f"{device}: {reason}; leave the device out, or use 'cpu', where kernels are interpreted")
    return named


def _of_context() -> torch.device | None:
    """Return the device of `with torch.device(...):` or torch.set_default_device, if any."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(torch.overrides._get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
