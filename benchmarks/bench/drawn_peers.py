"""torch at its best for a drawn row: cuDNN's search, where it ends in time, and without peers that are far slower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.bench import drawn_conv
from minidl.tools.bench.measure import Work
from minidl.tools.bench.sides import Call
from minidl.tools.first_line import first_line

# Seconds that cuDNN may be expected to search for; it cannot be interrupted.
SEARCH = 5.0
# The slowest that it tried computed some 1e9 products and sums a second: what has fewer is searched for at once.
SOON = 1e10
# The part of the images with which is found how long a search takes.
FEWER = 32
# Times as long as in the other order of memory, both unsearched, from which on a search finds nothing that counts.
FAR, NOISE = 3.0, 0.02  # ms


@contextlib.contextmanager
def torch_at_its_best(search: bool = True) -> Iterator[None]:
    """cuDNN searches its fastest algorithm; float32 products are those of float32 on both sides."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=search, allow_tf32=False):
        yield


def chosen(
    work: Work, layer: drawn_conv.Layer | None, direction: str, search: bool = True
) -> tuple[dict[str, str], dict[str, str]]:
    """Leave out the peers that fail, or are far slower than another. Returns why, and those for which cuDNN does not
    search, with the reason, by their names; without `search` these are all.

    Expects `torch_at_its_best`.
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
        except Exception as error:  # noqa: BLE001 (whatever torch raises is why it is left out)
            left_out[name] = first_line(error)
    limit = drawn_conv.SLOW * min(once.values(), default=0.0) + drawn_conv.LAUNCH_MS
    left_out |= {name: f"{ms:.1f} ms, another takes less" for name, ms in once.items() if ms > limit}
    work.peers = {name: calls for name, calls in work.peers.items() if name not in left_out}
    return left_out, {name: why for name, why in unsearched.items() if name in work.peers}


def _behind(work: Work) -> dict[str, float]:
    """Peers that take far longer than another before cuDNN searches, and how many times as long.

    Three quarters of the seconds of drawn convolutions were searches, half of them in the order that then lost.
    """
    once: dict[str, float] = {}
    for name, calls in work.peers.items():
        with contextlib.suppress(Exception), torch_at_its_best(search=False):
            calls[0]()
            once[name] = min(_each(calls[0]) for _ in range(2))
    least = min(once.values(), default=0.0)
    return {name: ms / least for name, ms in once.items() if ms > FAR * least and ms - least > NOISE}


def _each(call: Call) -> float:
    """Milliseconds of a call among four."""
    return drawn_conv.once(lambda: [call() for _ in range(4)]) / 4


def searches(layer: drawn_conv.Layer, direction: str) -> dict[str, float]:
    """The seconds that cuDNN's searches are expected to take, by the peer, of those that may take long.

    A search runs all that cuDNN has, and some of it takes thousands of times as long as the best: for the gradient of
    14x14 patches of 119 images 49 s, of 267 images 109 s, where the best takes 1.6 ms and 3.3 ms.
    """
    images = layer.shape.images
    few = max(1, images // FEWER)
    if layer.flop < SOON or 2 * few > images:
        return {}
    once, twice = (_searched(layer.of_images(count), direction) for count in (few, 2 * few))
    # What does not grow with the images is the compiling of kernels.
    return {name: (twice[name] - once[name]) / few * images for name in once if name in twice}


def _searched(layer: drawn_conv.Layer, direction: str) -> dict[str, float]:
    """Seconds of the searches of those that do not fail."""
    found = {}
    for name, calls in layer.theirs(direction).items():
        with contextlib.suppress(Exception):  # it fails again with all images, and is told there
            found[name] = drawn_conv.once(calls[0]) / 1e3
    return found


def _unsearched(call: Call) -> Any:
    with torch_at_its_best(search=False):
        return call()
