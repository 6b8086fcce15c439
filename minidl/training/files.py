"""Files of a run: JSON and safetensors, each written whole or not at all.

A file is written to a temporary sibling, flushed to the disk and renamed over its final name, and then the folder is
flushed: a reader finds the old content or the new, whenever the machine stops. Tensor files carry a checksum of their
values, so that a damaged one is refused and never used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl.training.errors import DamagedError

if TYPE_CHECKING:
    import torch

_CHECKSUM = "sha256"
_PART = ".part"


def write_bytes(path: Path, content: bytes) -> None:
    """Put `content` at `path`, whole or not at all. Raises OSError naming `path`, with the old content still there."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PART)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _flush_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of a value as indented JSON. Raises ValueError for NaN and infinity, which JSON has not."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_json_lines(path: Path, values: list[dict[str, Any]]) -> None:
    """`write_bytes` of one JSON object per line."""
    write_text(path, "".join(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n" for value in values))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError, and DamagedError when it is anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged ({error}); restore it or train again") from None
    if not isinstance(value, dict):
        raise DamagedError(f"{path} is damaged (no JSON object); restore it or train again")
    return value


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """`write_bytes` of tensors as safetensors, with a checksum of their values; returns the checksum."""
    from safetensors.torch import save

    on_cpu = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    checksum = _checksum(on_cpu)
    write_bytes(path, save(on_cpu, metadata={_CHECKSUM: checksum}))
    return checksum


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors that `write_tensors` wrote. Raises FileNotFoundError, and DamagedError for any other content."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    raw = path.read_bytes()
    try:
        tensors = load(raw)
        (length,) = struct.unpack("<Q", raw[:8])
        written = json.loads(raw[8 : 8 + length]).get("__metadata__", {}).get(_CHECKSUM)
    except (SafetensorError, ValueError, KeyError, struct.error, RecursionError) as error:
        raise DamagedError(f"{path} is damaged ({error}); restore it or train again") from None
    if written != _checksum(tensors):
        raise DamagedError(f"{path} is damaged (its values do not match their checksum); restore it or train again")
    return tensors


def sweep(folder: Path) -> None:
    """Delete what a killed process has left of unfinished files."""
    for path in folder.glob(".*" + _PART):
        remove(path)


def remove(path: Path) -> None:
    """Delete a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _flush_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut; file systems that cannot do it are left as they are."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
