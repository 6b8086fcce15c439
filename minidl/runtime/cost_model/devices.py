"""The constants of time estimates for each device: files `constants/<name>.json`, with the fields of `schema`.

    {"device": "NVIDIA H100", "date": "2026-11-25", "source": "...", "figures": {...}, "base": ..., "constants": {...}}

Constants that a file omits come from its `base`, scaled if both have `figures`. A device without a file uses the
constants of an H100 or an A100, scaled to the figures that its driver reports.
"""

from __future__ import annotations

import errno
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minidl.common import read_files
from minidl.runtime import tile_tables
from minidl.runtime.cost_model import schema
from minidl.runtime.cost_model.schema import Constants, Figures, Products, Throughput

FOLDER = Path(__file__).parent / "constants"
NAME = "estimates.json"
# The file that is used without a device of the target.
USUAL = {"sm_90": "nvidia-h100", "sm_80": "nvidia-a100", "interpreted": "interpreted", "cpu": "cpu"}
NEAR = 0.1  # the share by which a board's memory may differ from its file's
_CURE = "delete it; `minidl tune --estimates` can then make a new one"
PARTS = {"device", "date", "source", "figures", "base", "constants"}
# Operations per clock of a multiprocessor, by architecture: tensor, float32, float64 (as `Figures`).
RATES = (
    ((12, 0), (1024.0, 256.0, 4.0)), ((10, 0), (8192.0, 256.0, 128.0)), ((9, 0), (4096.0, 256.0, 256.0)),
    ((8, 6), (1024.0, 256.0, 4.0)), ((8, 0), (2048.0, 128.0, 128.0)),
)  # fmt: skip


def usual(target: str) -> Path:
    """Return the file that is used for a target without a device, or for "cpu", kernels that are compiled for it."""
    return FOLDER / f"{USUAL[target]}.json"


def tuned_file() -> Path | None:
    """Return the file of `minidl tune --estimates` in the folder of MINIDL_TILES, None if there is none."""
    path = None if tile_tables.CHOSEN is None else Path(tile_tables.CHOSEN) / NAME
    return path if path is not None and path.exists() else None


def check() -> None:
    """Raise TableError if tile tables or estimates of MINIDL_TILES are unusable: call this before long work."""
    tile_tables.check()
    path = tuned_file()
    if path is not None:
        of_file(path)


def of_device(name: str, figures: Figures, target: str) -> Constants:
    """Return the constants for a device with this name and these figures: of its file, or scaled from the usual one."""
    path = file_of(name, figures)
    return scaled(of_file(usual(target)), _usual_figures(target), figures) if path is None else of_file(path)


def file_of(name: str, figures: Figures) -> Path | None:
    """Return the package's file for a device, None if there is none."""
    return next((path for path, listed in _named(name) if _is_same_board(listed, figures)), None)


def of_name(name: str) -> tuple[Constants, Figures] | None:
    """Return the constants and figures of the package's file for a device name, None if there is none."""
    return next(((of_file(path), figures) for path, figures in _named(name)), None)


def _named(name: str) -> Iterator[tuple[Path, Figures]]:
    for path in sorted(FOLDER.glob("*.json")):
        words, figures = _words(_read(path)["device"]), _figures(_read(path))
        if words == _words(name)[: len(words)] and figures is not None:
            yield path, figures


def _words(name: str) -> list[str]:
    return re.findall(r"\w+", name.lower())


def _is_same_board(listed: Figures, device: Figures) -> bool:
    """Compare multiprocessors and memory, in which boards of one name differ."""
    return listed.processors == device.processors and abs(listed.memory / device.memory - 1) < NEAR


