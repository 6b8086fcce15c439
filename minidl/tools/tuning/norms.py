"""Problems of batch norm's families."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minidl.kernels import norm
from minidl.kernels.norm import alone
from minidl.runtime import launch
from minidl.testing.specs import Case, Make
from minidl.testing.specs import base as inputs_of
from minidl.testing.specs.base import between, tensors
from minidl.tools.tuning.kind import Kind
from minidl.tools.tuning.problem import Call, Problem


def _fused_statistics(case: Case, make: Make) -> Call:
    """Return the call that joins the statistics of bands, one row of x for each."""
    (x,) = case.args
    statistics = torch.stack((x, x * x), 1).to(launch.acc_torch(x.dtype))
    return lambda: norm.batch_statistics(x, 1e-5, None, None, statistics)


def joined_statistics(kind: Kind) -> Iterator[Problem]:
    """Yield statistics of tiles: few channels have many tiles."""
    for bands, C in ((70, 16),) if kind.small else ((3136, 256), (196, 1024)):
        yield kind.problem(f"{bands} bands {C} channels", _fused_statistics, tensors((bands, C)))


def batch_norm(kind: Kind, *wrt: int) -> Iterator[Problem]:
    # Rules of norm_join depend on the number of bands: few channels have many bands.
    more = ((8,), (256,), (1024,), (2048,)) if kind.family == "norm_join" and not kind.small else ()
    for (C,) in (*kind.extents(C=64), *more):
        N = max(alone.MOST // 64 + 1, kind.rest(64 * C))
        vectors = (C,), between(0.5, 2.0, C), (C,), (C,)
        inputs = tensors(inputs_of.images(N, C, 8), *vectors, extra=(True, 0.1, 1e-5, "relu"))
        yield kind.operation(f"{N}x{C}x8x8", "batch_norm", wrt, inputs)


def plane_norm(kind: Kind) -> Iterator[Problem]:
    for C, size in ((16, 9), (64, 5)) if kind.small else ((64, 56), (64, 7), (3, 224)):
        N = max(2, kind.rest(C * size**2))
        vectors = (C,), between(0.5, 2.0, C), (C,), (C,)
        inputs = tensors((N, C, size, size), *vectors, extra=(True, 0.1, 1e-5, "relu"))
        yield kind.operation(f"{N}x{C}x{size}x{size}", "batch_norm", (), inputs)


def few_values(kind: Kind) -> Iterator[Problem]:
    """Yield batch norms of so few values per channel that one launch is enough."""
    for M, C in kind.extents(M=alone.MOST, C=256):
        vectors = (C,), between(0.5, 2.0, C), (C,), (C,)
        inputs = tensors((M, C), *vectors, extra=(True, 0.1, 1e-5, "relu"))
        yield kind.operation(f"{M}x{C}", "batch_norm", (), inputs)


def fold(kind: Kind) -> Iterator[Problem]:
    vectors = (512,), (512,), between(0.5, 2.0, 512), (512,), (512,)
    inputs = tensors((512, 64, 3, 3), *vectors, extra=(1e-5,))
    yield kind.operation("512 channels", "fold_batch_norm", (), inputs)
