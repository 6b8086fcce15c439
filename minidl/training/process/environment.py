"""The environment that a result depends on besides settings: versions, device, BLAS and its threads, precision, tile
tables and estimates.

It is written to environment.json and every checkpoint; a run continued in another environment shows a warning.
"""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from minidl.common import read_files
from minidl.common.console import one_line
from minidl.data.parsing import shorten
from minidl.errors import ConfigError
from minidl.version import __version__

_PACKAGES = ("torch", "triton", "numpy", "scipy", "scikit-learn", "safetensors")
# Entries on which the last bits of a result may depend. The Linux kernel, the driver (Triton's own ptxas compiles the
# kernels) and file libraries are not among them.
DECIDING = (
    "minidl", "python", *_PACKAGES[:-1], "libc", "device", "kernels", "target", "processor", "blas", "threads",
    "float32_precision", "tile_tables", "estimates", "fusion",
)  # fmt: skip
MOST_THREADS = 1024  # 65,536 take more memory maps than Linux gives a process
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_USUAL_THREADS = 4


def describe(threads: int) -> dict[str, Any]:
    """Return the content of environment.json. Call `fix_threads` and set the precision first."""
    from minidl.autograd.deferred import is_fused
    from minidl.runtime import launch
    from minidl.runtime.cost_model import selection

    return {
        "minidl": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "device": device_name(),
        "kernels": "interpreted" if launch.INTERPRETED else "compiled",
        "target": launch.target(),
        "driver": driver(),
        "processor": processor(),
        "blas": blas(),
        "threads": threads,
        "float32_precision": launch.float32_precision(),
        "tile_tables": tile_hash(),
        "estimates": selection.digest(launch.target()),
        "fusion": is_fused(),
    }


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the entries that differ and can change the last bits of a result: {name: [before, now]}.

    Entries missing in `before`, which an older minidl may have written, are left out.
    """
    names = [name for name in DECIDING if name in before and name in now]
    return {name: [before[name], now[name]] for name in names if before[name] != now[name]}


def shown(value: Any) -> str:
    """Return a value as text for display; a checksum is shortened."""
    text = "none" if value is None else one_line(str(value))
    return text[:12] if len(text) == 64 and " " not in text else text


def processor() -> str:
    """Return the model of the CPU and the vector instructions that numpy uses, which affect rounding."""
    import numpy as np

    config: dict[str, Any] = np.show_config(mode="dicts") or {}  # type: ignore[assignment]
    simd = config.get("SIMD Extensions", {})
    return " ".join([_model(), *simd.get("baseline", []), *simd.get("found", [])])


def blas() -> str:
    """Return each loaded BLAS with its version, the processor it is tuned for, and its number of threads."""
    from threadpoolctl import threadpool_info

    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    names = [
        " ".join(str(library[part]) for part in ("internal_api", "version", "architecture") if library.get(part))
        for library in libraries
    ]
    return ", ".join(
        sorted(f"{name} x {library['num_threads']}" for name, library in zip(names, libraries, strict=True))
    )


def device_name() -> str:
    """Return the name of the device that kernels run on, "cpu" if they are interpreted there."""
    import torch

    from minidl.runtime import launch

    if launch.ON_CPU:
        return "cpu (compiled)" if launch.COMPILED_CPU else "cpu"
    return torch.cuda.get_device_name()


def tile_hash() -> str:
    """Return the SHA-256 of all tile tables in use, as tiles determine the order of sums."""
    from minidl.runtime import launch, tile_tables

    digest = hashlib.sha256()
    for family in launch.families():
        digest.update(f"{family}\n".encode() + read_files.read_bytes(tile_tables.file_of(family)))
    return digest.hexdigest()


def code() -> str:
    """Return the SHA-256 of minidl's sources and version."""
    digest = hashlib.sha256(__version__.encode())
    folder = Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def check_threads() -> None:
    """Raise ConfigError for numbers of threads that the libraries cannot use. Call it before they are loaded."""
    for name in _THREADS:
        value = os.environ.get(name, "").strip()
        # OpenMP takes one number for each level of nesting.
        if value and not all(_is_count(part) for part in value.split(",")):
            raise ConfigError(
                f"{name} is {shorten(value)}, expected a number of threads from 1 to {MOST_THREADS}; set one, or "
                "unset it"
            )


def thread_count(most: int = _USUAL_THREADS) -> int:
    """Return OMP_NUM_THREADS if it is set, else the number of processors of this process, at most `most`."""
    value = os.environ.get("OMP_NUM_THREADS", "").strip()
    return int(value) if _is_count(value) else min(most, len(os.sched_getaffinity(0)))


def fix_threads(count: int) -> None:
    """Set the number of threads of BLAS, OpenMP and torch: a product's rounding depends on it."""
    import numpy as np
    import scipy.linalg  # noqa: F401  (loads scipy's BLAS, so that it is limited as well)
    import torch
    from threadpoolctl import threadpool_limits

    np.dot(np.ones((2, 2)), np.ones((2, 2)))
    threadpool_limits(count)
    torch.set_num_threads(count)


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MOST_THREADS


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _model() -> str:
    """Return the processor's name."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def driver() -> str | None:
    """Return the version of the NVIDIA driver, None without one."""
    try:
        with Path("/proc/driver/nvidia/version").open() as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
