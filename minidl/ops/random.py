"""Random tensors and dropout. Each number depends only on the seed, the stream and its position (`minidl.random`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl import random
from minidl.autograd import Function
from minidl.autograd.function import recordable
from minidl.kernels import check, elementwise, reduce, scan
from minidl.kernels import random as kernels
from minidl.ops.binary import piecewise_linear
from minidl.ops.elementwise import mul
from minidl.ops.inplace import apply_in_place
from minidl.tensors import Tensor, device_of

__all__ = ["dropout", "dropout1d", "dropout2d", "dropout3d", "multinomial", "rand", "randint", "randn"]


@recordable(gradient=piecewise_linear(kernels.dropout))
class Dropout(Function):
    gradient = staticmethod(kernels.dropout)

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, p: float, seed: int, stream: int | kernels.DeviceStream, first: int
    ) -> torch.Tensor:
        ctx.options = p, seed, stream, first
        return kernels.dropout(x, *ctx.options)

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        return cls.gradient(dy, *ctx.options), None, None, None, None


def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, seed: int | None = None
) -> Tensor:
    """Set each element to 0 with probability p and divide the others by 1 - p; nothing if not training or p is 0.

    The gradient draws the same elements, so no mask is stored. A `seed` draws the same elements every call.
    Raises TypeError for an integer tensor, ValueError for p outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p is {p}, expected a probability from 0 to 1")
    if not training or p == 0.0:
        return input
    key = random.key(seed)
    return apply_in_place(lambda x: Dropout.apply(x, p, *key, random.first_index(input.shape)), input, inplace)


def dropout1d(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, seed: int | None = None
) -> Tensor:
    """Return `dropout2d` of sequences: of [N, C, L], or of [C, L] as one. Raises as it."""
    return _of_channels("dropout1d", "L", input, p, training, inplace, seed)


def dropout2d(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, seed: int | None = None
) -> Tensor:
    """Return `dropout` of channels: of [N, C, H, W], or of [C, H, W] as one image.

    Raises as `dropout`; ValueError for other shapes.
    """
    return _of_channels("dropout2d", "H, W", input, p, training, inplace, seed)


def dropout3d(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, seed: int | None = None
) -> Tensor:
    """Return `dropout2d` of volumes: of [N, C, D, H, W], or of [C, D, H, W] as one. Raises as it."""
    return _of_channels("dropout3d", "D, H, W", input, p, training, inplace, seed)


def _of_channels(
    op: str, sizes: str, input: Tensor, p: float, training: bool, inplace: bool, seed: int | None
) -> Tensor:
    axes = len(sizes.split(", "))
    if input.ndim not in (axes + 1, axes + 2):
        raise ValueError(f"{op}: input has shape {list(input.shape)}, expected [N, C, {sizes}] or [C, {sizes}]")
    if not training or p == 0.0:
        return input
    ones = torch.ones(*input.shape[:-axes], *[1] * axes, dtype=input.dtype, device=input.device)
    mask = dropout(Tensor(ones), p, seed=seed)
    return apply_in_place(lambda x: mul(x, mask), input, inplace)


def rand(
    *shape: int | Sequence[int],
    seed: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of uniform numbers from [0, 1), drawn from the seed, or from the process's next stream.

    float16 and bfloat16 may round up to 1. Raises TypeError for an integer dtype, ValueError for a negative size.
    """
    return _drawn("rand", kernels.uniform, shape, seed, dtype, device, requires_grad)


def randn(
    *shape: int | Sequence[int],
    seed: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of normally distributed numbers with mean 0 and standard deviation 1. Seeds and errors as
    `rand`."""
    return _drawn("randn", kernels.normal, shape, seed, dtype, device, requires_grad)


def _drawn(
    op: str, draw: Callable[..., torch.Tensor], shape: tuple[Any, ...], seed: int | None, dtype: torch.dtype | None,
    device: torch.device | str | None, requires_grad: bool,
) -> Tensor:  # fmt: skip
    where, sizes, kind = device_of(device), check.sizes(op, shape), dtype or torch.get_default_dtype()
    if where.type == "meta":  # no memory to fill
        return Tensor(torch.empty(sizes, dtype=kind, device=where), requires_grad)
    data = draw(sizes, 0.0, 1.0, *random.key(seed), dtype=kind, device=where, first=random.first_index(sizes))
    return Tensor(data, requires_grad)


def randint(
    low: int, high: int, size: Sequence[int], seed: int | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Return an int64 tensor of integers from low (included) to high (excluded). Seeds as `rand`.

    Raises ValueError unless low < high <= low + 2^31, or for a negative size.
    """
    where = device_of(device)
    sizes = check.sizes("randint", (size,))
    low, high = check.integer("randint", "low", low), check.integer("randint", "high", high)
    return Tensor(kernels.randint(sizes, low, high, *random.key(seed), device=where, first=random.first_index(sizes)))


def multinomial(input: Tensor, num_samples: int, replacement: bool = False, *, seed: int | None = None) -> Tensor:
    """Return positions drawn with probabilities proportional to input [K] or [B, K]: int64 [num_samples] or
    [B, num_samples], different ones of a row unless `replacement`. A probability of 0 is never drawn. Seeds as `rand`.

    Raises TypeError for integers, ValueError for other shapes, for more samples than positions without replacement, and
    on the CPU for probabilities that are negative, not finite or too few above 0.
    """
    check.floating("multinomial", input=input.data)
    if input.ndim not in (1, 2) or not input.shape[-1]:
        raise ValueError(f"multinomial: input has shape {list(input.shape)}, expected [K] or [B, K]")
    K, S = input.shape[-1], check.integer("multinomial", "num_samples", num_samples)
    if S < 1 or (S > K and not replacement):
        raise ValueError(f"multinomial: num_samples is {S}, expected 1 to {K}, or 1 and more with replacement=True")
    p = input.data.reshape(-1, K).to(torch.float64)
    positive = elementwise.gt(p, 0)
    if not p.is_cuda:  # reading would wait for the device
        if not bool((elementwise.ge(p, 0) & elementwise.lt(p, float("inf"))).all()):
            raise ValueError("multinomial: input has a number that is negative, infinite or NaN")
        if bool((positive.sum(1) < (1 if replacement else S)).any()):
            raise ValueError(f"multinomial: a row has fewer than {1 if replacement else S} probabilities above 0")
    u = rand(len(p), S if replacement else K, seed=seed, dtype=torch.float64, device=p.device).data
    if replacement:
        # Positions of probability 0 have the sum of the position before: the search passes them.
        last = torch.where(positive, torch.arange(K, device=p.device), 0).cummax(1).values
        sums = scan.cumsum(p, 1).gather(1, last)
        drawn = torch.searchsorted(sums, elementwise.mul(u, sums[:, -1:]), right=True)
    else:
        # The largest of p / e with e from an exponential distribution (Efraimidis and Spirakis, 2006).
        e = elementwise.clamp(elementwise.neg(elementwise.log(elementwise.sub(1.0, u))), 1e-300, None)
        drawn = reduce.leading(elementwise.div(p, e), S, 1, True)[1]
    return Tensor(drawn.reshape(*input.shape[:-1], S))
