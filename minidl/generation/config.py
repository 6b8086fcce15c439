"""The settings of `minidl generate`, and of `minidl evaluate` for a generator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from minidl.data.parsing import shorten
from minidl.errors import ConfigError
from minidl.training.settings.declaration import UTF8, Expected, Settings, Written
from minidl.training.settings.fields import Data, Device, Devices, JsonFile, Workers, is_number

BUILT_IN = ("mnist",)  # models
MAX_COUNT = 10**7
MAX_SEED = 2**63 - 1
USUAL_COUNT = 64
USUAL_STEPS = 9


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return seeds in order from "0-63,100". Raises ConfigError for text that is not a list of numbers and ranges, a
    range that ends before it begins, a seed above 2^63 - 1, a repeated seed, and more than 10 million seeds."""
    seeds: list[int] = []
    for part in text.split(","):
        ends = [_seed("--seeds", end.strip()) for end in part.split("-")]
        if len(ends) > 2:
            raise ConfigError(
                f"--seeds: {shorten(part.strip())} is not a range; write the first and the last seed, such as 0-63"
            )
        first, last = ends[0], ends[-1]
        if last < first:
            raise ConfigError(f"--seeds: the range {first}-{last} ends before it begins; write {last}-{first}")
        if len(seeds) + last - first >= MAX_COUNT:
            raise ConfigError(
                f"--seeds names more than {MAX_COUNT:,} seeds: generate the pictures with several commands"
            )
        seeds += range(first, last + 1)
    seen: set[int] = set()
    for seed in seeds:
        if seed in seen:
            raise ConfigError(f"--seeds names {seed} twice; name each seed once")
        seen.add(seed)
    return tuple(seeds)


def parse_pair(texts: tuple[str, str]) -> tuple[int, int]:
    """Return the two seeds of an interpolation. Raises ConfigError for text that is not a seed, and for equal seeds."""
    first, last = (_seed("--interpolate", text.strip()) for text in texts)
    if first == last:
        raise ConfigError(f"--interpolate requires two different seeds, got {first} twice")
    return first, last


