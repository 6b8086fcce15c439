"""The machine on which a benchmark ran."""

from __future__ import annotations

import datetime as dt
import platform
from importlib.metadata import version

import torch

from minidl.runtime import launch, tile_tables
from minidl.runtime.cost_model import selection
from minidl.training.process.environment import driver, tile_hash


def machine() -> dict[str, str]:
    """Return what results depend on: device, driver, versions, date, estimates, and tile tables if not the package's.

    Needs a CUDA device.
    """
    return {
        "device": torch.cuda.get_device_name(),
        "driver": str(driver()),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "estimates": selection.digest(launch.target())[:12],
        **({"tile_tables": f"{tile_tables.CHOSEN} {tile_hash()}"} if tile_tables.CHOSEN else {}),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
    }
