"""The constants of time estimates: their fields, and how they are read from and written to JSON."""

from __future__ import annotations

import functools
import json
import math
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

TILES = "tiles"


class Figures(NamedTuple):
    """A device's data sheet. clock: Hz; memory: bytes per second; tensor, float32, float64: operations per clock of a
    multiprocessor, for float16 with float32 sums and for these types; cache: bytes of L2."""

    processors: float
    clock: float
    memory: float
    tensor: float
    float32: float
    float64: float
    cache: float


class Throughput(NamedTuple):
    """slots: programs that run together on a multiprocessor. step: us of one step of all of them, 64 values of K."""

    slots: int
    step: float


class Steps(NamedTuple):
    """Steps of programs, and rounds of all programs, of convolutions.

    launch        us of a launch besides its rounds
    edges         bytes per us that one multiprocessor reads from L2 while all read, for tiles without measurements
    alone, last   factor of a step if fewer programs run on a multiprocessor than fit, by kind of round; for the last
                  round after full ones
    per_block     share of a step that does not depend on the length of the block of K, if read through pointers
    flat          factor of loads for taps and channels as one axis, value by value; `flat_weight` for weight gradients,
                  `patches` times that if a patch is longer than a tile; `strided` times as long with a stride
    waited        factor of such steps with loads of 2 bytes, which no asynchronous copy has
    short, pages  factors of runs of fewer than 64 images, and of images of 1 MB or more, on many pages of memory
    narrow        factor by the bytes of one load
    across_lines  factor for rows that begin within a cache line
    rounds        us of a round in addition to its steps: the first blocks and the epilogue
    reorder       us to reorder the weights
    reorder_from  us of a launch from which reordering the weights first pays
    splits        factor of a step whose blocks the kernel splits into tf32 parts (`tf32x3`), by kind of tile
    tf32          factor of a step in "tf32", by kind of tile: blocks across K are transposed in registers
    shares, cached, uncached   us to add partial sums; bytes per us of partial sums in L2 and in memory
    cache         bytes of partial sums that stay in L2
    fill, filled  us of a small copy without its launch; the share of a copy's rate that rows of odd lengths reach
    """

    launch: float
    edges: float
    alone: Mapping[str, float]
    last: float
    per_block: float
    flat: float
    flat_weight: float
    patches: float
    strided: float
    pages: float
    short: float
    waited: float
    narrow: Mapping[int, float]
    across_lines: float
    rounds: Mapping[str, float]
    reorder: float
    reorder_from: float
    shares: float
    cached: float
    uncached: float
    cache: float
    fill: float
    filled: float
    splits: Mapping[str, float]
    tf32: Mapping[str, float]


class Channels(NamedTuple):
    """The depthwise forms in 16 bits, which sum each channel separately.

    launch                   us of a launch
    program, load, product   us of a multiprocessor to start a program; for a load and for products of a warp
    wait, tile               us that a thread waits for a load; for a tile of the weight gradient
    ordered                  us to reorder the weights
    sum, joined              us to add partial sums, and the number of partial sums added per us
    """

    launch: float
    program: float
    load: float
    product: float
    wait: float
    tile: float
    ordered: float
    sum: float
    joined: float


class Boxes(NamedTuple):
    """Matrix products that read boxes. Launch, program, wait for a block of K and `sum` (the launch that adds shares of
    K) in us; written: values, operations, l2 (bytes): rates per us of one multiprocessor; l2_all, memory, shares: bytes
    per us of all."""

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
    """Matrix products that read through pointers: as `Boxes`, but with loads of a warp in place of bytes of L2."""

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
    """By family of tiles. copy, copied: us of a copy of rows; bytes read and written per us."""

    gemm: Boxes
    gemm_pointer: Pointers
    copy: float
    copied: float


class Constants(NamedTuple):
    """All constants of a device.

    launch      us of one kernel
    copy        bytes read and written per us; `reached`: the share of it that tiles of products reach
    products    operations per us, by dtype or float32 precision
    tiles       Throughput by kind, BLOCK_M and BLOCK_N: "pixel 128x64"; "run 128x128" of images, if different from
                pixels; "box 128x128x8" with 8 warps; "weight 64x64x3" of a weight gradient with 3 taps, "weight run",
                "weight box" and "weight unfolded" of these forms of it, and "weight" of all others
    """

    launch: float
    copy: float
    reached: float
    products: Mapping[str, float]
    steps: Steps
    channels: Channels
    tiles: Mapping[str, Throughput]
    gemm: Products


def from_json(constants: Any) -> Constants:
    """Return the constants in parsed JSON. Raises ValueError if it has anything else."""
    return _parsed(Constants, constants, "constants")


def figures_from_json(figures: Any) -> Figures:
    """Return the figures in parsed JSON. Raises ValueError if it has anything else."""
    return _parsed(Figures, figures, "figures")


def as_json(constants: Any) -> Any:
    """Return the constants as values for JSON, the inverse of `from_json`."""
    if hasattr(constants, "_asdict"):
        if isinstance(constants, Throughput):
            return list(constants)
        return {name: as_json(value) for name, value in constants._asdict().items()}
    if isinstance(constants, Mapping):
        return {str(name): as_json(value) for name, value in constants.items()}
    return list(constants) if isinstance(constants, tuple) else constants


def merged(base: Any, changes: Any, name: str = "constants") -> Any:
    """Return `base` with `changes`, part by part. Raises ValueError for an unknown name, other than a tile's."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    unknown = sorted(changes.keys() - base.keys())
    if unknown and name != TILES:
        raise ValueError(f"{name} has {', '.join(unknown)[:40]}, known: {', '.join(base)}")
    return {**base, **{key: merged(base.get(key), value, key) for key, value in changes.items()}}


def _parsed(kind: Any, value: Any, name: str) -> Any:
    """Convert a JSON value to `kind`: named tuples, numbers above 0, mappings of these.

    Raises ValueError that names the part with another type.
    """
    if kind in (float, int):
        number = type(value) in (int, float) and math.isfinite(value) and value == kind(value)
        if not number or value <= 0:
            raise _type_error(value, name, "a number above 0")
        return kind(value)
    if kind is Throughput or typing.get_origin(kind) is tuple:
        kinds = list(_types(Throughput).values()) if kind is Throughput else typing.get_args(kind)
        if not isinstance(value, list) or len(value) != len(kinds):
            raise _type_error(value, name, f"{len(kinds)} numbers")
        parts = [_parsed(item_kind, part, name) for item_kind, part in zip(kinds, value, strict=True)]
        return Throughput(*parts) if kind is Throughput else tuple(parts)
    if not isinstance(value, dict):
        raise _type_error(value, name, "an object")
    if typing.get_origin(kind) is not None:
        key_kind, value_kind = typing.get_args(kind)
        return {key_kind(key): _parsed(value_kind, part, f"{name}, {key}") for key, part in value.items()}
    if value.keys() != _types(kind).keys():
        raise _type_error(sorted(value), name, ", ".join(_types(kind)))
    return kind(**{key: _parsed(field, value[key], f"{name}, {key}") for key, field in _types(kind).items()})


def _type_error(value: Any, name: str, expected: str) -> ValueError:
    return ValueError(f"{name.removeprefix('constants, ')} is {json.dumps(value)[:40]}, expected {expected}")


_types = functools.cache(typing.get_type_hints)
