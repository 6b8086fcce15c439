"""Launches as jobs, which can be compiled elsewhere before a launch needs them.

A launch becomes a job specialised as Triton itself does it, so the launch then finds its kernel in Triton's cache. A
kernel that is not compiled ahead, for whatever reason, is compiled as it is launched, and tells its error there.
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

# Kernels and functions that no import finds, by the names that jobs have for them.
known: dict[str, Any] = {}


def gpu(arch: Arch) -> GPUTarget:
    """An architecture as Triton's target; AMD's have waves of 64 lanes up to gfx9."""
    if isinstance(arch, str):
        return GPUTarget("hip", arch, 2 * WARP if arch.startswith("gfx9") else WARP)
    return GPUTarget("cuda", arch, WARP)


def job_of(
    arch: Arch, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], name: str = ""
) -> Job:
    """The job of a launch of a JITFunction, specialised as Triton itself does on that architecture.

    `name` is that in `known`. Raises TypeError for a constant that is neither a number nor a string nor a type.
    """
    if not name:
        cache_keys.compute_key(kernel)
    backend, bind = _binder(kernel, arch)
    bound, specialization, extra = bind(*args, **meta)
    # About one in ten recorded launches is new, and making this key takes a tenth of the time of making a job.
    key = (kernel, arch, str(specialization), str(extra))
    if key not in _jobs:
        options, signature, constants, attributes = kernel._pack_args(backend, dict(meta), bound, specialization, extra)
        given = {name: value for name, value in meta.items() if name in options.__dict__}
        _jobs[key] = Job(
            kernel=name or f"{kernel.__module__}:{kernel.__name__}",
            arch=arch,
            signature=signature,
            constants=[(list(path), _plain(value)) for path, value in constants.items()],
            attributes=[(list(path), known) for path, known in attributes.items()],
            options={"num_warps": 4, "num_stages": options.num_stages, **given},
            declared=[parameter.name for parameter in kernel.params if parameter.is_constexpr],
        )
    return _jobs[key]


_jobs: dict[tuple[Any, ...], Job] = {}


@functools.cache
def _binder(kernel: Any, arch: Arch) -> tuple[Any, Callable[..., Any]]:
    backend = make_backend(gpu(arch))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def _plain(value: Any) -> Any:
    """A constant as JSON. Raises TypeError for one that JSON cannot hold, and a function that is not in `known`."""
    if isinstance(value, tl.constexpr):  # its text is in the key of Triton's cache
        return {"constexpr": _plain(value.value)}
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, JITFunction):
        for name, function in known.items():
            if function.fn is value.fn:
                return {"function": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the constant {value!r} of a kernel is neither a number nor a string nor a type")


def _constant(value: Any) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, dict) and "function" in value:
        return known[value["function"]]
    if isinstance(value, dict):
        return tl.dtype(value["dtype"]) if "dtype" in value else tl.constexpr(_constant(value["constexpr"]))
    return tuple(_constant(item) for item in value) if isinstance(value, list) else value


def source_of(job: Job) -> ASTSource:
    """What Triton compiles for a job. Raises ImportError and AttributeError for a kernel that is not importable."""
    kernel = known.get(job.kernel)
    if kernel is None:
        module, name = job.kernel.split(":")
        kernel = getattr(importlib.import_module(module), name)
    cache_keys.compute_key(kernel)
    return ASTSource(
        kernel,
        {parameter: _constant(kind) for parameter, kind in job.signature.items()},
        {tuple(path): _constant(value) for path, value in job.constants},
        {tuple(path): known for path, known in job.attributes},
    )


def compile_job(job: Job) -> Any:
    """The compiled kernel of a job, from Triton's cache or new and then in it."""
    return triton.compile(source_of(job), target=gpu(job.arch), options=job.options)


def is_compiled(job: Job) -> bool:
    """Whether Triton's cache has the kernel of a job."""
    name = job.name[:150]  # as Triton cuts names of files
    return bool(get_cache_manager(hashlib.sha256(cache_key(job).encode()).hexdigest()).get_group(f"{name}.json"))


def is_wanted(job: Job) -> bool:
    """Whether Triton's cache lacks the kernel of a job, and nobody in this process has asked yet: who asks has it
    compiled. A question takes milliseconds."""
    asked = (str(triton.knobs.cache.dir), job.key)
    if asked in _asked:
        return False
    _asked.add(asked)
    return not is_compiled(job)


_asked: set[tuple[str, str]] = set()


def cache_key(job: Job) -> str:
    """The text whose hash names the kernel of a job in Triton's cache."""
    source, backend = source_of(job), make_backend(gpu(job.arch))
    options = backend.parse_options({**job.options, **source.parse_options()})
    return str(get_cache_key(source, backend, options, env_vars=invalidating()))


def get_ready() -> None:
    """Read what the keys of all kernels have in common: Triton's own files and the version of ptxas, for a second."""
    triton_key()
    make_backend(gpu(90)).hash()


def invalidating() -> dict[str, Any]:
    """The environment variables that change what Triton compiles."""
    found: dict[str, Any] = get_cache_invalidating_env_vars()
    return found


def compilable(kernel: Any) -> bool:
    """Whether launches of a kernel can become jobs: an importable function of Triton's."""
    return type(kernel) is JITFunction and kernel.__module__ != "__main__"
