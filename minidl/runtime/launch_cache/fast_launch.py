"""A fast path that launches kernels Triton has already compiled, without Triton's own lookup.

`kernel[grid](...)` binds arguments to names, formats the options as text, compares the kernel's global constants in
Python, and calls two chains of empty hooks; `benchmarks/launch_cost.py` measures both ways. Triton still decides which
compiled variant a launch uses: the key of a launch holds, for each argument, the result of Triton's own specialisation
function (its type, alignment, divisibility by 16, being 1, None), then every constant and option as passed. A new key
goes through Triton, and the compiled kernel that it returns is kept.

`launch` does nothing and returns False where Triton must decide: a new key, a knob or hook of Triton that is set, a
kernel whose source or global constants changed, a tensor on another device, constants that are passed by position or
cannot be compared, and an unknown version of Triton.
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
KNOWN = triton.__version__.rpartition(".")[0] in VERSIONS


class Ready(NamedTuple):
    """A compiled kernel, and its launcher's arguments other than grid, stream and the kernel's own."""

    compiled: CompiledKernel  # in 3.9 its module is unloaded with it
    run: Any
    function: int
    metadata: Any
    tensors: tuple[int, ...]
    boxes: tuple[int, ...]
    forms: "_Forms"

    def launch(self, grid: tuple[int, ...], stream: int, args: Sequence[Any]) -> None:
        """Launch on a stream of the device in use, with addresses in place of tensors or not."""
        x, y, z = (*grid, 1, 1)[:3]
        self.run(x, y, z, stream, self.function, self.metadata, None, None, None, *args, *self.forms.rest)


class Opened:
    """A launch of Triton 3.6 with its descriptors taken apart, which takes half of the time of `Ready.launch`.

    args    all of them; `at` says where in these an argument is, or the first part of a descriptor, which alone depends
            on its address
    """

    MOST = 64  # descriptors that are kept of one argument

    def __init__(self, ready: Ready, raw: Any, args: Sequence[Any]) -> None:
        launcher = ready.run
        self._raw, self._kernel = raw, ready.compiled
        scratch = hooks = None
        self._head = (
            ready.function, launcher.launch_cooperative_grid, launcher.launch_pdl, scratch, scratch, ready.metadata,
            hooks, hooks, hooks,
        )  # fmt: skip
        layouts = iter(ready.compiled.metadata.tensordesc_meta or ())
        self.args: list[Any] = []
        self.at: list[int] = []
        self._boxes: dict[int, tuple[Any, dict[int, Any]]] = {}
        for index, value in enumerate(args):
            self.at.append(len(self.args))
            if isinstance(value, TensorDescriptor):
                layout = next(layouts, None)
                self._boxes[index] = layout, {}
                self.args += _taken_apart(value, layout)
            else:
                self.args.append(value)
        self.args += ready.forms.rest

    def box(self, index: int, like: TensorDescriptor, address: int) -> Any:
        """The first part of the descriptor that is argument `index`, at an address."""
        layout, known = self._boxes[index]
        if layout is None:
            return address
        found = known.get(address)
        if found is None:
            if len(known) >= self.MOST:
                known.clear()
            found = known[address] = _taken_apart(at_address(like, address), layout)[0]
        return found

    def launch(self, grid: tuple[int, ...], stream: int, args: list[Any]) -> None:
        """As `Ready.launch`."""
        x, y, z = (*grid, 1, 1)[:3]
        self._raw(x, y, z, stream, *self._head, *args)


def opened(ready: Ready, args: Sequence[Any]) -> Opened | None:
    """The launch of a kernel with such arguments; None where this version of Triton does not have it so."""
    if not triton.__version__.startswith("3.6."):
        return None
    launcher = ready.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    wrapped = launcher.launch
    names = wrapped.__code__.co_freevars if hasattr(wrapped, "__code__") else ()
    raw = wrapped.__closure__[names.index("launcher")].cell_contents if "launcher" in names else wrapped
    return Opened(ready, raw, args)


def _taken_apart(box: TensorDescriptor, layout: Any) -> list[Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return list(make_tensordesc_arg(box, layout))


class _Address:
    """Stands for a tensor in a descriptor."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def at_address(like: TensorDescriptor, address: int) -> TensorDescriptor:
    """The same boxes of what lies elsewhere."""
    return of_base(like, _Address(address))


