"""The one place that decides how a kernel runs: compiled or interpreted, in which precision, with which tile.

Tile tables are data: `tiles/<family>.json` holds, per target ("interpreted", "sm_80", "sm_90"), a list of
rules read from the top. A rule is

    {"when": {"dtype": ["float16"], "M_max": 64, "N_min": 16}, "tile": {"BLOCK_M": 64, ...}, "warps": 4, "stages": 3}

with an optional "when" (all of its conditions must hold; "precision" is that of float32 products) and sizes of two to
some power. A rule with "or": true leaves the choice between its tile and those of rules below to the kernel's launcher,
which estimates their times (`estimates`). The choice depends on dtype, precision, shape and device alone, so results
are the same in every process.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from minidl.common import locks
from minidl.common.architecture import target_of
from minidl.interpreter import patches
from minidl.runtime import cache_keys, launch_hooks, tile_tables
from minidl.runtime.descriptors import Box, ConcatPair
from minidl.runtime.launch_cache import fast_launch
from minidl.runtime.launch_hooks import before_changes as before_changes
from minidl.runtime.launch_hooks import handed_over as handed_over
from minidl.runtime.launch_hooks import record as record
from minidl.runtime.launch_hooks import recording as recording
from minidl.runtime.launch_hooks import runs as runs
from minidl.runtime.launch_hooks import settle as settle
from minidl.runtime.launch_hooks import settled_by as settled_by
from minidl.runtime.launch_hooks import watch as watch

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
PRECISIONS = ("tf32x3", "ieee", "tf32")
NO_BFLOAT16 = (
    "bfloat16 is not supported on the CPU (Triton's interpreter computes it wrongly): "
    "use float32 or float16, or a CUDA device"
)
NO_CPU = (
    "kernels are compiled for CUDA in this process; move it with .to('cuda'), or set TRITON_INTERPRET=1 before "
    "starting Python to run on the CPU"
)
MAX_GRID = (2**31 - 1, 65535, 65535)

if INTERPRETED:
    patches.speed_up()


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
        """Keyword arguments for `run`: the sizes, num_warps and num_stages."""
        return {**self.sizes, "num_warps": self.num_warps, "num_stages": self.num_stages}

    def __str__(self) -> str:
        sizes = " ".join(f"{name.removeprefix('BLOCK_')}={size}" for name, size in self.sizes.items())
        return f"{sizes} warps={self.num_warps} stages={self.num_stages}"


@dataclass
class _State:
    precision: str = "tf32x3"
    forced: dict[str, Tile] | None = None
    given: Mapping[str, tile_tables.Table] | None = None


_state = _State()


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch `kernel` on `grid` programs; an empty grid launches nothing.

    FP fusion is passed explicitly (Triton's default changes between versions). Raises TypeError for bfloat16 in the
    interpreter and for CPU tensors where kernels are compiled, ValueError for a grid beyond CUDA's limits.
    """
    if 0 in grid:
        return
    if max(grid) > MAX_GRID[1]:
        _check_grid(kernel, grid)
    meta.setdefault("enable_fp_fusion", True)
    if launch_hooks.active and _hand_over(kernel, grid, args, meta):
        return
    if _tapes and (tape := _tapes.get(threading.get_ident())) is not None:
        tape.launches.append((kernel, grid, args, meta))
        with _disable_current_modes():  # what Triton asks torch for is no part of it
            _run_now(kernel, grid, args, meta)
    else:
        _run_now(kernel, grid, args, meta)


