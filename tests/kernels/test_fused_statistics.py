"""Statistics of a convolution's tiles, as its kernel hands them on, and the batch norm that joins them."""

import pytest
import torch

import minidl
from minidl import nn
from minidl.kernels import conv, norm
from minidl.kernels.conv import forms
from minidl.kernels.conv import product as by_product
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.norm import alone
from minidl.runtime import launch
from minidl.testing import GuardedAllocations
from tests.autograd.test_deferred import image, launches, step

EPS = 2.0**-24


def tile(M, N, pieces, **more):
    return launch.Tile({"BLOCK_M": M, "BLOCK_N": N, "BLOCK_K": 32, "PIECES": pieces, **more}, 4, 1)


def product(M, N, pieces):
    return {"gemm": tile(M, N, pieces, GROUP_M=8, FLATTEN=0)}


# name: (images, channels, outputs), tiles; of 1x1 at 8x8
CASES = {
    "columns beyond": ((2, 64, 56), product(64, 32, 2)),
    "one tile": ((1, 32, 16), product(64, 16, 1)),
    "wide": ((2, 32, 256), product(64, 128, 4)),
    "pieces": ((2, 32, 128), product(32, 64, 4)),
    "pointers": ((2, 30, 41), {"gemm_pointer": tile(64, 16, 1, GROUP_M=8)}),
}


def one_by_one(H, W):
    return Geometry.of((H, W), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1)


def convolved(name, device, mean=0.0):
    (N, C, M), tiles = CASES[name]
    make = torch.Generator().manual_seed(3)
    x, w = torch.randn(N, C, 8, 8, generator=make), torch.randn(M, C, 1, 1, generator=make) / C
    x[:, 0] = 1.0
    w[:, 0] += mean
    return one_by_one(8, 8), x.half().to(device), w.half().to(device), tiles


@pytest.mark.parametrize("mean", [0.0, -300.0])
@pytest.mark.parametrize("name", CASES)
def test_statistics_of_tiles_are_those_of_what_is_stored(name, mean, device):
    """Sums of n numbers are off by n roundings; the variance has that of the distances, and the mean's squared."""
    geometry, x, w, tiles = convolved(name, device, mean)
    bias = None if "pieces" in name else w[:, -1, 0, 0] * 3
    with launch.force(**tiles), GuardedAllocations():
        y, fused_statistics = conv.forward(x, w, geometry, bias, form="product", statistics=True)
        plain, _ = conv.forward(x, w, geometry, bias, form="product")
        found = norm.batch_statistics(y, 1e-5, None, None, fused_statistics)
    assert torch.equal(y, plain)
    values = y.double().transpose(0, 1).flatten(1)
    rows = values.shape[1] // len(fused_statistics)
    assert rows == next(iter(tiles.values()))["BLOCK_M"]
    off = rows * EPS * values.abs().mean(1)
    var = values.var(1, correction=0)
    assert ((found.mean - values.mean(1)).abs() <= off + EPS * values.mean(1).abs()).all()
    got = 1 / found.rstd.double() ** 2 - 1e-5
    assert ((got - var).abs() <= (rows + 8) * EPS * (var + 1e-5) + off**2 + 2 * off * var.sqrt() * EPS).all()
    # Of each band, too: a column's numbers of one tile.
    bands = y.double().permute(0, 2, 3, 1).reshape(len(fused_statistics), rows, -1)
    m2 = bands.var(1, correction=0) * rows
    assert ((fused_statistics[:, 1] - m2).abs() <= (rows + 8) * EPS * m2 + rows * off**2).all()


def test_what_is_no_number_stays_in_its_channel(device):
    geometry, x, w, tiles = convolved("pieces", device)
    w[5] = torch.nan
    with launch.force(**tiles):
        _, fused_statistics = conv.forward(x, w, geometry, form="product", statistics=True)
    assert torch.equal(fused_statistics.isnan(), (torch.arange(128, device=device) == 5).expand_as(fused_statistics))


