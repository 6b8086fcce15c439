"""Choose the device of a command, before Triton is imported, which reads TRITON_INTERPRET only then."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from typing import Any

from minidl.common import import_lock
from minidl.common.console import echo
from minidl.compilation import compiler_processes
from minidl.cpu import build
from minidl.distributed import workers
from minidl.errors import ConfigError
from minidl.training.process import helpers

_VARIABLE = "TRITON_INTERPRET"
_ON = ("1", "true", "on", "yes", "y")
_TILES = "MINIDL_TILES"
_CPU = "MINIDL_CPU"
_MOST = 64  # processes that interpret kernels


def choose(device: str, compile_for_cpu: bool = False) -> None:
    """Set up this process for "auto", "cuda" or "cpu". A CPU interprets kernels or, if wanted and possible without a
    GPU in the machine, compiles them.

    Raises ConfigError if a CUDA device is needed and missing, if the user's TRITON_INTERPRET contradicts `device`, and
    if MINIDL_TILES names invalid tile tables or estimates.
    """
    variable = os.environ.get(_VARIABLE)
    interpret = variable is not None and variable.lower() in _ON
    wants_cpu = compile_for_cpu and device != "cuda" and variable is None and not compiler_processes.has_gpu("auto")
    compiled = wants_cpu and _compiles_for_cpu()
    if device == "cpu":
        if variable is not None and not interpret:
            raise ConfigError(f"--device cpu interprets kernels, but {_VARIABLE}={variable} is set: unset it")
        if not compiled:
            os.environ[_VARIABLE] = "1"
    elif device == "cuda" and interpret:
        raise ConfigError(f"--device cuda compiles kernels, but {_VARIABLE}={variable} is set: unset it")
    elif device == "cuda" or (variable is not None and not interpret):
        _require_cuda("--device cuda" if device == "cuda" else f"{_VARIABLE}={variable}")
    if os.environ.get(_TILES):
        from minidl.runtime import tile_tables
        from minidl.runtime.cost_model import devices

        try:
            devices.check()
        except tile_tables.TableError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None


def _compiles_for_cpu() -> bool:
    """Have kernels compiled for the CPU unless MINIDL_CPU says otherwise or no C compiler works; return whether."""
    choice = os.environ.get(_CPU)
    if choice not in (None, "compiled", "interpreted"):
        raise ConfigError(f"{_CPU} is {choice!r}, expected compiled or interpreted")
    if choice == "interpreted":
        return False
    if build.compiler() is not None:
        os.environ[_CPU] = "compiled"
        return True
    if choice == "compiled":
        raise ConfigError(f"{_CPU} is {choice!r}, but {build.NO_COMPILER}; or unset it")
    echo(f"kernels are interpreted, which is slow: {build.NO_COMPILER}", error=True)
    return False


def processes(devices: int | str, device: str) -> int:
    """Return the number of processes for --devices, one for each GPU; without a GPU, "all" is 1. Does not import torch.

    Raises ConfigError for more devices than the machine has.
    """
    interpreted = device == "cpu" or os.environ.get(_VARIABLE, "0").lower() in _ON
    gpus = 0 if interpreted or devices == 1 else workers.gpus()
    if isinstance(devices, str):
        return max(1, gpus)
    if devices > (gpus or _MOST):
        raise ConfigError(f"--devices is {devices}, expected at most {gpus or _MOST}" + " GPUs" * bool(gpus))
    return devices


def prepare(device: str, module: str) -> Any:
    """Choose the device, then import and return the module that works on it. Raises as `choose`.

    Without a GPU, kernels are compiled for the CPU if possible.

    For a GPU, threads meanwhile create its context (0.3 s) and hash Triton's files (0.3 s) for the keys of its cache.
    """
    choose(device, compile_for_cpu=True)
    waits = []
    if compiler_processes.has_gpu(device):
        waits.append(helpers.in_thread(_wake_driver))
    with import_lock.LOCK:
        importlib.import_module("torch")
    from minidl.runtime import launch

    if launch.ON_CPU:
        compiler_processes.end()  # torch does not use the driver
    else:
        from minidl.compilation import launch_jobs

        waits.append(helpers.in_thread(launch_jobs.preload))
    imported = importlib.import_module(module)
    for wait in waits:
        wait()
    return imported


def _wake_driver() -> None:
    """Create the context of the first GPU of this process, which torch uses. torch reports failures."""
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _require_cuda(setting: str) -> None:
    import torch

    if torch.cuda.is_available():
        return
    why = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
    raise ConfigError(
        f"{setting} needs a GPU, but {why}; use --device cpu or auto, or run `minidl doctor` to see what is missing"
    )
