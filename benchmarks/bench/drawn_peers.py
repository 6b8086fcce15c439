"""The best of torch for a drawn row: with cuDNN's search if it ends in time, without peers that are far slower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.bench import drawn_conv
from minidl.runtime import launch
from minidl.tools.bench.measure import Work
from minidl.tools.bench.sides import Call
from minidl.tools.first_line import first_line

# The longest expected search of cuDNN, in seconds; a search cannot be interrupted.
SEARCH = 5.0
# The slowest algorithm computed some 1e9 operations a second: with fewer operations, the search starts at once.
SOON = 1e10
# A search is timed on 1 / FEWER of the images.
FEWER = 32
# From this ratio to the other memory format, both without a search, a search cannot make the peer the best.
FAR, NOISE = 3.0, 0.02  # ms
TF32 = "tf32"  # a setting `dtype` of drawn rows: float32 with products in this precision


def dtype_of(name: str) -> torch.dtype:
    """Return the data type of the setting `dtype`: float32 for tf32."""
    dtype: torch.dtype = getattr(torch, "float32" if name == TF32 else name)
    return dtype


def in_precision(name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context with the precision of float32 products that the setting `dtype` names."""
    return launch.in_precision(TF32) if name == TF32 else contextlib.nullcontext()


@contextlib.contextmanager
def torch_at_its_best(search: bool = True) -> Iterator[None]:
    """A context in which cuDNN searches its fastest algorithm, with TF32 for float32 only if minidl uses it."""
    tf32, products = launch.float32_precision() == TF32, torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, tf32
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=search, allow_tf32=tf32):
            yield
    finally:
        products.allow_tf32 = before


def chosen(
    work: Work, layer: drawn_conv.Layer | None, direction: str, search: bool = True
) -> tuple[dict[str, str], dict[str, str]]:
    """Remove the peers that fail, or are far slower than another. Returns the reasons by name, and the reasons why
    other peers run without cuDNN's search (without `search`, all do).

    Call it inside `torch_at_its_best`.
    """
    left_out, once, unsearched = {}, {}, {}
    behind = _behind(work) if search and layer is not None else {}
    seconds = searches(layer, direction) if search and layer is not None else {}
    for name, calls in tuple(work.peers.items()):
        if not search:
            unsearched[name] = "a search did not end"
        elif name in behind:
            unsearched[name] = f"{behind[name]:.1f} times as long as in another order"
        elif seconds.get(name, 0.0) > SEARCH:
            unsearched[name] = f"a search of about {seconds[name]:.0f} s"
        if name in unsearched:
            calls = [partial(_unsearched, call) for call in calls]
            work.peers = {**work.peers, name: calls}
        try:
            calls[0]()  # cuDNN searches
            once[name] = min(drawn_conv.once(calls[0]) for _ in range(2))
        except Exception as error:  # noqa: BLE001 (any error of torch is the reason to leave it out)
            left_out[name] = first_line(error)
    limit = drawn_conv.SLOW * min(once.values(), default=0.0) + drawn_conv.LAUNCH_MS
    left_out |= {name: f"{ms:.1f} ms, another takes less" for name, ms in once.items() if ms > limit}
    work.peers = {name: calls for name, calls in work.peers.items() if name not in left_out}
    return left_out, {name: why for name, why in unsearched.items() if name in work.peers}


def _behind(work: Work) -> dict[str, float]:
    """Return the peers that take far longer than another without a search, with the ratio.

    Searches took three quarters of the time of drawn convolutions, half of it in the slower memory format.
    """
    once: dict[str, float] = {}
    for name, calls in work.peers.items():
        with contextlib.suppress(Exception), torch_at_its_best(search=False):
            calls[0]()
            once[name] = min(_each(calls[0]) for _ in range(2))
    least = min(once.values(), default=0.0)
    return {name: ms / least for name, ms in once.items() if ms > FAR * least and ms - least > NOISE}


def _each(call: Call) -> float:
    """Return milliseconds of a call, the mean of four."""
    return drawn_conv.once(lambda: [call() for _ in range(4)]) / 4


def searches(layer: drawn_conv.Layer, direction: str) -> dict[str, float]:
    """Return the expected seconds of cuDNN's searches by peer, for those that may take long.

    A search runs all of cuDNN's algorithms, and some take thousands of times as long as the best: for the gradient of
    14x14 patches 49 s with 119 images and 109 s with 267, while the best takes 1.6 ms and 3.3 ms.
    """
    images = layer.shape.images
    few = max(1, images // FEWER)
    if layer.flop < SOON or 2 * few > images:
        return {}
    once, twice = (_searched(layer.of_images(count), direction) for count in (few, 2 * few))
    # The compilation of kernels does not depend on the number of images.
    return {name: (twice[name] - once[name]) / few * images for name in once if name in twice}


def _searched(layer: drawn_conv.Layer, direction: str) -> dict[str, float]:
    """Return the seconds of the searches of peers that do not fail."""
    seconds = {}
    for name, calls in layer.theirs(direction).items():
        with contextlib.suppress(Exception):  # it fails again with all images, which is reported
            seconds[name] = drawn_conv.once(calls[0]) / 1e3
    return seconds


def _unsearched(call: Call) -> Any:
    with torch_at_its_best(search=False):
        return call()
