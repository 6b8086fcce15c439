"""Specs of random numbers and dropout, whose reference is Philox in torch's integers.

Uniform numbers and integers are exact except for the rounding to float16 or bfloat16. A normal number is r cos a or
r sin a with r = sqrt(-2 log u): a logarithm is off by 8 units of rounding (half of that in r), the root and the last
product by one each, sine and cosine on [-pi/4, pi/4] by four for their series and three for the rounded angle: 16.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from minidl.ops.random import randint
from minidl.testing.specs import bounds
from minidl.testing.specs.base import WANTS_FLOATING, Bad, Case, OpSpec, refuses, spec_factory, tensors
from minidl.testing.specs.elementwise import few_grad_units, few_units
from minidl.testing.specs.make import Make

_MASK = 0xFFFFFFFF


def philox(groups: int, seed: int, stream: int, first: int = 0) -> torch.Tensor:
    """Return Philox4x32-10 of `groups` counters of a stream, starting at `first`: words [groups, 4] in int64.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A product of two words wraps
    around in int64 with the right bits.
    """
    counter = torch.arange(first, first + groups)
    c = [counter & _MASK, counter >> 32, *(torch.full_like(counter, half) for half in (stream & _MASK, stream >> 32))]
    k = [seed & _MASK, seed >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        high_a, high_b = (a >> 32) & _MASK, (b >> 32) & _MASK
        c = [high_b ^ c[1] ^ k[0], b & _MASK, high_a ^ c[3] ^ k[1], a & _MASK]
        k = [(k[0] + 0x9E3779B9) & _MASK, (k[1] + 0xBB67AE85) & _MASK]
    return torch.stack(c, 1)


def words(n: int, seed: int, stream: int = 0) -> torch.Tensor:
    """Return the first n words of a stream, in int64."""
    return philox(-(-n // 4), seed, stream).flatten()[:n]


def uniform(n: int, seed: int, dtype: torch.dtype, stream: int = 0) -> torch.Tensor:
    """Return n numbers of [0, 1) in float64, before they are rounded to a `dtype` narrower than float32."""
    if dtype == torch.float64:
        a, b = words(2 * n, seed, stream).view(-1, 2).unbind(1)
        return ((a >> 5) * 2**26 + (b >> 6)).double() * 2.0**-53
    return (words(n, seed, stream) >> 8).double() * 2.0**-24


def normal(n: int, seed: int, dtype: torch.dtype, stream: int = 0) -> torch.Tensor:
    """Return n normal numbers in float64, from uniform numbers of `dtype`."""
    pairs = -(-n // 2)
    if dtype == torch.float64:
        a, b, c, d = words(4 * pairs, seed, stream).view(-1, 4).unbind(1)
        unit = ((a >> 5) * 2**26 + (b >> 6) + 1).double() * 2.0**-53
    else:
        a, c = words(2 * pairs, seed, stream).view(-1, 2).unbind(1)
        d = torch.zeros_like(c)
        unit = (a.float() + 1).double() * 2.0**-32
    quarter, low = c >> 30, (c << 2) & _MASK
    rest = (torch.where(low >= 2**31, low - 2**32, low).double() + d.double() * 2.0**-30) * 2.0**-32
    sine, cosine = (rest * (math.pi / 2)).sin(), (rest * (math.pi / 2)).cos()
    quarters = torch.stack([cosine, sine, -sine, cosine, -cosine, -sine, sine, -cosine]).view(4, 2, pairs)
    direction = quarters.gather(0, quarter.expand(1, 2, pairs))[0]
    return ((-2 * unit.log()).sqrt() * direction).t().flatten()[:n]


def _dropout(x: torch.Tensor, p: float, training: bool, inplace: bool, seed: int) -> torch.Tensor:
    if not training or p == 0:
        return x
    if p == 1:
        return torch.zeros_like(x)
    survives = words(x.numel(), seed).view(x.shape).to(x.device) >= round(p * 2**32)
    return torch.where(survives, x / (1 - p), 0.0)


def _dropout_channels(axes: int, x: torch.Tensor, p: float, *how: Any) -> torch.Tensor:
    return x * _dropout(x.new_ones(*x.shape[:-axes], *[1] * axes), p, *how)


def _channels_bound(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bound: the factor of a channel is rounded to the dtype."""
    return bounds.rounded(y, 2 * bounds.UNIT[dtype] * y.abs(), dtype)


