"""Out-of-memory errors: the memory that was requested and free, and a batch size that fits.

Once the failed work has freed its memory, smaller batches are tried: on a GPU within its own memory, on a CPU within
the free memory, so that Linux kills no other program. `check_networks` compares a model's memory before it is made.

No function that handles an error imports torch, as an import fails when memory has run out.
"""

from __future__ import annotations

import contextlib
import gc
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from minidl.errors import RunError
from minidl.training.process import memory_limit

if TYPE_CHECKING:
    from pydantic import BaseModel

    from minidl import nn, optim

T = TypeVar("T")
Networks = Iterable[tuple["nn.Module", "optim.Optimizer | None"]]
_CHECKPOINT = 3  # copies of weights and state that are in memory while a checkpoint is written
BATCH_SIZE = "a --batch-size of {}"
NEW_RUN = "a new run (--overwrite) with a --batch-size of {}"  # a resumed run keeps its batch size
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
_AMOUNT = r"([\d.]+) (bytes|[KMGTPE]iB|B)\b"
# Messages of torch, Python and the loader of libraries, which raises ImportError.
_FULL = re.compile(r"can't allocate memory|Cannot allocate memory|failed to map segment")
# A thread or process that cannot be started lacks memory only if less than a stack is free.
_NO_THREAD = re.compile(r"can't start new thread|Resource temporarily unavailable")
_STACK = 2**26


@dataclass(frozen=True)
class Shortage:
    """Sizes in bytes of an allocation that failed; None if unknown. `what` and `remedy` see `used_for`."""

    where: str  # "GPU", "machine", "kernel" or "threads"
    requested: int | None = None
    free: int | None = None
    total: int | None = None
    kind: str = ""  # of a kernel's memory
    what: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        if self.where == "kernel":
            return f"a kernel needs {self.requested:,} of {self.kind}, but this GPU has {self.total:,}"
        if self.where == "threads":
            return "no more threads or processes can be started"
        full = "the GPU is out of memory" if self.where == "GPU" else "this machine is out of memory"
        request = "an allocation" if self.requested is None else f"{size(self.requested)} were requested"
        request += f" for {self.what}" if self.what else ""
        request += " failed" if self.requested is None else ""
        if self.free is None:
            return f"{full}: {request}"
        of = "" if self.total is None else f" of {size(self.total)}"
        return f"{full}: {request}, {size(self.free)}{of} were free"


@contextlib.contextmanager
def used_for(what: str, remedy: str = "") -> Iterator[None]:
    """A context that adds to an error the use of the memory, and a setting that needs less."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "used_for"):  # the innermost context is the most precise
            error.used_for = what, remedy  # type: ignore[attr-defined]
        raise


def size(count: int) -> str:
    """Return bytes as text: "3.20 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 * _UNITS[unit] or unit == "TiB":
            break
    return f"{count:,} bytes" if unit == "bytes" else f"{count / _UNITS[unit]:,.2f} {unit}"


def read(error: BaseException) -> Shortage | None:
    """Return the shortage that an error reports, None for an error of another kind."""
    about = getattr(error, "used_for", ("", ""))
    if type(error).__name__ == "InterpreterError" and error.__cause__ is not None:  # Triton's, for an error in a kernel
        error = error.__cause__
    text = str(error)
    requested = _amount("allocate " + _AMOUNT, text)
    if type(error).__name__ == "OutOfResources":  # Triton's; the name does not need the import
        required, limit = getattr(error, "required", None), getattr(error, "limit", None)
        return Shortage("kernel", required, None, limit, str(getattr(error, "name", "memory")))
    # torch.OutOfMemoryError, or CUDA's own message for memory that torch's allocator does not manage.
    is_torchs = type(error).__name__ == "OutOfMemoryError"
    if is_torchs or (isinstance(error, RuntimeError) and "CUDA" in text and "out of memory" in text):
        return Shortage("GPU", requested if is_torchs else None, *_of_device(), "", *about)
    # The errors of minidl contain their own advice.
    is_foreign = not type(error).__module__.startswith("minidl.")
    has_message = is_foreign and isinstance(error, RuntimeError | ImportError | OSError)
    free, no_thread = memory_limit.free(), has_message and _NO_THREAD.search(text)
    if no_thread and (free is None or free >= _STACK):
        return Shortage("threads")
    if no_thread or (has_message and _FULL.search(text)) or isinstance(error, MemoryError):
        return Shortage("machine", requested, free, None, "", *about)
    return None


def guarded(
    work: Callable[[], T],
    batch: int,
    attempt: Callable[[int], object] | None,
    share: float = 1.0,
    smaller: str = BATCH_SIZE,
) -> T:
    """Return the result of `work`. Raises RunError with advice when it runs out of memory.

    `attempt(n)` does one step of the work with n examples; it may overwrite the work's results. A batch fits if it
    takes at most `share` of the free memory. `smaller` is the phrase that names a smaller batch.
    """
    short: Shortage | None = None
    try:
        return work()
    except Exception as error:
        short = read(error)
        if short is None:
            raise
    # After the handler the error is freed, and with it the frames that hold the memory.
    raise RunError(f"{short}; {advice(short, batch, attempt, share, smaller)}")


