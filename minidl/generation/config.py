"""The settings of `minidl generate`, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidl.data.parsing import is_utf8, shorten
from minidl.training.config import DEVICES, is_number
from minidl.training.errors import ConfigError

BUILT_IN = ("mnist",)  # models
FORMATS = ("png", "bmp", "npy")
PRECISIONS = ("float32", "tf32", "float16")
MAX_COUNT = 10**7
MAX_SEED = 2**63 - 1
USUAL_COUNT = 64
USUAL_STEPS = 9


@dataclass(frozen=True, kw_only=True)
class Generate:
    """`minidl generate`. `seeds` and `count` None: as many as the grid has places, else 64, from 0.

    `interpolate` are the two seeds at the ends of a walk of `steps` pictures; `latents` is a file of latent vectors.
    """

    out: Path
    model: str = "mnist"
    seeds: tuple[int, ...] | None = None
    count: int | None = None
    grid: tuple[int, int] | None = None
    truncation: float | None = None
    interpolate: tuple[int, int] | None = None
    steps: int | None = None
    latents: Path | None = None
    format: str = "png"
    batch_size: int | None = None
    precision: str = "float32"
    device: str = "auto"
    overwrite: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for the first setting of a wrong range, and for settings that exclude each other."""
        for name, known in (("format", FORMATS), ("precision", PRECISIONS), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"--{name} is {shorten(getattr(self, name))}, expected one of {', '.join(known)}")
        sources = {
            "--seeds": self.seeds, "--count": self.count, "--interpolate": self.interpolate, "--latents": self.latents,
        }  # fmt: skip
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} each say which pictures to make: give one of them")
        for name in ("model", "latents"):
            value = getattr(self, name)
            if value is not None and not is_utf8(str(value)):
                raise ConfigError(f"--{name} is {value}, expected a name in UTF-8, which images.json can record")
        _whole("--count", self.count, 1, MAX_COUNT)
        _whole("--batch-size", self.batch_size, 1, MAX_COUNT)
        _whole("--steps", self.steps, 2, MAX_COUNT)
        if self.steps is not None and self.interpolate is None:
            raise ConfigError("--steps is the number of pictures of a walk: give its ends with --interpolate A B")
        if self.truncation is not None:
            if self.latents is not None:
                raise ConfigError("--truncation is for seeds: the latents of a file are taken as they are")
            if not (math.isfinite(self.truncation) and 0 < self.truncation <= 100):
                raise ConfigError(f"--truncation is {self.truncation:g}, expected a number above 0, at most 100")
        if self.grid is not None and self.format == "npy":
            raise ConfigError("--grid is a picture: give it with --format png or bmp")
        if self.grid is not None and self.latents is None and self.total() > self.grid[0] * self.grid[1]:
            grid_too_small(self.grid, self.total())

    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of the pictures in order; the two ends where a walk is wanted, none for latents from a file."""
        if self.latents is not None:
            return ()
        if self.interpolate is not None:
            return self.interpolate
        return self.seeds if self.seeds is not None else tuple(range(self.total()))

    def total(self) -> int:
        """How many pictures seeds and steps ask for."""
        if self.interpolate is not None:
            return self.steps or USUAL_STEPS
        if self.seeds is not None:
            return len(self.seeds)
        if self.count is not None:
            return self.count
        return USUAL_COUNT if self.grid is None else self.grid[0] * self.grid[1]


def grid_too_small(grid: tuple[int, int], count: int) -> None:
    """Raises ConfigError."""
    places = f"--grid {grid[0]}x{grid[1]} has {grid[0] * grid[1]} places"
    raise ConfigError(f"{places}, and {count} pictures are asked for: give a larger grid or fewer pictures")


def parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """Seeds in order from "0-63,100". Raises ConfigError for what is no list of numbers and ranges, a range that ends
    before it begins, a seed above 2^63 - 1, one named twice, and more than 10 million."""
    if text is None:
        return None
    seeds: list[int] = []
    for part in text.split(","):
        ends = [_seed("--seeds", end.strip()) for end in part.split("-")]
        if len(ends) > 2:
            raise ConfigError(
                f"--seeds: {shorten(part.strip())} is no range; give the first and the last, such as 0-63"
            )
        first, last = ends[0], ends[-1]
        if last < first:
            raise ConfigError(f"--seeds: the range {first}-{last} ends before it begins; give {last}-{first}")
        if len(seeds) + last - first >= MAX_COUNT:
            raise ConfigError(f"--seeds names more than {MAX_COUNT:,} seeds: make the pictures in several commands")
        seeds += range(first, last + 1)
    seen: set[int] = set()
    for seed in seeds:
        if seed in seen:
            raise ConfigError(f"--seeds names {seed} twice: a picture depends on its seed alone, name each once")
        seen.add(seed)
    return tuple(seeds)


def parse_pair(texts: tuple[str, str] | None) -> tuple[int, int] | None:
    """The ends of a walk. Raises ConfigError for what is no seed, and for equal ones."""
    if texts is None:
        return None
    first, last = (_seed("--interpolate", text.strip()) for text in texts)
    if first == last:
        raise ConfigError(f"--interpolate goes from seed {first} to itself: give two different seeds")
    return first, last


def parse_grid(text: str | None) -> tuple[int, int] | None:
    """(rows, columns) from 8x8. Raises ConfigError."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(is_number(part) and 1 <= int(part) <= 1000 for part in parts):
        raise ConfigError(f"--grid is {shorten(text)}, expected rows and columns from 1 to 1000, such as 8x8")
    return int(parts[0]), int(parts[1])


def _seed(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= MAX_SEED):
        raise ConfigError(
            f"{flag}: {shorten(text)} is no seed; give whole numbers from 0 to 2^63 - 1"
            + (", and ranges of them: 0-63,100" if flag == "--seeds" else "")
        )
    return int(text)


def _whole(flag: str, value: Any, low: int, high: int) -> None:
    if value is not None and not (type(value) is int and low <= value <= high):
        raise ConfigError(f"{flag} is {value}, expected a whole number from {low} to {high}")
