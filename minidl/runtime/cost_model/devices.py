"""Constants that estimates of time count with, as data for each device: `constants/<name>.json`.

    {"device": "NVIDIA H100", "date": "2026-11-25", "source": "...", "figures": {...}, "base": ..., "constants": {...}}

What `constants` does not name is that of the `base`; where both have `figures`, scaled to them. A device without a file
has those of an H100 or an A100, scaled to what its driver says of it.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minidl.common import read_files
from minidl.runtime import tile_tables

FOLDER = Path(__file__).parent / "constants"
NAME = "estimates.json"
# Whose constants a target has, where no device of it is at hand.
USUAL = {"sm_90": "nvidia-h100", "sm_80": "nvidia-a100", "interpreted": "interpreted"}
NEAR = 0.1  # by what share a board's memory may differ from the file's
TILES = "tiles", "boxes", "boxed", "weights"
_CURE = "delete it; `minidl tune --estimates` can then make a new one"
PARTS = {"device", "date", "source", "figures", "base", "constants"}
# Operations of a multiprocessor in a clock, by architecture: tensor, float32, float64 (as `Figures`).
RATES = (
    ((12, 0), (1024.0, 256.0, 4.0)), ((10, 0), (8192.0, 256.0, 128.0)), ((9, 0), (4096.0, 256.0, 256.0)),
    ((8, 6), (1024.0, 256.0, 4.0)), ((8, 0), (2048.0, 128.0, 128.0)),
)  # fmt: skip


class Figures(NamedTuple):
    """Of a data sheet. clock: Hz; memory: bytes a second; tensor, float32, float64: operations of a multiprocessor in a
    clock, of float16 with sums in float32, and of numbers of that type; cache: bytes of the second one."""

    processors: float
    clock: float
    memory: float
    tensor: float
    float32: float
    float64: float
    cache: float


class Pace(NamedTuple):
    """slots: programs of a multiprocessor that run together. step: us of a step of all of them, of 64 along K."""

    slots: int
    step: float


class Images(NamedTuple):
    """Times as long: runs of too few images; in too many pages of memory; pixels of few bytes; boxes of many images."""

    short_run: float
    pages: float
    narrow: float
    many: float


class Steps(NamedTuple):
    """Of tiles of a convolution in 16 bits: what steps and rounds of programs take.

    launch        us of one, of pixels
    edges         bytes a us that one multiprocessor gets from the second cache while all read, of tiles not measured
    alone, last   a step of programs with a multiprocessor for themselves, where more could run, by kind of round; of
                  such after full rounds
    apart         of a step, what does not depend on the length of its block of K; of boxes
    flat          times as long, of taps and channels as one axis; value by value; for the gradient of the weight
    narrow        by the bytes that are read at once
    across_lines  rows that begin within a line of the cache
    turned        weights of a way back as they lie, whose channels that are written are neighbours
    rounds        us of a round beside its steps: the first blocks, the epilogue
    farther       of boxes of pixels with many channels, with twice as many
    turn, turns_from   us of turning the weights; of a launch from which on they are turned before it
    shares, cached, uncached   us of adding partial sums, bytes a us of these in the second cache and in memory, and
    cache         how many bytes stay in it
    fill, filled  us of a small copy beside its launch, and what rows of odd lengths reach of a copy's rate
    """

    launch: float
    edges: float
    alone: Mapping[str, float]
    last: float
    apart: float
    apart_boxes: float
    flat: float
    flat_values: float
    flat_weight: float
    narrow: Mapping[int, float]
    across_lines: float
    turned: float
    farther: float
    rounds: Mapping[str, float]
    turn: float
    turns_from: float
    shares: float
    cached: float
    uncached: float
    cache: float
    fill: float
    filled: float


class Channels(NamedTuple):
    """Of the depthwise forms in 16 bits, whose channels have sums of their own.

    launch                   us of one
    memory, weight_memory    times as long as a copy of what they read and write; for the gradient of the weight
    program, load, product   us of a multiprocessor: a program that begins; a load, and products, of a warp
    several                  times as long, of the gradient of the weight with several inputs or outputs
    wait, tile               us that a thread waits for a load; for a tile of the gradient of the weight
    ordered                  us of ordering the weights
    sum, joined              us of adding shares, and how many partial sums are added in a us
    """

    launch: float
    memory: float
    weight_memory: float
    program: float
    load: float
    product: float
    several: float
    wait: float
    tile: float
    ordered: float
    sum: float
    joined: float


class Boxes(NamedTuple):
    """Of products in boxes, in us and on one multiprocessor: a launch, a program, a wait for a block of K, values that
    a program writes, operations, bytes through L2, of one and of all; bytes of memory; the launch of the sum of shares
    and their bytes."""

    launch: float
    program: float
    wait: float
    written: float
    operations: float
    l2: float
    l2_all: float
    memory: float
    sum: float
    shares: float


class Pointers(NamedTuple):
    """As `Boxes`; loads: those of a warp, in place of bytes through L2."""

    launch: float
    program: float
    wait: float
    written: float
    operations: float
    loads: float
    memory: float
    sum: float
    shares: float


class Products(NamedTuple):
    """By family of tiles. copy, copied: us of a copy of rows, and bytes a us that are read and written."""

    gemm: Boxes
    gemm_pointer: Pointers
    copy: float
    copied: float


class Constants(NamedTuple):
    """launch   us of one kernel
    copy        bytes a us that are read and written; `reached`: what tiles of products reach of it
    products    operations a us, by dtype or precision of float32
    forms       of convolutions: what their operations cost beside `products`
    relative    times the estimate of another form
    whole       of estimates beside those of tiles of 16 bits: times as long, and us more
    tiles, boxes, boxed, weights   Pace by BLOCK_M, BLOCK_N and, of the boxed form, warps, of gradients of weights TAPS;
        `boxes`, of runs of images, where they differ from `tiles`
    """

    launch: float
    copy: float
    reached: float
    products: Mapping[str, float]
    forms: Mapping[str, float]
    relative: Mapping[str, float]
    whole: Mapping[str, tuple[float, float]]
    images: Images
    steps: Steps
    channels: Channels
    tiles: Mapping[str, Pace]
    boxes: Mapping[str, Pace]
    boxed: Mapping[str, Pace]
    weights: Mapping[str, Pace]
    gemm: Products


def usual(target: str) -> Path:
    """The file of the device whose constants a target has where no device of it is at hand."""
    return FOLDER / f"{USUAL[target]}.json"


def own_file() -> Path | None:
    """What `minidl tune --estimates` has written in the folder of MINIDL_TILES, where it has."""
    path = None if tile_tables.CHOSEN is None else Path(tile_tables.CHOSEN) / NAME
    return path if path is not None and path.exists() else None


def check() -> None:
    """Raise TableError if tile tables or estimates of MINIDL_TILES are unusable: call this before long work."""
    tile_tables.check()
    path = own_file()
    if path is not None:
        of_file(path)


def of_device(name: str, figures: Figures, target: str) -> Constants:
    """Those of the file for a device of this name and these figures, else of the usual one, scaled."""
    path = file_of(name, figures)
    return scaled(of_file(usual(target)), _known(target), figures) if path is None else of_file(path)


def file_of(name: str, figures: Figures) -> Path | None:
    """The package's file for a device; None where there is none."""
    return next((path for path, known in _named(name) if _same(known, figures)), None)


