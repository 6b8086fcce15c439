"""How kernels are launched: compiled or interpreted, in which precision, with which tile. Knows no kernel.

Importing this package decides where kernels run. With a CUDA device they are compiled; without one, Triton's
interpreter runs the same source on the CPU. Triton reads the choice while it is imported, so it is made here, before
any kernel module. A value of TRITON_INTERPRET set by the user is obeyed.
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
            "Triton was imported before minidl on a machine without a CUDA device, so it is set to compile for a GPU "
            "that is not there; import minidl first, or set TRITON_INTERPRET=1 in the environment"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def _check_version() -> None:
    """Before an older one fails at whatever it has not."""
    try:
        found = metadata.version("triton")
    except metadata.PackageNotFoundError:  # a build of another name
        return
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        raise ImportError(f"minidl needs Triton 3.6 or newer, this is {found}; call pip install --upgrade triton")


_choose_where_kernels_run()
_check_version()
