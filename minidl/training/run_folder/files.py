"""Read and write JSON, text and safetensors files, atomically (see `write_files`).

Tensor files and sealed JSON files contain a checksum, so that damaged files are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl.common import read_files, write_files
from minidl.data.parsing import parse_json
from minidl.errors import damaged

if TYPE_CHECKING:
    import torch

write_bytes = write_files.write_bytes
make_folder = write_files.make_folder
flush_folder = write_files.flush_folder
_SEAL = "checksum"  # the key of the SHA-256 of all other entries of a JSON object


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text. Raises OSError."""
    write_bytes(path, text_bytes(text))


def text_bytes(text: str) -> bytes:
    """Return the bytes that `write_text` writes."""
    # A file name that is not UTF-8 has half surrogates: they are escaped, as in JSON.
    return text.encode(errors="backslashreplace")


def write_json(path: Path, value: Any, sealed: bool = False) -> None:
    """Write a value as indented JSON, a `sealed` object with a checksum of its content.

    Raises OSError, and ValueError for NaN and infinity, which JSON does not support.
    """
    write_bytes(path, json_bytes({**value, _SEAL: json_checksum(value)} if sealed else value))


def json_bytes(value: Any) -> bytes:
    """Return the bytes that `write_json` writes."""
    return text_bytes(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_json_lines(path: Path, values: list[dict[str, Any]]) -> None:
    """Write one JSON object per line. Raises OSError."""
    write_text(path, "".join(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n" for value in values))


def is_folder(path: Path) -> bool:
    """Return whether the path is a folder; False for an invalid name."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raises FileNotFoundError, and DamagedError if the path is not a regular file.

    A path through a file raises NotADirectoryError.
    """
    try:
        return read_files.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        raise
    except OSError as error:
        raise damaged(path, error.strerror or error) from None


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file. Raises as `read_bytes`, and DamagedError for other content."""
    return as_text(read_bytes(path), path)


def as_text(raw: bytes, path: Path) -> str:
    """Decode the content of a file, see `read_text`."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise damaged(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, without its seal.

    Raises as `read_bytes`, and DamagedError for other content or a seal that does not match.
    """
    return as_json(read_bytes(path), path)


def as_json(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse the content of a file, see `read_json`."""
    try:
        value = parse_json(raw, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise damaged(path, error) from None
    if not isinstance(value, dict):
        raise damaged(path, "not a JSON object")
    if _SEAL in value and value.pop(_SEAL) != json_checksum(value):  # older files have no seal
        raise damaged(path, "its content does not match its checksum")
    return value


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file with the metadata `about` and a checksum of all; return the checksum. Raises OSError."""
    content, checksum = write_files.tensor_bytes(tensors, about)
    write_bytes(path, content)
    return checksum


def read_tensors(path: Path, checksum: str | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors in a file of `write_tensors`, whose checksum must be `checksum` if given.

    Raises FileNotFoundError, and DamagedError for any other content.
    """
    return as_tensors(read_bytes(path), path, checksum)[0]


def as_tensors(raw: bytes, path: Path, checksum: str | None = None) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors in the content of a file, and its metadata, see `read_tensors`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        (length,) = struct.unpack("<Q", raw[:8])
        header = parse_json(raw[8 : 8 + length])
        _check_shapes(header)
        tensors = load(raw)
        about = dict(header.get("__metadata__") or {})  # it may be null
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise damaged(path, error) from None
    written = about.pop(write_files.CHECKSUM, None)
    if written != write_files.checksum(tensors, about):
        raise damaged(path, "its values do not match their checksum")
    if checksum is not None and written != checksum:
        raise damaged(path, "its values are intact, but are not those saved under this name")
    return tensors, about


def _check_shapes(header: dict[str, Any]) -> None:
    """Raise ValueError for a shape whose strides overflow 64 bits, which safetensors accepts if it contains a 0."""
    for name, entry in header.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if isinstance(shape, list) and math.prod(max(size, 1) for size in shape if isinstance(size, int)) >= 2**63:
            raise ValueError(f"{name[:60]} has a shape of {len(shape)} sizes whose product is beyond 64 bits")


def sweep(folder: Path) -> None:
    """Delete the unfinished files of a killed process."""
    for path in folder.glob(".*" + write_files.PART):
        if write_files.is_part(path.name):
            write_files.remove(path)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    with read_files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_checksum(text: str) -> str:
    """Return the SHA-256 of a text file's content."""
    return hashlib.sha256(text.encode()).hexdigest()


def _finite(text: str) -> float:
    """Parse a finite number; Python would also accept NaN, Infinity and 1e999."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def json_checksum(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object as it is read back, with string keys and lists for tuples."""
    plain = json.loads(json.dumps(value, allow_nan=False))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