def of_name(name: str) -> tuple[Constants, Figures] | None:
    """The package's constants for a device of this name, and the figures of its file; None where there is none."""
    return next(((of_file(path), known) for path, known in _named(name)), None)


def _named(name: str) -> Iterator[tuple[Path, Figures]]:
    for path in sorted(FOLDER.glob("*.json")):
        words, known = _words(_parsed(path)["device"]), _figures(_parsed(path))
        if words == _words(name)[: len(words)] and known is not None:
            yield path, known


def _words(name: str) -> list[str]:
    return re.findall(r"\w+", name.lower())


def _same(known: Figures, found: Figures) -> bool:
    """Boards of one name differ in multiprocessors and memory."""
    return known.processors == found.processors and abs(known.memory / found.memory - 1) < NEAR


@functools.cache
def of_file(path: Path) -> Constants:
    """The constants of a file. Raises TableError for one that this version cannot use."""
    try:
        known = _parsed(path)
        if not known.keys() <= PARTS:
            raise ValueError(f"unknown: {', '.join(sorted(known.keys() - PARTS))}")
        own = known.get("constants", {})
        if "base" in known:
            if known["base"] not in {each.stem for each in FOLDER.glob("*.json")}:
                raise ValueError(f"the base {known['base']!r} is no device of the package")
            below = FOLDER / f"{known['base']}.json"
            base = of_file(below)
            have, wanted = _figures(_parsed(below)), _figures(known)
            if have is not None and wanted is not None:
                base = scaled(base, have, wanted)
            own = _over(as_json(base), own)
        return made(own)
    except tile_tables.TableError:
        raise
    except OSError as error:
        why, cure = error.strerror, "make it a file that can be read, or delete it"
    except RecursionError:
        why, cure = "it is nested too deeply", _CURE
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        why, cure = str(error), _CURE
    raise tile_tables.TableError(errno.EINVAL, f"no estimates for this version ({why}); {cure}", str(path))


