"""Batch norms folded into the convolutions before them, for inference."""

from __future__ import annotations

from minidl import ops
from minidl.kernels.activation import Activation
from minidl.nn.conv import Conv2d, ConvTranspose2d
from minidl.nn.layers import Sequential
from minidl.nn.module import Module
from minidl.nn.vision import BatchNorm2d
from minidl.tensor import Tensor


class FoldedConv2d(Module):
    """act(scale * conv(x, weight) + shift): a convolution (or a transposed one) and the batch norm after it, in one
    kernel.

    It shares the convolution's weight; scale and shift [out] are those of the batch norm in eval mode when it was made.
    Works without a gradient only.
    """

    def __init__(self, conv: Conv2d | ConvTranspose2d, norm: BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.conv = conv
        self.act: Activation = norm.act
        # Of the weight only the dtype and the number of outputs count.
        weight = Tensor(conv.weight.data.new_empty(conv.out_channels))
        scale, shift = ops.fold_batch_norm(
            weight, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps, wide=True
        )
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        if isinstance(conv, ConvTranspose2d):
            return ops.conv_transpose2d(
                x, conv.weight, self.shift, conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation,
                self.act, scale=self.scale,
            )  # fmt: skip
        return ops.conv2d(
            x, conv.weight, self.shift, conv.stride, conv.padding, conv.dilation, conv.groups, self.act,
            scale=self.scale,
        )  # fmt: skip


def fold_batch_norms(model: Module) -> Module:
    """`model` with every Conv2d or ConvTranspose2d that a BatchNorm2d follows in a Sequential made one layer,
    in place; returns it.

    For inference: the results are those of eval mode, and no gradient can be taken. A convolution with an activation or
    pool of its own, and a batch norm without running statistics, stay as they are.
    """
    for child in model.children():
        fold_batch_norms(child)
    if isinstance(model, Sequential):
        layers = list(model.children())
        folded: list[Module] = []
        for layer in layers:
            before = folded[-1] if folded else None
            if (
                isinstance(layer, BatchNorm2d)
                and isinstance(before, Conv2d | ConvTranspose2d)
                and _plain(before, layer)
            ):
                folded[-1] = FoldedConv2d(before, layer)
            else:
                folded.append(layer)
        if len(folded) < len(layers):
            for name in list(model._modules):
                delattr(model, name)
            for index, layer in enumerate(folded):
                setattr(model, str(index), layer)
    return model


def _plain(conv: Conv2d | ConvTranspose2d, norm: BatchNorm2d) -> bool:
    return conv.act is None and getattr(conv, "pool", None) is None and norm.running_mean is not None
