"""Linear layers and convolutions in float8, for inference."""

from __future__ import annotations

import torch

from minidl import ops
from minidl.autograd import no_grad
from minidl.nn.conv import Conv2d
from minidl.nn.fold import FoldedConv2d, FoldedLinear, own_kind
from minidl.nn.layers import Linear
from minidl.nn.module import Module
from minidl.ops.float8 import Float8
from minidl.tensors import Tensor

UNIT = 32  # features that tensor cores take at once: layers with others stay as they are


class Float8Linear(Linear):
    """A linear layer whose weight is float8: the buffers weight and weight_scale; bias is a buffer, too."""

    _fixed = "weight", "weight_scale"

    def forward(self, input: Tensor) -> Tensor:
        y = ops.float8.linear(input, Float8(self.weight, self.weight_scale), self.bias, self.act)
        assert isinstance(y, Tensor)
        return y


class Float8Conv2d(Conv2d):
    """A convolution whose weight is float8, as `Float8Linear`; `scale` is the buffer of a folded batch norm or None."""

    _fixed = "weight", "weight_scale"

    def forward(self, input: Tensor) -> Tensor:
        y = ops.float8.conv2d(
            input, Float8(self.weight, self.weight_scale), self.bias, self.stride, self.padding, self.dilation,
            self.groups, self.act, scale=self.scale,
        )  # fmt: skip
        assert isinstance(y, Tensor)
        if self.pool is None:
            return y
        return ops.max_pool2d(y, 2) if self.pool == "max" else ops.avg_pool2d(y, 2)


_KINDS: dict[type[Module], type[Module]] = {
    Linear: Float8Linear, FoldedLinear: Float8Linear, Conv2d: Float8Conv2d, FoldedConv2d: Float8Conv2d,
}  # fmt: skip


def to_float8(model: Module, dtype: torch.dtype = torch.float8_e4m3fn) -> Module:
    """`model` with the weights of its Linear and Conv2d layers in float8, in place; returns it. For inference only.

    The layers quantize their inputs at every call (`ops.float8`) and return the dtype of these. Layers stay as they are
    whose features, or channels of a group, are not a multiple of 32, as those of the first convolution, and layers of
    float64. Fold batch norms first (`fold_batch_norms`). What is to keep its accuracy, the last layer for example, is
    left out by converting the other modules one by one. Raises TypeError for a dtype that is not float8.
    """
    for layer in list(model.modules()):
        kind = own_kind(layer, *_KINDS)
        if kind is None or layer.weight.dtype == torch.float64 or layer.weight.shape[1] % UNIT:
            continue
        with no_grad():
            values, scale = ops.float8.quantize(layer.weight, dtype)
        bias, factor = layer.bias, getattr(layer, "scale", None)
        del layer.weight, layer.bias
        layer.register_buffer("weight", values)
        layer.register_buffer("weight_scale", scale)
        layer.register_buffer("bias", None if bias is None else Tensor(bias.data))
        if issubclass(_KINDS[kind], Conv2d):
            layer.register_buffer("scale", factor)
        # In place, so that every reference to the layer is to the new one.
        object.__setattr__(layer, "__class__", _KINDS[kind])
    return model
