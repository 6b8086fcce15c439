"""Launch a kernel.

A launch goes to the first of these that takes it:

- a recorder or a watcher (`launch_hooks`)
- `fast_launch`, for a kernel that is already compiled for such arguments
- Triton, after checks of the tensors; `fast_launch` stores the compiled kernel
"""

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from minidl.common import locks
from minidl.interpreter import patches
from minidl.runtime import cache_keys, kernel_source, launch_hooks, launch_tape
from minidl.runtime.launch_cache import fast_launch
from minidl.runtime.target import COMPILED_CPU, INTERPRETED, ON_CPU

NO_BFLOAT16 = (
    "bfloat16 is not supported on the CPU (Triton's interpreter computes it wrongly): "
    "use float32 or float16, or a CUDA device"
)
NO_CPU = (
    "kernels are compiled for CUDA in this process; move it with .to('cuda'), or set TRITON_INTERPRET=1 before "
    "starting Python to run on the CPU"
)
MAX_GRID = (2**31 - 1, 65535, 65535)

if INTERPRETED:
    patches.speed_up()
else:
    kernel_source.install()


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up, for b above 0. (`triton.cdiv` takes 3 us on the host.)"""
    return -(-a // b)


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch `kernel` on `grid` programs; an empty grid launches nothing.

    FP fusion is passed explicitly (Triton's default changes between versions). Raises TypeError for bfloat16 in the
    interpreter and for CPU tensors where kernels are compiled, ValueError for a grid beyond CUDA's limits.
    """
    if 0 in grid:
        return
    if max(grid) > MAX_GRID[1]:
        _check_grid(kernel, grid)
    meta.setdefault("enable_fp_fusion", True)
    if launch_hooks.active and _hand_over(kernel, grid, args, meta):
        return
    if launch_tape.tapes and (tape := launch_tape.current()) is not None:
        tape.launches.append((kernel, grid, args, meta))
        with _disable_current_modes():  # the recorder must not see what Triton allocates
            _run_now(kernel, grid, args, meta)
    else:
        _run_now(kernel, grid, args, meta)


def _hand_over(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> bool:
    recorder, watcher = launch_hooks.recorder(), launch_hooks.watcher()
    if recorder is not None:
        recorder(kernel, grid, args, meta)
    elif watcher is not None:
        watcher(kernel, grid, args, meta, functools.partial(_run_now, kernel, grid, args, meta))
    return recorder is not None or watcher is not None


def _run_now(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    if COMPILED_CPU:
        _run_on_cpu(kernel, grid, args, meta)
        return
    if not fast_launch.launch(kernel, grid, args, meta):
        _run_by_triton(kernel, grid, args, meta)


def _run_on_cpu(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    from minidl.cpu import run as cpu

    compiled = cpu.lookup(kernel, args, meta)
    if compiled is None:
        _check_tensors(kernel, args)
        cache_keys.compute_key(kernel)
        compiled = cpu.compile_launch(kernel, args, meta)
    compiled.bind(grid, args).run()


def _run_by_triton(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    device = _check_tensors(kernel, args)
    with locks.TRITON:
        cache_keys.compute_key(kernel)
        if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
            fast_launch.store(kernel, args, meta, kernel[grid](*args, **meta))
            return
        with torch.cuda.device(device):
            if not fast_launch.launch(kernel, grid, args, meta):
                fast_launch.store(kernel, args, meta, kernel[grid](*args, **meta))


def _check_grid(kernel: Any, grid: tuple[int, ...]) -> None:
    for size, limit in zip(grid, MAX_GRID, strict=False):
        if size > limit:
            raise ValueError(f"{kernel.__name__}: a grid of {grid} programs is above the limit {MAX_GRID[: len(grid)]}")


def _check_tensors(kernel: Any, args: tuple[Any, ...]) -> torch.device | None:
    device = None
    for value in args:
        tensor = getattr(value, "base", value)
        if not isinstance(tensor, torch.Tensor):
            continue
        device = tensor.device
        if INTERPRETED and tensor.dtype == torch.bfloat16:
            raise TypeError(NO_BFLOAT16)
        if not ON_CPU and device.type != "cuda":
            raise TypeError(f"{kernel.__name__}: got a tensor on {device}, but {NO_CPU}")
    return device
