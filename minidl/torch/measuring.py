"""Which layers of a model are slower with minidl's operators than with torch's, on an example of input."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from minidl.compilation.rehearsal import compile_ahead
from minidl.runtime import launch
from minidl.torch.layers import CLASSES

# A layer is torch's where these take longer than that: clocks differ by as much from one run to the next.
NEVER_SLOWER = 1.02
REPEATS, ROUNDS = 10, 5


def slower(model: nn.Module, example: Any, layers: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Return the layers that are slower with our classes than with torch's, and by how much.

    Raises what the model does with the example. Nothing is timed where kernels are interpreted, nor what is not called
    with one tensor.
    """
    seen = _inputs(model, example, layers)
    if launch.INTERPRETED:
        return {}
    known: dict[Hashable, tuple[float, float]] = {}
    found: dict[nn.Module, str] = {}
    for layer, x in seen.items():
        key = repr(layer), tuple(x.shape), x.dtype, x.stride(), layer.training
        if key not in known:
            known[key] = _times(layer, x)
        ours, theirs = known[key]
        if ours > NEVER_SLOWER * theirs:
            found[layer] = f"torch takes {theirs:.1f} us, these {ours:.1f}"
    return found


def _inputs(model: nn.Module, example: Any, modules: Iterable[nn.Module]) -> dict[nn.Module, torch.Tensor]:
    """What each module gets first. Buffers are as they were afterwards."""
    seen: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module not in seen and len(args) == 1 and isinstance(args[0], torch.Tensor):
            seen[module] = torch.empty_like(args[0])

    handles = [module.register_forward_pre_hook(keep) for module in modules]
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        with torch.no_grad():
            model(*example if isinstance(example, tuple) else (example,))
    finally:
        for handle in handles:
            handle.remove()
        _put_back(model.buffers(), before)
    return seen


def _put_back(buffers: Iterable[torch.Tensor], before: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def _times(layer: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Microseconds of a call with our class and with torch's, forward and, in training, back; the layer is left as it
    was.

    All of it is on one stream beside the others: gradients of leaves are added on the stream of their first use, which
    a capture must not leave.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = _both(layer, x)
    torch.cuda.current_stream().wait_stream(stream)
    return found


def _both(layer: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    before = [buffer.clone() for buffer in layer.buffers()]
    kind = type(layer)
    wanted = [p for p in layer.parameters() if p.requires_grad] if layer.training else []
    x = torch.randn_like(x).requires_grad_(layer.training)

    def call() -> None:
        y = layer(x)
        if layer.training:
            torch.autograd.grad(y, [x, *wanted], torch.ones_like(y))

    with torch.set_grad_enabled(layer.training):
        layer.__class__ = CLASSES[kind]
        try:
            if __name__.startswith("minidl."):  # a copy of another name cannot be imported by processes that compile
                compile_ahead(call)
            ours = _time(call)
        finally:
            layer.__class__ = kind
        theirs = _time(call)
    _put_back(layer.buffers(), before)
    return ours, theirs


def _time(call: Callable[[], None]) -> float:
    """The least of some rounds of calls, after those that compile.

    Calls are replayed in a CUDA graph: launched one by one, a layer of few pixels takes what Python takes, which says
    nothing of its kernels.
    """
    cached = torch.is_autocast_cache_enabled()
    # Each call casts weights, as each step does.
    torch.set_autocast_cache_enabled(False)
    try:
        for _ in range(3):
            call()
        run = _captured(call)
        return min(_clocked(run) for _ in range(ROUNDS)) / REPEATS
    finally:
        torch.set_autocast_cache_enabled(cached)


def _clocked(run: Callable[[], None]) -> float:
    """Microseconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    """Some calls as one replay; one by one where something of the layer waits for the device."""

    def calls() -> None:
        for _ in range(REPEATS):
            call()

    torch.cuda.synchronize()
    try:
        graph = _graph(calls)
    except RuntimeError:
        torch.cuda.synchronize()
        # torch's generator of random numbers is still being captured then, until a capture ends well.
        _graph(lambda: torch.zeros(1, device="cuda"))
        return calls
    graph.replay()
    return graph.replay


def _graph(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        run()
    finally:
        graph.capture_end()
    return graph