class _Forms:
    """The compiled variants of one kernel on one device, by the keys of their launches."""

    def __init__(self, kernel: Any, caches: tuple[Any, ...]) -> None:
        self.caches = caches  # kept so that no other tuple gets its id
        self.hash = kernel.hash
        # Triton has just compared these in Python (0.9 us each); a comparison of lists runs in C.
        self.globals = [(place, name) for (name, _), (_, place) in kernel.used_global_vals.items()]
        self.values = [place.get(name) for place, name in self.globals]
        runtime = [parameter for parameter in kernel.params if not parameter.is_constexpr]
        self.count = len(runtime) if runtime == kernel.params[: len(runtime)] else -1
        # The launcher steps over the places of constants.
        self.rest = (None,) * (len(kernel.params) - len(runtime))
        self.questions = (
            (caches[3],) * len(runtime),
            [parameter.is_const for parameter in runtime],
            [not parameter.do_not_specialize for parameter in runtime],
            [not parameter.do_not_specialize_on_alignment for parameter in runtime],
        )
        self.ready: dict[tuple[Any, ...], Ready] = {}

    def unchanged(self, kernel: Any) -> bool:
        if kernel.hash is not self.hash or kernel.pre_run_hooks:
            return False
        return [place.get(name) for place, name in self.globals] == self.values

    def key(self, kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> tuple[Any, ...]:
        backends, const, specialize, align = self.questions
        answers = map(jit.native_specialize_impl, backends, args, const, specialize, align)
        return (*answers, kernel.debug, *meta, *meta.values())


_forms: dict[int, _Forms] = {}


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> bool:
    """Launch on the current device and stream and return True, or do nothing and return False."""
    ready = found(kernel, args, meta)
    if ready is None:
        return False
    ready.launch(grid, stream(), args)
    return True


def _on_device(ready: Ready, args: tuple[Any, ...], device: int) -> bool:
    for place in ready.tensors:
        if args[place].get_device() != device:
            return False
    for place in ready.boxes:  # noqa: SIM110 (a generator takes as long as four of these)
        if args[place].base.get_device() != device:
            return False
    return True


def keep(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], compiled: Any) -> None:
    """Keep the kernel that Triton has just launched with these arguments on the current device."""
    if not KNOWN or type(kernel) is not jit.JITFunction or type(compiled) is not CompiledKernel or _unusual():
        return
    caches = kernel.device_caches[_current_device()]
    forms = _forms.get(id(caches))
    if forms is None or not forms.unchanged(kernel):
        forms = _forms[id(caches)] = _Forms(kernel, caches)
    if len(args) != forms.count:
        return
    boxes = tuple(place for place, value in enumerate(args) if isinstance(value, TensorDescriptor))
    tensors = tuple(place for place, value in enumerate(args) if hasattr(value, "get_device"))
    with contextlib.suppress(TypeError):  # a constant that has no hash
        forms.ready[forms.key(kernel, args, meta)] = Ready(
            compiled, compiled.run, compiled.function, compiled.packed_metadata, tensors, boxes, forms
        )


def usable(kernels: Sequence[tuple[Any, _Forms]]) -> bool:
    """Whether Triton would launch what was kept of these kernels again, on the device in use."""
    if _unusual():
        return False
    device = _current_device()
    return all(forms.unchanged(kernel) and kernel.device_caches[device] is forms.caches for kernel, forms in kernels)


def stream() -> int:
    """The current stream of the device in use."""
    return int(driver.active.get_current_stream(_current_device()))


def _current_device() -> int:
    return driver.active.get_current_device()


if hasattr(torch._C, "_cuda_getDevice"):  # torch.cuda.current_device first asks whether CUDA is there, for 1.5 us
    _current_device = torch._C._cuda_getDevice


def found(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> Ready | None:
    """What was kept of a launch with such arguments on the current device; None where they are on another."""
    if type(kernel) is not jit.JITFunction or _unusual():
        return None
    device = _current_device()
    forms = _forms.get(id(kernel.device_caches[device]))
    if forms is None or len(args) != forms.count or not forms.unchanged(kernel):
        return None
    try:
        ready = forms.ready.get(forms.key(kernel, args, meta))
        return ready if ready is not None and _on_device(ready, args, device) else None
    except (TypeError, AttributeError):  # a constant without a hash, a pointer that is no tensor
        return None


def _unusual() -> bool:
    runtime = knobs.runtime
    # Knobs set in this process are in these dicts; values from the environment are not.
    if runtime.__dict__ or knobs.compilation.__dict__:
        return True
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
