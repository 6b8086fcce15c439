"""Folding of batch norms into the preceding convolutions and linear layers, for inference."""

from __future__ import annotations

from typing import Any

import torch

from minidl import ops
from minidl.autograd import no_grad
from minidl.nn.conv import Conv2d, ConvTranspose2d
from minidl.nn.layers import Linear, Sequential, SparseLinear
from minidl.nn.module import Module, Parameter
from minidl.nn.placeholder import Call
from minidl.nn.trace import NormCall, Trace
from minidl.nn.vision import BatchNorm1d, BatchNorm2d, SyncBatchNorm
from minidl.tensors import Tensor


class FoldedConv2d(Conv2d):
    """act(scale * conv(x, weight) + bias): a convolution and the batch norm after it, in one kernel.

    weight is the convolution's; scale and bias [out] are buffers computed from the batch norm's running statistics. For
    inference only: no gradients.
    """

    def forward(self, input: Tensor) -> Tensor:
        input, padding = self._padded(input)
        return ops.conv2d(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups, self.act, scale=self.scale
        )


class FoldedConvTranspose2d(ConvTranspose2d):
    """A transposed convolution and the batch norm after it, as `FoldedConv2d`."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.conv_transpose2d(
            input, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation,
            self.act, scale=self.scale,
        )  # fmt: skip


class FoldedLinear(Linear):
    """A linear layer with the batch norm after it merged into weight and bias. Shapes: [N, in] -> [N, out]."""

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 2:
            raise ValueError(
                f"FoldedLinear: input has shape {list(input.shape)}, expected [N, {self.in_features}]; pass an example "
                "input of this shape to fold_batch_norms, which then does not fold this batch norm"
            )
        return super().forward(input)


class _Folded(Module):
    """A folded batch norm: the identity. It stays in a Sequential whose layers are called by index."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def forward(self, input: Tensor) -> Tensor:
        return input


_FOLDED = {Conv2d: FoldedConv2d, ConvTranspose2d: FoldedConvTranspose2d, Linear: FoldedLinear, SparseLinear: None}
_NORMS = BatchNorm1d, BatchNorm2d, SyncBatchNorm


def fold_batch_norms(model: Module, *example: Any) -> Module:
    """Fold every BatchNorm2d or SyncBatchNorm after a Conv2d or ConvTranspose2d, and every batch norm after a Linear or
    SparseLinear, into that layer, in place. Returns `model`.

    For inference: results are those of eval mode, and there are no gradients. A batch norm is "after" a layer if every
    output of the layer is used by this batch norm only; views between a linear layer and its batch norm are allowed.
    To find out, the model is called once: on `example`, the arguments of a real call, or on a placeholder for each
    argument of `forward` without a default. A layer whose parameters are read by name elsewhere is not folded.

    The batch norm is removed from the modules, parameters and buffers of the model: a Sequential is renumbered, and an
    attribute becomes a function that returns its argument (an identity module in a Sequential whose layers are called
    by index). Not folded are layers with an activation or pool, linear layers in float16 or bfloat16 (rounding the new
    weights would change the results) and batch norms without running statistics.

    Raises ValueError, with the model unchanged, if there is no example and the `forward` of a module with layers or
    batch norms reads the values of its input, or branches or loops on the shape.
    """
    if not any(map(_is_norm, model.modules())):
        return model
    trace = Trace(model, example, _is_layer, _is_norm)
    calls: dict[Module, list[Call]] = {}
    for call in trace.calls:
        calls.setdefault(call.layer, []).append(call)
    by_norm: dict[Module, list[NormCall]] = {}
    for use in trace.norm_calls:
        by_norm.setdefault(use.norm, []).append(use)
    for norm, uses in by_norm.items():
        assert isinstance(norm, _NORMS)
        layer = uses[0].call.layer if uses[0].call is not None else None
        if layer is None or {layer, norm} & trace.read:
            continue
        if any(call.used_elsewhere or {*call.norms} != {norm} for call in calls[layer]):
            continue
        if all(_same_use(use, uses[0]) for use in uses):
            with no_grad():
                _fold(layer, norm, uses[0].features)
            _remove(model, norm, trace.callers)
    return model


