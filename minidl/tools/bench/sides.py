"""What both sides of a row are made from: torch eager and compiled, in both memory orders, with gradients, a step."""

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
    call: Callable[..., Any] = lambda function, *given: function(*given),
    **how: Any,
) -> Calls:
    """torch's calls of a function on each of the inputs; `how` are options of torch.compile.

    call    what calls the function, which may do more around it, such as the gradients
    """
    sides = {"torch": function, "torch.compile": torch.compile(function, dynamic=False, **how)}
    return {name: [partial(call, side, *given) for given in inputs] for name, side in sides.items()}


def in_both_orders(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], xs: Sequence[torch.Tensor], w: torch.Tensor
) -> Calls:
    """cuDNN's calls on channels-last tensors and on contiguous ones."""
    last, plain = w.movedim(1, -1).contiguous().movedim(-1, 1), w.contiguous()
    return {
        "cuDNN, channels last": [partial(function, x, last) for x in xs],
        "cuDNN, contiguous": [partial(function, x.contiguous(), plain) for x in xs],
    }


def torch_gradients(
    function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], dy: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The result and the gradients of the leaves."""
    y = function(*leaves)
    return y, *torch.autograd.grad(y, leaves, dy)


def our_gradients(
    function: Callable[..., Tensor], leaves: Sequence[Tensor], dy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The same of minidl."""
    for leaf in leaves:
        leaf.grad = None
    y = function(*leaves)
    y.backward(Tensor(dy))
    return y.data, *(leaf.grad.data for leaf in leaves if leaf.grad is not None)


def right(record: str, got: Any, *args: Any, wrt: Sequence[int] = (), dy: torch.Tensor | None = None) -> bool:
    """Whether a result is as exact as the operation's record promises, or the gradients by the arguments at `wrt`."""
    expected = Expected(all_specs()[record], Case(args), args[0].dtype, wrt, lambda *shape: dy)
    return expected.holds(*as_tuple(got))


def training_step(optimizer: Any, loss: Callable[[], Any]) -> Callable[[], Any]:
    """A step of either side: the loss, its gradients, the update."""

    def step() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value

    return step
