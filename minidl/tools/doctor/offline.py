"""Compile recorded launches for a GPU, which need not be present, and read the compiler's figures.

Inside `recording(arch)` the launchers run on CPU tensors, and each launch becomes a `Job`: the kernel with the types,
constants and alignments that Triton would specialise it for. `compile_job` compiles one and returns its `Figures`.
Needs a process that does not interpret: set TRITON_INTERPRET=0 before starting Python.

    with offline.recording(90) as jobs:
        gemm.gemm(torch.empty(512, 256), torch.empty(256, 128), act="relu")
    print(*map(offline.compile_job, jobs), sep="\n")
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler.errors import CompilationError
from triton.runtime.cache import get_cache_manager

from minidl.common.architecture import Arch
from minidl.compilation import launch_jobs
from minidl.compilation.job import Job
from minidl.runtime import launch
from minidl.tools.doctor import constants
from minidl.tools.doctor.jobs import Figures, target_name
from minidl.tools.first_line import first_line

# wgmma had to be serialised because other instructions use the registers of the accumulators in between.
SERIALISED = ("C7510", "C7511", "C7515")
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async\b", "mma": r"\bmma\.sync\b", "tcgen05": r"\btcgen05\.mma\b",
    "mfma": r"\bv_mfma_", "wmma": r"\bv_wmma_", "tma": r"\bcp\.async\.bulk\.tensor\b",
    "loads": r"\bld\.global\b|\bcp\.async\.c[ag]\b|\b(?:global|buffer)_load_",
    "wide": r"\bld\.global\S*\.(?:v4\.\w32|v8\.\w32|v[24]\.\w64)|\bcp\.async\.c[ag]\b[^;]*\b0x10\b"
    r"|\b(?:global|buffer)_load_(?:lds_)?(?:dwordx4|b128)",
}  # fmt: skip
# In Triton's IR, a product whose left operand or precision tensor cores support.
WANTS_MATRIX = r" tt\.dot .*(?:inputPrecision = tf32|: tensor<[\dx]+x(?:f16|bf16|f64|f8E\w+)> \*)"
WANTS_MATRIX_OF_AMD = r" tt\.dot .*: tensor<[\dx]+x(?:f16|bf16)> \*"
AMD_FIGURES = {
    "registers": r"\.vgpr_count: +(\d+)", "spill": r"\.vgpr_spill_count: +(\d+)",
    "stack": r"\.private_segment_fixed_size: +(\d+)",
}  # fmt: skip
WAIT = "griddepcontrol.wait"
MEMORY = r"\b(?:ld\.global|st\.global|cp\.async|atom\.global|red\.global)"
# An error that LLVM writes to standard error, with its line of assembler if there is one.
LLVM_ERROR = r"(?<!ld\.lld: )error: (.*(?:\n[ \t]+\S.*)?)"
_MOST_STDERR = 1 << 22  # bytes, with the code that a pass of the compiler failed on
FIGURES_FILE = "minidl_figures_8.json"
# A wgmma whose left operand is in registers, and the number of them that stay in flight after a wait.
FROM_REGISTERS, IN_FLIGHT = r"\bwgmma\.mma_async[^{]*\{[^}]*\},\s*\{", r"\bwgmma\.wait_group\S* (\d+)"


@contextlib.contextmanager
def recording(arch: Arch) -> Iterator[list[Job]]:
    """A context that collects launches as jobs for `arch`, with its tile table, and computes nothing.

    Raises RuntimeError in a process that interprets kernels.
    """
    if launch.INTERPRETED:
        raise RuntimeError("kernels are interpreted in this process; set TRITON_INTERPRET=0 before starting Python")
    jobs: list[Job] = []

    def keep(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        if isinstance(arch, str):  # AMD's GPUs have neither this option nor PTX
            meta = {name: value for name, value in meta.items() if name != "launch_pdl"}
            if "OPAQUE" in meta:
                meta["OPAQUE"] = False
        jobs.append(launch_jobs.job_of(arch, kernel, grid, args, meta))

    with launch.record(keep, target_name(arch)):
        yield jobs


def compile_job(job: Job) -> Figures:
    """Compile and measure; a job compiled before comes from Triton's cache. A failure becomes `Figures.error`."""
    start = time.perf_counter()
    log = io.StringIO()
    try:
        # Triton only prints the output of ptxas on request.
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = True
            compiled = launch_jobs.compile_job(job)
    except Exception as error:  # noqa: BLE001 (any error of the compiler is the result)
        return Figures(error=_reason(error), seconds=time.perf_counter() - start)
    cache = get_cache_manager(compiled.hash)
    if path := cache.get_file(FIGURES_FILE):
        return Figures(**json.loads(Path(path).read_text()))
    output = log.getvalue()
    if "ptx" in compiled.asm and "registers" not in output:
        output = _ptxas(compiled.asm["ptx"], job)
    figures = _read(compiled, output, time.perf_counter() - start)
    cache.put(json.dumps(asdict(figures)), FIGURES_FILE, binary=False)
    return figures


