"""Sources of cases with values of several kinds in several layouts, from a seed or a list of decisions.

Every decision (a size, a kind of values, a layout, a seed) is an integer in a range from one method. So a case is
determined by the list of its decisions.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

# Simplest first: a search for the smallest failing case prefers these.
KINDS = ("integers", "normal", "positive", "constant", "cancelling", "mixed", "tiny", "huge")
SPECIAL = "special"
LAYOUTS = ("contiguous", "transposed", "padded", "step", "offset", "expanded")
# 1, primes, one off powers of two; 0 last.
SIZES = (2, 1, 3, 5, 8, 7, 16, 13, 17, 15, 32, 31, 33, 37, 40, 64, 63, 65, 127, 128, 129, 255, 256, 257, 0)


class Make(ABC):
    """The source of the inputs of a case: a source of integers, stored in `decisions`."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        kinds: Sequence[str] = KINDS,
        layouts: Sequence[str] = LAYOUTS,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.kinds, self.layouts, self.sizes = tuple(kinds), tuple(layouts), tuple(sizes)
        self.decisions: list[int] = []

    @abstractmethod
    def _decide(self, low: int, high: int) -> int:
        """Return an integer in [low, high]."""

    def integer(self, low: int, high: int) -> int:
        """Return an integer in [low, high]."""
        value = self._decide(low, high)
        self.decisions.append(value)
        return value

    def choice(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return options[self.integer(0, len(options) - 1)]

    def size(self, low: int = 0, high: int = 40) -> int:
        """Return an extent in [low, high]: small, prime, one off a power of two, 1, and 0 where low allows."""
        listed = [size for size in self.sizes if low <= size <= high]
        return self.choice(listed) if listed else self.integer(low, high)

    def shape(self, low: int = 0, high: int = 4, smallest: int = 0, largest: int = 12) -> tuple[int, ...]:
        """Return a shape of `low` to `high` dimensions with extents from `smallest` to `largest`."""
        return tuple(self.size(smallest, largest) for _ in range(self.integer(low, high)))

    def tensor(self, *shape: int, low: float | None = None, high: float | None = None) -> torch.Tensor:
        """Return values in `dtype`, of one of `kinds`, in one of `layouts` (contiguous, transposed, strided, ...).

        With `low` or `high` the values lie between these.
        """
        kind = self.choice(self.kinds)
        layout = self.choice([name for name in self.layouts if fits(name, len(shape))])
        generator = torch.Generator().manual_seed(self.integer(0, 2**31 - 1))
        if layout != "expanded":
            return lay_out(values(kind, shape, self.dtype, generator, low, high).to(self.device), layout)
        dim = self.integer(0, len(shape) - 1)
        one = (*shape[:dim], 1, *shape[dim + 1 :])
        return values(kind, one, self.dtype, generator, low, high).to(self.device).expand(shape)

    def integers(self, *shape: int, low: int, high: int) -> torch.Tensor:
        """Return an int64 tensor with values in [low, high]: labels and indices."""
        generator = torch.Generator().manual_seed(self.integer(0, 2**31 - 1))
        return torch.randint(low, high + 1, shape, generator=generator).to(self.device)


class SeededMake(Make):
    """Decisions from a seed, for the offline compile, tuning and fixed examples."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kinds: Sequence[str] = ("normal",),
        layouts: Sequence[str] = ("contiguous",),
        sizes: Sequence[int] = SIZES,
    ) -> None:
        super().__init__(dtype, device, kinds, layouts, sizes)
        self._random = random.Random(seed)

    def _decide(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


class EmptyMake(SeededMake):
    """A Make of uninitialised tensors, for recording launches."""

    def tensor(self, *shape: int, low: float | None = None, high: float | None = None) -> torch.Tensor:
        """Return uninitialised memory."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def integers(self, *shape: int, low: int, high: int) -> torch.Tensor:
        """Return a tensor of the lowest number."""
        return torch.full(shape, low, dtype=torch.int64, device=self.device)

    def choice(self, options: Sequence[T]) -> T:
        """Return the first option."""
        return options[0]


def fits(layout: str, rank: int) -> bool:
    """Return whether a tensor of `rank` dimensions can have the layout."""
    return rank >= {"contiguous": 0, "offset": 0, "step": 1, "expanded": 1}.get(layout, 2)


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the values of `tensor` in a new layout; gaps hold NaN (floats) or large integers.

    contiguous  as torch.empty lays them          transposed  dimensions stored in reverse order
    padded      three elements between rows       step        every second element of a larger tensor
    offset      one element after an aligned address
    """
    shape = tensor.shape
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "transposed":
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    if layout == "offset":
        return _gaps(tensor, (tensor.numel() + 1,))[1:].view(shape).copy_(tensor)
    if layout == "padded":
        return _gaps(tensor, (*shape[:-1], shape[-1] + 3))[..., : shape[-1]].copy_(tensor)
    if layout == "step":
        return _gaps(tensor, (*shape[:-1], 2 * shape[-1]))[..., ::2].copy_(tensor)
    raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")


def _gaps(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    fill = math.nan if like.dtype.is_floating_point else torch.iinfo(like.dtype).max
    return torch.full(shape, fill, dtype=like.dtype, device=like.device)


def values(
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
    low: float | None = None,
    high: float | None = None,
) -> torch.Tensor:
    """Return a contiguous tensor of one kind of values on the CPU, finite in `dtype` except for the kind "special".

    integers    -3 to 3                                normal      standard normal
    positive    uniform in (0, 1]                      constant    one normal value
    cancelling  1000 and -1000 in turn, plus normal    mixed       magnitudes over many powers of two
    tiny        around the smallest normal number      huge        so large that most products overflow
    special     normal, an eighth of them NaN, infinite or a zero of either sign

    With `low` or `high` the values lie in that range, distributed by kind. Raises ValueError for an unknown kind.
    """
    shape = tuple(shape)
    if kind not in (*KINDS, SPECIAL):
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join((*KINDS, SPECIAL))}")
    if low is None and high is None:
        tensor = _free(kind, shape, dtype, generator)
    else:
        tensor = _between(kind, shape, generator, low, high)
    largest = torch.finfo(dtype).max
    tensor = tensor.clamp(-largest, largest).to(dtype)
    if kind == SPECIAL:
        choices = [math.nan, *([math.inf] if high is None else []), *([-math.inf] if low is None else [])]
        choices += [0.0, -0.0] if low is None and high is None else []
        pick = torch.tensor(choices, dtype=dtype)[torch.randint(len(choices), shape, generator=generator)]
        tensor = torch.where(torch.rand(shape, generator=generator) < 0.125, pick, tensor)
    return tensor


def _free(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    info = torch.finfo(dtype)
    emax, emin = math.log2(info.max), math.log2(info.tiny)

    def uniform(a: float, b: float) -> torch.Tensor:
        return a + (b - a) * torch.rand(shape, generator=generator, dtype=torch.float64)

    def powers(a: float, b: float) -> torch.Tensor:
        return torch.exp2(uniform(a, b)) * (1 - 2 * torch.randint(2, shape, generator=generator))

    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    spread = min(20.0, emax / 2.5)
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "integers": lambda: torch.randint(-3, 4, shape, generator=generator).double(),
        "positive": lambda: 1 - uniform(0, 1),
        "constant": lambda: torch.randn((), generator=generator, dtype=torch.float64).expand(shape).clone(),
        "cancelling": lambda: _alternate(shape, 1000.0, -1000.0) + normal,
        "mixed": lambda: powers(-spread, spread),
        "tiny": lambda: powers(emin + math.log2(info.eps), emin + 3),
        # The reference overflows in float64, too, so float64 products of three numbers must fit.
        "huge": lambda: powers(100, 300) if dtype == torch.float64 else powers(0.4 * emax, 0.95 * emax),
    }
    return kinds.get(kind, lambda: normal)()


def _between(
    kind: str, shape: tuple[int, ...], generator: torch.Generator, low: float | None, high: float | None
) -> torch.Tensor:
    low = (high or 0.0) - 4.0 if low is None else low
    high = low + 4.0 if high is None else high
    share = torch.rand(shape, generator=generator, dtype=torch.float64)
    smallest, largest = math.ceil(low), math.floor(high)
    if kind == "integers" and smallest <= largest and (smallest, largest) != (0, 0):
        return torch.randint(smallest, largest + 1, shape, generator=generator).double()
    if kind == "constant":
        share = torch.rand((), generator=generator, dtype=torch.float64).expand(shape)
    elif kind == "cancelling":
        share = _alternate(shape, 0.9, 0.0) + 0.1 * share
    elif kind in ("mixed", "tiny"):
        share = torch.exp2(-20 * share)
    elif kind == "huge":
        share = 1 - torch.exp2(-20 * share)
    return low + (high - low) * share


def _alternate(shape: tuple[int, ...], even: float, odd: float) -> torch.Tensor:
    index = torch.arange(math.prod(shape)).view(shape)
    return torch.where(index % 2 == 0, even, odd).double()
