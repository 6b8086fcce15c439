"""Where a command runs its kernels, chosen before Triton is imported, which reads TRITON_INTERPRET only then."""

from __future__ import annotations

import os

from minidl.training.errors import ConfigError

_VARIABLE = "TRITON_INTERPRET"
_TILES = "MINIDL_TILES"


def choose(device: str) -> None:
    """Set up this process for "auto", "cuda" or "cpu".

    Raises ConfigError when a CUDA device is needed and missing, when the user's TRITON_INTERPRET contradicts it, and
    when MINIDL_TILES names invalid tile tables.
    """
    given = os.environ.get(_VARIABLE)
    interpret = given is not None and given.lower() in ("1", "true", "on", "yes", "y")
    if device == "cpu":
        if given is not None and not interpret:
            raise ConfigError(f"--device cpu interprets kernels, but {_VARIABLE}={given} is set: unset it")
        os.environ[_VARIABLE] = "1"
    elif device == "cuda" and interpret:
        raise ConfigError(f"--device cuda compiles kernels, but {_VARIABLE}={given} is set: unset it")
    elif device == "cuda" or (given is not None and not interpret):
        _require_cuda("--device cuda" if device == "cuda" else f"{_VARIABLE}={given}")
    if os.environ.get(_TILES):
        from minidl.runtime import tables

        try:
            tables.check()
        except tables.TableError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None


def begin() -> None:
    """Wake the device that was chosen, where it is a GPU: its first use takes half a second, and Triton's one."""
    import torch

    from minidl.tensors import default_device

    if default_device().type == "cuda":
        from minidl.runtime import ahead

        torch.empty(1, device="cuda")
        ahead.get_ready()


def _require_cuda(what: str) -> None:
    import torch

    if torch.cuda.is_available():
        return
    why = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
    raise ConfigError(
        f"{what} needs a GPU, but {why}; use --device cpu (or auto), or see what `minidl doctor` finds missing"
    )
