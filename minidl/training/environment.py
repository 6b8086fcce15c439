"""What a result depends on besides the settings: versions, device, threads, tile tables."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from minidl import __version__

_PACKAGES = ("torch", "triton", "numpy", "scipy", "scikit-learn", "safetensors")
MOST_THREADS = 65536
_USUAL_THREADS = 4


def describe(threads: int) -> dict[str, Any]:
    """The content of environment.json."""
    from minidl.kernels import launch

    return {
        "minidl": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "device": device_name(),
        "kernels": "interpreted" if launch.INTERPRETED else "compiled",
        "target": launch.target(),
        "driver": driver(),
        "threads": threads,
        "tile_tables": tile_hash(),
    }


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs, of all that can change the last bits of a result: "torch is 2.12, was 2.11"."""
    return [f"{name} is {now[name]}, was {before.get(name)}" for name in now if before.get(name) != now[name]]


def device_name() -> str:
    """The name of the device kernels run on, "cpu" where they are interpreted."""
    import torch

    from minidl.kernels import launch

    return "cpu" if launch.INTERPRETED else torch.cuda.get_device_name()


def tile_hash() -> str:
    """SHA-256 over every tile table in use: they decide in which order sums are taken."""
    from minidl.kernels import launch, tables

    digest = hashlib.sha256()
    for family in launch.families():
        digest.update(f"{family}\n".encode() + tables.file_of(family).read_bytes())
    return digest.hexdigest()


def wanted_threads(most: int = _USUAL_THREADS) -> int:
    """OMP_NUM_THREADS if it is set, else the processors this process may use, at most `most`."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return min(MOST_THREADS, int(given))
    return min(most, len(os.sched_getaffinity(0)))


def fix_threads(count: int) -> None:
    """Set the number of threads of BLAS, OpenMP and torch: a product's rounding depends on it."""
    import numpy as np
    import scipy.linalg  # noqa: F401  (brings a BLAS of its own, which must be loaded to be limited)
    import torch
    from threadpoolctl import threadpool_limits

    np.dot(np.ones((2, 2)), np.ones((2, 2)))
    threadpool_limits(count)
    torch.set_num_threads(count)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """The NVIDIA driver's version, where there is one."""
    try:
        with Path("/proc/driver/nvidia/version").open() as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
