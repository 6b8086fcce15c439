"""How kernels are launched: compiled or interpreted, in which precision, with which tile. Knows no kernel.

Importing this package decides where kernels run. With a CUDA device they are compiled; without one, Triton's
interpreter runs the same source on the CPU. Triton reads the choice while it is imported, so it is made here, before
any kernel module. A value of TRITON_INTERPRET set by the user is obeyed.
"""

import os
import sys

import torch


def _choose_where_kernels_run() -> None:
    if "TRITON_INTERPRET" in os.environ or torch.cuda.is_available():
        return
    if "triton" in sys.modules:
        raise ImportError(
            "Triton was imported before minidl on a machine without a CUDA device, so it is set to compile for a GPU "
            "that is not there; import minidl first, or set TRITON_INTERPRET=1 in the environment"
        )
    os.environ["TRITON_INTERPRET"] = "1"


_choose_where_kernels_run()
