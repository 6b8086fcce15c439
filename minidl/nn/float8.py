"""Linear layers and convolutions in float8, for inference."""

from __future__ import annotations

import torch

from minidl import ops
from minidl.autograd import no_grad
from minidl.nn.conv import Conv2d
from minidl.nn.fold import FoldedConv2d, FoldedLinear, exact_kind
from minidl.nn.layers import Linear
from minidl.nn.module import Module
from minidl.ops.float8 import Float8
from minidl.tensors import Tensor

UNIT = 32  # layers whose features are no multiple of this are not converted


class Float8Linear(Linear):
    """A linear layer whose weight is float8: the buffers weight and weight_scale; so is bias."""

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
    """Convert the weights of Linear and Conv2d layers to float8, in place; returns `model`. For inference only.

    The layers quantize their inputs at every call (`ops.float8`) and return the inputs' dtype. Not converted are layers
    in float64 and those whose features or channels per group are no multiple of 32, such as the first convolution. Fold
    batch norms first (`fold_batch_norms`). To exclude a layer that needs its accuracy, such as the last one, convert
    the other modules one by one. Raises TypeError for a dtype that is not float8.
    """
    for layer in list(model.modules()):
        kind = exact_kind(layer, *_KINDS)
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
        # In place, so that all references to the layer refer to the new one.
        object.__setattr__(layer, "__class__", _KINDS[kind])
    return model
