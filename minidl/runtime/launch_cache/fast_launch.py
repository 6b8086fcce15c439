"""A fast path that launches kernels Triton has already compiled, without Triton's own lookup.

`kernel[grid](...)` binds arguments to names, formats the options as text, compares the kernel's global constants in
Python, and calls two chains of empty hooks; `benchmarks/launch_cost.py` measures both ways. Triton still decides which
compiled variant a launch uses: the key of a launch has the result of Triton's specialisation function for each argument
(type, alignment, divisibility by 16, equality to 1, None), then every constant and option as passed. A launch with a
new key goes through Triton, and `store` caches the compiled kernel.

`launch` does nothing and returns False if Triton must decide: for a new key, a knob or hook of Triton that is set, a
kernel whose source or global constants changed, a tensor on another device, constants that are passed by position or
cannot be compared, and an unsupported version of Triton.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import jit
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.runtime.descriptors import of_base

VERSIONS = ("3.6", "3.7", "3.9")
SUPPORTED = triton.__version__.rpartition(".")[0] in VERSIONS


class CompiledLaunch(NamedTuple):
    """A compiled kernel, and its launcher's arguments other than grid, stream and the kernel's arguments."""

    compiled: CompiledKernel  # Triton 3.9 unloads the module with this object
    run: Any
    function: int
    metadata: Any
    tensors: tuple[int, ...]
    descriptors: tuple[int, ...]
    variants: "_Variants"

    def launch(self, grid: tuple[int, ...], stream: int, args: Sequence[Any]) -> None:
        """Launch on a stream of the current device; `args` may have addresses in place of tensors."""
        x, y, z = (*grid, 1, 1)[:3]
        self.run(x, y, z, stream, self.function, self.metadata, None, None, None, *args, *self.variants.constants)


class UnpackedLaunch:
    """A launch of Triton 3.6 with unpacked descriptors, which takes half the time of `CompiledLaunch.launch`.

    args        all arguments; only the first part of a descriptor depends on its address
    position    the index in `args` of each argument, or of the first part of a descriptor
    raw, head   the launch is raw(*grid, stream, *head, *args)
    """

    MAX_DESCRIPTORS = 64  # cached per argument

    def __init__(self, compiled: CompiledLaunch, raw: Any, args: Sequence[Any]) -> None:
        launcher = compiled.run
        self.raw, self._kernel = raw, compiled.compiled
        scratch = hooks = None
        self.head = (
            compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, scratch, scratch,
            compiled.metadata,
            hooks, hooks, hooks,
        )  # fmt: skip
        layouts = iter(compiled.compiled.metadata.tensordesc_meta or ())
        self.args: list[Any] = []
        self.position: list[int] = []
        self._descriptors: dict[int, tuple[Any, dict[int, Any]]] = {}
        for index, value in enumerate(args):
            self.position.append(len(self.args))
            if isinstance(value, TensorDescriptor):
                layout = next(layouts, None)
                self._descriptors[index] = layout, {}
                self.args += _unpacked_descriptor(value, layout)
            else:
                self.args.append(value)
        self.args += compiled.variants.constants

    def descriptor(self, index: int, like: TensorDescriptor, address: int) -> Any:
        """Return the first part of argument `index`, a descriptor, for an address."""
        layout, cache = self._descriptors[index]
        if layout is None:
            return address
        part = cache.get(address)
        if part is None:
            if len(cache) >= self.MAX_DESCRIPTORS:
                cache.clear()
            part = cache[address] = _unpacked_descriptor(at_address(like, address), layout)[0]
        return part


def unpack(compiled: CompiledLaunch, args: Sequence[Any]) -> UnpackedLaunch | None:
    """Return a launch with unpacked descriptors, or None if this version of Triton or the kernel does not allow it."""
    if not triton.__version__.startswith("3.6."):
        return None
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    wrapped = launcher.launch
    names = wrapped.__code__.co_freevars if hasattr(wrapped, "__code__") else ()
    raw = wrapped.__closure__[names.index("launcher")].cell_contents if "launcher" in names else wrapped
    return UnpackedLaunch(compiled, raw, args)


def _unpacked_descriptor(descriptor: TensorDescriptor, layout: Any) -> list[Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return list(make_tensordesc_arg(descriptor, layout))


class _Address:
    """Takes the place of a tensor in a descriptor."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def at_address(like: TensorDescriptor, address: int) -> TensorDescriptor:
    """Return a descriptor with the same layout for memory at `address`."""
    return of_base(like, _Address(address))