def advice(
    short: Shortage,
    batch: int = 1,
    attempt: Callable[[int], object] | None = None,
    share: float = 1.0,
    smaller: str = BATCH_SIZE,
) -> str:
    """Return advice as the end of a sentence; arguments as for `guarded`. A batch is named only after a trial."""
    if short.where == "kernel":
        return "its tile is too large for this GPU: make tables for it with `minidl tune`, or unset MINIDL_TILES"
    if short.where == "threads":
        return "stop other programs, or raise the limit of processes (ulimit -u, or pids.max of the control group)"
    if short.remedy or attempt is None or batch <= 1:
        return f"stop other programs, or use {short.remedy or 'less data or a smaller model'}"
    if fitting := largest(attempt, batch, share, short.where):
        return f"use {smaller.format(fitting)}: a trial with {fitting} fitted"
    others, cpu = (" on the GPU", " or --device cpu") if short.where == "GPU" else ("", "")
    return f"not even a batch of 1 fits: stop other programs{others}, or use a smaller model{cpu}"


def check_networks(networks: Callable[[Any], Networks], config: BaseModel, scaled_by: Sequence[str]) -> None:
    """Raises RunError when the `networks` of these settings cannot be trained in the memory that is free.

    The message says how much they need, and how large they may be: `scaled_by` are the settings that can be halved.
    `networks` makes them on torch's device "meta", without memory, each with its optimizer if it is trained.
    """
    from minidl.tensors import default_device

    on_gpu = default_device().type == "cuda"
    free = _of_device()[0] if on_gpu else memory_limit.free()
    parameters, need = _training(networks(config), on_gpu)
    if free is None or need <= free:
        return
    fitting, sizes = need, {name: getattr(config, name) for name in scaled_by}
    while fitting > free and (most := max(map(_largest, sizes.values()), default=1)) > 1:
        sizes = {name: _halved(value, most) for name, value in sizes.items()}
        fitting = _training(networks(config.model_copy(update=sizes)), on_gpu)[1]
    flags = " ".join(f"--{name} {str(value).strip('(,)').replace(' ', '')}" for name, value in sizes.items())
    fits = f"{flags} ({size(fitting)})" if fitting <= free else "fewer features or classes"
    raise RunError(
        f"the model has {parameters:,} parameters, and their training needs {size(need)}, but this "
        f"{'GPU' if on_gpu else 'machine'} has {size(free)} free; stop other programs, or use {fits}"
    )


def _largest(value: int | tuple[int, ...]) -> int:
    return max(value) if isinstance(value, tuple) else value


def _halved(value: Any, most: int) -> Any:
    """Return a number, or a tuple of numbers, with those that equal `most` halved."""
    if isinstance(value, tuple):
        return tuple(_halved(number, most) for number in value)
    return value // 2 if value == most else value


def _training(networks: Networks, on_gpu: bool) -> tuple[int, int]:
    """Return the number of parameters, and the bytes of weights, gradients and optimizer state; on a CPU with those of
    a checkpoint, which is a copy and the content of a file."""
    parameters = need = 0
    for model, optimizer in networks:
        weights = sum(tensor.nbytes for tensor in model.state_dict().values())
        state = optimizer.flat_state().values() if optimizer is not None else ()
        states = sum(value.nbytes for value in state if hasattr(value, "nbytes"))
        parameters += model.num_parameters()
        need += weights + states + (0 if on_gpu else _CHECKPOINT * (weights + states))
        need += sum(parameter.data.nbytes for parameter in model.parameters()) if optimizer is not None else 0
    return parameters, need


def largest(attempt: Callable[[int], object], batch: int, share: float = 1.0, where: str = "GPU") -> int | None:
    """Return the largest of batch / 2, batch / 4, ... 1 with which `attempt` fits, None if none does; see `fits`."""
    while batch > 1:
        batch //= 2
        if fits(attempt, batch, share, where):
            return batch
    return None


def fits(attempt: Callable[[int], object], batch: int, share: float = 1.0, where: str = "GPU") -> bool:
    """Return whether `attempt` succeeds within this share of the free memory of the "GPU" or the "machine"."""
    import torch

    gc.collect()
    on_gpu = where == "GPU"
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    allocated, free = torch.cuda.memory_allocated(), _of_device()[0] if on_gpu else memory_limit.free()
    # On a machine a fifth is left for the rest of a run (with a tenth, about one run in ten failed), and malloc keeps
    # more memory from step to step: 97, 97, 171, 240 and 240 MiB after the first five.
    spare = 0 if on_gpu or free is None else int((1 - min(share, 0.8)) * free)
    try:
        with within(None if on_gpu or free is None else free - spare, spare):
            for _ in range(1 if on_gpu else 4):
                attempt(batch)
    except Exception as error:
        if read(error) is None:
            raise
        return False
    return not on_gpu or free is None or torch.cuda.max_memory_allocated() - allocated <= share * free


@contextlib.contextmanager
def within(free: int | None, spare: int = 0) -> Iterator[None]:
    """A context in which allocating more than `free` bytes (None: no limit) raises MemoryError, before Linux kills the
    process. An existing limit is kept less `spare`: memory that malloc keeps after earlier work counts against it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if free is not None:
        limits = [max(0, limit - spare) for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([memory_limit.data() + free, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _of_device() -> tuple[int | None, int | None]:
    """Return the (free, total) bytes of the GPU; memory that torch has reserved and does not use is free.

    A limit set by `torch.cuda.set_per_process_memory_fraction` counts as the size of the GPU.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None, None
    free, total = torch.cuda.mem_get_info()
    used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    limit = int(torch.cuda.get_per_process_memory_fraction() * total)
    return max(0, min(free + reserved - used, limit - used)), min(total, limit)


def _amount(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def peaks() -> dict[str, int]:
    """Return the peak memory of this process in bytes: of the machine, and of the GPU (0 without one)."""
    torch = sys.modules.get("torch")
    on_device = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "device_bytes": torch.cuda.max_memory_allocated() if torch is not None and on_device else 0,
    }
