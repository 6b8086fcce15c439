"""Weights in files: safetensors, so that nothing is pickled and others read them."""

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

_TREE = "minidl.tree"  # in the metadata: what is not a plain dict of tensors
_RESERVED = "__metadata__"  # is no name of a tensor in a safetensors file


def save(obj: Any, f: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a module's state, a dict of tensors, or dicts, lists and tuples of these with numbers, text and None.

    The file at `f` is whole or as before; one that is open for bytes is written to. A dict of tensors is a plain
    safetensors file with these names, contiguous; the structure of anything else is JSON in its metadata. Raises
    TypeError, naming the place, for anything else, ValueError for what contains itself, and OSError.
    """
    value = obj.state_dict() if isinstance(obj, Module) else obj
    tensors: dict[str, torch.Tensor] = {}
    try:
        tree = _taken(value, "", tensors)
    except RecursionError:
        raise ValueError("minidl.save: it contains itself, or is nested deeper than Python follows") from None
    # safetensors refuses memory that two names share.
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
    """What `save` wrote, or the dict of torch tensors of any safetensors file, on the CPU or at `map_location`.

    A file that is open is read to its end.

    Raises OSError, and ValueError for another kind of file or one that does not match its checksum; there is nothing
    but data in it, whatever `weights_only`.
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
        return _put(json.loads(about[_TREE]), tensors)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{f}: its metadata {_TREE} is not the structure that minidl.save writes") from None


def _taken(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The structure of `value` as JSON, its tensors put into `tensors` by the names that stand for them there."""
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
        return {"dict": [[key, _taken(item, f"{inner}{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_taken(item, f"{inner}{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    # Of NumPy, whose bool is no number.
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", None) == ():
        return bool(value)
    raise TypeError(
        f"minidl.save: {name or 'it'} is a {type(value).__name__}; it writes modules, tensors, numbers, text, None and "
        "dicts, lists and tuples of them"
    )


def _put(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `_taken`. Raises ValueError, KeyError or TypeError for what that does not give."""
    if not isinstance(tree, dict):
        return tree
    ((kind, inside),) = tree.items()
    if kind not in ("tensor", "dict", "list", "tuple"):
        raise ValueError(kind)
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {key: _put(item, tensors) for key, item in inside}
    items = (_put(item, tensors) for item in inside)
    return list(items) if kind == "list" else tuple(items)