def _channels(axes: int, make: Make) -> Case:
    shape = [make.size(0, 7) for _ in range(axes + make.integer(1, 2))]
    return Case((make.tensor(*shape), make.choice([0.5, 0.1]), make.choice([True, False]), False, _seed(make)))


def _rand_bound(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype in (torch.float32, torch.float64):
        return torch.zeros_like(y)
    return bounds.rounded(y, torch.zeros_like(y), dtype)


def _seed(make: Make) -> int:
    return make.choice([0, 1, 16, 3_000_000_000, 2**63 - 1])


def _shaped(make: Make, *shape: int) -> Case:
    return Case(shape, {"seed": _seed(make), "dtype": make.dtype})


def _randint_inputs(make: Make) -> Case:
    low, high = make.choice([(0, 1), (-5, 2), (3_000_000_000, 3_000_000_007), (-5, 2**31 - 5)])
    return Case((low, high, make.shape(0, 3)), {"seed": _seed(make)})


def _dropout_inputs(make: Make) -> Case:
    p = make.choice([0.5, 0.1, 0.75, 1.0, 0.0])
    return Case((make.tensor(*make.shape(0, 3)), p, make.choice([True, True, False]), False, _seed(make)))


_drawn = spec_factory(
    inputs=lambda make: _shaped(make, *make.shape(0, 3)),
    families=("random",),
    examples={
        "one group": lambda make: _shaped(make, 3),
        "several programs": lambda make: _shaped(make, 3, 1000),
    },
    specials=False,
)


def _bad(name: str) -> tuple[Bad, ...]:
    return (
        refuses(ValueError, rf"{name}: size is \[2, -1\], expected sizes from 0", extra=(2, -1)),
        refuses(TypeError, "dtype torch.int64", extra=(2,), dtype=torch.int64),
        refuses(ValueError, "seed is -1, expected an integer from 0", extra=(2,), seed=-1),
    )


SPECS: list[OpSpec] = [
    _drawn(
        "rand",
        reference=lambda *shape, seed, dtype: uniform(math.prod(shape), seed, dtype).view(shape),
        bound=_rand_bound,
        bad=_bad("rand"),
    ),
    _drawn(
        "randn",
        reference=lambda *shape, seed, dtype: normal(math.prod(shape), seed, dtype).view(shape),
        bound=few_units(16),
        bad=_bad("randn"),
    ),
    _drawn(
        "randint",
        op=randint,
        reference=lambda low, high, size, seed: (low + ((words(math.prod(size), seed) * (high - low)) >> 32)).view(
            size
        ),
        inputs=_randint_inputs,
        bound=_rand_bound,
        dtypes=(torch.float32,),
        examples={"several programs": lambda make: Case((0, 10, (3, 1000)), {"seed": _seed(make)})},
        bad=(
            refuses(ValueError, "low is 3 and high is 3", extra=(3, 3, (2,))),
            refuses(ValueError, "low is 0", extra=(0, 2**31 + 1, (2,))),
            refuses(ValueError, r"size is \[-1\], expected sizes from 0", extra=(0, 2, (-1,))),
        ),
    ),
    spec_factory()(
        "dropout",
        reference=_dropout,
        inputs=_dropout_inputs,
        bound=few_units(4),
        grad_bound=few_grad_units(4),
        differentiable=(0,),
        families=("dropout",),
        examples={
            "half": tensors((37, 31), extra=(0.5, True, False, 1)),
            "several programs": tensors((3, 1000), extra=(0.1, True, False, 2)),
        },
        bad=(
            refuses(ValueError, "p is 1.5, expected a probability from 0 to 1", (3,), extra=(1.5,)),
            WANTS_FLOATING,
        ),
    ),
    *(
        spec_factory()(
            f"dropout{axes}d",
            reference=partial(_dropout_channels, axes),
            inputs=partial(_channels, axes),
            bound=_channels_bound,
            grad_bound=lambda case, dy, grads, dtype: (_channels_bound(case, grads[0], dtype),),
            differentiable=(0,),
            families=("dropout", "elementwise_tile"),
            specials=False,  # an infinity times 0
            examples={"half": tensors((3, 7, *(5, 9, 4)[:axes]), extra=(0.5, True, False, 1))},
            bad=(refuses(ValueError, rf"expected \[N, C, {sizes}\] or \[C, {sizes}\]", (4,)),),
        )
        for axes, sizes in ((1, "L"), (2, "H, W"), (3, "D, H, W"))
    ),
]
