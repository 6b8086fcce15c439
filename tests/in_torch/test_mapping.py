"""The operators under torch.vmap: results, gradients of each example, and one launch where one is enough."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import minidl.torch as mt
from minidl.runtime import launch
from tests.in_torch.test_operators import CASES, _randn

NAMES = (
    "conv2d with a sum", "conv_transpose2d", "batch norm, inference", "conv norm", "max pool", "avg pool",
    "adaptive avg pool", "linear, gelu", "bias act", "softmax", "cross entropy", "linear cross entropy", "rms norm",
    "scaled sum", "scaled sum of rows and examples",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_of_each_example_are_torchs(name):
    ours, torchs, tensors = CASES[name]
    vmap = functools.partial(torch.vmap, randomness="same")  # a case makes its statistics
    x, *rest = tensors()
    xs = torch.stack([x, x.flip(0), x * 0.5], 1)
    dims = (1, *[None] * len(rest))
    torch.testing.assert_close(*(vmap(f, dims)(xs, *rest) for f in (ours, torchs)), rtol=1e-10, atol=1e-10)
    of = 1 if rest and "pool" not in name else 0
    gradients = [vmap(grad(lambda *t, f=f: f(*t).square().sum(), of), dims)(xs, *rest) for f in (ours, torchs)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mapped", [(0, None, None), (None, None, 2), (1, None, 0)])
def test_images_of_all_places_are_one_launch(mapped):
    x, w, added = _randn(2, 3, 4, 4), _randn(3, 3, 3, 3), _randn(2, 3, 4, 4)
    inputs = [t if d is None else torch.stack([t, -t], d) for t, d in zip((x, w, added), mapped, strict=True)]
    launched = []
    with launch.watch(lambda kernel, grid, args, meta, go: (launched.append(kernel.__name__), go())):
        y = vmap(lambda x, w, r: mt.conv2d(x, w, padding=1, added=r), mapped)(*inputs)
        count = len(launched)
        mt.conv2d(x, w, padding=1, added=added)
    assert count == len(launched) - count
    expected = vmap(lambda x, w, r: F.conv2d(x, w, padding=1) + r, mapped)(*inputs)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_running_statistics_are_mapped_with_the_images_or_refused():
    x, mean = _randn(2, 3, 4, 2), torch.zeros(2, 4, dtype=torch.float64, device=_randn(1).device)
    var = mean + 1
    statistics = mean.clone(), var.clone()
    y = vmap(lambda x, m, v: mt.batch_norm(x, m, v, training=True))(x, mean, var)
    torch.testing.assert_close(y, vmap(lambda x, m, v: F.batch_norm(x, m, v, training=True))(x, *statistics))
    torch.testing.assert_close((mean, var), statistics)
    with pytest.raises(ValueError, match="maps x but not running_mean, which is updated"):
        vmap(lambda x: mt.batch_norm(x, mean[0], var[0], training=True))(x)


@pytest.mark.parametrize("name", ["max_pool3d", "avg_pool3d", "adaptive_avg_pool3d"])
def test_pools_of_volumes_are_mapped(name):
    x = _randn(3, 2, 4, 6, 5, 4)
    y = vmap(lambda t: getattr(mt, name)(t, 2))(x)
    torch.testing.assert_close(y, torch.stack([getattr(F, name)(t, 2) for t in x]))