@functools.cache
def of_file(path: Path) -> Constants:
    """Return the constants of a file. Raises TableError if this version cannot use it."""
    try:
        content = _read(path)
        if not content.keys() <= PARTS:
            raise ValueError(f"unknown: {', '.join(sorted(content.keys() - PARTS))}")
        constants = content.get("constants", {})
        if "base" in content:
            if content["base"] not in {file.stem for file in FOLDER.glob("*.json")}:
                raise ValueError(f"the base {content['base']!r} is no device of the package")
            base_path = FOLDER / f"{content['base']}.json"
            base = of_file(base_path)
            base_figures, figures = _figures(_read(base_path)), _figures(content)
            if base_figures is not None and figures is not None:
                base = scaled(base, base_figures, figures)
            constants = schema.merged(schema.as_json(base), constants)
        return schema.from_json(constants)
    except tile_tables.TableError:
        raise
    except OSError as error:
        why, cure = error.strerror, "make it a file that can be read, or delete it"
    except RecursionError:
        why, cure = "it is nested too deeply", _CURE
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        why, cure = str(error), _CURE
    raise tile_tables.TableError(errno.EINVAL, f"no estimates for this version ({why}); {cure}", str(path))


def figures_of(properties: Any, target: str) -> Figures:
    """Return the figures of a device from `torch.cuda.get_device_properties`; missing ones are those of `usual`.

    Operations per clock depend on the architecture; a GeForce has half the tensor throughput with float32 sums.
    """
    capability = (properties.major, properties.minor)
    tensor, float32, float64 = next(rates for lowest, rates in RATES if capability >= lowest)
    if "GeForce" in properties.name and capability >= (8, 6):
        tensor /= 2
    names = "clock_rate", "memory_clock_rate", "memory_bus_width", "L2_cache_size"
    clock, memory, bus, cache = (getattr(properties, name, 0) for name in names)
    usual_ = _usual_figures(target)
    return Figures(
        properties.multi_processor_count, 1e3 * clock or usual_.clock, 2e3 * memory * bus / 8 or usual_.memory,
        tensor, float32, float64, cache or usual_.cache,
    )  # fmt: skip


def scaled(constants: Constants, source: Figures, device: Figures) -> Constants:
    """Return constants measured on a device with figures `source`, scaled to another device.

    Memory traffic scales with memory bandwidth; products with multiprocessors, clock and operations per clock; L2
    traffic and the work of one multiprocessor with the clock; steps with the slower of L2 and tensor cores. Launches
    and all ratios stay.
    """
    clock = device.clock / source.clock
    memory = device.memory / source.memory
    all_processors = clock * device.processors / source.processors
    tensor = device.tensor / source.tensor
    by_type = {"ieee": device.float32 / source.float32, "float64": device.float64 / source.float64}
    products = {name: rate * all_processors * by_type.get(name, tensor) for name, rate in constants.products.items()}
    longer = max(1.0, 1 / tensor) / clock

    def product(rates: Any) -> Any:
        times = {"program": 1 / clock, "wait": 1 / clock, "written": clock, "operations": clock * tensor, "l2": clock,
                 "l2_all": all_processors, "loads": clock, "memory": memory, "shares": all_processors}  # fmt: skip
        return rates._replace(**{
            name: value * times.get(name, 1.0) for name, value in rates._asdict().items()
        })  # fmt: skip

    gemm = constants.gemm
    steps, channels = constants.steps, constants.channels
    per_processor = "program", "load", "product", "wait", "tile"
    return constants._replace(
        copy=constants.copy * memory, products=products,
        steps=steps._replace(
            edges=steps.edges * clock, rounds={name: us / clock for name, us in steps.rounds.items()},
            cached=steps.cached * all_processors, uncached=steps.uncached * memory,
            cache=steps.cache * device.cache / source.cache,
        ),
        channels=channels._replace(
            joined=channels.joined * all_processors, **{name: getattr(channels, name) / clock for name in per_processor}
        ),
        tiles={name: Throughput(slots, step * longer) for name, (slots, step) in constants.tiles.items()},
        gemm=Products(product(gemm.gemm), product(gemm.gemm_pointer), gemm.copy, gemm.copied * memory),
    )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(read_files.read_text(path))
    if not isinstance(content, dict):
        raise ValueError(f"expected an object with {', '.join(sorted(PARTS))}")
    return content


def _figures(content: dict[str, Any]) -> Figures | None:
    return schema.figures_from_json(content["figures"]) if "figures" in content else None


def _usual_figures(target: str) -> Figures:
    return Figures(**_read(usual(target))["figures"])
