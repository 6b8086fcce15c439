"""How a function on torch tensors becomes an operator of torch: `torch.ops.minidl.NAME`.

`operator` defines the schema, registers the function for the CPU (where it runs in Triton's interpreter) and CUDA, the
shapes and strides of its results for tracing, its gradient, and what autocast does to its tensors. What it returns is
called in place of `torch.ops`: it calls the function at once where nothing but the dispatcher would see the call, and
leaves out the dispatcher's keys that have nothing to do, which Python would visit one after another. An operator of
thirteen arguments adds 3 us to what is replayed (10 us), and 7 us more where a gradient is recorded (a core of an
EPYC); one of eight through `torch.ops` 9.6 and 13.7, with `torch.library.register_autograd` 9.8 and 33, by
`torch.library.custom_op` 19 and 54.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from minidl.kernels.activation import SLOPES
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import MISSING, TENSORS, Calls

NAMESPACE = __name__.partition(".")[0]  # "minidl", or the name of a copy, see `workbench.kernels_package`
_library = torch.library.Library(NAMESPACE, "DEF")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
# A result in channels-last memory is no view of the tensor that kernels write: it may be changed in place.
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
Gradients = tuple[torch.Tensor | None, ...]
# What autocast makes of tensors: torch's two lists.
LOWER, FLOAT32 = "the dtype of autocast", "float32"
RESULT = "float32 for the result alone"
NAMES: list[str] = []  # of all operators, in the order of their definition


def operator(
    schema: str,
    fake: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Gradients] | None = None,
    cast: tuple[str, Sequence[int]] | None = None,
    pack: int | None = None,
    replay: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that registers a function as the operator of a schema, and returns how it is called: with all of its
    arguments, by position. What it returns has the function itself as `function`.

    fake      what it returns, as empty tensors: also called with sizes that are symbols
    save      (ctx, inputs, output) before `backward`, as torch's `setup_context`
    backward  (ctx, *gradients of the results) -> those of the arguments; without it a gradient is refused when it is
              asked for
    cast      under autocast the tensors among these arguments get LOWER or FLOAT32, as torch has it for what they
              stand for; RESULT: the tensors stay, and the argument that is the result's dtype is float32 if it is None
    pack      the weight of a convolution among them: autocast writes it in channels-last memory as it casts it
    replay    the function does nothing but what `runtime.replay` can launch again
    """

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        calls = Calls(run, plain=True) if replay else None
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        called = run if calls is None else calls
        _library.impl(name, called, "CUDA")
        _library.impl(name, _on_cpu(name, called), "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        op = getattr(getattr(torch.ops, NAMESPACE), name).default
        listed = schema.endswith("Tensor[]")

        def below(*args: Any) -> Any:
            """The function, without a gradient."""
            direct = straight(args)
            if direct and calls is not None and (result := calls.replay(args)) is not MISSING:
                return result
            with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
                if not direct:
                    return op(*args)
                return run(*args) if calls is None else calls.call(args)

        # Not the apply of torch.autograd.Function, which torch.func's transforms have look for a rule of their own.
        apply = super(torch.autograd.Function, _function(name, below, save, backward)).apply

        def recorded(*args: Any) -> Any:
            if forward_ad._current_level >= 0:
                _refuse_tangents(name, args)
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
                if torch._C._are_functorch_transforms_active():
                    with _single_level():
                        found = apply(*args)
                else:
                    found = apply(*args)
                return list(found) if listed else found
            return below(*args)

        _library.impl(name, recorded, "Autograd")
        if cast is not None:
            for kind in ("cpu", "cuda"):
                _library.impl(name, _autocast(op, kind, *cast, pack), f"Autocast{kind.upper()}")
        lowered = {kind: _autocast(recorded, kind, *cast or (LOWER, ()), pack) for kind in ("cpu", "cuda")}

        def call(*args: Any) -> Any:
            if torch.compiler.is_compiling() or transformed() or torch._C._get_tracing_state() is not None:
                return op(*args)
            run_ = recorded
            if torch._C._is_any_autocast_enabled():
                if not straight(args):
                    return op(*args)
                kind = args[0].device.type
                run_ = lowered[kind] if torch.is_autocast_enabled(kind) else recorded
            return run_(*args)

        NAMES.append(name)
        call.function = run  # type: ignore[attr-defined]
        return call

    return register


def _on_cpu(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    if launch.INTERPRETED:
        return run

    def refused(*args: Any) -> Any:
        if launch.handed_over():  # to be compiled for another machine
            return run(*args)
        raise TypeError(f"minidl::{name}: got a tensor on the CPU, but {launch.NO_CPU}")

    return refused


# Of arguments that nothing but the dispatcher's own keys has to see.
_PLAIN = TENSORS | {type(None), bool, int, float, str, list, tuple}


def straight(args: Sequence[Any]) -> bool:
    """Whether the dispatcher would call an operator's function and nothing else below a gradient: its way there takes
    6 us."""
    return (
        _PLAIN.issuperset(map(type, args))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
        and (args[0].is_cuda or (args[0].is_cpu and launch.INTERPRETED))
        and not torch._C._functorch.is_legacy_batchedtensor(args[0])  # a gradient of `is_grads_batched`
        and not _negate(args)
    )


def transformed() -> bool:
    """Whether torch.func's transforms are under way."""
    return torch._C._are_functorch_transforms_active()


def may_want(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient may be asked for: within `torch.vmap` tensors do not tell that they require one outside."""
    if not torch.is_grad_enabled():
        return False
    if not torch.compiler.is_compiling() and transformed():
        return True
    return any(t is not None and t.requires_grad for t in tensors)


def _negate(args: Sequence[Any]) -> bool:
    """Whether one is a view whose numbers are those of its memory with the other sign, as `x.conj().imag`."""
    for each in args:  # noqa: SIM110 (a generator takes longer)
        if type(each) in TENSORS and each.is_neg():
            return True
    return False


def _refuse_tangents(name: str, args: Sequence[Any]) -> None:
    if any(isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args):
        raise NotImplementedError(
            f"minidl::{name}: forward-mode derivatives (jvp) of minidl's operators are not built; call "
            "minidl.torch.restore(model) to take them"
        )


@contextlib.contextmanager
def _single_level() -> Iterator[None]:
    """A context in which torch.func's transforms, which have called the dispatcher for each of theirs, allow apply."""
    before = torch._C._functorch.get_single_level_autograd_function_allowed()
    torch._C._functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        torch._C._functorch.set_single_level_autograd_function_allowed(before)


def _function(name: str, below: Any, save: Any, backward: Any) -> Any:
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)  # those of results without one would be zeros of their size
        output = below(*args)
        if save is not None:
            save(ctx, args, output)
        return tuple(output) if isinstance(output, list) else output

    def refused(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(
            f"minidl::{name} has no derivative: second derivatives of minidl's operators are not built; call "
            "minidl.torch.restore(model) to take them"
        )

    def back(ctx: Any, *grads: Any) -> Any:
        if all(each is None for each in grads):
            return (None,) * len(ctx.needs_input_grad)
        return (backward or refused)(ctx, *grads)

    members = {"forward": staticmethod(forward), "backward": staticmethod(back)}
    return type(name, (torch.autograd.Function,), members)


def _autocast(run: Any, device: str, to: str, which: Sequence[int], pack: int | None) -> Callable[..., Any]:
    def cast(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device) if to == LOWER else torch.float32
        given = list(args)
        for index in which:
            value = given[index] if index < len(given) else None
            if to == RESULT and value is None and given[0].dtype != torch.float64:
                given[index] = dtype
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                given[index] = _packed(value, dtype) if index == pack else value.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return run(*given)

    return cast


class _Pack(torch.autograd.Function):
    """A weight [M, C, ...] cast to a dtype and put in channels-last memory in one pass; its gradient comes back so."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return last(weight.shape, weight, dtype).copy_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.new_empty(grad.shape, dtype=ctx.dtype).copy_(grad), None


def _packed(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight of a dtype, in channels-last memory where it is contiguous."""
    if weight.dim() < 3 or weight.dtype == dtype or not weight.is_contiguous() or not straight((weight,)):
        return weight.to(dtype)
    if weight.movedim(1, -1).is_contiguous():
        return weight.to(dtype)
    packed: torch.Tensor = _Pack.apply(weight, dtype)  # type: ignore[no-untyped-call]
    return packed


def last(shape: Sequence[Any], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor [N, C, ...] that lies channels-last, for any number of sizes."""
    axes = len(shape)
    empty = like.new_empty((shape[0], *shape[2:], shape[1]), dtype=dtype or like.dtype)
    return empty.permute(0, axes - 1, *range(1, axes - 1))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of `dtype` are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def act_of(name: str | None, slope: float) -> Any:
    """The activation that an operator is given as a name and its number."""
    return (name, slope) if name in SLOPES else name
