"""All arithmetic of minidl: Triton kernels and their launchers on plain torch tensors, a chapter per file or folder.

Read `elementwise`, `softmax`, `reduce` and `norm` first, then `plan`, `epilogue` and `gemm`, then `conv`.
"""

import importlib.util
from types import ModuleType

import minidl.runtime  # noqa: F401 (decides where kernels run, before Triton is imported)


def __getattr__(name: str) -> ModuleType:
    """Import a chapter on first use: `minidl.kernels.gemm`."""
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
