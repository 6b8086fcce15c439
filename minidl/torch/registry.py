"""Register functions on torch tensors as torch operators: `torch.ops.minidl.NAME`.

`operator` defines the schema and registers the function for CUDA and the CPU (in Triton's interpreter), its fake
implementation for tracing, its gradient and its autocast rule. The returned function replaces `torch.ops`: it calls the
implementation directly if only the dispatcher would see the call, and skips dispatch keys that have nothing to do. With
thirteen arguments it adds 3 us to a replay (10 us), and 7 us more if a gradient is recorded (one core of an EPYC);
with eight arguments `torch.ops` adds 9.6 and 13.7, `torch.library.register_autograd` 9.8 and 33,
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

NAMESPACE = __name__.partition(".")[0]  # "minidl", or the name of a copy, see `tools.kernels_package`
_library = torch.library.Library(NAMESPACE, "DEF")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
# A channels-last result must not count as a view of the tensor that kernels write: it may be changed in place.
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
Gradients = tuple[torch.Tensor | None, ...]
# The dtypes to which autocast casts arguments, as in torch's two lists.
LOWER, FLOAT32 = "the dtype of autocast", "float32"
RESULT = "float32 for the result alone"
NAMES: list[str] = []  # of all operators, in order of definition


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
    """Decorate a function as the operator of a schema. The result takes all arguments by position; its attribute
    `function` is the function itself.

    fake      returns empty results; also called with symbolic sizes
    save      (ctx, inputs, output), as torch's `setup_context`
    backward  (ctx, *gradients of the results) -> gradients of the arguments; without it, backward() raises an error
    cast      (dtype, indices): autocast casts these arguments to LOWER or FLOAT32, as it does for torch's equivalent;
              RESULT: no tensor is cast, and the argument with the result's dtype becomes float32 if it is None
    pack      index of a convolution's weight, which autocast writes in channels-last memory when it casts it
    replay    the function meets the conditions of `launch_cache.replay`

    If the schema ends in "bool[] wanted) -> Tensor[]", function, `fake` and the result return a gradient for each of
    these flags, which is not used, or None from the result, where it is False: the operator returns the others.
    """
    is_masked = schema.endswith("bool[] wanted) -> Tensor[]")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        run = _masked(function) if is_masked else function
        calls = Calls(run) if replay else None
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        called = run if calls is None else calls
        _library.impl(name, called, "CUDA")
        _library.impl(name, _on_cpu(name, called), "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _masked(fake) if is_masked else fake, lib=_library)
        op = getattr(getattr(torch.ops, NAMESPACE), name).default
        listed = schema.endswith("Tensor[]")

        def below(*args: Any) -> Any:
            """Call the function without recording a gradient."""
            direct = straight(args)
            if direct and calls is not None and (result := calls.replay(args)) is not MISSING:
                return result
            with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
                if not direct:
                    return op(*args)
                return run(*args) if calls is None else calls.call(args)

        # Not Function.apply, for which torch.func's transforms would need a rule.
        apply = super(torch.autograd.Function, _function(name, below, save, backward)).apply

        def recorded(*args: Any) -> Any:
            if forward_ad._current_level >= 0:
                _refuse_tangents(name, args)
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
                if torch._C._are_functorch_transforms_active():
                    with _single_level():
                        outputs = apply(*args)
                else:
                    outputs = apply(*args)
                return list(outputs) if listed else outputs
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
        result, direct = (_unmasked(call), _unmasked(run)) if is_masked else (call, run)
        result.function = direct  # type: ignore[attr-defined]
        return result

    return register


def _masked(function: Callable[..., Any]) -> Callable[..., Any]:
    def masked(*args: Any) -> list[torch.Tensor]:
        return [gradient for gradient, want in zip(function(*args), args[-1], strict=True) if want]

    return masked


def _unmasked(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: spread(function(*args), args[-1])


def spread(gradients: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Return the gradients at the flags that are True, None at the others."""
    following = iter(gradients)
    return [next(following) if want else None for want in mask]


def save_linear(ctx: Any, inputs: Any, output: Any) -> None:
    """Save for a linear operator NAME(x, size, SETTINGS) on images. Without a size it computes its function, with one
    the gradient of images of that size: so derivatives of every order are the operator itself."""
    x, size, *ctx.settings = inputs
    ctx.size = [] if size else list(x.shape[2:])


