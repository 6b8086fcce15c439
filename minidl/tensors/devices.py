"""The device of new tensors."""

from __future__ import annotations

import torch
from torch.utils._device import DeviceContext

from minidl.runtime import launch


def default_device() -> torch.device:
    """Where new tensors are made: the current CUDA device where kernels are compiled and run, else the CPU."""
    if launch.INTERPRETED or launch.recording():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def device_of(device: torch.device | str | None) -> torch.device:
    """A device by name; None for torch's default device where one is set, else where kernels run.

    Raises RuntimeError for CUDA where torch sees no GPU.
    """
    if device is None:
        chosen = _of_context()
        return default_device() if chosen is None else device_of(chosen)
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        raise RuntimeError(f"{device}: {why}; leave the device out, or use 'cpu', where kernels are interpreted")
    return found


def _of_context() -> torch.device | None:
    """The device of `with torch.device(...):` or torch.set_default_device, if any."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(torch.overrides._get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
