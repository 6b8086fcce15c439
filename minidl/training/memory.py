"""Out-of-memory errors: what was requested, what was free, and which batch size would fit.

On a GPU smaller batches are tried, once the failed work has freed its memory. On a CPU a trial might get other programs
killed, so there the batch size is estimated.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from minidl.training.errors import RunError

T = TypeVar("T")
BATCH_SIZE = "a --batch-size of {}"
# A resumed run keeps its batch size.
NEW_RUN = "a new run (--overwrite) with a --batch-size of {}"
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
_AMOUNT = r"([\d.]+) (bytes|[KMGTPE]iB|B)\b"


@dataclass(frozen=True)
class Shortage:
    """Sizes in bytes of an allocation that failed; None where unknown."""

    where: str  # "GPU", "machine" or "kernel"
    asked: int | None = None
    free: int | None = None
    total: int | None = None
    kind: str = ""  # of a kernel's memory

    def __str__(self) -> str:
        if self.where == "kernel":
            return f"a kernel needs {self.asked:,} of {self.kind}, but this GPU has {self.total:,}"
        full = "the GPU is out of memory" if self.where == "GPU" else "this machine is out of memory"
        asked = "an allocation failed" if self.asked is None else f"{size(self.asked)} were requested"
        if self.free is None:
            return f"{full}: {asked}"
        of = "" if self.total is None else f" of {size(self.total)}"
        return f"{full}: {asked}, {size(self.free)}{of} were free"


def size(count: int) -> str:
    """Bytes as text: "3.20 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 * _UNITS[unit] or unit == "TiB":
            break
    return f"{count:,} bytes" if unit == "bytes" else f"{count / _UNITS[unit]:,.2f} {unit}"


def read(error: BaseException) -> Shortage | None:
    """The shortage that an error reports, None for an error of another kind."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        free, total = _of_device()
        return Shortage("GPU", _amount("allocate " + _AMOUNT, text), free, total)
    if type(error).__name__ == "OutOfResources":  # Triton's, which the name tells without importing Triton
        required, limit = getattr(error, "required", None), getattr(error, "limit", None)
        return Shortage("kernel", required, None, limit, str(getattr(error, "name", "memory")))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return Shortage("machine", _amount("allocate " + _AMOUNT, text), _available())
    # CUDA's own message, for memory that torch's allocator does not manage.
    if isinstance(error, RuntimeError) and "CUDA" in text and "out of memory" in text:
        return Shortage("GPU", None, *_of_device())
    return None


def guarded(
    work: Callable[[], T],
    batch: int,
    attempt: Callable[[int], object] | None,
    share: float = 1.0,
    smaller: str = BATCH_SIZE,
) -> T:
    """The result of `work`. Raises RunError with advice when it runs out of memory.

    `attempt(n)` does one step of the work with n examples; it may overwrite the work's results. A batch fits if it
    takes at most `share` of the free memory. `smaller` is the phrase that asks for a smaller batch.
    """
    short: Shortage | None = None
    try:
        return work()
    except Exception as error:
        short = read(error)
        if short is None:
            raise
    # Outside of the handler the error is gone, and with it the frames that held the memory.
    raise RunError(f"{short}; {advice(short, batch, attempt, share, smaller)}")


def advice(
    short: Shortage,
    batch: int,
    attempt: Callable[[int], object] | None = None,
    share: float = 1.0,
    smaller: str = BATCH_SIZE,
) -> str:
    """What to do, as the end of a sentence; arguments as for `guarded`."""
    if short.where == "kernel":
        return "its tile is too large for this GPU: make tables for it with `minidl tune`, or unset MINIDL_TILES"
    if batch <= 1:
        return "end other programs, or take less data or a smaller model"
    if short.where == "machine" and short.asked and short.free is not None:
        found = max(1, min(batch // 2, batch * short.free // short.asked))
        take = smaller.format(found)
        return f"end other programs, or take {take}, which fits if memory use is proportional to the batch size"
    if short.where == "machine" or attempt is None:
        return f"end other programs, or take {smaller.format(max(1, batch // 2))} or less"
    tried = largest(attempt, batch, share)
    if tried:
        return f"take {smaller.format(tried)}: a trial with {tried} fitted"
    return "not even a batch of 1 fits: end other programs on the GPU, or take a smaller model or --device cpu"


def largest(attempt: Callable[[int], object], batch: int, share: float = 1.0) -> int | None:
    """The largest of batch / 2, batch / 4, ... 1 with which `attempt` succeeds, None if it always fails."""
    while batch > 1:
        batch //= 2
        if fits(attempt, batch, share):
            return batch
    return None


def fits(attempt: Callable[[int], object], batch: int, share: float = 1.0) -> bool:
    """Whether `attempt` succeeds within this share of the free memory."""
    _release()
    before, free = torch.cuda.memory_allocated(), _of_device()[0]
    try:
        attempt(batch)
    except Exception as error:
        if read(error) is None:
            raise
        return False
    return free is None or torch.cuda.max_memory_allocated() - before <= share * free


def _release() -> None:
    """Release unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _of_device() -> tuple[int | None, int | None]:
    """(free, total) bytes of the GPU; what torch has reserved and does not use is free.

    A limit set by `torch.cuda.set_per_process_memory_fraction` counts as the size of the GPU.
    """
    if not torch.cuda.is_available():
        return None, None
    free, total = torch.cuda.mem_get_info()
    used, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    limit = int(torch.cuda.get_per_process_memory_fraction() * total)
    return max(0, min(free + held - used, limit - used)), min(total, limit)


def _available() -> int | None:
    """Bytes that Linux can allocate without swapping."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _amount(pattern: str, text: str) -> int | None:
    found: Any = re.search(pattern, text)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])
