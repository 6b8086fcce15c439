"""A CUDA device that is pretended: kernels are compiled for sm_90 in full, and what would be launched is written down.

Run as a program (TRITON_INTERPRET=0), it launches each probe through Triton and directly, and prints what it saw.
"""

import json
import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from minidl.compilation import launch_jobs, rehearsal
from minidl.compilation.compiler_processes import Compilers
from minidl.kernels import bias_act, softmax
from minidl.runtime import launch
from minidl.runtime.launch_cache import fast_launch
from minidl.tools.doctor import warm
from minidl.tools.doctor.workloads import workloads
from tests.kernels import probes

launched: list[tuple[Any, tuple[Any, ...]]] = []


class Launcher:
    """The launcher of one compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        function, packed, _, _, _, *args = rest
        launched.append((self, (x, y, z, stream, function, packed, *args)))


class Driver:
    """CPU tensors say that they are on device -1; so does this driver."""

    device = -1
    launcher_cls = Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *args: (1, 2, 32, 0, 1024),
        unload_module=lambda module: None,
    )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def by_triton(probe: probes.Launch, keep: bool = True) -> tuple[Any, tuple[Any, ...]]:
    compiled = probe.kernel[probe.grid](*probe.args, **probe.meta)
    if keep:
        fast_launch.store(probe.kernel, probe.args, probe.meta, compiled)
    return launched.pop()


def directly(probe: probes.Launch) -> tuple[Any, tuple[Any, ...]] | None:
    if fast_launch.launch(probe.kernel, probe.grid, probe.args, probe.meta):
        return launched.pop()
    assert not launched
    return None


def same_arguments(probe: probes.Launch, one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Up to the places of constants, which a launcher does not read."""
    count = 6 + len(probe.args)
    return len(one) == len(other) and all(a is b or a == b for a, b in zip(one[:count], other[:count], strict=True))


def specialisations() -> dict[str, dict[str, Any]]:
    """Of each probe: whether it was new, and whether both ways launched one kernel with the same arguments."""
    seen: dict[str, dict[str, Any]] = {}
    first: dict[str, Any] = {}
    for probe in probes.launches("cpu"):
        known = directly(probe)
        launcher, args = by_triton(probe)
        first[probe.name] = launcher
        again = directly(probe)
        seen[probe.name] = {
            "known": known is not None,
            "known_right": known is None or known[0] is launcher,
            "kernel_right": again is not None and again[0] is launcher,
            "arguments_right": again is not None and same_arguments(probe, again[1], args),
            "alone": probe.same is not None
            or all(launcher is not old for name, old in first.items() if name != probe.name),
            "shared": probe.same is None or launcher is first[probe.same],
        }
    # With all kernels there, in another order.
    for probe in reversed(probes.launches("cpu")):
        again = directly(probe)
        seen[probe.name]["found_again"] = again is not None and again[0] is first[probe.name]
    return seen


class Elsewhere(torch.Tensor):
    def get_device(self) -> int:
        return 1


def refusals() -> dict[str, bool]:
    """Whether a launch that is known is left to Triton after each change, and direct again once it is undone."""
    probe = probes.launches("cpu")[0]
    kernel = probe.kernel
    seen: dict[str, bool] = {}

    def check(name: str, before: Any, after: Any) -> None:
        by_triton(probe)
        ready = directly(probe) is not None
        before()
        left = directly(probe) is None
        after()
        by_triton(probe)
        seen[name] = ready and left and directly(probe) is not None

    def hook(*args: Any, **kwargs: Any) -> None:
        pass

    def with_args(**changed: Any) -> bool:
        names = list(kernel.arg_names)
        args = list(probe.args)
        for name, value in changed.items():
            args[names.index(name)] = value
        return directly(probe._replace(args=tuple(args))) is None

    for chain in ("launch_enter_hook", "launch_exit_hook"):
        hooks = getattr(knobs.runtime, chain)
        check(chain, lambda hooks=hooks: hooks.add(hook), lambda hooks=hooks: hooks.remove(hook))
    for group, knob, value in (
        (knobs.runtime, "debug", True),
        (knobs.runtime, "add_stages_inspection_hook", lambda: ("key", "hash")),
        (knobs.compilation, "instrumentation_mode", "consan"),
    ):
        check(
            knob,
            lambda group=group, knob=knob, value=value: setattr(group, knob, value),
            lambda group=group, knob=knob: delattr(group, knob),
        )
    check("pre_run_hook", lambda: kernel.add_pre_run_hook(hook), kernel.pre_run_hooks.clear)
    check("debug of the kernel", lambda: setattr(kernel, "debug", True), lambda: setattr(kernel, "debug", None))
    check("source", lambda: kernel._unsafe_update_src(kernel.src + "\n"), lambda: None)
    check("caches of Triton cleared", kernel.device_caches.clear, lambda: None)
    offset = probes.OFFSET
    check(
        "global constant", lambda: setattr(probes, "OFFSET", triton.language.constexpr(4)),
        lambda: setattr(probes, "OFFSET", offset),
    )  # fmt: skip
    check("other device", lambda: setattr(Driver, "device", 0), lambda: setattr(Driver, "device", -1))

    by_triton(probe)
    elsewhere = probe.args[0].as_subclass(Elsewhere)
    seen["tensor of another device"] = with_args(p_x=elsewhere)
    kept, left = (fast_launch.lookup(kernel, (x, *probe.args[1:]), probe.meta) for x in (probe.args[0], elsewhere))
    seen["replay of another device"] = kept is not None and left is None
    seen["pointer that is no tensor"] = with_args(p_x=triton.reinterpret(probe.args[0], triton.language.float32))
    seen["argument by name"] = (
        directly(probe._replace(args=probe.args[:-1], meta={"negate": False, **probe.meta})) is None
    )
    seen["constant by position"] = directly(
        probe._replace(args=(*probe.args, 1), meta={k: v for k, v in probe.meta.items() if k != "SHIFT"})
    ) is None  # fmt: skip
    seen["constant without a hash"] = directly(probe._replace(meta={**probe.meta, "NAME": []})) is None
    known, fast_launch.SUPPORTED = fast_launch.SUPPORTED, False
    other = probe._replace(meta={**probe.meta, "SHIFT": 77})
    by_triton(other)
    seen["unknown version"] = directly(other) is None
    fast_launch.SUPPORTED = known
    return seen