def parse_grid(text: str) -> tuple[int, int]:
    """Return (rows, columns) from 8x8. Raises ConfigError."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(is_number(part) and 1 <= int(part) <= 1000 for part in parts):
        raise ConfigError(f"--grid is {shorten(text)}, expected rows and columns from 1 to 1000, such as 8x8")
    return int(parts[0]), int(parts[1])


def _seed(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= MAX_SEED):
        raise ConfigError(
            f"{flag}: {shorten(text)} is not a seed; expected whole numbers from 0 to 2^63 - 1"
            + (", and ranges of them: 0-63,100" if flag == "--seeds" else "")
        )
    return int(text)


_RECORDED = "a name in UTF-8, which images.json can record"
_Count = Annotated[int | None, Field(ge=1, le=MAX_COUNT)]
_Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Precision = Annotated[Literal["float32", "tf32", "float16"], Field(description="Precision of matrix products:")]


class Generate(Settings):
    """Generate pictures with a trained generator.

    A picture depends only on its seed, not on batch size or order. PNG, JPEG and WebP files have the seed and the
    model's SHA-256 in their metadata; images.json lists both for all pictures.
    """

    examples = (
        "minidl generate --grid 8x8 --out pictures",
        "minidl generate --seeds 0-63,100 --truncation 0.9 --out pictures",
        "minidl generate --interpolate 3 17 --steps 12 --grid 1x12 --out walk",
        "minidl generate --seeds 0-9999 --format zip --out archive",
        "minidl generate --count 1000000 --format npy --devices all --out million",
        "minidl generate --model runs/gan --count 1000 --format npy --out arrays",
        "minidl generate --latents latents.txt --out pictures",
    )
    out: Annotated[Path, Field(description="Folder for the pictures; created if missing.")]
    model: Annotated[
        str,
        Field(description="mnist (built in), a run of `minidl train gan`, or a .safetensors file."),
        UTF8,
        Expected("a model", utf8=_RECORDED),
    ] = "mnist"
    seeds: Annotated[
        tuple[_Seed, ...] | None,
        Field(
            description="Seeds, one for each picture, such as 0-63,100. Default: as many as --grid has cells, or "
            f"{USUAL_COUNT}."
        ),
        Expected("seeds from 0 to 2^63 - 1"),
        Written(str, parse_seeds),
    ] = None
    count: Annotated[_Count, Field(description="Use this many seeds, starting at 0.")] = None
    grid: Annotated[
        tuple[int, int] | None,
        Field(description="Also save all pictures as one grid, rows by columns: 8x8."),
        Expected("rows and columns"),
        Written(str, parse_grid),
    ] = None
    truncation: Annotated[
        float | None,
        Field(
            gt=0,
            le=100,
            description="Shorten latents to at most this multiple of their typical length, the square root of their "
            "size. Below 0.7 pictures of the built-in model dissolve.",
        ),
    ] = None
    interpolate: Annotated[
        tuple[_Seed, _Seed] | None,
        Field(description="Interpolate from seed A to seed B on the sphere."),
        Expected("two seeds from 0 to 2^63 - 1"),
        Written(tuple[str, str], parse_pair, "A B"),
    ] = None
    steps: Annotated[
        int | None,
        Field(
            ge=2, le=MAX_COUNT, description=f"Number of pictures from A to B, both included. Default: {USUAL_STEPS}."
        ),
    ] = None
    latents: Annotated[
        Path | None,
        Field(description="File of latents: .txt (numbers separated by white space) or .npy."),
        UTF8,
        Expected("a file", utf8=_RECORDED),
    ] = None
    format: Annotated[
        Literal["png", "jpg", "webp", "bmp", "npy", "zip"],
        Field(description="png or bmp (exact), jpg or webp (lossy), npy (one float array), zip (one file of PNGs)."),
    ] = "png"
    workers: Annotated[
        Workers,
        Field(
            description="Number of processes that encode many pictures; with 1, no others are started. Default: one "
            "per processor."
        ),
    ] = None
    batch_size: Annotated[
        _Count, Field(description="Number of pictures generated at a time. Default: what fits into memory.")
    ] = None
    precision: Precision = "float32"
    device: Device = "auto"
    devices: Devices = 1
    overwrite: Annotated[bool, Field(description="Replace the pictures of an earlier command.")] = False
    quiet: Annotated[bool, Field(description="Print only errors.")] = False

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        sources = {
            "--seeds": self.seeds, "--count": self.count, "--interpolate": self.interpolate, "--latents": self.latents,
        }  # fmt: skip
        used = [name for name, value in sources.items() if value is not None]
        if len(used) > 1:
            raise ConfigError(f"{' and '.join(used)} cannot be combined: each selects the pictures")
        if self.steps is not None and self.interpolate is None:
            raise ConfigError("--steps requires --interpolate A B")
        if self.truncation is not None and self.latents is not None:
            raise ConfigError("--truncation cannot be combined with --latents")
        if self.grid is not None and self.format in ("npy", "zip"):
            raise ConfigError(f"--grid requires --format png, jpg, webp or bmp, got {self.format}")
        if self.grid is not None and self.latents is None and self.total() > self.grid[0] * self.grid[1]:
            grid_too_small(self.grid, self.total())
        return self

    def all_seeds(self) -> tuple[int, ...]:
        """Return the seeds of the pictures in order; two for an interpolation, none for latents from a file."""
        if self.latents is not None:
            return ()
        if self.interpolate is not None:
            return self.interpolate
        return self.seeds if self.seeds is not None else tuple(range(self.total()))

    def total(self) -> int:
        """Return the number of pictures from seeds or steps."""
        if self.interpolate is not None:
            return self.steps or USUAL_STEPS
        if self.seeds is not None:
            return len(self.seeds)
        if self.count is not None:
            return self.count
        return USUAL_COUNT if self.grid is None else self.grid[0] * self.grid[1]


class EvaluateGan(Settings):
    """Settings of the evaluation of a generator: `model` is a run of `minidl train gan`, its file, or a built-in name.

    `data` None is the data that the run was trained on.
    """

    model: str
    data: Data | None = None
    samples: Annotated[
        int | None,
        Field(
            ge=100,
            le=100_000,
            description="With a generator: number of pictures to score. Default: 10000, on a CPU 1000.",
        ),
    ] = None
    evaluator: Annotated[
        Path | None,
        Field(description="With a generator: image run whose features are compared. Default: a built-in one."),
    ] = None
    json_file: JsonFile = None


def grid_too_small(grid: tuple[int, int], count: int) -> None:
    """Raise ConfigError."""
    cells = f"--grid {grid[0]}x{grid[1]} has {grid[0] * grid[1]} cells"
    raise ConfigError(f"{cells}, and {count} pictures were requested: use a larger grid or fewer pictures")
