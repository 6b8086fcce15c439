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
    of_results: tuple[Any, ...] = ()
    recorded = any(isinstance(x, Tensor) and x.requires_grad for x in args)

    def on_inputs(inputs: Any) -> Any:
        for _, hook in sorted(module._on_gradients.items()):
            changed = hook(module, inputs, of_results)
            inputs = inputs if changed is None else changed if isinstance(changed, tuple) else (changed,)
        return inputs

    def on_results(results: Any) -> Any:
        nonlocal of_results
        of_results = results
        return results if recorded else (on_inputs((None,) * len(args)), results)[1]

    result = module.forward(*_through(on_inputs, args), **kwargs)
    return _through(on_results, result) if isinstance(result, tuple) else _through(on_results, (result,))[0]


def _through(change: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values, whose gradients become change(gradients); those without one are None there."""
    tensors = {i: x for i, x in enumerate(values) if isinstance(x, Tensor) and x.requires_grad}

    def change_some(grads: Any) -> Any:
        by_index = dict(zip(tensors, grads, strict=True))
        changed = change(tuple(map(by_index.get, range(len(values)))))
        return [changed[i] for i in tensors]

    passed = dict(zip(tensors, Through.apply(change_some, *tensors.values()) if tensors else (), strict=True))
    return tuple(passed.get(i, x) for i, x in enumerate(values))
