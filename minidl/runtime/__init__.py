"""Launch kernels. No kernel is imported here; kernel modules import `launch`, which has the names of most modules.

Read in this order:

1. `target` (where kernels run), `precision` (how float32 products are computed), `records` (arguments of kernels)
2. `tiles` (block sizes, warps and stages) with `tile_tables` and `cost_model`
3. `kernel_launch` (run a kernel), `descriptors` and `prepared_launch` (a launch without its tensors)
4. `launch_hooks` (launches recorded or watched), `launch_tape` (launches recorded while they run)
5. `launch_cache` (launches repeated without Python), `dependent_launch`, `cache_keys`, `kernel_source`, `streams`

Importing this package decides where kernels run: compiled with a CUDA device, else in Triton's interpreter on the CPU,
or compiled for it (`minidl.cpu`) if the environment variable MINIDL_CPU is "compiled", which commands set if a C
compiler works. Triton reads the decision when it is imported, so it is made here, before any kernel module. A value of
TRITON_INTERPRET set by the user is obeyed.
"""

import os
import sys
from importlib import metadata

import torch

from minidl.cpu import build

OLDEST = 3, 6  # of Triton


def _choose_where_kernels_run() -> None:
    if (choice := os.environ.get("MINIDL_CPU", "interpreted")) not in ("interpreted", "compiled"):
        raise ImportError(f"MINIDL_CPU is {choice!r}, expected 'interpreted' or 'compiled'")
    if "TRITON_INTERPRET" in os.environ or torch.cuda.is_available():
        return
    if choice == "compiled":
        if build.compiler() is None:
            raise ImportError(f"MINIDL_CPU is 'compiled', but {build.NO_COMPILER}")
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
