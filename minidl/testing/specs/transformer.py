"""Specs of the operations of transformers."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels.activation import Activation
from minidl.testing.specs import bounds
from minidl.testing.specs.activation import INPUT_FLOATING, apply, evaluation, gradient_error
from minidl.testing.specs.base import Case, OpSpec, integers, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make


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


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, sign: int = -1) -> torch.Tensor:
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pairs = torch.stack([a * cos + sign * b * sin, b * cos + a * sin], -1 if interleaved else -2)
    return pairs.flatten(-2)


def _rotary_error(case: Case, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of two products and a sum: the magnitudes of both rotations are those of sums."""
    _, cos, sin, interleaved = case.args
    total = _rotated(x.abs(), cos.abs(), sin.abs(), interleaved, 1)
    return bounds.or_infinite(2 * bounds.acc_unit(dtype) * total, total, dtype)


def _rotary_case(make: Make) -> Case:
    T, H = make.integer(1, 5), make.integer(1, 20)
    x, *angles = make.tensor(*make.shape(0, 2), T, 2 * H), make.tensor(T, H), make.tensor(T, H)
    return Case((x, *angles, make.choice([False, True])))


SPECS = [
    spec_factory(differentiable=(0,), families=("elementwise_tile",))(
        "rotary",
        reference=_rotated,
        inputs=_rotary_case,
        bound=bounds.off_by(lambda case, y, dtype: _rotary_error(case, case.args[0], dtype)),
        grad_bound=lambda case, dy, grads, dtype: (bounds.rounded(grads[0], _rotary_error(case, dy, dtype), dtype),),
        examples={
            "halves": tensors((3, 9, 128), (9, 64), (9, 64), extra=(False,)),
            "interleaved": tensors((2, 3, 7, 66), (7, 33), (7, 33), extra=(True,)),
        },
        bad=(
            refuses(TypeError, "rotary: input has dtype torch.int64", integers(2, 4), (2, 2), (2, 2)),
            refuses(ValueError, r"input \[2, 3\], cos \[2, 1\] and .*, expected", (2, 3), (2, 1), (2, 1)),
            refuses(ValueError, r"cos \[2, 4\] and sin \[2, 4\], expected", (2, 4), (2, 4), (2, 4)),
        ),
    ),
    _gated("swiglu", lambda: "silu", ()),
    _gated("geglu", lambda how="none": "gelu_tanh" if how == "tanh" else "gelu", (), ("none",), ("tanh",)),
]
