"""The machine that kernels run on: Triton's interpreter, or a GPU with its tile table and number of processors."""

import functools
import os

import torch
import triton

from minidl.common.architecture import target_of
from minidl.runtime import launch_hooks

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
# Without a GPU kernels are compiled for the CPU or interpreted; `minidl.runtime` has decided.
COMPILED_CPU: bool = not INTERPRETED and os.environ.get("MINIDL_CPU") == "compiled" and not torch.cuda.is_available()
ON_CPU: bool = INTERPRETED or COMPILED_CPU
CPU_SHARES = 8  # plans of compiled kernels on a CPU do not depend on its threads, so that bits do not
TARGETS = ("interpreted", "sm_80", "sm_90")  # the targets that every tile table has rules for


def target() -> str:
    """Return the target in use: "interpreted", or the newest one that the device's architecture can run."""
    return launch_hooks.target() or ("interpreted" if INTERPRETED else device_target())


@functools.cache
def device_target() -> str:
    """Return the target of the current GPU; compiled kernels on a CPU have the tiles of sm_80.

    Raises RuntimeError without a GPU and for compute capability below 8.0.
    """
    if COMPILED_CPU:
        return "sm_80"
    if not torch.cuda.is_available():
        raise RuntimeError(
            "kernels are compiled for CUDA in this process, but torch finds no CUDA device; set TRITON_INTERPRET=1 "
            "before starting Python to run on the CPU"
        )
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise RuntimeError(f"minidl needs compute capability 8.0 or above, this device has {capability}")
    return target_of(10 * capability[0] + capability[1])


def architecture(device: torch.device | None = None) -> int:
    """Return the architecture of a GPU (default: the current one) as a number, 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def boxes(target_: str | None = None) -> bool:
    """Return whether kernels read matrices through tensor descriptors on a target (default: the one in use).

    From sm_90 on, TMA hardware copies boxes; the interpreter slices arrays. On older GPUs Triton turns descriptors into
    pointers of unknown alignment, and loads are no longer asynchronous.
    """
    return (target_ or target()) != "sm_80"


def processors() -> int:
    """Return the number of multiprocessors, to size persistent grids and splits.

    Offline compilation uses 132 (an H100 or H200), a compiled CPU CPU_SHARES, and the interpreter 1.
    """
    if launch_hooks.for_other_target():
        return 132
    if COMPILED_CPU:
        return CPU_SHARES
    return 1 if INTERPRETED else _multiprocessors()


@functools.cache
def _multiprocessors() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def is_gpu(device: torch.device) -> bool:
    """Return whether launches on a device are for a GPU; while launches are recorded for another target, all are."""
    return device.type == "cuda" or launch_hooks.for_other_target()
