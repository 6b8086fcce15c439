"""Memory that runs out: what was asked for, what was free, and which batch would fit.

A smaller batch is tried where that does no harm: on a GPU, after the work that failed has let go of its memory. On a
CPU trying might end other programs, so what is told there is computed.
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
# A run that is continued keeps its own.
NEW_RUN = "a new run (--overwrite) with a --batch-size of {}"
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
_AMOUNT = r"([\d.]+) (bytes|[KMGTPE]iB|B)\b"


@dataclass(frozen=True)
class Shortage:
    """Memory that ran out, in bytes; None where it is not known."""

    where: str  # "GPU", "machine" or "kernel"
    asked: int | None = None
    free: int | None = None
    total: int | None = None
    kind: str = ""  # of a kernel's memory

    def __str__(self) -> str:
        if self.where == "kernel":
            return f"a kernel asks for {self.asked:,} of {self.kind}, and this GPU has {self.total:,}"
        full = "the GPU's memory is full" if self.where == "GPU" else "this machine's memory is full"
        asked = "more was asked for" if self.asked is None else f"{size(self.asked)} were asked for"
        if self.free is None:
            return f"{full}: {asked}"
        of = "" if self.total is None else f" of {size(self.total)}"
        return f"{full}: {asked}, and {size(self.free)}{of} were free"


def size(count: int) -> str:
    """Bytes as text: "3.20 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 * _UNITS[unit] or unit == "TiB":
            break
    return f"{count:,} bytes" if unit == "bytes" else f"{count / _UNITS[unit]:,.2f} {unit}"


def read(error: BaseException) -> Shortage | None:
    """What ran out, None for an error of another kind."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        free, total = _of_device()
        return Shortage("GPU", _amount("allocate " + _AMOUNT, text), free, total)
    if type(error).__name__ == "OutOfResources":  # Triton's, which the name tells without importing Triton
        required, limit = getattr(error, "required", None), getattr(error, "limit", None)
        return Shortage("kernel", required, None, limit, str(getattr(error, "name", "memory")))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return Shortage("machine", _amount("allocate " + _AMOUNT, text), _available())
    # CUDA's own words, where memory is not taken by way of torch's allocator.
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
    """What `work` returns; where memory runs out in it, RunError with what to do.

    `attempt(n)` does a step of the work with n examples, and may spoil what the work has made. `share` is how much of
    the free memory it may take for the batch to fit, `smaller` how one is asked for.
    """
    short: Shortage | None = None
    try:
        return work()
    except Exception as error:
        short = read(error)
        if short is None:
            raise
    # Here the error is gone, and with it the frames that held the memory.
    raise RunError(f"{short}; {advice(short, batch, attempt, share, smaller)}")


def advice(
    short: Shortage,
    batch: int,
    attempt: Callable[[int], object] | None = None,
    share: float = 1.0,
    smaller: str = BATCH_SIZE,
) -> str:
    """What to do, as the end of a sentence; arguments as those of `guarded`."""
    if short.where == "kernel":
        return "its tile is too large for this GPU: make tables for it with `minidl tune`, or unset MINIDL_TILES"
    if batch <= 1:
        return "end other programs, or take less data or a smaller model"
    if short.where == "machine" and short.asked and short.free is not None:
        found = max(1, min(batch // 2, batch * short.free // short.asked))
        return f"end other programs, or take {smaller.format(found)}, which fits where memory goes with the batch"
    if short.where == "machine" or attempt is None:
        return f"end other programs, or take {smaller.format(max(1, batch // 2))} or less"
    tried = largest(attempt, batch, share)
    if tried:
        return f"a batch of {tried} fits, as a trial showed: take {smaller.format(tried)}"
    return "not even a batch of 1 fits: end other programs on the GPU, or take a smaller model or --device cpu"


def largest(attempt: Callable[[int], object], batch: int, share: float = 1.0) -> int | None:
    """The largest of batch / 2, batch / 4, ... 1 that `attempt` gets through; None when it does with none."""
    while batch > 1:
        batch //= 2
        if fits(attempt, batch, share):
            return batch
    return None


def fits(attempt: Callable[[int], object], batch: int, share: float = 1.0) -> bool:
    """Whether `attempt` gets through, with at most this share of what is free."""
    _let_go()
    before, free = _allocated(), _of_device()[0]
    try:
        attempt(batch)
    except Exception as error:
        if read(error) is None:
            raise
        return False
    return free is None or _peak() - before <= share * free


def _let_go() -> None:
    """Give memory back that nothing uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _of_device() -> tuple[int | None, int | None]:
    """Bytes of the GPU that this process can still have, with what it holds and does not use, and of the whole GPU.

    A limit of the process (`torch.cuda.set_per_process_memory_fraction`) counts as the end of the GPU.
    """
    if not torch.cuda.is_available():
        return None, None
    free, total = torch.cuda.mem_get_info()
    used, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    limit = int(torch.cuda.get_per_process_memory_fraction() * total)
    return max(0, min(free + held - used, limit - used)), min(total, limit)


def _available() -> int | None:
    """Bytes that Linux could give a program without swapping."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _amount(pattern: str, text: str) -> int | None:
    found: Any = re.search(pattern, text)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])
