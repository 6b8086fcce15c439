"""What batch norms make of their running statistics, for all of a module's call at once.

A scale and a shift of some channels is a launch of 2 us, and ResNet-50 in evaluation has 53 of them. A module's call
notes what it asks for; the next call of the same module makes all of that when the first of it is asked for: the
vectors are copied behind one another, and one launch makes what is wanted of each. The numbers are the same. Where a
tensor was changed since, by torch, or may have been by minidl (an update, a batch norm in training), each is made when
it is asked for, as in the first call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from minidl import later
from minidl.kernels.norm import fold as kernels
from minidl.kernels.norm.statistics import Statistics

__all__: list[str] = []  # used by operations, none itself

_NAME = "folds"
_ALIGNED = 8  # results begin at multiples of so many numbers: of 16 bytes, as kernels expect
Vectors = tuple[torch.Tensor | None, ...]
Key = tuple[Callable[..., Any], tuple[Hashable, ...], tuple[int | None, ...]]
# What each module's call has asked for, with the vectors.
_asked: weakref.WeakKeyDictionary[Any, dict[Key, tuple[Any, ...]]] = weakref.WeakKeyDictionary()


class _Made(NamedTuple):
    vectors: Vectors  # kept, so that no other tensor gets the id of one
    versions: tuple[int, ...]
    results: tuple[torch.Tensor, ...]


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
    call = later.call()
    if call is not None:
        call.changed = True


def _fold(mean: torch.Tensor, var: torch.Tensor, conv_bias: Any, weight: Any, bias: Any, dtype: Any, eps: Any) -> Any:
    return kernels.fold(mean.new_empty(len(mean), dtype=dtype), conv_bias, mean, var, weight, bias, eps, wide=True)


def _of_call(make: Callable[..., Any], vectors: Vectors, *how: Hashable) -> tuple[torch.Tensor, ...]:
    """make(*vectors, *how), of this alone or with others."""
    call = later.call()
    if call is None or call.changed or not all(map(_fits, vectors)):
        return tuple(make(*vectors, *how))
    asked = _asked.setdefault(call.owner, {})
    ready: dict[Key, _Made] | None = call.notes.get(_NAME)
    if ready is None:
        ready = call.notes[_NAME] = _all(asked)
    key = make, how, tuple(None if vector is None else id(vector) for vector in vectors)
    found = ready.get(key)
    if found is not None and found.versions == _versions(vectors):
        return found.results
    asked[key] = tuple(None if vector is None else weakref.ref(vector) for vector in vectors)
    return tuple(make(*vectors, *how))


def _fits(vector: torch.Tensor | None) -> bool:
    if vector is None:
        return True
    versioned = not vector.is_inference()
    return versioned and vector.dim() == 1 and vector.is_contiguous() and len(vector) % _ALIGNED == 0


def _versions(vectors: Vectors) -> tuple[int, ...]:
    return tuple(0 if vector is None else vector._version for vector in vectors)


def _all(asked: dict[Key, tuple[Any, ...]]) -> dict[Key, _Made]:
    """Everything that was asked for before and whose tensors there still are."""
    alike: dict[Hashable, list[tuple[Key, Vectors]]] = {}
    for key, refs in list(asked.items()):
        vectors = tuple(None if ref is None else ref() for ref in refs)
        if any(ref is not None and vector is None for ref, vector in zip(refs, vectors, strict=True)):
            del asked[key]
            continue
        kind = tuple(None if vector is None else (vector.dtype, vector.device) for vector in vectors)
        alike.setdefault((*key[:2], kind), []).append((key, vectors))
    ready: dict[Key, _Made] = {}
    for members in alike.values():
        if len(members) == 1:
            continue
        make, how, _ = members[0][0]
        columns = zip(*(vectors for _, vectors in members), strict=True)
        made = make(*(None if column[0] is None else torch.cat(column) for column in columns), *how)
        start = 0
        for key, vectors in members:
            assert vectors[0] is not None
            end = start + len(vectors[0])
            ready[key] = _Made(vectors, _versions(vectors), tuple(result[start:end] for result in made))
            start = end
    return ready
