"""What batch norms make of their running statistics, for all of a module's call at once.

A scale and a shift of some channels is a launch of 2 us, and ResNet-50 in evaluation has 53 of them. A module's call
notes what it asks for; the next call of the same module makes all of that when the first of it is asked for: the
vectors are copied behind one another, and one launch makes what is wanted of each. The numbers are the same. Where a
tensor was changed since, by torch, or may have been by minidl (an update, a batch norm in training), each is made when
it is asked for, as in the first call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from minidl.autograd import deferred
from minidl.kernels.norm import fold as kernels
from minidl.kernels.norm.statistics import Statistics

__all__: list[str] = []  # used by operations, none itself

_NAME = "folds"
_ALIGNED = 8  # results begin at multiples of so many numbers: of 16 bytes, as kernels expect
Vectors = tuple[torch.Tensor | None, ...]
Key = tuple[Any, ...]  # what makes it, how, and the vectors' ids


class _Asked:
    """What each call of a module has asked for, with the vectors, and that in groups made at once.

    Threads may call one module: both change under the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.keys: dict[Key, tuple[Any, ...]] = {}
        self.groups: list[_Group] | None = None


_asked: weakref.WeakKeyDictionary[Any, _Asked] = weakref.WeakKeyDictionary()


class _Made(NamedTuple):
    vectors: Vectors  # kept, so that no other tensor gets the id of one
    versions: list[int]
    results: tuple[torch.Tensor, ...]


class _Group(NamedTuple):
    """What one launch makes: the keys, and the vectors in columns, one of each kind."""

    keys: list[Key]
    columns: list[list[Any] | None]  # weak references
    kind: Any

    def vectors(self) -> list[list[torch.Tensor] | None] | None:
        """The columns; None where one is gone or is another kind of tensor now."""
        found = [None if refs is None else [ref() for ref in refs] for refs in self.columns]
        there = all(vector is not None for column in found if column is not None for vector in column)
        return found if there and _kind(found) == self.kind else None


def fold(
    dtype: torch.dtype, conv_bias: torch.Tensor | None, mean: torch.Tensor, var: torch.Tensor,
    weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Scale and shift of a convolution with results of `dtype`, as `kernels.fold` with `wide`."""
    scale, shift = _of_call(_fold, (mean, var, conv_bias, weight, bias), dtype, float(eps))
    return scale, shift


def running_statistics(mean: torch.Tensor, var: torch.Tensor, eps: float, dtype: torch.dtype) -> Statistics:
    """As `kernels.running_statistics`."""
    return Statistics(*_of_call(kernels.running_statistics, (mean, var), float(eps), dtype))


def forget() -> None:
    """Running statistics change: what was made of them before is not used."""
    call = deferred.call()
    if call is not None:
        call.changed = True


def _fold(mean: torch.Tensor, var: torch.Tensor, conv_bias: Any, weight: Any, bias: Any, dtype: Any, eps: Any) -> Any:
    return kernels.fold(mean.new_empty(len(mean), dtype=dtype), conv_bias, mean, var, weight, bias, eps, wide=True)


def _of_call(make: Callable[..., Any], vectors: Vectors, *how: Hashable) -> tuple[torch.Tensor, ...]:
    """make(*vectors, *how), of this alone or with others."""
    call = deferred.call()
    if call is None or call.changed:
        return tuple(make(*vectors, *how))
    ready: dict[Key, _Made] | None = call.notes.get(_NAME)
    if ready is None:
        ready = call.notes[_NAME] = _all(_asked.setdefault(call.owner, _Asked()))
    key = make, how, *map(id, vectors)
    found = ready.get(key)
    if found is not None:
        if found.versions == _versions(vectors):
            return found.results
    elif all(map(_fits, vectors)):
        asked = _asked[call.owner]
        refs = tuple(None if vector is None else weakref.ref(vector) for vector in vectors)
        with asked.lock:
            if asked.keys.get(key) != refs:  # that of a tensor is one object: else what had its id is gone
                asked.keys[key], asked.groups = refs, None
    return tuple(make(*vectors, *how))


def _fits(vector: torch.Tensor | None) -> bool:
    if vector is None:
        return True
    versioned = not vector.is_inference()
    return versioned and vector.dim() == 1 and vector.is_contiguous() and len(vector) % _ALIGNED == 0


def _versions(vectors: Vectors) -> list[int]:
    return [vector._version for vector in vectors if vector is not None]


def _kind(columns: list[Any]) -> list[Any]:
    kept = [column for column in columns if column is not None]
    return [
        ([v.dtype for v in column], [v.device for v in column], [v.shape for v in column]) for column in kept
    ]  # fmt: skip


def _all(asked: _Asked) -> dict[Key, _Made]:
    """Everything that was asked for before and whose tensors there still are."""
    with asked.lock:
        groups = _grouped(asked) if asked.groups is None else asked.groups
        columns_of = [group.vectors() for group in groups]
        if None in columns_of:
            groups = _grouped(asked)
            columns_of = [group.vectors() for group in groups]
        asked.groups = groups
    ready: dict[Key, _Made] = {}
    for group, columns in zip(groups, columns_of, strict=True):
        assert columns is not None
        assert columns[0] is not None
        make, how = group.keys[0][:2]
        made = make(*(None if column is None else torch.cat(column) for column in columns), *how)
        lengths = [len(vector) for vector in columns[0]]
        none: list[Any] = [None] * len(lengths)
        members = zip(*(column or none for column in columns), strict=True)
        results = zip(*(result.split(lengths) for result in made), strict=True)
        for key, vectors, parts in zip(group.keys, members, results, strict=True):
            ready[key] = _Made(vectors, _versions(vectors), parts)
    return ready


def _grouped(asked: _Asked) -> list[_Group]:
    """What can be made at once, several of each; forgets what has a vector that is gone."""
    alike: dict[Hashable, list[tuple[Key, tuple[Any, ...]]]] = {}
    for key, refs in list(asked.keys.items()):
        vectors = tuple(None if ref is None else ref() for ref in refs)
        if any(ref is not None and vector is None for ref, vector in zip(refs, vectors, strict=True)):
            del asked.keys[key]
            continue
        kind = tuple(None if vector is None else (vector.dtype, vector.device) for vector in vectors)
        alike.setdefault((*key[:2], kind), []).append((key, refs))
    groups = []
    for members in alike.values():
        if len(members) > 1:
            columns = [
                None if column[0] is None else list(column) for column in zip(*(r for _, r in members), strict=True)
            ]
            vectors_ = [None if column is None else [ref() for ref in column] for column in columns]
            groups.append(_Group([key for key, _ in members], columns, _kind(vectors_)))
    return groups
