"""The calls of a row's sides: torch eager and compiled, in both memory orders, with gradients; a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from minidl.tensors import Tensor
from minidl.testing.compare import Expected, as_tuple
from minidl.testing.specs import Case, all_specs

Call = Callable[[], Any]
Calls = dict[str, list[Call]]


def eager_and_compiled(
    function: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]] = ((),),
    call: Callable[..., Any] = lambda function, *args: function(*args),
    **how: Any,
) -> Calls:
    """Return torch's calls of a function on each of the inputs; `how` are options of torch.compile.

    call    calls the function, and may do more, such as computing gradients
    """
    sides = {"torch": function, "torch.compile": torch.compile(function, dynamic=False, **how)}
    return {name: [partial(call, side, *args) for args in inputs] for name, side in sides.items()}


def in_both_orders(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], xs: Sequence[torch.Tensor], w: torch.Tensor
) -> Calls:
    """Return cuDNN's calls on channels-last tensors and on contiguous ones."""
    last, plain = w.movedim(1, -1).contiguous().movedim(-1, 1), w.contiguous()
    return {
        "cuDNN, channels last": [partial(function, x, last) for x in xs],
        "cuDNN, contiguous": [partial(function, x.contiguous(), plain) for x in xs],
    }


def torch_gradients(
    function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], dy: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the result and the gradients of the leaves."""
    y = function(*leaves)
    return y, *torch.autograd.grad(y, leaves, dy)


def our_gradients(
    function: Callable[..., Tensor], leaves: Sequence[Tensor], dy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the result and the gradients of minidl's leaves."""
    for leaf in leaves:
        leaf.grad = None
    y = function(*leaves)
    y.backward(Tensor(dy))
    return y.data, *(leaf.grad.data for leaf in leaves if leaf.grad is not None)


def right(spec: str, result: Any, *args: Any, wrt: Sequence[int] = (), dy: torch.Tensor | None = None) -> bool:
    """Return whether a result, or the gradients of the arguments at `wrt`, are within the bounds of a spec."""
    expected = Expected(all_specs()[spec], Case(args), args[0].dtype, wrt, lambda *shape: dy)
    return expected.holds(*as_tuple(result))


def training_step(optimizer: Any, loss: Callable[[], Any]) -> Callable[[], Any]:
    """Return a training step of either side: loss, gradients, update."""

    def step() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value

    return step
