"""Specs of pooling of volumes, in two steps: windows of slices, and along the depth. Read `pool` first."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from minidl.kernels import pool
from minidl.testing.specs.base import WANTS_FLOATING, Case, distinct, in_either_order, integers, refuses, tensors
from minidl.testing.specs.make import Make
from minidl.testing.specs.pool import avg_windows, axis_of, maximum, mean, with_distinct


def _volume(make: Make, *sizes: int) -> torch.Tensor:
    return in_either_order(make, make.tensor(make.size(0, 3), make.size(1, 17), *sizes))


def _max_volumes(make: Make) -> Case:
    sizes, kernel, padding, dilation = zip(*(axis_of(make, (1, 1, 2)) for _ in range(3)), strict=True)
    stride = make.choice([None, 1, 2, (1, 2, 3)])
    return Case((distinct(_volume(make, *sizes)), kernel, stride, padding, dilation, bool(make.integer(0, 1))))


def _avg_volumes(make: Make) -> Case:
    sizes, kernel, padding, _ = zip(*(axis_of(make) for _ in range(3)), strict=True)
    sizes = tuple(map(max, sizes, kernel))  # torch refuses a kernel larger than the volume without its padding
    ceil, include = bool(make.integer(0, 1)), bool(make.integer(0, 1))
    stride, divisor = make.choice([None, 1, 2, (1, 2, 3)]), make.choice([None, None, 3, -7])
    return Case((_volume(make, *sizes), kernel, stride, padding, ceil, include, divisor))


def _adaptive_volumes(make: Make) -> Case:
    x = _volume(make, *(make.integer(1, 7) for _ in range(3)))
    return Case((x, make.choice([1, 2, 5, (1, 1, 1), (3, 1, 1), (3, None, 2), (1, 9, 4)])))


_CUBE = (1, 1, 4, 4, 4)
_OF_VOLUMES = (
    refuses(TypeError, WANTS_FLOATING.message, integers(*_CUBE), extra=(2,)),
    refuses(ValueError, r"input has shape \[4, 4\], expected \[N, C, D, H, W\]", (4, 4), extra=(2,)),
)
_VOLUME_WINDOWS = (
    *_OF_VOLUMES,
    refuses(ValueError, "a kernel of depth 5 does not fit into an image of depth 4", _CUBE, kernel_size=(5, 1, 1)),
    refuses(ValueError, "padding 2 is above half of the kernel's depth 3", _CUBE, kernel_size=3, padding=(2, 1, 1)),
    refuses(TypeError, r"kernel_size is \(1, 2\), expected .* or three of them", _CUBE, kernel_size=(1, 2)),
    refuses(ValueError, "stride is 0, expected a whole number from 1", _CUBE, kernel_size=2, stride=0),
)
_VOLUME_OUTPUTS = (
    *_OF_VOLUMES,
    refuses(ValueError, "the volume is 0 x 4 x 4, expected sizes of 1 or more", (1, 2, 0, 4, 4), output_size=1),
    refuses(ValueError, "output_size is .*-1.*, expected a whole number from 0", _CUBE, output_size=-1),
    refuses(TypeError, r"output_size is \(1, 2\), expected", _CUBE, output_size=(1, 2)),
)


SPECS = [
    maximum(
        "max_pool3d",
        F.max_pool3d,
        partial(pool.volume_windows, "max_pool3d"),
        inputs=_max_volumes,
        examples={
            "2x2x2": tensors((3, 33, 4, 6, 4), kernel_size=2),
            "overlapping": tensors((2, 5, 7, 6, 5), kernel_size=3, stride=(2, 1, 2), padding=1),
            "ceil, dilated": tensors((2, 3, 8, 7, 9), kernel_size=(2, 3, 2), stride=3, dilation=2, ceil_mode=True),
        },
        bad=_VOLUME_WINDOWS,
    ),
    mean(
        "avg_pool3d",
        avg_windows(pool.volume_windows, "avg_pool3d"),
        inputs=_avg_volumes,
        examples={
            "2x2x2": tensors((3, 33, 4, 6, 4), kernel_size=2),
            "overlapping": tensors((2, 5, 7, 6, 5), kernel_size=3, stride=2, padding=1, count_include_pad=False),
            "ceil": tensors((2, 3, 8, 7, 9), kernel_size=(2, 3, 2), stride=3, padding=1, ceil_mode=True),
            "divisor": tensors((2, 70, 5, 5, 5), kernel_size=4, stride=1, divisor_override=5),
        },
        bad=(*_VOLUME_WINDOWS, refuses(ValueError, "divisor_override is 0", _CUBE, kernel_size=2, divisor_override=0)),
    ),
    mean(
        "adaptive_avg_pool3d",
        partial(pool.adaptive_volume_windows, "adaptive_avg_pool3d"),
        inputs=_adaptive_volumes,
        examples={
            "shrinking": tensors((3, 33, 5, 7, 4), output_size=(3, 4, 3)),
            "growing": tensors((2, 5, 3, 2, 4), output_size=5),
            "global": tensors((5, 70, 3, 5, 4), output_size=1),
            "slices": tensors((2, 3, 5, 4, 3), output_size=(None, 1, 1)),
        },
        bad=_VOLUME_OUTPUTS,
    ),
    maximum(
        "adaptive_max_pool3d",
        F.adaptive_max_pool3d,
        partial(pool.adaptive_volume_windows, "adaptive_max_pool3d"),
        inputs=with_distinct(_adaptive_volumes),
        examples={
            "halves": tensors((2, 5, 4, 6, 8), output_size=2),
            "global": tensors((5, 70, 3, 5, 4), output_size=1),
            "shrinking": tensors((3, 33, 5, 7, 4), output_size=(3, 4, 3)),
        },
        bad=_VOLUME_OUTPUTS,
    ),
]
