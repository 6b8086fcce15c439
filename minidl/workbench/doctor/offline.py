"""Compile recorded launches for a GPU that need not be present, and read the compiler's figures.

Inside `recording(arch)` the launchers run on CPU tensors, and each launch becomes a `Job`: the kernel with the types,
constants and alignments that Triton would specialise it for. `compile_job` compiles one and returns its `Figures`.
Needs a process that does not interpret: set TRITON_INTERPRET=0 before starting Python.

    with offline.recording(90) as jobs:
        gemm.gemm(torch.empty(512, 256), torch.empty(256, 128), act="relu")
    print(*map(offline.compile_job, jobs), sep="\n")
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import create_function_from_signature

from minidl.runtime import launch
from minidl.workbench.doctor.jobs import WARP, Figures, Job, target_name
from minidl.workbench.first_line import first_line

# wgmma had to be serialised because the registers of the accumulators are touched in between.
SERIALISED = ("C7510", "C7511", "C7515")
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async\b", "mma": r"\bmma\.sync\b", "tcgen05": r"\btcgen05\.mma\b",
    "tma": r"\bcp\.async\.bulk\.tensor\b",
}  # fmt: skip
# In Triton's own code, a product whose left operand or precision tensor cores have.
WANTS_MATRIX = r" tt\.dot .*(?:inputPrecision = tf32|: tensor<[\dx]+x(?:f16|bf16|f64)> \*)"
WAIT = "griddepcontrol.wait"
MEMORY = r"\b(?:ld\.global|st\.global|cp\.async|atom\.global|red\.global)"
FIGURES_FILE = "minidl_figures_2.json"


@contextlib.contextmanager
def recording(arch: int) -> Iterator[list[Job]]:
    """A context that collects launches as jobs for `arch`, with its tile table, and computes nothing.

    Raises RuntimeError in a process that interprets kernels.
    """
    if launch.INTERPRETED:
        raise RuntimeError("kernels are interpreted in this process; set TRITON_INTERPRET=0 before starting Python")
    jobs: list[Job] = []
    with launch.record(lambda *launched: jobs.append(job_of(arch, *launched)), target_name(arch)):
        yield jobs


def job_of(arch: int, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> Job:
    """The job of one launch, specialised as Triton itself does at a launch on that architecture."""
    backend, bind = _binder(kernel, arch)
    bound, specialization, extra = bind(*args, **meta)
    # About one in ten recorded launches is new, and making this key takes a tenth of the time of making a job.
    key = (kernel, arch, str(specialization), str(extra))
    if key not in _jobs:
        options, signature, constants, attributes = kernel._pack_args(backend, dict(meta), bound, specialization, extra)
        _jobs[key] = Job(
            kernel=f"{kernel.__module__}:{kernel.__name__}",
            arch=arch,
            signature=signature,
            constants=[(list(path), _plain(value)) for path, value in constants.items()],
            attributes=[(list(path), known) for path, known in attributes.items() if known],
            options={"num_warps": 4, "num_stages": 3, **{n: v for n, v in meta.items() if n in options.__dict__}},
            declared=[parameter.name for parameter in kernel.params if parameter.is_constexpr],
        )
    return _jobs[key]


_jobs: dict[tuple[Any, ...], Job] = {}


@functools.cache
def _binder(kernel: Any, arch: int) -> tuple[Any, Callable[..., Any]]:
    backend = make_backend(GPUTarget("cuda", arch, WARP))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def _plain(value: Any) -> Any:
    """A constant as JSON. Raises TypeError for one that JSON cannot hold."""
    value = getattr(value, "value", value)
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the constant {value!r} of a kernel is neither a number nor a string nor a type")


def _constant(value: Any) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, dict):
        return tl.dtype(value["dtype"])
    return tuple(_constant(item) for item in value) if isinstance(value, list) else value


def compile_job(job: Job) -> Figures:
    """Compile and measure; a job compiled before comes from Triton's cache. A failure becomes `Figures.error`."""
    start = time.perf_counter()
    log = io.StringIO()
    try:
        module, name = job.kernel.split(":")
        source = ASTSource(
            getattr(importlib.import_module(module), name),
            {parameter: _constant(kind) for parameter, kind in job.signature.items()},
            {tuple(path): _constant(value) for path, value in job.constants},
            {tuple(path): known for path, known in job.attributes},
        )
        # Triton only prints the output of ptxas on request.
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = True
            compiled = triton.compile(source, target=GPUTarget("cuda", job.arch, WARP), options=job.options)
    except Exception as error:  # noqa: BLE001 (whatever the compiler raises is the finding)
        return Figures(error=first_line(error), seconds=time.perf_counter() - start)
    cache = get_cache_manager(compiled.hash)
    if known := cache.get_file(FIGURES_FILE):
        return Figures(**json.loads(Path(known).read_text()))
    said = log.getvalue() if "registers" in log.getvalue() else _ptxas(compiled.asm["ptx"], job)
    figures = _read(compiled, said, time.perf_counter() - start)
    cache.put(json.dumps(asdict(figures)), FIGURES_FILE, binary=False)
    return figures


def _read(compiled: Any, said: str, seconds: float) -> Figures:
    ptx = compiled.asm["ptx"]
    found: dict[str, Any] = {name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()}
    spilled = [int(stores) + int(loads) for stores, loads in re.findall(r"(\d+) bytes spill stores, (\d+)", said)]
    return Figures(
        registers=max(map(int, re.findall(r"Used (\d+) registers", said)), default=0),
        spill=max(spilled, default=0),
        stack=max(map(int, re.findall(r"(\d+) bytes stack frame", said)), default=0),
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        **found,
        lines=ptx.count("\n"),
        wants_matrix=re.search(WANTS_MATRIX, compiled.asm["ttir"]) is not None,
        serialised=any(code in said for code in SERIALISED),
        hasty=_hasty(ptx),
        seconds=seconds,
    )


def _hasty(ptx: str) -> bool:
    """Whether programs that may start early access memory before they wait (`runtime.early`)."""
    body = ptx[ptx.find("{") :]
    touched = re.search(MEMORY, body)
    return "griddepcontrol.launch_dependents" in body and (
        WAIT not in body or (touched is not None and touched.start() < body.index(WAIT))
    )


def _ptxas(ptx: str, job: Job) -> str:
    """The output of ptxas for a kernel whose machine code came from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        options = [] if job.options.get("enable_fp_fusion", True) else ["--fmad=false"]
        command = [get_ptxas(job.arch).path, "-v", *options, f"--gpu-name={sm_arch_from_capability(job.arch)}"]
        command += [str(path), "-o", f"{path}.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
