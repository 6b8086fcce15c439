"""Launch kernels: compiled on a GPU, or by Triton's interpreter on the CPU.

`target` says where kernels run, `tiles` chooses block sizes and `precision` how float32 products are computed; kernels
use their names from here (`launch.tile`, `launch.precision`). `launch_hooks` hands launches to recorders and watchers.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from minidl.common import locks
from minidl.interpreter import patches
from minidl.runtime import cache_keys, launch_hooks
from minidl.runtime.descriptors import Box, ConcatPair
from minidl.runtime.launch_cache import fast_launch
from minidl.runtime.launch_hooks import before_changes as before_changes
from minidl.runtime.launch_hooks import handed_over as handed_over
from minidl.runtime.launch_hooks import record as record
from minidl.runtime.launch_hooks import recording as recording
from minidl.runtime.launch_hooks import runs as runs
from minidl.runtime.launch_hooks import settle as settle
from minidl.runtime.launch_hooks import settled_by as settled_by
from minidl.runtime.launch_hooks import watch as watch
from minidl.runtime.precision import PRECISIONS as PRECISIONS
from minidl.runtime.precision import acc as acc
from minidl.runtime.precision import acc_torch as acc_torch
from minidl.runtime.precision import float32_precision as float32_precision
from minidl.runtime.precision import in_precision as in_precision
from minidl.runtime.precision import precision as precision
from minidl.runtime.precision import set_float32_precision as set_float32_precision
from minidl.runtime.target import INTERPRETED as INTERPRETED
from minidl.runtime.target import TARGETS as TARGETS
from minidl.runtime.target import architecture as architecture
from minidl.runtime.target import boxes as boxes
from minidl.runtime.target import device_target as device_target
from minidl.runtime.target import is_gpu as is_gpu
from minidl.runtime.target import processors as processors
from minidl.runtime.target import target as target
from minidl.runtime.tiles import Tile as Tile
from minidl.runtime.tiles import cached as cached
from minidl.runtime.tiles import families as families
from minidl.runtime.tiles import force as force
from minidl.runtime.tiles import forget as forget
from minidl.runtime.tiles import register_cache as register_cache
from minidl.runtime.tiles import table as table
from minidl.runtime.tiles import tile as tile
from minidl.runtime.tiles import tile_of as tile_of
from minidl.runtime.tiles import tiles as tiles
from minidl.runtime.tiles import tiles_for as tiles_for
from minidl.runtime.tiles import use_tables as use_tables

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
    if _tapes and (tape := _tapes.get(threading.get_ident())) is not None:
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
    if not fast_launch.launch(kernel, grid, args, meta):
        _run_by_triton(kernel, grid, args, meta)


class Tape:
    """A context that records this thread's launches, which run as usual; `indirect` if one reads addresses."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        self.indirect = False

    def __enter__(self) -> "Tape":
        _tapes[threading.get_ident()] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _tapes[threading.get_ident()]


_tapes: dict[int, Tape] = {}


class Prepared(NamedTuple):
    """A launch without its tensors, which are the kernel's first arguments; `boxes` makes descriptors of the first
    tensors (None: pass the tensor itself)."""

    kernel: Any
    grid: tuple[int, ...]
    scalars: tuple[Any, ...]
    meta: dict[str, Any]
    boxes: tuple[Box | None, ...] = ()

    def run(self, *tensors: Any) -> None:
        """Launch with these tensors; raises the errors of `run`."""
        if self.boxes:
            boxed = [x if box is None else box.of(x) for box, x in zip(self.boxes, tensors, strict=False)]
            run(self.kernel, self.grid, *boxed, *tensors[len(boxed) :], *self.scalars, **self.meta)
            for x in tensors[: len(boxed)]:
                if isinstance(x, ConcatPair):
                    note_indirect(functools.partial(tuple, x))  # the distance holds for these two alone
        else:
            run(self.kernel, self.grid, *tensors, *self.scalars, **self.meta)


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
        if not INTERPRETED and device.type != "cuda":
            raise TypeError(f"{kernel.__name__}: got a tensor on {device}, but {NO_CPU}")
    return device


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up, for b above 0. (`triton.cdiv` takes 3 us on the host.)"""
    return -(-a // b)


def note_indirect(tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Declare that the last launch reads these tensors through addresses in memory, so delayed launches keep them."""
    for keep in indirect_keepers:
        keep(tensors())
    if _tapes and (tape := _tapes.get(threading.get_ident())) is not None:
        tape.indirect = True


indirect_keepers: list[Callable[[Iterable[torch.Tensor]], None]] = []
