"""Files of a run: JSON and safetensors, each written whole or not at all.

A file is written to a temporary sibling, flushed to the disk and renamed over its final name, and then the folder is
flushed: a reader finds the old content or the new, whenever the machine stops. Tensor files carry a checksum of their
values, so that a damaged one is refused and never used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl.data.parsing import parse_json
from minidl.training.errors import damaged

if TYPE_CHECKING:
    import torch

_CHECKSUM = "sha256"
_PART = ".part"


def write_bytes(path: Path, content: bytes) -> None:
    """Put `content` at `path`, whole or not at all. Raises OSError naming `path`, with the old content still there."""
    try:
        # A part of the name: the whole of a long one would be too long with what is added.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=_PART)
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


def is_folder(path: Path) -> bool:
    """Whether there is a folder; False, too, for a name that no file can have."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_bytes(path: Path) -> bytes:
    """The content of a run's file. Raises FileNotFoundError, and DamagedError when there is something else than a file.

    A path through a file raises NotADirectoryError.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        raise
    except OSError as error:
        raise damaged(path, error.strerror or error) from None


def read_text(path: Path) -> str:
    """`read_bytes` of UTF-8 text. Raises DamagedError for anything else, too."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise damaged(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises as `read_bytes`, and DamagedError when it is anything else."""
    raw = read_bytes(path)
    try:
        value = parse_json(raw, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise damaged(path, error) from None
    if not isinstance(value, dict):
        raise damaged(path, "no JSON object")
    return value


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """`write_bytes` of tensors as safetensors, with a checksum of their values; returns the checksum."""
    from safetensors.torch import save

    on_cpu = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    checksum = _checksum(on_cpu)
    write_bytes(path, save(on_cpu, metadata={_CHECKSUM: checksum}))
    return checksum


def read_tensors(path: Path, checksum: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors that `write_tensors` wrote, when it returned `checksum` if that is given.

    Raises FileNotFoundError, and DamagedError for any other content.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    raw = read_bytes(path)
    try:
        tensors = load(raw)
        (length,) = struct.unpack("<Q", raw[:8])
        # It may be null.
        about = parse_json(raw[8 : 8 + length]).get("__metadata__") or {}
    except (SafetensorError, ValueError, KeyError, struct.error) as error:
        raise damaged(path, error) from None
    written = about.get(_CHECKSUM)
    if written != _checksum(tensors):
        raise damaged(path, "its values do not match their checksum")
    if checksum is not None and written != checksum:
        raise damaged(path, "its values are whole, but not those that were saved under this name")
    return tensors


def sweep(folder: Path) -> None:
    """Delete what a killed process has left of unfinished files."""
    for path in folder.glob(".*" + _PART):
        remove(path)


def remove(path: Path) -> None:
    """Delete a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def text_checksum(text: str) -> str:
    """SHA-256 of a text file's content."""
    return hashlib.sha256(text.encode()).hexdigest()


def _finite(text: str) -> float:
    """A number of a JSON text; Python reads NaN, Infinity and 1e999 as well, which nothing here has written."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


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
