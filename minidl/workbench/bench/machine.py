"""The machine on which a benchmark ran."""

from __future__ import annotations

import datetime as dt
import platform
from importlib.metadata import version

import torch

from minidl.runtime import estimates, launch, tables
from minidl.training.environment import driver, tile_hash


def machine() -> dict[str, str]:
    """Device, driver, versions, date, estimates, and tile tables other than the package's: what results depend on.

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
        "estimates": estimates.digest(launch.target())[:12],
        **({"tile_tables": f"{tables.CHOSEN} {tile_hash()}"} if tables.CHOSEN else {}),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
    }
