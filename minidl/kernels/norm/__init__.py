"""Batch norm with its activation, for training and with running statistics, and its gradient.

    x, y  [N, C, ...]     weight, bias, running_mean, running_var  [C]     M = values per channel

    y = act(z)      z = (x - mean) rstd weight + bias      rstd = 1 / sqrt(var + eps)
    mean = sum x / M        var = sum (x - mean)^2 / M
    running_mean += momentum (mean - running_mean)         running_var += momentum (var M / (M - 1) - running_var)

    dz = dy act'(z)         dbias = sum dz                 dweight = sum dz n,  n = (x - mean) rstd
    dx = weight rstd (dz - (dbias + n dweight) / M)        with running statistics  dx = weight rstd dz

Ioffe and Szegedy, arXiv 1502.03167. The kernels read channels-last memory, a matrix [M, C], or contiguous planes
[N, C, S], and write the same order. Each program reduces a band of values of BLOCK_C channels, so that few channels
fill a GPU as well; a second launch joins the bands in order.

Statistics stay accurate for large means: the kernels subtract the channel's first value, and each lane of a band
updates its mean and its sum of squared distances from the mean value by value (Welford, Technometrics 4(3), 1962).
Lanes, then bands, are joined in float64 by sum_i [M2_i + n_i (mean_i - mean)^2] (Chan, Golub and LeVeque, The American
Statistician 37(3), 1983), and so are the shards of a batch. A convolution can supply the statistics of its tiles
(`gemm.fused_statistics`); then x is not read for them. The gradient saves x, mean and rstd, and recomputes z.

Read in this order: `statistics`, `values` (with the gradient), `alone` (all in one launch, for few values), and `fold`
(for inference). `layout` says where values are in memory, `launches` has the plan of a launch.
"""

from minidl.kernels.norm.launches import Buffers, Statistics, bands, check_arguments, check_vectors, depth
from minidl.kernels.norm.layout import in_planes
from minidl.kernels.norm.statistics import batch_statistics, join_shards
from minidl.kernels.norm.values import normalise, normalise_grad

__all__ = [
    "Buffers", "Statistics", "bands", "batch_statistics", "check_arguments", "check_vectors", "depth", "in_planes",
    "join_shards", "normalise", "normalise_grad",
]  # fmt: skip