def _hand_over(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> bool:
    recorder, watcher = launch_hooks.recorder(), launch_hooks.watcher()
    if recorder is not None:
        recorder(kernel, grid, args, meta)
    elif watcher is not None:
        watcher(kernel, grid, args, meta, functools.partial(_run_now, kernel, grid, args, meta))
    return recorder is not None or watcher is not None


def _run_now(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    if not fast_launch.launch(kernel, grid, args, meta):
        _run_by_triton(kernel, grid, args, meta)


class Tape:
    """A context that notes this thread's launches, which run as ever, and whether they find tensors by addresses."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        self.addresses = False

    def __enter__(self) -> "Tape":
        _tapes[threading.get_ident()] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _tapes[threading.get_ident()]


_tapes: dict[int, Tape] = {}


class Prepared(NamedTuple):
    """A launch but for its tensors, which come first among the kernel's arguments; `boxes` of the first ones, or None
    where these go as they are."""

    kernel: Any
    grid: tuple[int, ...]
    scalars: tuple[Any, ...]
    meta: dict[str, Any]
    boxes: tuple[Box | None, ...] = ()

    def run(self, *tensors: Any) -> None:
        """Launch with these tensors. Raises as `run`."""
        if self.boxes:
            boxed = [x if box is None else box.of(x) for box, x in zip(self.boxes, tensors, strict=False)]
            run(self.kernel, self.grid, *boxed, *tensors[len(boxed) :], *self.scalars, **self.meta)
            for x in tensors[: len(boxed)]:
                if isinstance(x, ConcatPair):
                    pointed_at(functools.partial(tuple, x))  # by a distance, which is of these two alone
        else:
            run(self.kernel, self.grid, *tensors, *self.scalars, **self.meta)


def _run_by_triton(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    device = _check_place(kernel, args)
    with locks.TRITON:
        cache_keys.settle(kernel)
        if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
            fast_launch.keep(kernel, args, meta, kernel[grid](*args, **meta))
            return
        with torch.cuda.device(device):
            if not fast_launch.launch(kernel, grid, args, meta):
                fast_launch.keep(kernel, args, meta, kernel[grid](*args, **meta))


def _check_grid(kernel: Any, grid: tuple[int, ...]) -> None:
    for size, limit in zip(grid, MAX_GRID, strict=False):
        if size > limit:
            raise ValueError(f"{kernel.__name__}: a grid of {grid} programs is above the limit {MAX_GRID[: len(grid)]}")


def _check_place(kernel: Any, args: tuple[Any, ...]) -> torch.device | None:
    device = None
    for value in args:
        tensor = getattr(value, "base", value)
        if not isinstance(tensor, torch.Tensor):
            continue
        device = tensor.device
        if INTERPRETED and tensor.dtype == torch.bfloat16:
            raise TypeError(NO_BFLOAT16)
        if not INTERPRETED and device.type != "cuda":
            raise TypeError(f"{kernel.__name__}: got a tensor on {device}, but {NO_CPU}")
    return device


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for b above 0. (`triton.cdiv` takes 3 us on the host.)"""
    return -(-a // b)


_made_of_tiles: list[Any] = []


def cached(function: Callable[..., Any]) -> Any:
    """`function` with a bounded cache, for what is made from tiles: `force` and `use_tables` empty it."""
    found = functools.lru_cache(maxsize=4096)(function)
    emptied_with_tiles(found)
    return found


def emptied_with_tiles(cache: Any) -> None:
    """Have `cache.cache_clear()` called as that of `cached` functions is."""
    _made_of_tiles.append(cache)


def forget() -> None:
    """Empty these caches: tiles or what estimates count with are others now."""
    for each in _made_of_tiles:
        each.cache_clear()


TARGETS = ("interpreted", "sm_80", "sm_90")  # the tile tables that there are


def target() -> str:
    """The tile table in use: "interpreted", or the newest table that the device's architecture can run."""
    return launch_hooks.target() or ("interpreted" if INTERPRETED else device_target())


@functools.cache
def device_target() -> str:
    """That of the device in use. Raises RuntimeError for one that is too old, and where there is none."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "kernels are compiled for CUDA in this process, and torch finds no CUDA device; set TRITON_INTERPRET=1 "
            "before starting Python to run on the CPU"
        )
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise RuntimeError(f"minidl needs compute capability 8.0 or above, this device has {capability}")
    return target_of(10 * capability[0] + capability[1])


def architecture(device: torch.device | None = None) -> int:
    """Of a GPU (default: the one in use), as 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def boxes(target_: str | None = None) -> bool:
    """Whether to read matrices in boxes through tensor descriptors, on a target (default: the one in use).

    From sm_90 on, hardware copies boxes; the interpreter slices arrays. On older GPUs boxes become pointers of unknown
    alignment, and loads are no longer asynchronous.
    """
    return (target_ or target()) != "sm_80"


def processors() -> int:
    """Multiprocessors of the device, to size persistent grids and splits; 132 (an H100 or H200) when compiling offline.

    The interpreter runs programs one after another: 1.
    """
    if recording():
        return 132
    return 1 if INTERPRETED else _multiprocessors()


@functools.cache
def _multiprocessors() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def table(family: str) -> tile_tables.Table:
    """The tile table of a kernel family, by target. Raises KeyError for an unknown family, TableError as `tables`."""
    if _state.given is not None and family in _state.given:
        return _state.given[family]
    try:
        return tile_tables.read(family)
    except FileNotFoundError:
        raise KeyError(f"no tile table {family}.json; known: {', '.join(families())}") from None


def families() -> list[str]:
    """Names of the kernel families that have a tile table."""
    return sorted(path.stem for path in tile_tables.FOLDER.glob("*.json"))


def tiles(family: str, name: str | None = None, dtype: torch.dtype | None = None) -> list[Tile]:
    """Every distinct tile of a family in the table `name` (default: the one in use), before clamping to a shape.

    With `dtype`, only the tiles that some shape of it can get, float32 in the precision in use.
    """
    found: list[Tile] = []
    for rule in table(family)[name or target()]:
        when = rule.get("when", {})
        if dtype is not None and not _takes(when, dtype, _precision(dtype)):
            continue
        tile_ = tile_of(rule)
        if tile_ not in found:
            found.append(tile_)
        # Rules behind one that holds for every shape are never used.
        if dtype is not None and not set(when) - {"dtype", "precision"} and not rule.get("or"):
            break
    return found


def tile(family: str, dtype: torch.dtype, **how: Any) -> Tile:
    """The tile for a problem: the first of `tiles_for`."""
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
    """All tiles between which a launcher is to choose for a problem, several where rules say "or".

    `shape` names its extents (M=, N=, K=, ...). A size BLOCK_X is cut to the power of two at or above extent X, but not
    below `floor` (16 for products). `precision` is that of float32 products, `target_` the target (by default those
    in use). A tile forced by `force` is taken as it is.
    """
    if _state.forced is not None and family in _state.forced:
        return (_state.forced[family],)
    return _choose(family, target_ or target(), dtype, precision or _precision(dtype), floor, tuple(shape.items()))


@cached
def _choose(
    family: str, target_: str, dtype: torch.dtype, precision: str, floor: int, shape: tuple[tuple[str, int], ...]
) -> tuple[Tile, ...]:
    extents = dict(shape)
    found: list[Tile] = []
    for rule in table(family)[target_]:
        when = rule.get("when", {})
        if _takes(when, dtype, precision) and _fits(when, extents):
            chosen = tile_of(rule)
            sizes = {
                name: min(
                    size, max(floor, triton.next_power_of_2(max(extents.get(name.removeprefix("BLOCK_"), size), 1)))
                )
                for name, size in chosen.sizes.items()
            }
            cut = Tile(sizes, chosen.num_warps, chosen.num_stages)
            if cut not in found:
                found.append(cut)
            if not rule.get("or"):
                return tuple(found)
    raise KeyError(f"the tile table of {family} for {target_} has no rule for {dtype} {extents}")


def _takes(when: Mapping[str, Any], dtype: torch.dtype, precision: str) -> bool:
    known = {"dtype": str(dtype).removeprefix("torch."), "precision": precision}
    return all(value in when.get(name, [value]) for name, value in known.items())


def _fits(when: Mapping[str, Any], extents: Mapping[str, int]) -> bool:
    limits = {name: value for name, value in when.items() if name not in ("dtype", "precision")}
    return all(
        extents[name[:-4]] <= value if name.endswith("_max") else extents[name[:-4]] >= value
        for name, value in limits.items()
    )


def tile_of(rule: Mapping[str, Any]) -> Tile:
    """The tile of a rule, before it is cut to a shape."""
    return Tile(dict(rule["tile"]), rule.get("warps", 4), rule.get("stages", 3))


@contextlib.contextmanager
def _changed(*caches: Any, **fields: Any) -> Iterator[None]:
    """A context in which `_state` has these fields, for all threads; `caches` depend on them."""

    def change(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(_state, name, value)
        for cached in caches:
            cached.cache_clear()

    settle()
    before = {name: getattr(_state, name) for name in fields}
    change(fields)
    try:
        yield
        settle()
    finally:
        change(before)


def force(**tiles_: Tile) -> AbstractContextManager[None]:
    """A context that uses the given tile for each named family and every shape: for tests and measurements."""
    return _changed(*_made_of_tiles, forced={**(_state.forced or {}), **tiles_})


def use_tables(**tables_: tile_tables.Table) -> AbstractContextManager[None]:
    """A context that replaces the tile tables of the named families: for tuning."""
    return _changed(*_made_of_tiles, given={**(_state.given or {}), **tables_})


def pointed_at(tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Say that launches just made find these tensors by addresses in memory: who has launches wait keeps them."""
    for keep in keepers:
        keep(tensors())
    if _tapes and (tape := _tapes.get(threading.get_ident())) is not None:
        tape.addresses = True


keepers: list[Callable[[Iterable[torch.Tensor]], None]] = []


def is_gpu(device: torch.device) -> bool:
    """Whether what is on a device is a GPU's: while launches are recorded for one, everything is."""
    return device.type == "cuda" or recording()


def in_precision(name: str) -> AbstractContextManager[None]:
    """A context in which float32 matrix products are computed as after `set_float32_precision(name)`."""
    return _changed(precision=_known_precision(name))


def precision(dtype: torch.dtype) -> str:
    """`input_precision` for a `tl.dot` of this dtype: the float32 setting for float32, "ieee" for all others."""
    return _precision(dtype)


def _precision(dtype: torch.dtype) -> str:
    return _state.precision if dtype == torch.float32 else "ieee"


def float32_precision() -> str:
    """How float32 products are computed: "tf32x3" (default), "ieee" or "tf32"."""
    return _state.precision


def set_float32_precision(name: str) -> None:
    """Set how float32 matrix products are computed on a GPU.

    "tf32x3" (default) reaches float32 accuracy on tensor cores with three products of tf32 parts, "ieee" uses float32
    multiply-adds, "tf32" keeps 10 fraction bits of each input. The interpreter always computes as "ieee".
    Raises ValueError for another name.
    """
    known = _known_precision(name)
    settle()
    _state.precision = known


def _known_precision(name: str) -> str:
    if name not in PRECISIONS:
        raise ValueError(f"unknown float32 precision {name!r}; known: {', '.join(PRECISIONS)}")
    return name


def acc(dtype: torch.dtype) -> tl.dtype:
    """The Triton type in which values of `dtype` are computed and accumulated: float64 for float64, else float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def acc_torch(dtype: torch.dtype) -> torch.dtype:
    """The torch dtype of `acc(dtype)`: for buffers of partial results."""
    return torch.float64 if dtype == torch.float64 else torch.float32
