"""Choose the tile of a launch: block sizes, warps and pipeline stages, from tables that are data.

`tiles/<family>.json` has for each target ("interpreted", "sm_80", "sm_90") a list of rules; the first that applies is
used. A rule is

    {"when": {"dtype": ["float16"], "M_max": 64, "N_min": 16}, "tile": {"BLOCK_M": 64, ...}, "warps": 4, "stages": 3}

with an optional "when" (all of its conditions must hold; "precision" is the precision of float32 products) and block
sizes that are powers of two. After a rule with "or": true later rules apply as well, and the kernel's launcher chooses
between their tiles by estimated times (`cost_model`). The choice depends on dtype, precision, shape and device alone,
so results are the same in every process.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton

from minidl.runtime import launch_hooks, tile_tables
from minidl.runtime.precision import precision as dtype_precision
from minidl.runtime.target import COMPILED_CPU, target

Record = TypeVar("Record")


@dataclass(frozen=True)
class Tile:
    """Block sizes with the number of warps and pipeline stages they were chosen for."""

    sizes: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 3

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments for `launch.run`: the sizes, num_warps and num_stages."""
        return {**self.sizes, "num_warps": self.num_warps, "num_stages": self.num_stages}

    @property
    def launch_options(self) -> dict[str, int]:
        """Keyword arguments for `launch.run` without the sizes, which `record` has."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def record(self, kind: Callable[..., Record], **fields: Any) -> Record:
        """Return an argument record of a kernel with the sizes and other fields."""
        return kind(**{**self.sizes, **fields})

    def __str__(self) -> str:
        sizes = " ".join(f"{name.removeprefix('BLOCK_')}={size}" for name, size in self.sizes.items())
        return f"{sizes} warps={self.num_warps} stages={self.num_stages}"


class _State:
    forced: Mapping[str, Tile] | None = None
    tables: Mapping[str, tile_tables.Table] | None = None


_caches: list[Any] = []


def cached(function: Callable[..., Any]) -> Any:
    """Give `function` a bounded cache for results that depend on tiles: `force` and `use_tables` clear it."""
    cache = functools.lru_cache(maxsize=4096)(function)
    register_cache(cache)
    return cache


def register_cache(cache: Any) -> None:
    """Register a cache: `cache.cache_clear()` is called whenever tiles change."""
    _caches.append(cache)


def forget() -> None:
    """Clear all registered caches, because tiles or the constants of estimates changed."""
    for cache in _caches:
        cache.cache_clear()


def table(family: str) -> tile_tables.Table:
    """Return the tile table of a kernel family, by target.

    Raises KeyError for an unknown family, TableError for an unusable file.
    """
    if _State.tables is not None and family in _State.tables:
        return _State.tables[family]
    try:
        return tile_tables.read(family)
    except FileNotFoundError:
        raise KeyError(f"no tile table {family}.json; known: {', '.join(families())}") from None


def table_target(family: str, target_: str) -> str:
    """Return the target whose rules apply: "cpu", if the table has it, where kernels are compiled for the CPU."""
    on_cpu = COMPILED_CPU and target_ == target() and not launch_hooks.for_other_target()
    return "cpu" if on_cpu and "cpu" in table(family) else target_


def families() -> list[str]:
    """Return the names of the kernel families that have a tile table."""
    return sorted(path.stem for path in tile_tables.FOLDER.glob("*.json"))


def tiles(family: str, name: str | None = None, dtype: torch.dtype | None = None) -> list[Tile]:
    """Return every distinct tile of a family for target `name` (default: the one in use), before it is cut to a shape.

    With `dtype`, only the tiles that some shape of this dtype can get; float32 uses the precision in use.
    """
    distinct: list[Tile] = []
    for rule in table(family)[table_target(family, name or target())]:
        when = rule.get("when", {})
        if dtype is not None and not _matches_dtype(when, dtype, dtype_precision(dtype)):
            continue
        tile_ = tile_of(rule)
        if tile_ not in distinct:
            distinct.append(tile_)
        # Rules behind one that applies to every shape are never used.
        if dtype is not None and not set(when) - {"dtype", "precision"} and not rule.get("or"):
            break
    return distinct


def tile(family: str, dtype: torch.dtype, **how: Any) -> Tile:
    """Return the first of `tiles_for`."""
    return tiles_for(family, dtype, **how)[0]


def tiles_for(
    family: str,
    dtype: torch.dtype,
    *,
    floor: int = 1,
    precision: str | None = None,
    target_: str | None = None,
    **shape: int,
) -> tuple[Tile, ...]:
    """Return the tiles that a launcher chooses from for a problem: several where rules say "or".

    `shape` has the extents (M=, N=, K=, ...). A size BLOCK_X is reduced to the power of two at or above extent X, but
    not below `floor` (16 for products). `precision` is the precision of float32 products; it and `target_` default to
    those in use. A tile from `force` is returned unchanged. Raises KeyError if no rule applies.
    """
    if _State.forced is not None and family in _State.forced:
        return (_State.forced[family],)
    name = table_target(family, target_ or target())
    return _choose(family, name, dtype, precision or dtype_precision(dtype), floor, tuple(shape.items()))


@cached
def _choose(
    family: str, target_: str, dtype: torch.dtype, precision: str, floor: int, shape: tuple[tuple[str, int], ...]
) -> tuple[Tile, ...]:
    extents = dict(shape)
    distinct: list[Tile] = []
    for rule in table(family)[target_]:
        when = rule.get("when", {})
        if _matches_dtype(when, dtype, precision) and _matches_shape(when, extents):
            tile_ = _cut(tile_of(rule), extents, floor)
            if tile_ not in distinct:
                distinct.append(tile_)
            if not rule.get("or"):
                return tuple(distinct)
    raise KeyError(f"the tile table of {family} for {target_} has no rule for {dtype} {extents}")


def _cut(tile_: Tile, extents: Mapping[str, int], floor: int) -> Tile:
    sizes = {
        name: min(size, max(floor, triton.next_power_of_2(max(extents.get(name.removeprefix("BLOCK_"), size), 1))))
        for name, size in tile_.sizes.items()
    }
    return Tile(sizes, tile_.num_warps, tile_.num_stages)


def _matches_dtype(when: Mapping[str, Any], dtype: torch.dtype, precision: str) -> bool:
    values = {"dtype": str(dtype).removeprefix("torch."), "precision": precision}
    return all(value in when.get(name, [value]) for name, value in values.items())


def _matches_shape(when: Mapping[str, Any], extents: Mapping[str, int]) -> bool:
    limits = {name: value for name, value in when.items() if name not in ("dtype", "precision")}
    return all(
        extents[name[:-4]] <= value if name.endswith("_max") else extents[name[:-4]] >= value
        for name, value in limits.items()
    )


def tile_of(rule: Mapping[str, Any]) -> Tile:
    """Return the tile of a rule, before it is cut to a shape."""
    return Tile(dict(rule["tile"]), rule.get("warps", 4), rule.get("stages", 3))


def force(**tiles_: Tile) -> AbstractContextManager[None]:
    """A context that uses these tiles for the named families and every shape, for tests and measurements."""
    return _changed("forced", tiles_)


def use_tables(**tables_: tile_tables.Table) -> AbstractContextManager[None]:
    """A context that replaces the tile tables of the named families, for tuning."""
    return _changed("tables", tables_)


@contextlib.contextmanager
def _changed(name: str, values: Mapping[str, Any]) -> Iterator[None]:
    """A context that adds to a field of `_State`, for all threads."""
    launch_hooks.settle()
    before = getattr(_State, name)
    setattr(_State, name, {**(before or {}), **values})
    forget()
    try:
        yield
        launch_hooks.settle()
    finally:
        setattr(_State, name, before)
        forget()
