"""Where a command runs its kernels, chosen before Triton is imported, which reads TRITON_INTERPRET only then."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from typing import Any

from minidl.common import import_lock
from minidl.compilation import compiler_processes
from minidl.distributed import workers
from minidl.errors import ConfigError
from minidl.training.process import helpers

_VARIABLE = "TRITON_INTERPRET"
_ON = ("1", "true", "on", "yes", "y")
_TILES = "MINIDL_TILES"
_MOST = 64  # processes that interpret


def choose(device: str) -> None:
    """Set up this process for "auto", "cuda" or "cpu".

    Raises ConfigError when a CUDA device is needed and missing, when the user's TRITON_INTERPRET contradicts it, and
    when MINIDL_TILES names invalid tile tables or estimates.
    """
    given = os.environ.get(_VARIABLE)
    interpret = given is not None and given.lower() in _ON
    if device == "cpu":
        if given is not None and not interpret:
            raise ConfigError(f"--device cpu interprets kernels, but {_VARIABLE}={given} is set: unset it")
        os.environ[_VARIABLE] = "1"
    elif device == "cuda" and interpret:
        raise ConfigError(f"--device cuda compiles kernels, but {_VARIABLE}={given} is set: unset it")
    elif device == "cuda" or (given is not None and not interpret):
        _require_cuda("--device cuda" if device == "cuda" else f"{_VARIABLE}={given}")
    if os.environ.get(_TILES):
        from minidl.runtime import tile_tables
        from minidl.runtime.cost_model import devices

        try:
            devices.check()
        except tile_tables.TableError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None


def processes(devices: int | str, device: str) -> int:
    """How many processes --devices asks for, each with a GPU of its own; for auto the most. Without torch.

    Without a GPU a number is taken as it is, and all is 1. Raises ConfigError for more than there are.
    """
    interpreted = device == "cpu" or os.environ.get(_VARIABLE, "0").lower() in _ON
    there = 0 if interpreted or devices == 1 else workers.gpus()
    if isinstance(devices, str):
        return max(1, there)
    if devices > (there or _MOST):
        raise ConfigError(f"--devices is {devices}, expected at most {there or _MOST}" + " GPUs" * bool(there))
    return devices


def prepare(device: str, module: str) -> Any:
    """Choose the device, and import the module that works on it: the value.

    What a GPU waits for in C goes on in threads meanwhile: its context (0.3 s), and the hash of Triton's own files
    (0.3 s), which is in all keys of its cache. Raises as `choose`.
    """
    choose(device)
    waits = []
    if compiler_processes.has_gpu(device):
        waits.append(helpers.in_thread(_wake_driver))
    with import_lock.LOCK:
        importlib.import_module("torch")
    from minidl.runtime import launch

    if launch.INTERPRETED:
        compiler_processes.end()  # there is a driver, but torch has no use for it
    else:
        from minidl.compilation import launch_jobs

        waits.append(helpers.in_thread(launch_jobs.preload))
    work = importlib.import_module(module)
    for wait in waits:
        wait()
    return work


def _wake_driver() -> None:
    """Make the context of the first GPU that this process may use, which is torch's. What fails is left to torch."""
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _require_cuda(what: str) -> None:
    import torch

    if torch.cuda.is_available():
        return
    why = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
    raise ConfigError(
        f"{what} needs a GPU, but {why}; use --device cpu or auto, or run `minidl doctor` to see what is missing"
    )
