"""Any Triton kernel, compiled for the CPU: `compiled(kernel)[grid](...)` in place of `kernel[grid](...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from minidl.runtime import cache_keys, launch

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


def compiled(kernel: Any) -> Compiled:
    """Return a kernel whose launches are compiled for the CPU by way of C.

    kernel  a function decorated with `triton.jit`; the function inside of `triton.autotune` or `triton.heuristics` is
            its attribute `fn`

    A launch takes the kernel's arguments, tensors on the CPU among them, and Triton's options such as `num_warps`,
    which change nothing. It raises NotImplementedError for an operation that is not supported, with its line,
    `minidl.cpu.build.CompilerError` without a C compiler, and ValueError for a tensor on another device.

    Raises TypeError for anything but a compiled kernel, and RuntimeError if this process interprets kernels.
    """
    if launch.INTERPRETED or type(kernel).__name__ == "InterpretedFunction":
        raise RuntimeError(
            "testing.compiled: this process interprets kernels: set MINIDL_CPU=compiled, and not TRITON_INTERPRET=1, "
            "before minidl or Triton is imported"
        )
    if not isinstance(kernel, JITFunction):
        raise TypeError(
            f"testing.compiled: got a {type(kernel).__name__}, expected a function decorated with triton.jit; that of "
            "an autotuned kernel is its attribute fn"
        )
    return Compiled(kernel)


class Compiled:
    """A kernel to be launched on the CPU, by grid: a tuple, or a function of the arguments by name."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        def run(*args: Any, **meta: Any) -> None:
            from minidl.cpu import run as cpu

            named = {name: meta.pop(name) for name in self.kernel.arg_names if name in meta}
            bound = self.kernel.signature.bind(*args, **named)
            bound.apply_defaults()
            for name, value in bound.arguments.items():
                if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                    raise ValueError(f"testing.compiled: {name} is on {value.device}, expected a tensor on the CPU")
            values = tuple(bound.arguments.values())
            sizes = grid(bound.arguments) if callable(grid) else grid
            cache_keys.compute_key(self.kernel)
            launched = cpu.lookup(self.kernel, values, meta) or cpu.compile_launch(self.kernel, values, meta)
            launched.bind(sizes, values).run()

        return run
