"""Backward hooks of a module: its inputs and results pass through an identity, whose backward calls them."""

from typing import Any

from minidl.autograd import Function
from minidl.autograd.function import in_operations
from minidl.tensors import Tensor


@in_operations
class Through(Function):
    """Tensors as they are, with the gradients that `change` returns."""

    @staticmethod
    def forward(ctx: Any, change: Any, *tensors: Any) -> Any:
        ctx.change = change
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.change(grads)


def call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the forward of a module with backward hooks, see `Module.register_full_backward_hook`."""
    recorded, of_results = [i for i, x in enumerate(args) if _is_recorded(x)], list[Any]()

    def on_inputs(grads: Any) -> Any:
        by_place = dict(zip(recorded, grads, strict=False))
        inputs: Any = tuple(map(by_place.get, range(len(args))))
        for hook in tuple(module._on_gradients.values()):
            changed = hook(module, inputs, tuple(of_results))
            inputs = inputs if changed is None else changed if isinstance(changed, tuple) else (changed,)
        return [inputs[i] for i in recorded]

    def on_results(grads: Any) -> Any:
        of_results[:] = grads
        return grads if recorded else (on_inputs(()), grads)[1]

    result = module.forward(*_through(on_inputs, args), **kwargs)
    return _through(on_results, result) if isinstance(result, tuple) else _through(on_results, (result,))[0]


def _is_recorded(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _through(change: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    tensors = filter(_is_recorded, values)
    passed = iter(Through.apply(change, *tensors) if any(map(_is_recorded, values)) else ())
    return tuple(next(passed) if _is_recorded(x) else x for x in values)
