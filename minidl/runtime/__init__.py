"""Launch kernels: target, tiles, precision, tensor descriptors and the launch cache. No kernel is imported here.

Read `launch` first, then `target`, `tiles`, `precision`, and `launch_cache`. Importing this package decides where
kernels run: compiled with a CUDA device, else in Triton's interpreter on the CPU. Triton reads the decision when it is
imported, so it is made here, before any kernel module. A value of TRITON_INTERPRET set by the user is obeyed.
"""

import os
import sys
from importlib import metadata

import torch

OLDEST = 3, 6  # of Triton


def _choose_where_kernels_run() -> None:
    if "TRITON_INTERPRET" in os.environ or torch.cuda.is_available():
        return
    if "triton" in sys.modules:
        raise ImportError(
            "Triton was imported before minidl on a machine without a CUDA device, so it is set to compile for a "
            "missing GPU; import minidl first, or set TRITON_INTERPRET=1 in the environment"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def _check_version() -> None:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:  # a build with another name
        return
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise ImportError(f"minidl needs Triton 3.6 or newer, got {version}; run pip install --upgrade triton")


_choose_where_kernels_run()
_check_version()
