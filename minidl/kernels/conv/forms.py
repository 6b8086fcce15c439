"""The forms of a convolution, each a module of this folder.

A form is a module of this folder with

    NAME       its public name; modules that share a name are variants of one form
    DIRECTIONS the directions it supports
    FAMILIES   the tile tables it uses
    able(problem)      True, or `Unsupported` with the reason
    estimate(problem)  microseconds on a GPU, by `costs`; only for problems it supports
    programs(problem)  optional: number of programs in the interpreter; else 1
    FLOAT8     optional: whether it reads 8-bit values, forward
    ADDED      optional: supports a sum before the activation if M is a multiple of this
    OVERLAPS   optional: whether it reads pixels that overlap in memory (`unshuffle`)
    reads_concat_pair(problem)  optional: whether it reads two joined tensors in place
    statistics_bands(problem)   optional: number of row bands whose statistics the kernel returns; 0 for none
    prepare(problem)   tiles, grids, flags, scalars and descriptors: everything `run` needs except tensors
    run(prepared, tensors)

and an entry in FORMS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from minidl.kernels.conv import (
    banded,
    banded_grad_weight,
    batch_back,
    batch_grad_weight,
    batch_tiled,
    boxed,
    boxed_grad_weight,
    depthwise,
    depthwise_grad_weight,
    few_outputs,
    fft,
    paired_box,
    patches_back,
    pixel_back,
    pixel_grad_weight,
    pixel_tiled,
    product,
    unfolded_grad_weight,
)
from minidl.kernels.conv.rewrites import REWRITES
from minidl.runtime import launch

FORMS: tuple[Any, ...] = (
    pixel_tiled, boxed, batch_tiled, paired_box, banded, fft, product, patches_back, few_outputs, batch_back,
    pixel_back, depthwise, pixel_grad_weight, batch_grad_weight, boxed_grad_weight, unfolded_grad_weight,
    banded_grad_weight, depthwise_grad_weight,
)  # fmt: skip


@contextlib.contextmanager
def among(*modules: Any) -> Iterator[None]:
    """Restrict plans to these form modules within a context; for measurements, as modules may share a name."""
    global FORMS  # noqa: PLW0603
    before, FORMS = FORMS, modules
    launch.forget()
    try:
        yield
    finally:
        FORMS = before
        launch.forget()


def names() -> tuple[str, ...]:
    """Return the names accepted by `form=`."""
    return (*dict.fromkeys(form.NAME for form in FORMS), *(rewrite.name for rewrite in REWRITES if rewrite.name))
