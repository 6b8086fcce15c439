"""Out-of-memory errors: what asked for how much, what was free, and which batch size would fit.

Smaller batches are tried, once the failed work has freed its memory: on a GPU within its own memory, on a CPU within
what is free, so that no other program is killed. What a model takes is known before it is made, see `check_model`.

Nothing here imports torch, which fails where memory has run out: an error of torch has been raised by a torch that is
there.
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
# A resumed run keeps its batch size.
NEW_RUN = "a new run (--overwrite) with a --batch-size of {}"
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
_AMOUNT = r"([\d.]+) (bytes|[KMGTPE]iB|B)\b"
# What torch, Python and the loader of libraries say of memory; a library that finds none is an ImportError.
_FULL = re.compile(r"can't allocate memory|Cannot allocate memory|failed to map segment")
# What is said of threads and processes, which lack memory only where there is none for a stack.
_NO_THREAD = re.compile(r"can't start new thread|Resource temporarily unavailable")
_STACK = 2**26


@dataclass(frozen=True)
class Shortage:
    """Sizes in bytes of an allocation that failed; None where unknown."""

    where: str  # "GPU", "machine", "kernel" or "threads"
    asked: int | None = None
    free: int | None = None
    total: int | None = None
    kind: str = ""  # of a kernel's memory
    what: str = ""  # what asked, and what then helps: see `used_for`
    remedy: str = ""

    def __str__(self) -> str:
        if self.where == "kernel":
            return f"a kernel needs {self.asked:,} of {self.kind}, but this GPU has {self.total:,}"
        if self.where == "threads":
            return "no more threads or processes can be started"
        full = "the GPU is out of memory" if self.where == "GPU" else "this machine is out of memory"
        asked = "an allocation" if self.asked is None else f"{size(self.asked)} were requested"
        asked += f" for {self.what}" if self.what else ""
        asked += " failed" if self.asked is None else ""
        if self.free is None:
            return f"{full}: {asked}"
        of = "" if self.total is None else f" of {size(self.total)}"
        return f"{full}: {asked}, {size(self.free)}{of} were free"


@contextlib.contextmanager
def used_for(what: str, remedy: str = "") -> Iterator[None]:
    """Names what asks for memory in the block, and what to take less of, should it run out there."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "used_for"):  # the innermost block knows best
            error.used_for = what, remedy  # type: ignore[attr-defined]
        raise


def size(count: int) -> str:
    """Bytes as text: "3.20 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 * _UNITS[unit] or unit == "TiB":
            break
    return f"{count:,} bytes" if unit == "bytes" else f"{count / _UNITS[unit]:,.2f} {unit}"


def read(error: BaseException) -> Shortage | None:
    """The shortage that an error reports, None for an error of another kind."""
    about = getattr(error, "used_for", ("", ""))
    if type(error).__name__ == "InterpreterError" and error.__cause__ is not None:  # Triton's, of an error in a kernel
        error = error.__cause__
    text = str(error)
    asked = _amount("allocate " + _AMOUNT, text)
    if type(error).__name__ == "OutOfResources":  # Triton's, which the name tells without importing Triton
        required, limit = getattr(error, "required", None), getattr(error, "limit", None)
        return Shortage("kernel", required, None, limit, str(getattr(error, "name", "memory")))
    # torch.OutOfMemoryError, or CUDA's own message for memory that torch's allocator does not manage.
    is_torchs = type(error).__name__ == "OutOfMemoryError"
    if is_torchs or (isinstance(error, RuntimeError) and "CUDA" in text and "out of memory" in text):
        return Shortage("GPU", asked if is_torchs else None, *_of_device(), "", *about)
    # An error of minidl's own has said what to do.
    says = isinstance(error, RuntimeError | ImportError | OSError) and not type(error).__module__.startswith("minidl.")
    free, thread = memory_limit.free(), says and _NO_THREAD.search(text)
    if thread and (free is None or free >= _STACK):
        return Shortage("threads")
    if thread or (says and _FULL.search(text)) or isinstance(error, MemoryError):
        return Shortage("machine", asked, free, None, "", *about)
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
    batch: int = 1,
    attempt: Callable[[int], object] | None = None,
    share: float = 1.0,
    smaller: str = BATCH_SIZE,
) -> str:
    """What to do, as the end of a sentence; arguments as for `guarded`. A batch is named only after a trial."""
    if short.where == "kernel":
        return "its tile is too large for this GPU: make tables for it with `minidl tune`, or unset MINIDL_TILES"
    if short.where == "threads":
        return "stop other programs, or raise the limit of processes (ulimit -u, or pids.max of the control group)"
    if short.remedy or attempt is None or batch <= 1:
        return f"stop other programs, or use {short.remedy or 'less data or a smaller model'}"
    tried = largest(attempt, batch, share, short.where)
    if tried:
        return f"use {smaller.format(tried)}: a trial with {tried} fitted"
    others, cpu = (" on the GPU", " or --device cpu") if short.where == "GPU" else ("", "")
    return f"not even a batch of 1 fits: stop other programs{others}, or use a smaller model{cpu}"


def check_networks(networks: Callable[[Any], Networks], config: BaseModel, scaled_by: Sequence[str]) -> None:
    """Raises RunError when the `networks` of these settings cannot be trained in the memory that is free.

    It says how much they need, and how large they may be: `scaled_by` are the settings that can be halved. `networks`
    makes them on torch's device "meta", without memory, each with its optimizer where it is trained.
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
    """The number, or numbers, with half of those that are `most`."""
    if isinstance(value, tuple):
        return tuple(_halved(number, most) for number in value)
    return value // 2 if value == most else value


