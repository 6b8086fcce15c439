"""All arithmetic of minidl: Triton kernels and their launchers on plain torch tensors.

Importing this package decides once where kernels run. With a CUDA device they are compiled; without
one, Triton's interpreter runs the same source on the CPU. Triton reads the choice while it is being
imported, so it is made here, before any kernel module. A value of TRITON_INTERPRET that the user has
set is obeyed.
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