def made(constants: Any) -> Constants:
    """Constants of what JSON has of them. Raises ValueError for anything else."""
    return _made(Constants, constants, "constants")


def as_json(constants: Any) -> Any:
    """What `_made` makes the constants of."""
    if hasattr(constants, "_asdict"):
        if isinstance(constants, Pace):
            return list(constants)
        return {name: as_json(value) for name, value in constants._asdict().items()}
    if isinstance(constants, Mapping):
        return {str(name): as_json(value) for name, value in constants.items()}
    return list(constants) if isinstance(constants, tuple) else constants


def figures_of(properties: Any, target: str) -> Figures:
    """Of a device, by what its driver says: `torch.cuda.get_device_properties`; what it does not say is as usual.

    Operations in a clock are those of its architecture; a GeForce has half of the tensor cores' with sums in float32.
    """
    capability = (properties.major, properties.minor)
    tensor, float32, float64 = next(rates for known, rates in RATES if capability >= known)
    if "GeForce" in properties.name and capability >= (8, 6):
        tensor /= 2
    names = "clock_rate", "memory_clock_rate", "memory_bus_width", "L2_cache_size"
    clock, memory, bus, cache = (getattr(properties, name, 0) for name in names)
    known = _known(target)
    return Figures(
        properties.multi_processor_count, 1e3 * clock or known.clock, 2e3 * memory * bus / 8 or known.memory,
        tensor, float32, float64, cache or known.cache,
    )  # fmt: skip