def _reason(error: BaseException) -> str:
    """Return in one line why a kernel does not compile: the innermost error, and its line of the kernel."""
    while isinstance(error, CompilationError) and error.error_message is None and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CompilationError) and error.src and hasattr(error.node, "lineno"):
        message = " ".join((error.error_message or "").split())
        return f"{type(error).__name__}: {message} at `{error.src.splitlines()[error.node.lineno - 1].strip()}`"
    errors = re.findall(LLVM_ERROR, _stderr()) if re.search("PassManager|LLD", str(error)) else []
    return f"{type(error).__name__}: {' '.join(errors[-1].split())}" if errors else first_line(error)


def _stderr() -> str:
    """Return the end of this process's standard error if that is a file, else ""."""
    with contextlib.suppress(OSError):
        return os.pread(2, _MOST_STDERR, max(0, os.fstat(2).st_size - _MOST_STDERR)).decode(errors="replace")
    return ""


def _read(compiled: Any, output: str, seconds: float) -> Figures:
    code, amd = compiled.asm.get("ptx") or compiled.asm["amdgcn"], "amdgcn" in compiled.asm
    figures: dict[str, Any] = {name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()}
    figures |= _read_amd(code) if amd else _read_ptxas(output)
    pattern = WANTS_MATRIX_OF_AMD if amd else WANTS_MATRIX
    return Figures(
        **figures,
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        lines=code.count("\n"),
        wants_matrix=re.search(pattern, compiled.asm["ttir"]) is not None,
        serialised=any(warning in output for warning in SERIALISED),
        hasty=_hasty(code),
        overwrites=_overwrites(code),
        rounded=", ".join(constants.rounded(compiled.asm["ttir"])),
        triton=triton.__version__,
        seconds=seconds,
    )


def _read_ptxas(output: str) -> dict[str, int]:
    spilled = [int(stores) + int(loads) for stores, loads in re.findall(r"(\d+) bytes spill stores, (\d+)", output)]
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", output)), default=0),
        "spill": max(spilled, default=0),
        "stack": max(map(int, re.findall(r"(\d+) bytes stack frame", output)), default=0),
    }


def _read_amd(code: str) -> dict[str, int]:
    figures = {name: max(map(int, re.findall(pattern, code)), default=0) for name, pattern in AMD_FIGURES.items()}
    return figures | {"spill": 4 * figures["spill"]}  # registers of 4 bytes


def _hasty(ptx: str) -> bool:
    """Return whether programs of a dependent launch access memory before they wait (`runtime.dependent_launch`)."""
    body = ptx[ptx.find("{") :]
    access = re.search(MEMORY, body)
    return "griddepcontrol.launch_dependents" in body and (
        WAIT not in body or (access is not None and access.start() < body.index(WAIT))
    )


def _overwrites(ptx: str) -> bool:
    """Return whether a loop ends with matrix instructions in flight whose operand registers its next round writes."""
    labels = {label[1]: label.start() for label in re.finditer(r"^\s*(\$L__BB\w+):", ptx, re.MULTILINE)}
    for branch in re.finditer(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)", ptx):
        body = ptx[labels.get(branch[1], branch.start()) : branch.start()]
        products = [match.end() for match in re.finditer(FROM_REGISTERS, body)]
        if not products:
            continue
        behind, waits = re.findall(IN_FLIGHT, body[products[-1] :]), re.findall(IN_FLIGHT, body)
        if int(behind[-1] if behind else waits[0] if waits else 1):  # else the next round waits first
            return True
    return False


def _ptxas(ptx: str, job: Job) -> str:
    """Return the output of ptxas for a kernel whose machine code came from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        options = [] if job.options.get("enable_fp_fusion", True) else ["--fmad=false"]
        command = [get_ptxas(job.arch).path, "-v", *options, f"--gpu-name={sm_arch_from_capability(job.arch)}"]
        command += [str(path), "-o", f"{path}.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
