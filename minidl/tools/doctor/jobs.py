"""The compiler's figures of a job and the problems in them, as plain data, without torch and Triton."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidl.common.architecture import Arch, target_of
from minidl.compilation.job import WARP, Job

# Maximum shared memory of a program, by compute capability (CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability", less the 1 KB that the system keeps), and AMD's LDS.
SHARED_LIMITS: dict[Arch, int] = {
    80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376,
    "gfx942": 65536, "gfx950": 163840, "gfx1201": 65536,
}  # fmt: skip
# Precisions of float32 products on AMD GPUs; other GPUs have all of `launch.PRECISIONS`.
PRECISIONS: dict[Arch, tuple[str, ...]] = {"gfx942": ("ieee", "tf32"), "gfx950": ("ieee",), "gfx1201": ("ieee",)}
REGISTERS = 65536
FLOAT64_MATRIX = 80, 90  # NVIDIA GPUs with matrix instructions for float64 products
MAX_REGISTERS = 255
ACCEPTED = Path(__file__).parent / "accepted_spills.json"
MATRIX = ("wgmma", "mma", "tcgen05", "mfma", "wmma")


@dataclass(frozen=True)
class Figures:
    """Figures of a compiled job; only `error` is set when compilation failed."""

    registers: int = 0
    spill: int = 0  # bytes per thread stored to and loaded from the stack because registers ran out
    stack: int = 0
    shared: int = 0  # bytes
    warps: int = 0
    wgmma: int = 0
    mma: int = 0
    tcgen05: int = 0
    mfma: int = 0
    wmma: int = 0
    tma: int = 0
    loads: int = 0  # instructions that load from global memory
    wide: int = 0  # loads of 16 bytes or more per thread
    lines: int = 0  # of PTX, or AMD's assembler
    wants_matrix: bool = False  # a product in a type that tensor cores have
    serialised: bool = False
    hasty: bool = False  # accesses memory before waiting for the previous launch
    overwrites: bool = False  # a loop writes registers that matrix instructions in flight read
    rounded: str = ""  # float32 constants among float64 values (`doctor.constants`)
    triton: str = ""  # the version
    seconds: float = 0.0
    error: str = ""

    @property
    def matrix(self) -> int:
        """The number of matrix instructions of all kinds."""
        return sum(getattr(self, name) for name in MATRIX)


@dataclass(frozen=True)
class Accepted:
    """An accepted spill and its reason: up to `bytes` in jobs with the fields `where`, for a version of Triton."""

    bytes: int
    reason: str
    where: Mapping[str, Any] = field(default_factory=dict)
    triton: str = ""  # how the version begins

    def covers(self, job: Job, figures: Figures) -> bool:
        """Return whether this entry applies to the job and allows its spill."""
        return (
            figures.spill <= self.bytes
            and figures.triton.startswith(self.triton)
            and all(getattr(job, name) == value for name, value in self.where.items())
        )


@functools.cache
def accepted_spills(path: Path = ACCEPTED) -> tuple[Accepted, ...]:
    """Read a file of accepted spills: {"bytes", "reason", "triton"?, "kernel"?, "tile"?, "dtype"?, ...}."""
    entries = []
    for entry in json.loads(path.read_text()):
        where = {"name" if key == "kernel" else key: value for key, value in entry.items()}
        fields = {name: where.pop(name) for name in ("bytes", "reason", "triton") if name in where}
        entries.append(Accepted(**fields, where=where))
    return tuple(entries)


def kernels() -> list[str]:
    """Return the package's kernels as "module:name", read from the source without importing it."""
    package = Path(__file__).parents[2]
    result = []
    for path in sorted((package / "kernels").rglob("*.py")):
        names = re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        result += [f"{module}:{name}" for name in names]
    return result


def target_name(arch: Arch) -> str:
    """Return the name of an architecture's tile table. Raises ValueError for an unknown one."""
    if arch not in SHARED_LIMITS:
        raise ValueError(f"unknown architecture {arch}; known: {', '.join(map(str, SHARED_LIMITS))}")
    return target_of(arch)


def problems(job: Job, figures: Figures, accepted: Iterable[Accepted] | None = None) -> list[str]:
    """Return a message for each problem of a compiled job."""
    if figures.error:
        return [figures.error]
    messages = []
    entries = accepted_spills() if accepted is None else accepted
    if figures.spill and not any(entry.covers(job, figures) for entry in entries):
        messages.append(f"spills {figures.spill} bytes of registers")
    if figures.shared > SHARED_LIMITS[job.arch]:
        messages.append(f"needs {figures.shared} bytes of shared memory, the limit is {SHARED_LIMITS[job.arch]}")
    total = figures.registers * WARP * figures.warps
    if isinstance(job.arch, int) and (figures.registers > MAX_REGISTERS or total > REGISTERS):
        messages.append(f"needs {figures.registers} registers in {figures.warps} warps, a processor has {REGISTERS}")
    if figures.serialised:
        messages.append("matrix instructions are serialised (ptxas warning C7510, C7511 or C7515)")
    if figures.hasty:
        messages.append("accesses memory before waiting for the previous launch")
    if figures.overwrites:
        messages.append("a loop writes registers that matrix instructions in flight read")
    if figures.rounded and job.dtype == "float64":
        messages.append(f"float64 values meet constants rounded to float32: {figures.rounded}")
    scalar = job.dtype == "float64" and isinstance(job.arch, int) and job.arch not in FLOAT64_MATRIX
    if figures.wants_matrix and not figures.matrix and not scalar:
        messages.append("no matrix instructions")
    return messages
