"""Gradient clipping and norms of weights, as in torch.nn.utils, and padded and packed sequences in `rnn`.

The optimisers clip by themselves with `max_norm`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from minidl.common import suggestions
from minidl.kernels import elementwise, reduce
from minidl.nn.utils import parametrizations as parametrizations
from minidl.nn.utils.norms import remove_spectral_norm, remove_weight_norm, spectral_norm, weight_norm
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor

__all__ = [
    "clip_grad_norm_", "clip_grad_value_", "remove_spectral_norm", "remove_weight_norm", "spectral_norm", "weight_norm",
]  # fmt: skip


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients so that their joint norm is at most max_norm; returns the norm before scaling.

    norm_type 2 or infinity. `foreach` is ignored. Raises ValueError for another norm_type, RuntimeError for a norm that
    is not finite if error_if_nonfinite is set.
    """
    if norm_type not in (2, math.inf):
        raise ValueError(f"clip_grad_norm_: norm_type is {norm_type}, expected 2 or infinity")
    grads = _grads(parameters)
    if not grads:
        return Tensor(torch.zeros(()))
    if norm_type == 2:
        total = reduce.norm(torch.stack([reduce.norm(g).to(grads[0].device) for g in grads]))
    else:
        total = reduce.amax(torch.stack([reduce.amax(elementwise.abs(g)).to(grads[0].device) for g in grads]))
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {total.item()}, which is not finite")
    factor = elementwise.minimum(elementwise.div(float(max_norm), elementwise.add(total, 1e-6)), 1.0)
    for g in grads:
        elementwise.mul(g, factor.to(g.device, g.dtype), out=g)
    return Tensor(total)


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
    """Limit every gradient's values to [-clip_value, clip_value]. `foreach` is ignored."""
    for g in _grads(parameters):
        elementwise.clamp(g, -clip_value, clip_value, out=g)


def _grads(parameters: Tensor | Iterable[Tensor]) -> list[torch.Tensor]:
    """Return the tensors of all gradients; of a row-sparse gradient its rows."""
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.raw_grad for p in tensors]
    return [g.values if isinstance(g, RowGrad) else g for g in gradients if g is not None]


def __getattr__(name: str) -> object:
    raise suggestions.attribute("minidl.nn.utils", name, __all__)
