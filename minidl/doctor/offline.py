"""Compiling recorded launches for a GPU that is not there, and reading what the compiler made of them.

Inside `recording(arch)` the launchers run on CPU tensors, and each launch becomes a `Job`: the kernel with the types,
constants and alignments that Triton would specialise it for. `compile_job` compiles one and returns its `Figures`.
Needs a process that does not interpret: set TRITON_INTERPRET=0 before starting Python.

    from minidl.doctor import offline
    from minidl.kernels import gemm

    with offline.recording(90) as jobs:
        gemm.gemm(torch.empty(512, 256), torch.empty(256, 128), act="relu")
    offline.show(jobs)
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import create_function_from_signature

from minidl.kernels import launch

# Shared memory that one program may have, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability", less the 1 KB that the system keeps).
SHARED_LIMITS = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
REGISTERS = 65536
MAX_REGISTERS = 255
WARP = 32
# ptxas: wgmma had to be serialised because the registers of the accumulators are touched in between.
SERIALISED = ("C7510", "C7511", "C7515")
MATRIX = {"wgmma": r"\bwgmma\.mma_async\b", "mma": r"\bmma\.sync\b", "tcgen05": r"\btcgen05\.mma\b"}
FIGURES_FILE = "minidl_figures.json"


@dataclass(frozen=True)
class Job:
    """A kernel with everything that decides its machine code. Equal `key`s give equal code."""

    kernel: Any = field(repr=False, compare=False)
    arch: int
    signature: dict[str, str] = field(compare=False)
    constants: dict[tuple[int, ...], Any] = field(compare=False)
    attributes: dict[tuple[int, ...], Any] = field(compare=False)
    options: dict[str, Any] = field(compare=False)
    key: str

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def constant(self) -> dict[str, Any]:
        """The constexpr parameters by name, without those that come from a value being 1 or None."""
        names = self.kernel.arg_names
        declared = {parameter.name for parameter in self.kernel.params if parameter.is_constexpr}
        found = {names[path[0]]: value for path, value in self.constants.items() if len(path) == 1}
        return {name: getattr(value, "value", value) for name, value in found.items() if name in declared}

    @property
    def tile(self) -> str:
        """Block sizes, warps and stages, as `launch.Tile` prints them."""
        sizes = {name: value for name, value in self.constant.items() if name.startswith("BLOCK")}
        return str(launch.Tile(sizes, self.options["num_warps"], self.options["num_stages"]))

    @property
    def dtype(self) -> str:
        """Of the first floating tensor among the arguments."""
        for kind in self.signature.values():
            found = re.match(r"(?:\*k?|tensordesc<)(fp16|bf16|fp32|fp64)", kind)
            if found:
                return {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}[found[1]]
        return "-"

    @property
    def precision(self) -> str:
        """How a float32 matrix product is computed, "-" where there is none."""
        return self.constant.get("PRECISION", "-") if self.dtype == "float32" else "-"

    def __str__(self) -> str:
        return f"{self.name} [{self.tile}] {self.dtype} {self.precision} sm_{self.arch}"


@dataclass(frozen=True)
class Figures:
    """What the compiler made of a job; `error` is set instead when it failed."""

    registers: int = 0
    spill: int = 0  # bytes per thread stored to and loaded from the stack for want of registers
    stack: int = 0
    shared: int = 0  # bytes
    warps: int = 0
    wgmma: int = 0
    mma: int = 0
    tcgen05: int = 0
    tma: int = 0
    wants_matrix: bool = False  # a product in a type that tensor cores have
    serialised: bool = False
    seconds: float = 0.0
    error: str = ""

    @property
    def matrix(self) -> int:
        return self.wgmma + self.mma + self.tcgen05


def target_name(arch: int) -> str:
    """The tile table for an architecture. Raises ValueError for one whose limits are not known."""
    if arch not in SHARED_LIMITS:
        raise ValueError(f"unknown architecture {arch}; known: {', '.join(map(str, SHARED_LIMITS))}")
    return "sm_90" if arch // 10 == 9 else "sm_80"


@contextlib.contextmanager
def recording(arch: int) -> Iterator[list[Job]]:
    """Collect the launches made inside as jobs for `arch`, with its tile table; nothing is computed.

    Raises RuntimeError in a process that interprets kernels.
    """
    if launch.INTERPRETED:
        raise RuntimeError("kernels are interpreted in this process; set TRITON_INTERPRET=0 before starting Python")
    jobs: list[Job] = []
    with launch.record(lambda *recorded: jobs.append(job(*recorded, arch=arch)), target_name(arch)):
        yield jobs


def job(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], arch: int) -> Job:
    """The job of one launch, specialised as Triton itself does at a launch on that architecture."""
    backend = make_backend(GPUTarget("cuda", arch, WARP))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, extra = bind(*args, **meta)
    options, signature, constants, attributes = kernel._pack_args(backend, dict(meta), bound, specialization, extra)
    named = {
        "kernel": f"{kernel.__module__}.{kernel.__name__}",
        "arch": arch,
        "signature": signature,
        "constants": [(path, str(value)) for path, value in constants.items()],
        "attributes": [(path, value) for path, value in attributes.items() if value],
        "options": {name: value for name, value in meta.items() if name in options.__dict__},
    }
    key = hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return Job(kernel, arch, signature, constants, attributes, options.__dict__, key)


def compile_job(job: Job) -> Figures:
    """Compile and measure; a job compiled before comes from Triton's cache. A failure becomes `Figures.error`."""
    start = time.perf_counter()
    log = io.StringIO()
    try:
        source = ASTSource(job.kernel, job.signature, job.constants, job.attributes)
        # Triton keeps what ptxas said to itself unless asked to print it.
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = True
            compiled = triton.compile(source, target=GPUTarget("cuda", job.arch, WARP), options=job.options)
    except Exception as error:  # noqa: BLE001 (whatever the compiler raises is the finding)
        return Figures(error=_first_line(error), seconds=time.perf_counter() - start)
    cache = get_cache_manager(compiled.hash)
    if known := cache.get_file(FIGURES_FILE):
        return Figures(**json.loads(Path(known).read_text()))
    said = log.getvalue() if "registers" in log.getvalue() else _ptxas(compiled.asm["ptx"], job)
    figures = _read(compiled, said, time.perf_counter() - start)
    cache.put(json.dumps(asdict(figures)), FIGURES_FILE, binary=False)
    return figures