def _is_layer(module: Module) -> bool:
    """Return whether a batch norm can be folded into a module."""
    kind = exact_kind(module, *_FOLDED)
    if kind in (Linear, SparseLinear) and module.weight.dtype not in (torch.float32, torch.float64):
        return False
    return kind is not None and module.act is None and getattr(module, "pool", None) is None


def _is_norm(module: Module) -> bool:
    return exact_kind(module, *_NORMS) is not None


def _is_sequential(module: Module | None) -> bool:
    return isinstance(module, Sequential) and exact_kind(module, Sequential) is not None


def exact_kind(module: Module, *kinds: type[Module]) -> type[Module] | None:
    """Return the class in `kinds` whose `forward` and `__call__` the module has, None for others and with a norm."""
    for kind in kinds:
        is_kind = isinstance(module, kind) and not hasattr(type(module), "_computed") and "forward" not in vars(module)
        if is_kind and (type(module).forward, type(module).__call__) == (kind.forward, kind.__call__):
            return kind
    return None


def _same_use(use: NormCall, first: NormCall) -> bool:
    """Return whether a call of a batch norm uses the same outputs of the same layer as the first, in the same order."""
    norm, call, features = use.norm, use.call, use.features
    assert isinstance(norm, _NORMS)
    if call is None or first.call is None or call.layer is not first.call.layer or norm.running_mean is None:
        return False
    if isinstance(call.layer, Conv2d | ConvTranspose2d):
        return 4 in norm.ranks and norm.num_features == call.layer.out_channels
    if features is None or first.features is None or not torch.equal(features, first.features):
        return False
    return features.dim() + 1 in norm.ranks and len(features) == norm.num_features


def _fold(layer: Module, norm: BatchNorm1d | BatchNorm2d | SyncBatchNorm, features: torch.Tensor | None) -> None:
    """Fold a batch norm into a layer. `features` are the outputs of a linear layer by channel."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    vectors: list[Tensor | None] = [norm.running_mean, norm.running_var, norm.weight, norm.bias]
    if features is not None:
        channels = torch.empty(features.numel(), dtype=torch.int64)
        channels[features.flatten()] = torch.arange(len(features)).repeat_interleave(features[0].numel())
        channels = channels.to(norm.running_mean.device)
        vectors = [None if vector is None else Tensor(vector.data[channels]) for vector in vectors]
    mean, var, weight, bias = vectors
    assert mean is not None
    assert var is not None
    # Only the dtype and the number of outputs of this tensor matter.
    outputs = Tensor(layer.weight.data.new_empty(len(mean)))
    scale, shift = ops.fold_batch_norm(outputs, layer.bias, mean, var, weight, bias, norm.eps, wide=features is None)
    layer.act, layer.bias = norm.act, None
    if features is None:
        layer.register_buffer("scale", scale)
        del layer.bias
        layer.register_buffer("bias", shift)
    else:
        requires_grad = layer.weight.requires_grad
        rows = scale.reshape(-1, 1) if isinstance(layer, Linear) else scale
        layer.weight, layer.bias = Parameter(layer.weight * rows, requires_grad), Parameter(shift, requires_grad)
    kind = next(_FOLDED[kind] for kind in _FOLDED if isinstance(layer, kind))
    if kind is not None:
        # In place, so that all references to the layer refer to the folded one.
        object.__setattr__(layer, "__class__", kind)


def _remove(model: Module, norm: Module, callers: dict[Module, list[Module | None]]) -> None:
    """Remove a folded batch norm from the model; `callers` are the modules that call each module."""
    norm._parameters.clear()
    norm._buffers.clear()
    object.__setattr__(norm, "__class__", _Folded)
    for parent in list(model.modules()):
        names = [name for name, child in parent._modules.items() if child is norm]
        if not isinstance(parent, Sequential):
            for name in names:
                del parent._modules[name]
                parent.__dict__[name] = norm
        # In a Sequential whose layers are called by index, the layers keep their numbers.
        elif names and all(_is_sequential(caller) for child in parent for caller in callers.get(child, ())):
            layers = {name: child for name, child in parent._modules.items() if child is not norm}
            numbered = all(name.isdigit() for name in layers)
            parent._modules.clear()
            parent._modules.update(
                (str(index) if numbered else name, layer) for index, (name, layer) in enumerate(layers.items())
            )