def scaled(constants: Constants, have: Figures, wanted: Figures) -> Constants:
    """The constants of a device with other figures.

    What memory does goes with its bytes a second; products with multiprocessors, clock and operations in a clock; what
    goes through L2, and the work of one multiprocessor, with the clock; steps take as much longer as L2 or tensor
    cores are slower. Launches and all ratios stay.
    """
    clock = wanted.clock / have.clock
    memory = wanted.memory / have.memory
    all_of_them = clock * wanted.processors / have.processors
    tensor = wanted.tensor / have.tensor
    of_types = {"ieee": wanted.float32 / have.float32, "float64": wanted.float64 / have.float64}
    products = {name: rate * all_of_them * of_types.get(name, tensor) for name, rate in constants.products.items()}
    longer = max(1.0, 1 / tensor) / clock

    def paces(known: Mapping[str, Pace]) -> dict[str, Pace]:
        return {name: Pace(pace.slots, pace.step * longer) for name, pace in known.items()}

    def product(known: Any) -> Any:
        times = {"program": 1 / clock, "wait": 1 / clock, "written": clock, "operations": clock * tensor, "l2": clock,
                 "l2_all": all_of_them, "loads": clock, "memory": memory, "shares": all_of_them}  # fmt: skip
        return known._replace(**{
            name: value * times.get(name, 1.0) for name, value in known._asdict().items()
        })  # fmt: skip

    gemm = constants.gemm
    steps, channels = constants.steps, constants.channels
    of_a_processor = "program", "load", "product", "wait", "tile"
    return constants._replace(
        copy=constants.copy * memory, products=products,
        steps=steps._replace(
            edges=steps.edges * clock, rounds={name: us / clock for name, us in steps.rounds.items()},
            cached=steps.cached * all_of_them, uncached=steps.uncached * memory,
            cache=steps.cache * wanted.cache / have.cache,
        ),
        channels=channels._replace(
            joined=channels.joined * all_of_them, **{name: getattr(channels, name) / clock for name in of_a_processor}
        ),
        tiles=paces(constants.tiles), boxes=paces(constants.boxes), boxed=paces(constants.boxed),
        weights=paces(constants.weights),
        gemm=Products(product(gemm.gemm), product(gemm.gemm_pointer), gemm.copy, gemm.copied * memory),
    )  # fmt: skip


def _parsed(path: Path) -> dict[str, Any]:
    known = json.loads(read_files.read_text(path))
    if not isinstance(known, dict):
        raise ValueError(f"expected an object with {', '.join(sorted(PARTS))}")
    return known


def _figures(known: dict[str, Any]) -> Figures | None:
    return _made(Figures, known["figures"], "figures") if "figures" in known else None


def _known(target: str) -> Figures:
    return Figures(**_parsed(usual(target))["figures"])


def _over(below: Any, above: Any, name: str = "constants") -> Any:
    """`below` with what `above` names, part by part. Raises ValueError for a name that is not known, but of a tile."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    unknown = sorted(above.keys() - below.keys())
    if unknown and name not in TILES:
        raise ValueError(f"{name} has {', '.join(unknown)[:40]}, known: {', '.join(below)}")
    return {**below, **{each: _over(below.get(each), value, each) for each, value in above.items()}}


def _made(kind: Any, value: Any, name: str) -> Any:
    """A value of JSON as what it is to be: named parts, numbers above 0 (in `whole` 0, too), and mappings of these.

    Raises ValueError naming the part that is something else.
    """
    if kind in (float, int):
        number = type(value) in (int, float) and math.isfinite(value) and value == kind(value)
        if not number or value < 0 or (value == 0 and ", whole, " not in name):
            raise _not(value, name, "a number above 0")
        return kind(value)
    if kind is Pace or typing.get_origin(kind) is tuple:
        kinds = list(_types(Pace).values()) if kind is Pace else typing.get_args(kind)
        if not isinstance(value, list) or len(value) != len(kinds):
            raise _not(value, name, f"{len(kinds)} numbers")
        parts = [_made(each, part, name) for each, part in zip(kinds, value, strict=True)]
        return Pace(*parts) if kind is Pace else tuple(parts)
    if not isinstance(value, dict):
        raise _not(value, name, "an object")
    if typing.get_origin(kind) is not None:
        of_name, of_value = typing.get_args(kind)
        return {of_name(each): _made(of_value, part, f"{name}, {each}") for each, part in value.items()}
    if value.keys() != _types(kind).keys():
        raise _not(sorted(value), name, ", ".join(_types(kind)))
    return kind(**{each: _made(wanted, value[each], f"{name}, {each}") for each, wanted in _types(kind).items()})


def _not(value: Any, name: str, wanted: str) -> ValueError:
    return ValueError(f"{name.removeprefix('constants, ')} is {json.dumps(value)[:40]}, expected {wanted}")


_types = functools.cache(typing.get_type_hints)