def _training(networks: Networks, on_gpu: bool) -> tuple[int, int]:
    """Parameters, and the bytes of weights, gradients and the optimizer's state; on a CPU with a checkpoint of these,
    which is a copy and a file that is put together."""
    parameters = need = 0
    for model, optimizer in networks:
        weights = sum(tensor.nbytes for tensor in model.state_dict().values())
        own = optimizer.flat_state().values() if optimizer is not None else ()
        states = sum(value.nbytes for value in own if hasattr(value, "nbytes"))
        parameters += model.num_parameters()
        need += weights + states + (0 if on_gpu else _CHECKPOINT * (weights + states))
        need += sum(parameter.data.nbytes for parameter in model.parameters()) if optimizer is not None else 0
    return parameters, need


def largest(attempt: Callable[[int], object], batch: int, share: float = 1.0, where: str = "GPU") -> int | None:
    """The largest of batch / 2, batch / 4, ... 1 with which `attempt` succeeds, None if it always fails; see `fits`."""
    while batch > 1:
        batch //= 2
        if fits(attempt, batch, share, where):
            return batch
    return None


def fits(attempt: Callable[[int], object], batch: int, share: float = 1.0, where: str = "GPU") -> bool:
    """Whether `attempt` succeeds within this share of the free memory of the "GPU" or the "machine"."""
    import torch

    _release()
    before, free = torch.cuda.memory_allocated(), _of_device()[0]
    left = memory_limit.free() if where == "machine" else None
    try:
        # A fifth is left to what else a run needs (with a tenth, one in some ten runs then failed). On a machine malloc
        # keeps more from step to step: 97, 97, 171, 240 and 240 MiB were seen after the first five.
        spare = 0 if left is None else int((1 - min(share, 0.8)) * left)
        with within(None if left is None else left - spare, spare):
            for _ in range(1 if where == "GPU" else 4):
                attempt(batch)
    except Exception as error:
        if read(error) is None:
            raise
        return False
    return where == "machine" or free is None or torch.cuda.max_memory_allocated() - before <= share * free


@contextlib.contextmanager
def within(free: int | None, spare: int = 0) -> Iterator[None]:
    """While entered, this process is told by a MemoryError that it would take more than this: it is free, and beyond it
    Linux kills a process without a word. None: no limit. `spare` is left of a limit that there is already: what a work
    has freed counts as taken, if malloc keeps it, and not as this one's."""
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    if free is not None:
        left = [max(0, limit - spare) for limit in (before, most) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([memory_limit.data() + free, *left]), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _release() -> None:
    """Release unused memory."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _of_device() -> tuple[int | None, int | None]:
    """(free, total) bytes of the GPU; what torch has reserved and does not use is free.

    A limit set by `torch.cuda.set_per_process_memory_fraction` counts as the size of the GPU.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None, None
    free, total = torch.cuda.mem_get_info()
    used, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    limit = int(torch.cuda.get_per_process_memory_fraction() * total)
    return max(0, min(free + held - used, limit - used)), min(total, limit)


def _amount(pattern: str, text: str) -> int | None:
    found: Any = re.search(pattern, text)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def peaks() -> dict[str, int]:
    """The most memory that this process has had: of the machine, and of the GPU (0 without one), in bytes."""
    torch = sys.modules.get("torch")
    on_device = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "device_bytes": torch.cuda.max_memory_allocated() if torch is not None and on_device else 0,
    }
