"""Specs of the operations of transformers."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels.activation import Activation
from minidl.testing.specs import bounds
from minidl.testing.specs.activation import INPUT_FLOATING, apply, evaluation, gradient_error
from minidl.testing.specs.base import Case, OpSpec, refuses, spec_factory, tensors


def _even(*choices: tuple[Any, ...]) -> Any:
    """Return the function that draws a tensor with an even last size, and one of these arguments."""
    return lambda make: Case((make.tensor(*make.shape(0, 3), 2 * make.integer(1, 20)), *make.choice(choices)))


def _gated(name: str, act: Any, *choices: tuple[Any, ...], **fields: Any) -> OpSpec:
    """Return the spec of act(a) b; `act` makes the activation from the other arguments."""

    def halves(case: Case) -> tuple[torch.Tensor, torch.Tensor, Activation]:
        a, b = case.args[0].chunk(2, -1)
        return a, b, act(*case.args[1:])

    def reference(*args: Any) -> torch.Tensor:
        a, b, name = halves(Case(args))
        return apply(a, name) * b

    def bound(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        a, b, name = halves(case)
        return b.abs() * evaluation(a, name, dtype) + bounds.acc_unit(dtype) * y.abs()

    def grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        a, b, name = halves(case)
        da, db = grads[0].chunk(2, -1)
        u, tiny = bounds.acc_unit(dtype), bounds.TINY[dtype]
        error_a = b.abs() * (gradient_error(dy, a, 0.0, name, dtype) + tiny) + u * da.abs()
        error_b = dy.abs() * evaluation(a, name, dtype) + u * db.abs()
        return (bounds.rounded(grads[0], torch.cat([error_a, error_b], -1), dtype),)

    return spec_factory(differentiable=(0,), families=("elementwise_tile",))(
        name, reference=reference, inputs=_even(*choices), bound=bounds.off_by(bound), grad_bound=grad_bound,
        examples={"rows": tensors((37, 130)), "one row": tensors((1200,))},
        bad=(INPUT_FLOATING, refuses(ValueError, r"input has shape \[2, 3\], expected an even last size", (2, 3))),
    )  # fmt: skip


SPECS = [
    _gated("swiglu", lambda: "silu", ()),
    _gated("geglu", lambda how="none": "gelu_tanh" if how == "tanh" else "gelu", (), ("none",), ("tanh",)),
]