def left_to_triton() -> list[str]:
    """Kernels of minidl with a launch that comes in another form than arguments by position, constants by name."""
    found = set()

    def recorder(kernel: Any, grid: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        constant = [parameter.is_constexpr for parameter in kernel.params]
        if any(constant[: len(args)]) or not all(constant[len(args) :]):
            found.add(kernel.__name__)
        hash(tuple(meta.values()))

    for load in workloads():
        for dtype in load.dtypes:
            with launch.record(recorder, "sm_90"):
                for _, call in load.calls(dtype):
                    call()
    return sorted(found)


def keys() -> dict[str, int]:
    """Kernels that Triton would look for under another key of its cache than that of the launch's job."""
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    jobs: dict[str, Any] = {}
    other: dict[str, int] = {}

    def recorder(kernel: Any, grid: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        job = launch_jobs.job_of(90, kernel, grid, args, meta)
        if job.key not in jobs:
            jobs[job.key] = job
            found.append((kernel, args, meta))

    for load in workloads():
        for dtype in load.dtypes:
            with launch.record(recorder, "sm_90"):
                for _, call in load.calls(dtype):
                    call()
    for name in ("text", "table", "generate"):
        for work in warm.works(name):
            with rehearsal.rehearsal(recorder, "sm_90"):
                work()
    by_triton: list[str] = []

    def compile_(kernel: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, *rest: Any) -> None:
        source = ASTSource(kernel, signature, constants, rest[0])
        by_triton.append(
            get_cache_key(source, make_backend(Driver().get_current_target()), options, launch_jobs.invalidating())
        )

    original, JITFunction._do_compile = JITFunction._do_compile, compile_
    try:
        for job, (kernel, args, meta) in zip(jobs.values(), found, strict=True):
            kernel.device_caches.clear()
            kernel.warmup(*args, grid=(1,), **meta)
            other[job.name] = other.get(job.name, 0) + (by_triton.pop() != launch_jobs.cache_key(job))
    finally:
        JITFunction._do_compile = original
    return other


def compiled_ahead(folder: str) -> dict[str, Any]:
    """Probes compiled by processes into an empty cache: Triton then finds them all."""
    os.environ["TRITON_CACHE_DIR"] = folder
    jobs: list[Any] = []
    with launch.record(lambda *launched: jobs.append(launch_jobs.job_of(90, *launched)), "sm_90"):
        x = torch.empty(8, 40)
        softmax.softmax(x)
        for act in ("gelu", "relu"):
            bias_act.bias_act(x, x[0], act)
        softmax.softmax(x)
    before, seen = [launch_jobs.is_compiled(job) for job in jobs], []
    with Compilers(["minidl.kernels.softmax", "no.such.module"]) as compilers:
        compilers.compile(jobs, lambda done, of: seen.append((done, of)), processes=2)
        again = [launch_jobs.is_compiled(job) for job in jobs]
    return {"jobs": len(jobs), "before": sum(before), "after": sum(again), "seen": seen}


if __name__ == "__main__":
    driver.set_active(Driver())
    fast_launch._current_device = Driver().get_current_device  # where torch has CUDA, it is asked
    with tempfile.TemporaryDirectory() as folder:
        result = {"ahead": compiled_ahead(folder)}
        os.environ.pop("TRITON_CACHE_DIR")
    result |= {
        "known": fast_launch.SUPPORTED,
        "specialisations": specialisations(),
        "refusals": refusals(),
        "left": left_to_triton(),
        "keys": keys(),
    }
    json.dump(result, sys.stdout)
