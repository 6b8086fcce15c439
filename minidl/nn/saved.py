"""Saving and loading weights as safetensors, without pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any

import torch

from minidl.common import write_files
from minidl.kernels import memory_layout
from minidl.nn.module import Module
from minidl.tensors import Tensor

_TREE = "minidl.tree"  # metadata key: the structure of anything but a plain dict of tensors
_RESERVED = "__metadata__"  # cannot be the name of a tensor in a safetensors file


def save(obj: Any, f: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a module's state, a dict of tensors, or dicts, lists and tuples of these with numbers, text and None.

    The file at `f` is replaced atomically; a binary file object is written to. A dict of tensors is a plain
    safetensors file with these names, contiguous; the structure of anything else is JSON in its metadata. Raises
    TypeError, with the position, for anything else, ValueError for a value that contains itself, and OSError.
    """
    value = obj.state_dict() if isinstance(obj, Module) else obj
    tensors: dict[str, torch.Tensor] = {}
    try:
        tree = _structure(value, "", tensors)
    except RecursionError:
        raise ValueError("minidl.save: the value contains itself or is nested too deeply") from None
    # safetensors rejects overlapping memory.
    last = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < last:
            tensors[name] = tensor.clone()
        last = max(last, tensor.data_ptr() + memory_layout.span(tensor) * tensor.element_size())
    plain = isinstance(value, Mapping) and list(tensors) == list(value)
    content, _ = write_files.tensor_bytes(tensors, {} if plain else {_TREE: json.dumps(tree)})
    if isinstance(f, str | os.PathLike):
        write_files.write_bytes(Path(f), content)
    else:
        f.write(content)


def load(
    f: str | os.PathLike[str] | IO[bytes], map_location: torch.device | str | None = None, weights_only: bool = True
) -> Any:
    """Return what `save` wrote, or the torch tensors of any safetensors file, on the CPU or at `map_location`.

    A file object is read to its end. `weights_only` is ignored: the file contains only data.

    Raises OSError, and ValueError for another kind of file or one that does not match its checksum.
    """
    try:
        tensors, about = write_files.read_tensors(Path(f) if isinstance(f, str | os.PathLike) else f.read())
    except ValueError as error:
        raise ValueError(f"{f}: {error}; minidl.load reads safetensors, torch.load what torch.save wrote") from None
    if map_location is not None:
        tensors = {name: tensor.to(map_location) for name, tensor in tensors.items()}
    if _TREE not in about:
        return tensors
    try:
        return _restore(json.loads(about[_TREE]), tensors)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{f}: its metadata {_TREE} is not the structure that minidl.save writes") from None


def _structure(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the structure of `value` for JSON, with tensors replaced by names; the tensors go into `tensors`."""
    if isinstance(value, Module):
        value = value.state_dict()
    if isinstance(value, Tensor):
        value = value.data
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise TypeError(f"minidl.save: {name or 'it'} is of layout {value.layout}; write its values and indices")
        while name in tensors or name == _RESERVED:
            name += "_"
        tensors[name] = value.detach()
        return {"tensor": name}
    inner = f"{name}." if name else ""
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"minidl.save: {name or 'the dict'} has the key {key!r}, expected text or an integer")
        return {"dict": [[key, _structure(item, f"{inner}{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_structure(item, f"{inner}{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    # NumPy scalars; its bool is no Real.
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", None) == ():
        return bool(value)
    raise TypeError(
        f"minidl.save: {name or 'it'} is a {type(value).__name__}; it writes modules, tensors, numbers, text, None and "
        "dicts, lists and tuples of them"
    )


def _restore(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Invert `_structure`. Raises ValueError, KeyError or TypeError for other input."""
    if not isinstance(tree, dict):
        return tree
    ((kind, inside),) = tree.items()
    if kind not in ("tensor", "dict", "list", "tuple"):
        raise ValueError(kind)
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {key: _restore(item, tensors) for key, item in inside}
    items = (_restore(item, tensors) for item in inside)
    return list(items) if kind == "list" else tuple(items)
