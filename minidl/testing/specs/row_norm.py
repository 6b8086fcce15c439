"""Specs of the norms of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl import ops
from minidl.testing.specs import row_norm_bounds
from minidl.testing.specs.base import Bad, Case, OpSpec, distinct, integers, refuses, tensors
from minidl.testing.specs.make import Make


def _parameters(make: Make, *shape: int) -> tuple[Any, Any]:
    return tuple(make.tensor(*shape) if make.integer(0, 2) else None for _ in range(2))  # type: ignore[return-value]


def _layer_inputs(make: Make) -> Case:
    shape = [make.size(1, 12) for _ in range(make.integer(1, 3))]
    dims = shape[make.integer(0, len(shape) - 1) :]
    x = distinct(make.tensor(*shape))
    return Case((x, dims, *_parameters(make, *dims), make.choice([1e-5, 0.25])))


def _rms_inputs(make: Make) -> Case:
    shape = [make.size(1, 12) for _ in range(make.integer(1, 3))]
    dims = shape[make.integer(0, len(shape) - 1) :]
    return Case((distinct(make.tensor(*shape)), dims, _parameters(make, *dims)[0], make.choice([1e-5, 0.25])))


def _sum_inputs(make: Make) -> Case:
    x, *rest = _rms_inputs(make).args
    return Case((x, make.tensor(*x.shape), *rest))


def _group_inputs(make: Make) -> Case:
    groups, each = make.integer(1, 4), make.integer(1, 4)
    shape = make.size(0, 5), groups * each, *(make.size(1, 7) for _ in range(make.integer(0, 2)))
    x = distinct(make.tensor(*shape))
    if x.dim() == 4 and make.integer(0, 1):
        x = x.contiguous(memory_format=torch.channels_last)
    return Case((x, groups, *_parameters(make, groups * each)))


def _instance_inputs(make: Make) -> Case:
    shape = make.size(1, 5), make.integer(1, 6), make.size(2, 7), make.size(1, 7)
    x = distinct(make.tensor(*shape))
    return Case((x, None, None, *_parameters(make, shape[1])))


def _affine(*shape: int, rest: tuple[Any, ...], C: int, last: bool = False) -> Callable[[Make], Case]:
    def case(make: Make) -> Case:
        x = make.tensor(*shape)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        return Case((x, *rest, make.tensor(C), make.tensor(C)))

    return case


def _norm_and_sum(x: torch.Tensor, residual: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return row_norm_bounds.reference(row_norm_bounds.rms)(total, *rest), total


def _spec(
    name: str, parse: Callable[..., row_norm_bounds.Rows], differentiable: tuple[int, ...], **fields: Any
) -> OpSpec:  # fmt: skip
    return OpSpec(
        name=name,
        op=getattr(ops, name),
        reference=row_norm_bounds.reference(parse),
        bound=row_norm_bounds.bound(parse),
        grad_bound=row_norm_bounds.grad_bound(parse),
        differentiable=differentiable,
        families=("row_norm", "row_norm_grad"),
        **fields,
    )


_FLOATING = r"input has dtype torch.int64, expected a floating type"

SPECS = [
    _spec(
        "layer_norm",
        row_norm_bounds.layers,
        (0, 2, 3),
        inputs=_layer_inputs,
        examples={
            "short": _affine(70, 37, rest=([37],), C=37),
            "long": _affine(3, 9001, rest=([9001],), C=9001),
            "plain": lambda make: Case((make.tensor(17, 130), 130, None, None)),
        },
        bad=(
            refuses(TypeError, _FLOATING, integers(3, 4), extra=([4],)),
            Bad(lambda make: Case((make.tensor(3, 4), [3])), ValueError, r"expected one that ends in \[3\]"),
            Bad(_affine(3, 4, rest=([4],), C=3), ValueError, r"weight has shape \[3\], expected \[4\]"),
        ),
    ),
    _spec(
        "rms_norm",
        row_norm_bounds.rms,
        (0, 2),
        inputs=_rms_inputs,
        examples={
            "short": lambda make: Case((make.tensor(70, 37), [37], make.tensor(37), 1e-5)),
            "long": lambda make: Case((make.tensor(3, 9001), [9001], make.tensor(9001), 1e-5)),
        },
        bad=(refuses(TypeError, _FLOATING, integers(3, 4), extra=([4],)),),
    ),
    OpSpec(
        name="add_rms_norm",
        op=ops.add_rms_norm,
        reference=_norm_and_sum,
        inputs=_sum_inputs,
        bound=row_norm_bounds.bound_of_sum,
        grad_bound=row_norm_bounds.grad_bound_of_sum,
        differentiable=(0, 1, 3),
        families=("row_norm", "row_norm_grad"),
        examples={
            "short": lambda make: Case((make.tensor(70, 37), make.tensor(70, 37), [37], make.tensor(37), 1e-5)),
            "long": lambda make: Case((make.tensor(3, 9001), make.tensor(3, 9001), [9001], make.tensor(9001), 1e-5)),
        },
        bad=(
            refuses(TypeError, _FLOATING, integers(3, 4), integers(3, 4), extra=([4],)),
            refuses(ValueError, r"residual has shape \[4\], expected \[3, 4\]", (3, 4), (4,), extra=([4],)),
        ),
    ),
    _spec(
        "group_norm",
        row_norm_bounds.groups,
        (0, 2, 3),
        inputs=_group_inputs,
        examples={
            "images": _affine(3, 12, 5, 7, rest=(3,), C=12),
            "channels last": _affine(3, 12, 5, 7, rest=(3,), C=12, last=True),
            "long": _affine(2, 4, 70, 70, rest=(2,), C=4),
            "long, channels last": _affine(2, 4, 70, 70, rest=(2,), C=4, last=True),
        },
        bad=(
            Bad(
                lambda make: Case((make.tensor(3, 4), 3)), ValueError, "4 channels cannot be shared out to num_groups 3"
            ),
            refuses(ValueError, r"input has shape \[3\], expected \[N, C, ...\]", (3,), extra=(1,)),
            refuses(TypeError, _FLOATING, integers(3, 4), extra=(2,)),
        ),
    ),
    _spec(
        "instance_norm",
        row_norm_bounds.instances,
        (0, 3, 4),
        inputs=_instance_inputs,
        examples={
            "images": tensors((3, 5, 6, 7), None, None, None, None),
            "affine": _affine(3, 5, 6, 7, rest=(None, None), C=5),
            "side by side": _affine(3, 32, 9, 5, rest=(None, None), C=32, last=True),
            "long, side by side": _affine(2, 64, 35, 31, rest=(None, None), C=64, last=True),
        },
        bad=(
            refuses(ValueError, r"running_mean has shape \[4\], expected \[5\]", (3, 5, 6), (4,), (4,)),
            refuses(ValueError, "more than 1 value per channel", (3, 4, 1)),
        ),
    ),
]
