"""All batch norms of a model in inference folded by few operators, where `torch.compile` or `torch.export` traces it.

Without a trace `ops.folds` makes all at a model's second call. A trace would have one operator for each convolution,
a launch of 2 us and 20 us of the host, of which ResNet-50 has 53: here the outermost module begins with one for all
that are of a kind, and leaves each convolution its part for as long as it is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from minidl.kernels.norm import fold as kernels
from minidl.torch import layers
from minidl.torch.registry import NAMESPACE, _library, accumulator

_NAME, _ALIGNED = "fold_batch_norms", 8  # parts begin at multiples of so many numbers: of 16 bytes, as kernels expect
_CONVS = (layers.Conv1d, layers.Conv2d, layers.Conv3d, layers.ConvTranspose1d, layers.ConvTranspose2d)
_NORMS = (layers.BatchNorm1d, layers.BatchNorm2d, layers.BatchNorm3d)
_PART = "_minidl_folded"  # a convolution's attribute, within a trace


class Pair(NamedTuple):
    """Paths to a convolution and to its batch norm."""

    conv: str
    norm: str


def _fold(mean: Any, var: Any, conv_bias: Any, weight: Any, bias: Any, eps: float, double: bool) -> Any:
    """(scales, shifts) behind one another; a list is empty where there are none."""
    joined = [torch.cat(column) if column else None for column in (conv_bias, mean, var, weight, bias)]
    count = sum(map(len, mean))
    return kernels.fold(mean[0].new_empty(count, dtype=_dtype(double)), *joined, eps, wide=True)


def _fake(mean: Any, var: Any, conv_bias: Any, weight: Any, bias: Any, eps: float, double: bool) -> Any:
    scales = mean[0].new_empty(sum(len(each) for each in mean), dtype=_dtype(double))
    return scales, torch.empty_like(scales)


def _dtype(double: bool) -> torch.dtype:
    return torch.float64 if double else torch.float32


def _mapped(info: Any, in_dims: Any, *args: Any) -> Any:
    """Once for each place, as of models that are mapped."""

    def at(arg: Any, dim: Any, place: int) -> Any:
        if isinstance(arg, list):
            return [at(each, d, place) for each, d in zip(arg, dim or [None] * len(arg), strict=True)]
        return arg if dim is None else arg.select(dim, place)

    made = [
        _operator(*(at(a, d, place) for a, d in zip(args, in_dims, strict=True))) for place in range(info.batch_size)
    ]
    return tuple(map(torch.stack, zip(*made, strict=True))), (0, 0)


# Without a gradient, and not for Python to call: what `registry.operator` adds is for others.
_library.define(
    f"{_NAME}(Tensor[] mean, Tensor[] var, Tensor[] conv_bias, Tensor[] weight, Tensor[] bias, float eps, bool double) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _device in ("CPU", "CUDA"):
    _library.impl(_NAME, _fold, _device)
torch.library.register_fake(f"{NAMESPACE}::{_NAME}", _fake, lib=_library)
torch.library.register_vmap(f"{NAMESPACE}::{_NAME}", _mapped, lib=_library)
_operator = getattr(getattr(torch.ops, NAMESPACE), _NAME).default


def traced(module: nn.Module, known: tuple[Pair, ...], forward: Callable[[], Any]) -> Any:
    """What forward returns, with the batch norms of these folded before it, where a trace is under way."""
    if not known or torch.is_grad_enabled():
        return forward()
    alike: dict[Any, list[tuple[Any, Any]]] = {}
    for pair in known:
        conv, norm = _at(module, pair.conv), _at(module, pair.norm)
        if type(conv) in _CONVS and type(norm) in _NORMS and not norm._minidl_of_batch and _fits(norm):
            none = conv.bias is None, norm.weight is None, norm.bias is None
            kind = norm.running_mean.dtype, norm.running_mean.device, conv.weight.dtype, norm.eps, none
            alike.setdefault(kind, []).append((conv, norm))
    convs = []
    for members in alike.values():
        if len(members) > 1:
            _share_out(members)
            convs += [conv for conv, _ in members]
    try:
        return forward()
    finally:
        for conv in convs:
            delattr(conv, _PART)


def part(conv: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scale and shift of a convolution, within such a trace."""
    return getattr(conv, _PART, None)


def _share_out(members: list[tuple[Any, Any]]) -> None:
    norms = [norm for _, norm in members]
    columns = [
        [norm.running_mean for norm in norms], [norm.running_var for norm in norms], [conv.bias for conv, _ in members],
        [norm.weight for norm in norms], [norm.bias for norm in norms],
    ]  # fmt: skip
    double = accumulator(members[0][0].weight.dtype) == torch.float64
    given = [[] if column[0] is None else column for column in columns]
    lengths = [norm.num_features for norm in norms]
    scales, shifts = (each.split(lengths) for each in _operator(*given, norms[0].eps, double))
    for (conv, _), scale, shift in zip(members, scales, shifts, strict=True):
        setattr(conv, _PART, (scale, shift))


def _fits(norm: Any) -> bool:
    return bool(norm.num_features % _ALIGNED == 0)


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = module._modules.get(name)
        if module is None:
            return None
    return module
