"""The one place that decides how a kernel runs: compiled or interpreted, in which precision, with which tile.

Tile tables are data: `tiles/<family>.json` holds, per target ("interpreted", "sm_80", "sm_90"), a list of
rules read from the top. A rule is

    {"when": {"dtype": ["float16"], "M_max": 64, "N_min": 16}, "tile": {"BLOCK_M": 64, ...}, "warps": 4, "stages": 3}

with an optional "when" (all of its conditions must hold; "precision" is that of float32 products) and sizes of two to
some power. The choice depends on dtype, precision and shape alone, so results are the same in every process.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import direct, interpret, tables

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
PRECISIONS = ("tf32x3", "ieee", "tf32")
NO_BFLOAT16 = (
    "bfloat16 is not supported on the CPU (Triton's interpreter computes it wrongly): "
    "use float32 or float16, or a CUDA device"
)
MAX_GRID = (2**31 - 1, 65535, 65535)

if INTERPRETED:
    interpret.speed_up()


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
    target: str | None = None
    instead: Callable[..., None] | None = None
    forced: dict[str, Tile] | None = None
    given: Mapping[str, tables.Table] | None = None


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
    if _state.instead is not None:
        _state.instead(kernel, grid, args, meta)
    elif not direct.launch(kernel, grid, args, meta):
        _run_by_triton(kernel, grid, args, meta)


def _run_by_triton(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    device = _check_place(kernel, args)
    if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
        direct.keep(kernel, args, meta, kernel[grid](*args, **meta))
        return
    with torch.cuda.device(device):
        if not direct.launch(kernel, grid, args, meta):
            direct.keep(kernel, args, meta, kernel[grid](*args, **meta))


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
            raise TypeError(
                f"{kernel.__name__}: got a tensor on {device}, but kernels are compiled for CUDA in this process; "
                "move it with .to('cuda'), or set TRITON_INTERPRET=1 before starting Python to run on the CPU"
            )
    return device


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, b above 0. Triton's own serves kernels too and takes 3 us on the host."""
    return -(-a // b)


def target() -> str:
    """The tile table in use: "interpreted", or the newest table that the device's architecture can run."""
    if _state.target is not None:
        return _state.target
    if INTERPRETED:
        return "interpreted"
    return _device_target()


@functools.cache
def _device_target() -> str:
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise RuntimeError(f"minidl needs compute capability 8.0 or above, this device has {capability}")
    return "sm_90" if capability[0] == 9 else "sm_80"


def boxes() -> bool:
    """Whether to read matrices in boxes through tensor descriptors.

    From sm_90 the hardware copies them; the interpreter slices arrays. Below, they become pointers whose alignment the
    compiler does not see, and loads are no longer asynchronous.
    """
    return target() != "sm_80"


@functools.cache
def processors() -> int:
    """Multiprocessors of the device, to size persistent grids and splits; 132 (an H100 or H200) when compiling offline.

    The interpreter runs programs one after another: 1.
    """
    if _state.target is not None:
        return 132
    return 1 if INTERPRETED else torch.cuda.get_device_properties("cuda").multi_processor_count


def table(family: str) -> tables.Table:
    """The tile table of a kernel family, by target. Raises KeyError for an unknown family, TableError as `tables`."""
    if _state.given is not None and family in _state.given:
        return _state.given[family]
    try:
        return tables.read(family)
    except FileNotFoundError:
        raise KeyError(f"no tile table {family}.json; there are {', '.join(families())}") from None


def families() -> list[str]:
    """Names of the kernel families that have a tile table."""
    return sorted(path.stem for path in tables.FOLDER.glob("*.json"))


def tiles(
    family: str, name: str | None = None, dtype: torch.dtype | None = None, precision: str | None = None
) -> list[Tile]:
    """Every distinct tile of a family in the table `name` (default: the one in use), before clamping to a shape.

    With `dtype`, only the tiles that it can get at some shape, float32 in `precision` (default: the one in use).
    """
    found: list[Tile] = []
    for rule in table(family)[name or target()]:
        when = rule.get("when", {})
        if dtype is not None and not _takes(when, dtype, precision or _precision(dtype)):
            continue
        tile_ = _of_rule(rule)
        if tile_ not in found:
            found.append(tile_)
        # What remains is out of reach behind a rule that holds for every shape.
        if dtype is not None and not set(when) - {"dtype", "precision"}:
            break
    return found


def tile(family: str, dtype: torch.dtype, *, floor: int = 1, precision: str | None = None, **shape: int) -> Tile:
    """The tile for a problem: `shape` names its extents (M=, N=, K=, ...).

    A size BLOCK_X is cut to the power of two at or above extent X, but not below `floor` (16 for matrix products).
    `precision` is that of float32 products (default: the one in use). A tile forced by `force` is taken as it is.
    """
    if _state.forced is not None and family in _state.forced:
        return _state.forced[family]
    return _choose(family, target(), dtype, precision or _precision(dtype), floor, tuple(shape.items()))


@functools.lru_cache(maxsize=4096)
def _choose(
    family: str, target_: str, dtype: torch.dtype, precision: str, floor: int, shape: tuple[tuple[str, int], ...]
) -> Tile:
    extents = dict(shape)
    for rule in table(family)[target_]:
        when = rule.get("when", {})
        if _takes(when, dtype, precision) and _fits(when, extents):
            chosen = _of_rule(rule)
            sizes = {
                name: min(
                    size, max(floor, triton.next_power_of_2(max(extents.get(name.removeprefix("BLOCK_"), size), 1)))
                )
                for name, size in chosen.sizes.items()
            }
            return Tile(sizes, chosen.num_warps, chosen.num_stages)
    raise KeyError(f"the tile table of {family} for {target_} has no rule for {dtype} {extents}")


def _takes(when: Mapping[str, Any], dtype: torch.dtype, precision: str) -> bool:
    known = {"dtype": str(dtype).removeprefix("torch."), "precision": precision}
    return all(value in when.get(name, [value]) for name, value in known.items())


def _fits(when: Mapping[str, Any], extents: Mapping[str, int]) -> bool:
    for name, value in when.items():
        if name in ("dtype", "precision"):
            continue
        if name.endswith("_max"):
            if extents[name.removesuffix("_max")] > value:
                return False
        elif extents[name.removesuffix("_min")] < value:
            return False
    return True


def _of_rule(rule: Mapping[str, Any]) -> Tile:
    return Tile(dict(rule["tile"]), rule.get("warps", 4), rule.get("stages", 3))


@contextlib.contextmanager
def force(**tiles_: Tile) -> Iterator[None]:
    """Use the given tile for each named family, whatever the shape: for tests and measurements."""
    before = _state.forced
    _state.forced = {**(before or {}), **tiles_}
    try:
        yield
    finally:
        _state.forced = before


@contextlib.contextmanager
def use_tables(**tables_: tables.Table) -> Iterator[None]:
    """Choose tiles by the given table for each named family, as if it stood in its file: for tuning."""
    before = _state.given
    _state.given = {**(before or {}), **tables_}
    _choose.cache_clear()
    try:
        yield
    finally:
        _state.given = before
        _choose.cache_clear()


@contextlib.contextmanager
def record(recorder: Callable[..., None], target_: str) -> Iterator[None]:
    """Hand every launch to `recorder(kernel, grid, args, meta)` instead of running it, with the tiles of `target_`.

    For compiling offline: launchers run as usual on tensors of any device, and nothing is computed.
    """
    before = _state.instead, _state.target
    _state.instead, _state.target = recorder, target_
    processors.cache_clear()
    try:
        yield
    finally:
        _state.instead, _state.target = before
        processors.cache_clear()


def recording() -> bool:
    """Whether launches are recorded and not run."""
    return _state.target is not None


@contextlib.contextmanager
def watch(watcher: Callable[..., None]) -> Iterator[None]:
    """Hand every launch to `watcher(kernel, grid, args, meta, go)`, where `go()` launches it, in all threads.

    Launches that are recorded and not run are not watched.
    """

    def instead(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        def go() -> None:
            if not direct.launch(kernel, grid, args, meta):
                _run_by_triton(kernel, grid, args, meta)

        watcher(kernel, grid, args, meta, go)

    before, _state.instead = _state.instead, instead
    try:
        yield
    finally:
        _state.instead = before


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
    if name not in PRECISIONS:
        raise ValueError(f"unknown float32 precision {name!r}; known: {', '.join(PRECISIONS)}")
    _state.precision = name


def acc(dtype: torch.dtype) -> tl.dtype:
    """The Triton type in which values of `dtype` are computed and accumulated: float64 for float64, else float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def acc_torch(dtype: torch.dtype) -> torch.dtype:
    """The torch dtype of `acc(dtype)`: for buffers of partial results."""
    return torch.float64 if dtype == torch.float64 else torch.float32