def show(jobs: Iterable[Job]) -> bool:
    """Compile the jobs, each distinct one once, print a line for each, and return whether all are without problems."""
    fine = True
    for job in {job.key: job for job in jobs}.values():
        figures = compile_job(job)
        wrong = problems(job, figures)
        fine = fine and not wrong
        print(
            f"{job}: {figures.registers} registers, {figures.spill} B spilled, {figures.shared} B shared, "
            f"wgmma {figures.wgmma}, mma {figures.mma}, TMA {figures.tma}, {figures.seconds:.1f} s: "
            + ("; ".join(wrong) or "ok"),
            flush=True,
        )
    return fine


def problems(job: Job, figures: Figures) -> list[str]:
    """What is wrong with a compiled job, in words; empty when nothing is."""
    if figures.error:
        return [figures.error]
    found = []
    if figures.spill:
        found.append(f"spills {figures.spill} bytes of registers")
    if figures.shared > SHARED_LIMITS[job.arch]:
        found.append(f"needs {figures.shared} bytes of shared memory, the limit is {SHARED_LIMITS[job.arch]}")
    if figures.registers > MAX_REGISTERS or figures.registers * WARP * figures.warps > REGISTERS:
        found.append(f"needs {figures.registers} registers in {figures.warps} warps, a processor has {REGISTERS}")
    if figures.serialised:
        found.append("wgmma instructions are serialised")
    if figures.wants_matrix and not figures.matrix:
        found.append("no matrix instructions")
    return found


def _read(compiled: Any, said: str, seconds: float) -> Figures:
    ptx = compiled.asm["ptx"]
    spilled = [int(stores) + int(loads) for stores, loads in re.findall(r"(\d+) bytes spill stores, (\d+)", said)]
    return Figures(
        registers=max(map(int, re.findall(r"Used (\d+) registers", said)), default=0),
        spill=max(spilled, default=0),
        stack=max(map(int, re.findall(r"(\d+) bytes stack frame", said)), default=0),
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        **{name: len(re.findall(pattern, ptx)) for name, pattern in MATRIX.items()},
        tma=len(re.findall(r"\bcp\.async\.bulk\.tensor\b", ptx)),
        wants_matrix=_wants_matrix(compiled.asm["ttir"]),
        serialised=any(code in said for code in SERIALISED),
        seconds=seconds,
    )


def _wants_matrix(ttir: str) -> bool:
    for line in ttir.splitlines():
        if " tt.dot " in line:
            left = re.search(r": tensor<[\dx]+x(\w+)>", line)
            if "inputPrecision = tf32" in line or (left and left[1] in ("f16", "bf16", "f64")):
                return True
    return False


def _ptxas(ptx: str, job: Job) -> str:
    """What ptxas says of a kernel whose machine code came from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(job.arch).path, "-v", f"--gpu-name={sm_arch_from_capability(job.arch)}", str(path)]
        if not job.options["enable_fp_fusion"]:
            command.append("--fmad=false")
        return subprocess.run(
            [*command, "-o", f"{path}.cubin"], capture_output=True, text=True, check=True
        ).stderr  # fmt: skip


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