def _on_cpu(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    if launch.ON_CPU:
        return run

    def refused(*args: Any) -> Any:
        if launch.handed_over():  # recorded, to compile for another machine
            return run(*args)
        raise TypeError(f"minidl::{name}: got a tensor on the CPU, but {launch.NO_CPU}")

    return refused


# Types of arguments that need only the dispatcher's own keys.
_PLAIN = TENSORS | {type(None), bool, int, float, str, list, tuple}


def straight(args: Sequence[Any]) -> bool:
    """Return whether the dispatcher would only call the operator's function below autograd, which takes it 6 us."""
    return (
        _PLAIN.issuperset(map(type, args))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
        and (args[0].is_cuda or (args[0].is_cpu and launch.ON_CPU))
        and not torch._C._functorch.is_legacy_batchedtensor(args[0])  # a gradient of `is_grads_batched`
        and not _negate(args)
    )


def transformed() -> bool:
    """Return whether transforms of torch.func are active."""
    return torch._C._are_functorch_transforms_active()


def may_want(*tensors: torch.Tensor | None) -> bool:
    """Return whether a gradient may be needed: within `torch.vmap`, tensors hide that they require one outside."""
    if not torch.is_grad_enabled():
        return False
    if not torch.compiler.is_compiling() and transformed():
        return True
    return any(t is not None and t.requires_grad for t in tensors)


def _negate(args: Sequence[Any]) -> bool:
    """Return whether an argument is a negative view, such as `x.conj().imag`."""
    for arg in args:  # noqa: SIM110 (a generator takes longer)
        if type(arg) in TENSORS and arg.is_neg():
            return True
    return False


def _refuse_tangents(name: str, args: Sequence[Any]) -> None:
    if any(isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args):
        raise NotImplementedError(
            f"minidl::{name}: forward-mode derivatives (jvp) of minidl's operators are not supported; call "
            "minidl.torch.restore(model) to take them"
        )


@contextlib.contextmanager
def _single_level() -> Iterator[None]:
    """A context in which torch.func's transforms, which dispatch each level, allow `apply`."""
    before = torch._C._functorch.get_single_level_autograd_function_allowed()
    torch._C._functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        torch._C._functorch.set_single_level_autograd_function_allowed(before)


def _function(name: str, below: Any, save: Any, backward: Any) -> Any:
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)  # missing gradients would become zeros
        # `apply` turns gradients off, but other levels of torch.func record theirs.
        with torch.enable_grad() if transformed() else contextlib.nullcontext():
            output = below(*args)
        if save is not None:
            save(ctx, args, output)
        return tuple(output) if isinstance(output, list) else output

    def refused(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(
            f"minidl::{name} has no derivative: second derivatives of minidl's operators are not supported; call "
            "minidl.torch.restore(model) to take them"
        )

    def back(ctx: Any, *grads: Any) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        return (backward or refused)(ctx, *grads)

    members = {"forward": staticmethod(forward), "backward": staticmethod(back)}
    return type(name, (torch.autograd.Function,), members)


def _autocast(run: Any, device: str, to: str, which: Sequence[int], pack: int | None) -> Callable[..., Any]:
    def cast(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device) if to == LOWER else torch.float32
        values = list(args)
        for index in which:
            value = values[index] if index < len(values) else None
            if to == RESULT and value is None and values[0].dtype != torch.float64:
                values[index] = dtype
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                values[index] = _packed(value, dtype) if index == pack else value.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return run(*values)

    return cast


class _Pack(torch.autograd.Function):
    """Cast a weight [M, C, ...] and write it in channels-last memory in one pass, and its gradient in reverse."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return last(weight.shape, weight, dtype).copy_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.new_empty(grad.shape, dtype=ctx.dtype).copy_(grad), None


def _packed(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a weight; a contiguous one becomes channels-last."""
    if weight.dim() < 3 or weight.dtype == dtype or not weight.is_contiguous() or not straight((weight,)):
        return weight.to(dtype)
    if weight.movedim(1, -1).is_contiguous():
        return weight.to(dtype)
    packed: torch.Tensor = _Pack.apply(weight, dtype)  # type: ignore[no-untyped-call]
    return packed


def last(shape: Sequence[Any], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an empty channels-last tensor [N, C, ...] of any rank."""
    axes = len(shape)
    empty = like.new_empty((shape[0], *shape[2:], shape[1]), dtype=dtype or like.dtype)
    return empty.permute(0, axes - 1, *range(1, axes - 1))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def act_of(name: str | None, slope: float) -> Any:
    """Return the activation with a name and a number, an operator's arguments."""
    return (name, slope) if name in SLOPES else name