class _Variants:
    """The compiled variants of one kernel on one device, by the keys of their launches."""

    def __init__(self, kernel: Any, caches: tuple[Any, ...]) -> None:
        self.caches = caches  # referenced so that no other tuple gets its id
        self.hash = kernel.hash
        # Triton compares these in Python (0.9 us each); a comparison of lists runs in C.
        self.scopes = [scope for _, scope in kernel.used_global_vals.values()]
        self.names = [name for name, _ in kernel.used_global_vals]
        self.values = list(map(dict.get, self.scopes, self.names))
        runtime = [parameter for parameter in kernel.params if not parameter.is_constexpr]
        self.count = len(runtime) if runtime == kernel.params[: len(runtime)] else -1
        # The launcher skips the positions of constants.
        self.constants = (None,) * (len(kernel.params) - len(runtime))
        self.specialization = (
            (caches[3],) * len(runtime),
            [parameter.is_const for parameter in runtime],
            [not parameter.do_not_specialize for parameter in runtime],
            [not parameter.do_not_specialize_on_alignment for parameter in runtime],
        )
        self.launches: dict[tuple[Any, ...], CompiledLaunch] = {}

    def unchanged(self, kernel: Any) -> bool:
        if kernel.hash is not self.hash or kernel.pre_run_hooks:
            return False
        return list(map(dict.get, self.scopes, self.names)) == self.values

    def key(self, kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> tuple[Any, ...]:
        backends, const, specialize, align = self.specialization
        specializations = map(jit.native_specialize_impl, backends, args, const, specialize, align)
        return (*specializations, kernel.debug, *meta, *meta.values())


_variants: dict[int, _Variants] = {}


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> bool:
    """Launch on the current device and stream and return True, or do nothing and return False."""
    compiled = lookup(kernel, args, meta)
    if compiled is None:
        return False
    compiled.launch(grid, stream(), args)
    return True


def _on_device(compiled: CompiledLaunch, args: tuple[Any, ...], device: int) -> bool:
    tensors = [args[i] for i in compiled.tensors] + [args[i].base for i in compiled.descriptors]
    return False not in [x.get_device() == device for x in tensors]


def store(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], compiled: Any) -> None:
    """Cache the kernel that Triton has just launched with these arguments on the current device."""
    if not SUPPORTED or type(kernel) is not jit.JITFunction or type(compiled) is not CompiledKernel or not usable(()):
        return
    caches = kernel.device_caches[_current_device()]
    variants = _variants.get(id(caches))
    if variants is None or not variants.unchanged(kernel):
        variants = _variants[id(caches)] = _Variants(kernel, caches)
    if len(args) != variants.count:
        return
    descriptors = tuple(i for i, value in enumerate(args) if isinstance(value, TensorDescriptor))
    tensors = tuple(i for i, value in enumerate(args) if hasattr(value, "get_device"))
    with contextlib.suppress(TypeError):  # an unhashable constant
        variants.launches[variants.key(kernel, args, meta)] = CompiledLaunch(
            compiled, compiled.run, compiled.function, compiled.packed_metadata, tensors, descriptors, variants
        )


def usable(kernels: Sequence[tuple[Any, _Variants]]) -> bool:
    """Return whether Triton is not customized and would launch the cached variants of these kernels."""
    runtime = knobs.runtime
    # These dicts have the knobs set in this process, not values from the environment.
    if runtime.__dict__ or knobs.compilation.__dict__:
        return False
    if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        return False
    device = _current_device()
    for kernel, variants in kernels:
        if not variants.unchanged(kernel) or kernel.device_caches[device] is not variants.caches:
            return False
    return True


def stream() -> int:
    """Return the current stream of the current device."""
    return int(_current_stream(_current_device()))


# torch.cuda.current_device, which Triton calls, first checks for CUDA, for 1.5 us. `active` needs a GPU.
_current_device = getattr(torch._C, "_cuda_getDevice", lambda: driver.active.get_current_device())  # noqa: PLW0108
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda at: driver.active.get_current_stream(at))  # noqa: PLW0108


def lookup(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> CompiledLaunch | None:
    """Return the cached launch for these arguments; None if there is none or tensors are on another device."""
    if type(kernel) is not jit.JITFunction or not usable(()):
        return None
    device = _current_device()
    variants = _variants.get(id(kernel.device_caches[device]))
    if variants is None or len(args) != variants.count or not variants.unchanged(kernel):
        return None
    try:
        compiled = variants.launches.get(variants.key(kernel, args, meta))
        return compiled if compiled is not None and _on_device(compiled, args, device) else None
    except (TypeError, AttributeError):  # an unhashable constant, a pointer that is not a tensor
        return None
