"""Check the inputs of a captured step: tensors and CSR batches of constant types and dtypes on one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device

Input = Tensor | torch.Tensor | CSR
Kind = tuple[type, torch.dtype]


def check_inputs(inputs: tuple[Any, ...], kinds: tuple[Kind, ...] | None, key: torch.Tensor | None) -> torch.device:
    """Return the device of the inputs of a step. Raises TypeError and ValueError, see `capture`.

    `kinds` are those of an earlier call, and `key` is on its device; None before the first call.
    """
    for i, x in enumerate(inputs):
        if not isinstance(x, Tensor | torch.Tensor | CSR):
            raise TypeError(
                f"a captured step takes tensors and CSR batches, input {i} is a {type(x).__name__}: pass a "
                "tensor if it changes from call to call, else use it inside the step without passing it"
            )
        if not isinstance(x, CSR) and x.requires_grad:
            raise ValueError(
                f"input {i} of a captured step requires a gradient: .detach() it, or compute it in the step; "
                "backward() in the step cannot reach beyond its inputs"
            )
    if kinds is not None:
        if len(inputs) != len(kinds):
            raise ValueError(f"a captured step was called with {len(kinds)} inputs, now with {len(inputs)}")
        for i, (x, (type_, dtype)) in enumerate(zip(inputs, kinds, strict=True)):
            if kind_of(x) != (type_, dtype):
                raise TypeError(
                    f"input {i} of a captured step is a {_type_name(type(x))} of {x.dtype}, and was a "
                    f"{_type_name(type_)} of {dtype} before: convert it, or capture another step for it"
                )
    devices = {x.device for x in inputs}
    if len(devices) > 1:
        raise ValueError(
            f"the inputs of a captured step are on {' and '.join(sorted(map(str, devices)))}, expected one device"
        )
    device = devices.pop() if devices else default_device()
    if key is not None and device != key.device:
        raise ValueError(
            f"the inputs of a captured step are on {device}, and were on {key.device} before: capture another step "
            "for each device"
        )
    return device


def shape_of(x: Input) -> tuple[Any, ...]:
    """Return the shape of an input; for a CSR batch with the sizes of its memory."""
    return (x.shape, *x.sizes.values()) if isinstance(x, CSR) else tuple(x.shape)


def kind_of(x: Input) -> Kind:
    """Return the type and dtype of an input."""
    return type(x), x.dtype


def _type_name(type_: type) -> str:
    return f"torch.{type_.__name__}" if issubclass(type_, torch.Tensor) else f"minidl.{type_.__name__}"


def shapes_message(shape: tuple[Any, ...], earlier: Iterable[tuple[Any, ...]]) -> str:
    """Return the error message for a call with more shapes than allowed."""
    texts = [str(list(map(_described, shapes))) for shapes in earlier]
    more = "" if len(texts) == 1 else f", {len(texts)} different ones"
    return (
        f"a captured step has inputs of shapes {list(map(_described, shape))}, and was called with "
        f"{' and '.join(texts)} before{more}: pass batches of one size, or capture(step, shapes={len(texts) + 1})"
    )


def _described(shape: tuple[Any, ...]) -> Any:
    if shape and isinstance(shape[0], tuple):
        return f"CSR {list(shape[0])} of sizes {list(shape[1:])}"
    return list(shape)
