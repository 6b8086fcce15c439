"""Kernels of values that are computed each for itself give the same bits in tiles of a few values as in one tile.

In the interpreter tiles are large, so that most tests have one; here every index of a program is more than 0.
"""

import pytest
import torch

from minidl import ops
from minidl.kernels import crops, mixing, tree
from minidl.kernels.update import newton
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device

TILES = {
    "elementwise": launch.Tile({"BLOCK_N": 8}, 1, 1),
    "images": launch.Tile({"BLOCK_M": 2, "BLOCK_N": 4}, 1, 1),
}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device())


def whole(below, *shape, seed=0, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(below, shape, generator=generator).to(dtype).to(default_device())


def mixed():
    box = torch.tensor([[0, 1, 3, 4], [0, 0, 0, 0], [2, 0, 5, 7]], dtype=torch.int32).to(default_device())
    return mixing.mix(normal(3, 2, 5, 7), whole(3, 3), normal(3).abs(), box)


def mixed_targets():
    return mixing.mix_targets(whole(11, 5), whole(5, 5, seed=1), normal(5).sigmoid(), 11)


def cropped():
    parts = torch.tensor([[0, 0, 6, 7, 0], [1, 2, 4, 3, 1], [2, 1, 3, 5, 0]], dtype=torch.int32).to(default_device())
    x, scale = whole(256, 4, 6, 7, 2, dtype=torch.uint8), normal(2).abs() + 1
    return crops.crop(x, whole(4, 3), parts, (5, 6), normal(2), scale, torch.float32)


def resampled():
    x = Tensor(normal(2, 3, 5, 7)).requires_grad_()
    y = ops.interpolate(x, (4, 9), mode="bilinear")
    y.backward(Tensor(normal(*y.shape, seed=1)))
    return torch.cat([y.data.flatten(), x.grad.data.flatten()])


def summed():
    return tree.sum_rows(normal(5, 37), range(5), tree.leaves(5), normal(5, seed=1).double())


def orthogonal():
    x = normal(2, 5, 7)
    newton.orthogonalise(x, (3.4445, -4.7750, 2.0315), 3, 1e-7)
    return x


@pytest.mark.parametrize("call", [mixed, mixed_targets, cropped, resampled, summed, orthogonal])
def test_tiles_change_no_bit(call):
    before, launched = call(), []

    def watcher(kernel, grid, args, meta, go):
        launched.append(grid)
        go()

    with launch.force(**TILES), launch.watch(watcher):
        after = call()
    assert torch.equal(before, after)
    assert any(grid[0] > 3 for grid in launched), "one tile"