@pytest.mark.parametrize("bands", [1, 5, 16, 65])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_bands_are_joined_as_one(bands, momentum, device):
    """One value repeated is exact, and running statistics move as those of x, which is not read."""
    make = torch.Generator().manual_seed(bands)
    x = torch.randn(16 * bands, 6, generator=make, dtype=torch.float64) + torch.tensor([0, 1, -50.0, 9, 1e3, 3])
    x[:, 5] = -37.25
    values = x.view(bands, 16, 6)
    fused_statistics = torch.stack((values.mean(1), values.var(1, correction=0) * 16), 1).float().to(device)

    def buffers():
        return norm.Buffers(*(torch.full((6,), v, device=device) for v in (0.5, 2.0)), torch.tensor(2, device=device))

    moved, expected = buffers(), buffers()
    with launch.force(norm_handed=launch.Tile({"BLOCK_B": 16, "BLOCK_C": 4}, 4, 1)):
        got = norm.batch_statistics(
            torch.full_like(x, torch.nan).half().to(device), 1e-5, momentum, moved, fused_statistics
        )
    want = norm.batch_statistics(x.float().to(device), 1e-5, momentum, expected)
    for a, b in zip((*got, *moved), (*want, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert got.mean[5] == -37.25
    assert moved.batches == 3


@pytest.mark.parametrize(
    ("shape", "dtype", "tiles"),
    [
        ((32, 5, 7), torch.float16, product(32, 16, 1)),  # rows beyond the result
        ((32, 4, 8), torch.float16, product(32, 256, 1)),  # more columns than are moved
        ((528, 4, 8), torch.float16, product(32, 16, 1)),  # so long a K has tiles that wait for it
        ((32, 4, 8), torch.float32, product(32, 16, 1)),
    ],
)
def test_what_takes_longer_or_has_other_rows_hands_on_nothing(shape, dtype, tiles, device):
    C, *size = shape
    x, w = torch.ones(1, *shape, device=device, dtype=dtype), torch.ones(16, C, 1, 1, device=device, dtype=dtype)
    geometry = one_by_one(*size)
    with launch.force(**tiles):
        y, fused_statistics = conv.forward(x, w, geometry, statistics=True)
    assert fused_statistics is None
    assert (y == C).all()
    with pytest.raises(ValueError, match="an epilogue of at most a bias"):
        conv.forward(x, w, geometry, act="relu", statistics=True)


class Normed(nn.Module):
    """A convolution whose batch norm takes statistics from it; with `look` its result is read before."""

    def __init__(self, look=False):
        super().__init__()
        self.conv, self.bn, self.look = nn.Conv2d(32, 16, 1), nn.BatchNorm2d(16), look

    def forward(self, x):
        y = self.conv(x)
        assert not self.look or y.data is not None
        return self.bn(y).relu()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_batch_norm_does_not_read_what_hands_on_statistics(frozen, device, monkeypatch):
    monkeypatch.setattr(alone, "fits", lambda x: False)
    minidl.manual_seed(0)
    model = Normed().to(torch.float16).to(device)
    model.conv.weight.requires_grad = not frozen
    x = image(4, 32, 8, 8).half().contiguous(memory_format=torch.channels_last)
    with forms.among(by_product), launch.force(**product(256, 16, 1)):
        fused, few = launches(lambda: step(model, x, True))
        model.look = True
        looked, many = launches(lambda: step(model, x, True))
        model.look = False
        with minidl.fusion(False):
            plain = step(model, x, True)
    assert (few["batch_norm_handed_kernel"], few["batch_norm_stats_kernel"]) == (1, 0)
    assert (many["batch_norm_handed_kernel"], many["batch_norm_stats_kernel"]) == (0, 1)
    for a, b, c in zip(fused, plain, looked, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-9, atol=2**-10)
        torch.testing.assert_close(c, b, rtol=2**-9, atol=2**-10)
