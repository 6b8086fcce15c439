"""Scales and shifts that batch norms compute from running statistics, for one call of a module at once.

The scale and the shift of some channels take a launch of 2 us, and ResNet-50 in evaluation has 53 of them. A call of a
module records its requests; the next call of the same module computes all of them at the first request: it concatenates
the vectors, and one launch computes every result. The numbers are the same. If torch has changed a tensor since, or
minidl may have (an update, a batch norm in training), each result is computed on request, as in the first call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from minidl.autograd import deferred
from minidl.kernels.norm import fold as kernels
from minidl.kernels.norm.launches import Statistics

__all__: list[str] = []  # no public operations

_NAME = "folds"
_ALIGNED = 8  # results begin at multiples of 8 numbers, or 16 bytes, as kernels expect
Vectors = tuple[torch.Tensor | None, ...]
Key = tuple[Any, ...]  # function, settings, and the vectors' ids


class _Requests:
    """The requests of a module's calls, with their vectors, and in groups that one launch computes.

    Threads may call one module: both change under the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.keys: dict[Key, tuple[Any, ...]] = {}
        self.groups: list[_Group] | None = None


_requests: weakref.WeakKeyDictionary[Any, _Requests] = weakref.WeakKeyDictionary()


class _Fold(NamedTuple):
    vectors: Vectors  # referenced, so that no other tensor gets the id of one
    versions: list[int]
    results: tuple[torch.Tensor, ...]


class _Group(NamedTuple):
    """Requests that one launch computes: the keys, and the vectors in columns, one column an argument."""

    keys: list[Key]
    columns: list[list[Any] | None]  # weak references
    kind: Any

    def vectors(self) -> list[list[torch.Tensor] | None] | None:
        """Return the columns; None if one was freed or has another dtype, device or shape now."""
        columns = [None if refs is None else [ref() for ref in refs] for refs in self.columns]
        exist = all(vector is not None for column in columns if column is not None for vector in column)
        return columns if exist and _kind(columns) == self.kind else None


def fold(
    dtype: torch.dtype, conv_bias: torch.Tensor | None, mean: torch.Tensor, var: torch.Tensor,
    weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return scale and shift of a convolution with results of `dtype`, as `kernels.fold` with `wide`."""
    scale, shift = _fold_of_call(_fold, (mean, var, conv_bias, weight, bias), dtype, float(eps))
    return scale, shift


def running_statistics(mean: torch.Tensor, var: torch.Tensor, eps: float, dtype: torch.dtype) -> Statistics:
    """Return `kernels.running_statistics`."""
    return Statistics(*_fold_of_call(kernels.running_statistics, (mean, var), float(eps), dtype))


def forget() -> None:
    """Drop the results computed so far: running statistics change."""
    call = deferred.call()
    if call is not None:
        call.changed = True


def _fold(mean: torch.Tensor, var: torch.Tensor, conv_bias: Any, weight: Any, bias: Any, dtype: Any, eps: Any) -> Any:
    return kernels.fold(mean.new_empty(len(mean), dtype=dtype), conv_bias, mean, var, weight, bias, eps, wide=True)


def _fold_of_call(make: Callable[..., Any], vectors: Vectors, *how: Hashable) -> tuple[torch.Tensor, ...]:
    """Return make(*vectors, *how), computed alone or with others."""
    call = deferred.call()
    if call is None or call.changed:
        return tuple(make(*vectors, *how))
    ready: dict[Key, _Fold] | None = call.notes.get(_NAME)
    if ready is None:
        requests = _requests.get(call.owner) or _requests.setdefault(call.owner, _Requests())
        ready = call.notes[_NAME] = _compute_requests(requests)
    key = make, how, *map(id, vectors)
    folded = ready.get(key)
    if folded is not None:
        if folded.versions == _versions(vectors):
            return folded.results
    else:
        requests = _requests[call.owner]
        refs = tuple([None if vector is None else weakref.ref(vector) for vector in vectors])
        # A tensor has one weakref: another one means that its id was reused.
        if requests.keys.get(key) != refs and all(map(_fits, vectors)):
            with requests.lock:
                requests.keys[key], requests.groups = refs, None
    return tuple(make(*vectors, *how))


def _fits(vector: torch.Tensor | None) -> bool:
    if vector is None:
        return True
    versioned = not vector.is_inference()
    return versioned and vector.dim() == 1 and vector.is_contiguous() and len(vector) % _ALIGNED == 0


def _versions(vectors: Vectors) -> list[int]:
    return [vector._version for vector in vectors if vector is not None]


def _kind(columns: list[Any]) -> list[Any]:
    present = [column for column in columns if column is not None]
    return [
        ([v.dtype for v in column], [v.device for v in column], [v.shape for v in column]) for column in present
    ]  # fmt: skip


def _compute_requests(requests: _Requests) -> dict[Key, _Fold]:
    """Compute every recorded request whose tensors still exist."""
    with requests.lock:
        groups = _grouped(requests) if requests.groups is None else requests.groups
        columns_of = [group.vectors() for group in groups]
        if None in columns_of:
            groups = _grouped(requests)
            columns_of = [group.vectors() for group in groups]
        requests.groups = groups
    ready: dict[Key, _Fold] = {}
    for group, columns in zip(groups, columns_of, strict=True):
        assert columns is not None
        assert columns[0] is not None
        make, how = group.keys[0][:2]
        outputs = make(*(None if column is None else torch.cat(column) for column in columns), *how)
        lengths = [len(vector) for vector in columns[0]]
        none: list[Any] = [None] * len(lengths)
        members = zip(*(column or none for column in columns), strict=True)
        results = zip(*(result.split(lengths) for result in outputs), strict=True)
        for key, vectors, parts in zip(group.keys, members, results, strict=True):
            ready[key] = _Fold(vectors, _versions(vectors), parts)
    return ready


def _grouped(requests: _Requests) -> list[_Group]:
    """Return the groups of several requests that one launch can compute; drop requests whose vector was freed."""
    alike: dict[Hashable, list[tuple[Key, tuple[Any, ...]]]] = {}
    for key, refs in list(requests.keys.items()):
        vectors = tuple(None if ref is None else ref() for ref in refs)
        if any(ref is not None and vector is None for ref, vector in zip(refs, vectors, strict=True)):
            del requests.keys[key]
            continue
        kind = tuple(None if vector is None else (vector.dtype, vector.device) for vector in vectors)
        alike.setdefault((*key[:2], kind), []).append((key, refs))
    groups = []
    for members in alike.values():
        if len(members) > 1:
            columns = [
                None if column[0] is None else list(column) for column in zip(*(r for _, r in members), strict=True)
            ]
            columns_now = [None if column is None else [ref() for ref in column] for column in columns]
            groups.append(_Group([key for key, _ in members], columns, _kind(columns_now)))
    return groups
