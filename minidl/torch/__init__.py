"""minidl's kernels in torch: operators on torch tensors, with torch's gradients, `torch.compile` and export.

    import minidl.torch

    y = minidl.torch.conv2d(x, weight, bias, padding=1, act="relu")     # one operator, as torch.nn.functional.conv2d

    minidl.torch.accelerate(model)                                      # the layers of a model

`torch.compile(model, backend="minidl")` fuses layers with later operations. Operators are `torch.ops.minidl.*`. Read
`registry` first (how a function becomes an operator), then `convolution`, `layer`, `accelerating` and `fusion`.
"""

from minidl.torch import flops, mapping, optim
from minidl.torch import scaling as scaling  # its operators have a rule of torch.vmap
from minidl.torch.accelerating import Report, accelerate, report, restore
from minidl.torch.activations import bias_act, linear
from minidl.torch.attention import scaled_dot_product_attention
from minidl.torch.bags import embedding_bag
from minidl.torch.compiling import backend
from minidl.torch.convolution import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from minidl.torch.linear_loss import linear_cross_entropy
from minidl.torch.mapping import batch_invariant
from minidl.torch.normalisation import batch_norm
from minidl.torch.pooling import (
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    avg_pool2d,
    avg_pool3d,
    max_pool2d,
    max_pool3d,
)
from minidl.torch.resampling import interpolate
from minidl.torch.rows import cross_entropy, group_norm, layer_norm, log_softmax, rms_norm, softmax

__all__ = [
    "Report", "accelerate", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "avg_pool2d", "avg_pool3d", "backend",
    "batch_invariant", "batch_norm", "bias_act", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "cross_entropy", "embedding_bag", "group_norm", "interpolate", "layer_norm", "linear",
    "linear_cross_entropy", "log_softmax", "max_pool2d", "max_pool3d", "optim", "report", "restore", "rms_norm",
    "scaled_dot_product_attention", "softmax",
]  # fmt: skip

flops.register()
mapping.register()
