"""Random numbers: published vectors, the same bits for every tile, and the statistics of fixed seeds.

The statistics are of numbers that never change, so a test that passes once passes always; limits are five standard
deviations of the statistic.
"""

import contextlib
import math

import pytest
import torch
import triton
import triton.language as tl

from minidl.kernels import random
from minidl.runtime import launch
from minidl.testing import GuardedAllocations

DTYPES = (torch.float32, torch.float16, torch.float64)
N = 200_000
NO = 0xFFFFFFFF


@triton.jit
def words_kernel(p_y, seed_low, seed_high, stream_low, stream_high, group):
    o = group.to(tl.int64) + tl.zeros((1,), tl.int64)
    a, b, c, d = random.words(seed_low, seed_high, stream_low, stream_high, o)
    o_y = tl.arange(0, 1)
    tl.store(p_y + o_y, a.to(tl.int64))
    tl.store(p_y + o_y + 1, b.to(tl.int64))
    tl.store(p_y + o_y + 2, c.to(tl.int64))
    tl.store(p_y + o_y + 3, d.to(tl.int64))


def words(counter, key, device):
    """The words of a counter of four words under a key of two."""
    signed = [random._halves(w)[0] for w in (*key, *counter[2:])]
    group = counter[0] + (counter[1] << 32)
    y = torch.zeros(4, dtype=torch.int64, device=device)
    launch.run(words_kernel, (1,), y, *signed, group - 2**64 if group >= 2**63 else group)
    return y.tolist()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((NO, NO, NO, NO), (NO, NO), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_published_vectors_of_philox(counter, key, expected, device):
    assert words(counter, key, device) == list(expected)


def draws(device, dtype, seed=7, stream=3):
    """One of each kind of numbers, of a size that fills no tile."""
    x = torch.ones(203, dtype=dtype, device=device)
    return [
        random.uniform((203,), -2.0, 5.0, seed, stream, dtype, device),
        random.normal((7, 29), 1.0, 2.0, seed, stream, dtype, device),
        random.randint((203,), -3, 11, seed, stream, device),
        random.dropout(x, 0.3, seed, stream),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_gives_the_same_bits(dtype, device):
    expected = draws(device, dtype)
    for block in (4, 32, 1024):
        tile = launch.Tile({"BLOCK_N": block})
        with launch.force(random=tile, dropout=tile):
            for a, b in zip(expected, draws(device, dtype), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("seed", "first", "offset"), [(7, 3, 0), (7, 1, 2), (2**62 + 5, 2**32 - 1, 1), (2**32 - 1, 5, 2**33), (0, 0, 0)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stream_numbered_on_the_device_is_the_one_of_that_number(dtype, seed, first, offset, device):
    stream = random.DeviceStream(torch.tensor([seed, first], device=device), offset)
    for given, on_device in zip(
        draws(device, dtype, seed, first + offset), draws(device, dtype, 0, stream), strict=True
    ):
        assert torch.equal(given, on_device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_depend_on_the_place_alone(dtype, device):
    long = random.normal((1000,), 0.0, 1.0, 5, 2, dtype, device)
    assert torch.equal(random.normal((501,), 0.0, 1.0, 5, 2, dtype, device), long[:501])
    view = torch.empty(25, 40, dtype=dtype, device=device).t()
    random.normal_(view, 0.0, 1.0, 5, 2)
    assert torch.equal(view, long.view(40, 25))


@pytest.mark.parametrize("first", [1, 6, 12])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_a_larger_tensor_has_its_values_there(dtype, first, device):
    def draws(count, first):
        return [
            random.uniform((count,), -2.0, 5.0, 7, 3, dtype, device, first),
            random.normal((count,), 1.0, 2.0, 7, 3, dtype, device, first),
            random.randint((count,), -3, 11, 7, 3, device, first),
        ]

    x, tile = torch.arange(1, 37, device=device).to(dtype), launch.Tile({"BLOCK_N": 8})
    whole = [*draws(36, 0), random.dropout(x, 0.3, 7, 3)]
    with launch.force(random=tile, dropout=tile), GuardedAllocations() as guards:
        part = guards.guard(x[first : first + 24])
        parts = [*draws(24, first), random.dropout(part, 0.3, 7, 3, first)]
        image = part.view(2, 3, 2, 2)
        last = random.dropout(image.contiguous(memory_format=torch.channels_last), 0.3, 7, 3, first)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a[first : first + 24], b)
    assert torch.equal(last, parts[-1].view(2, 3, 2, 2))


@pytest.mark.parametrize("columns", [1, 3, 4, 100, 257])
@pytest.mark.parametrize("block", [None, 4, 64, 1024])
def test_rows_of_seeds_are_those_of_each_seed(columns, block, device):
    seeds = [7, 0, 2**32 - 1, 2**32, 2**62 + 5, 2**63 - 1, 7, 1, 2, 3, 4]
    expected = torch.stack([random.normal((columns,), 0.0, 1.0, seed, device=device) for seed in seeds])
    with launch.force(random=launch.Tile({"BLOCK_N": block})) if block else contextlib.nullcontext():
        assert torch.equal(random.normal_rows(seeds, columns, device), expected)


def test_no_seed_has_no_row(device):
    assert random.normal_rows([], 5, device).shape == (0, 5)
    with pytest.raises(ValueError, match=r"normal_rows: seed is -1, expected an integer from 0 to 2\^63 - 1"):
        random.normal_rows([3, -1], 5, device)


def test_narrow_numbers_are_the_wide_ones_rounded(device):
    for draw in (random.uniform, random.normal):
        wide = draw((999,), 0.0, 1.0, 3, 4, torch.float32, device)
        assert torch.equal(draw((999,), 0.0, 1.0, 3, 4, torch.float16, device), wide.half())


def test_bounds(device):
    u = random.uniform((N,), 0.0, 1.0, 1, 0, torch.float32, device)
    assert u.min() >= 0
    assert u.max() < 1
    moved = random.uniform((N,), -3.0, -2.0, 1, 0, torch.float64, device)
    assert moved.min() >= -3
    assert moved.max() < -2
    whole = random.randint((N,), -2, 3, 1, 0, device)
    assert whole.unique().tolist() == [-2, -1, 0, 1, 2]
    assert random.normal((N,), 0.0, 1.0, 1, 0, torch.float32, device).isfinite().all()


def chi_square_is_usual(counts, expected):
    """Whether counts of equally likely bins lie within five deviations of what chi-square has."""
    chi = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.numel() - 1
    return abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_fill_every_bin(seed, dtype, device):
    u = random.uniform((N,), 0.0, 1.0, seed, 0, dtype, device).double().cpu()
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / N)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / N)
    assert chi_square_is_usual(torch.histc(u, 256, 0, 1), N / 256)
    # The lower bits too, and neighbours together.
    assert chi_square_is_usual(torch.histc(u * 2**16 % 1, 256, 0, 1), N / 256)
    pairs = (u[::2] * 16).floor() * 16 + (u[1::2] * 16).floor()
    assert chi_square_is_usual(torch.bincount(pairs.long(), minlength=256), N / 2 / 256)


def test_integers_are_equally_likely(device):
    counts = torch.bincount(random.randint((N,), 0, 100, 3, 0, device).cpu(), minlength=100)
    assert chi_square_is_usual(counts, N / 100)


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_have_the_normal_moments_and_distribution(seed, dtype, device):
    z = random.normal((N,), 0.0, 1.0, seed, 0, dtype, device).double().cpu()
    # The k-th power has the variance E z^2k - (E z^k)^2, with E z^2, 4, 6, 8 = 1, 3, 15, 105.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - mean) < 5 * math.sqrt(variance / N)
    cdf = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    assert chi_square_is_usual(torch.histc(cdf, 200, 0, 1), N / 200)
    for a, b in ((z[::2], z[1::2]), (z[:-4], z[4:]), (z[::2] ** 2 - 1, z[1::2] ** 2 - 1)):
        deviation = a.std() * b.std() / math.sqrt(a.numel())
        assert abs((a * b).mean()) < 5 * deviation


def test_streams_and_seeds_are_independent(device):
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2**32), (2**32, 0), (2**62, 2**62)]
    drawn = torch.stack([random.uniform((N,), -1.0, 1.0, *key, torch.float64, device).cpu() for key in keys])
    products = drawn @ drawn.t() / N * 3
    off = products - torch.eye(len(keys), dtype=torch.float64)
    assert off.abs().max() < 5 * math.sqrt(1 / N) * 3


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share(p, device):
    y = random.dropout(torch.ones(N, device=device), p, 11, 0)
    kept = y != 0
    assert abs(int(kept.sum()) - N * (1 - p)) < 5 * math.sqrt(N * p * (1 - p))
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
    assert torch.equal(random.dropout(torch.ones(N, device=device), p, 11, 0), y)
    assert not torch.equal(random.dropout(torch.ones(N, device=device), p, 11, 1), y)


def test_dropout_keeps_from_its_threshold_on(device):
    drawn = words((0, 0, 0, 0), (7, 0), device)
    for word in drawn:
        y = random.dropout(torch.ones(4, dtype=torch.float64, device=device), word / 2**32, 7)
        assert (y != 0).tolist() == [other >= word for other in drawn]


def test_dropout_at_the_ends(device):
    x = torch.tensor([1.0, float("nan"), float("inf")], device=device)
    torch.testing.assert_close(random.dropout(x, 0.0, 1), x, rtol=0, atol=0, equal_nan=True)
    assert random.dropout(x, 1.0, 1).eq(0).all()
    assert random.dropout(torch.empty(0, 3, device=device), 0.5, 1).shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random.uniform((2,), 1.0, 0.0, 0), "low is 1.0 and high is 0.0"),
        (lambda: random.normal((2,), 0.0, -1.0, 0), "std is -1.0"),
        (lambda: random.uniform((2,), 0.0, 1.0, -1), "seed is -1, expected an integer from 0"),
        (lambda: random.uniform((2,), 0.0, 1.0, 0, 2**63), "stream is 9223372036854775808"),
        (lambda: random.dropout(torch.ones(2), 1.5, 0), "p is 1.5"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
