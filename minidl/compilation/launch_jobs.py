"""Turn launches into jobs, which other processes can compile before the launch.

Jobs are specialised by Triton's own rules, so the launch finds the kernel in Triton's cache. A kernel that could not be
compiled ahead is compiled when it is launched, which also reports its errors.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.jit import JITFunction, create_function_from_signature

from minidl.common.architecture import Arch
from minidl.compilation.job import WARP, Job
from minidl.runtime import cache_keys

# Kernels and functions that cannot be imported, by their names in jobs.
registered: dict[str, Any] = {}


def gpu(arch: Arch) -> GPUTarget:
    """Return an architecture as Triton's target; AMD GPUs have waves of 64 lanes up to gfx9."""
    if isinstance(arch, str):
        return GPUTarget("hip", arch, 2 * WARP if arch.startswith("gfx9") else WARP)
    return GPUTarget("cuda", arch, WARP)


def job_of(
    arch: Arch, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], name: str = ""
) -> Job:
    """Return the job of a launch of a JITFunction, specialised by Triton's rules for that architecture.

    `name` is the name in `registered`. Raises TypeError for a constant that is no number, string or type.
    """
    if not name:
        cache_keys.compute_key(kernel)
    backend, bind = _binder(kernel, arch)
    bound, specialization, extra = bind(*args, **meta)
    # One in ten recorded launches is new, and this key takes a tenth of the time of building a job.
    key = (kernel, arch, str(specialization), str(extra))
    if key not in _jobs:
        options, signature, constants, attributes = kernel._pack_args(backend, dict(meta), bound, specialization, extra)
        passed = {name: value for name, value in meta.items() if name in options.__dict__}
        _jobs[key] = Job(
            kernel=name or f"{kernel.__module__}:{kernel.__name__}",
            arch=arch,
            signature={parameter: _plain(kind) for parameter, kind in signature.items()},
            constants=[(list(path), _plain(value)) for path, value in constants.items()],
            attributes=[(list(path), properties) for path, properties in attributes.items()],
            options={"num_warps": 4, "num_stages": options.num_stages, **passed},
            declared=[parameter.name for parameter in kernel.params if parameter.is_constexpr],
        )
    return _jobs[key]


_jobs: dict[tuple[Any, ...], Job] = {}


@functools.cache
def _binder(kernel: Any, arch: Arch) -> tuple[Any, Callable[..., Any]]:
    backend = make_backend(gpu(arch))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def _plain(value: Any) -> Any:
    """Return a constant as JSON. Raises TypeError if JSON has no such value, or for an unregistered function."""
    if isinstance(value, tl.constexpr):  # its repr is in the key of Triton's cache
        return {"constexpr": _plain(value.value)}
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if hasattr(value, "_fields"):  # an argument record; its repr is in the key as well
        name = f"{type(value).__module__}:{type(value).__name__}"
        return {"record": name, "fields": {field: _plain(item) for field, item in value._asdict().items()}}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, JITFunction):
        for name, function in registered.items():
            if function.fn is value.fn:
                return {"function": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the constant {value!r} of a kernel is neither a number nor a string nor a type")


def _constant(value: Any) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, dict) and "function" in value:
        return registered[value["function"]]
    if isinstance(value, dict) and "record" in value:
        module, name = value["record"].split(":")
        record = getattr(importlib.import_module(module), name)
        return record(**{field: _constant(item) for field, item in value["fields"].items()})
    if isinstance(value, dict):
        return tl.dtype(value["dtype"]) if "dtype" in value else tl.constexpr(_constant(value["constexpr"]))
    return tuple(_constant(item) for item in value) if isinstance(value, list) else value


def source_of(job: Job) -> ASTSource:
    """Return the source that Triton compiles for a job. Raises ImportError or AttributeError if it has no kernel."""
    kernel = registered.get(job.kernel)
    if kernel is None:
        module, name = job.kernel.split(":")
        kernel = getattr(importlib.import_module(module), name)
    cache_keys.compute_key(kernel)
    return ASTSource(
        kernel,
        {parameter: _constant(kind) for parameter, kind in job.signature.items()},
        {tuple(path): _constant(value) for path, value in job.constants},
        {tuple(path): properties for path, properties in job.attributes},
    )


def compile_job(job: Job) -> Any:
    """Return the compiled kernel of a job, from Triton's cache or added to it."""
    return triton.compile(source_of(job), target=gpu(job.arch), options=job.options)


def is_compiled(job: Job) -> bool:
    """Return whether Triton's cache has the kernel of a job."""
    name = job.name[:150]  # Triton cuts file names
    return bool(get_cache_manager(hashlib.sha256(cache_key(job).encode()).hexdigest()).get_group(f"{name}.json"))


def is_wanted(job: Job) -> bool:
    """Return whether the caller should compile a job: Triton's cache lacks it, and this is the first call for it in
    this process. A first call takes milliseconds."""
    key = (str(triton.knobs.cache.dir), job.key)
    if key in _requested:
        return False
    _requested.add(key)
    return not is_compiled(job)


_requested: set[tuple[str, str]] = set()


def cache_key(job: Job) -> str:
    """Return the text whose hash is the name of a job's kernel in Triton's cache."""
    source, backend = source_of(job), make_backend(gpu(job.arch))
    options = backend.parse_options({**job.options, **source.parse_options()})
    return str(get_cache_key(source, backend, options, env_vars=invalidating()))


def preload() -> None:
    """Read the common part of all cache keys (Triton's files, the version of ptxas), which takes a second."""
    triton_key()
    make_backend(gpu(90)).hash()


def invalidating() -> dict[str, Any]:
    """Return the environment variables that change what Triton compiles."""
    variables: dict[str, Any] = get_cache_invalidating_env_vars()
    return variables


def compilable(kernel: Any) -> bool:
    """Return whether launches of a kernel can become jobs: it is a JITFunction that can be imported."""
    return type(kernel) is JITFunction and kernel.__module__ != "__main__"
