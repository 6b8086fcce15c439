"""Time the layers of a model on an example with minidl's operators and with torch's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from minidl.compilation.rehearsal import compile_ahead
from minidl.runtime import launch
from minidl.torch.layers import CLASSES

# A layer stays torch's from this ratio of times, the difference between two runs.
SLOWER_RATIO = 1.02
REPEATS, ROUNDS = 10, 5


def slower(model: nn.Module, example: Any, layers: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Return the layers that are slower with our classes than with torch's, and by how much.

    Raises the exceptions of the model. The interpreter times nothing; layers with other arguments than one tensor are
    not timed.
    """
    inputs = _inputs(model, example, layers)
    if launch.INTERPRETED:
        return {}
    times: dict[Hashable, tuple[float, float]] = {}
    reasons: dict[nn.Module, str] = {}
    for layer, x in inputs.items():
        key = repr(layer), tuple(x.shape), x.dtype, x.stride(), layer.training
        if key not in times:
            times[key] = _times(layer, x)
        ours, theirs = times[key]
        if ours > SLOWER_RATIO * theirs:
            reasons[layer] = f"torch takes {theirs:.1f} us, these {ours:.1f}"
    return reasons


def _inputs(model: nn.Module, example: Any, modules: Iterable[nn.Module]) -> dict[nn.Module, torch.Tensor]:
    """Return the first input of each module; buffers are restored."""
    inputs: dict[nn.Module, torch.Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module not in inputs and len(args) == 1 and isinstance(args[0], torch.Tensor):
            inputs[module] = torch.empty_like(args[0])

    handles = [module.register_forward_pre_hook(note) for module in modules]
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        with torch.no_grad():
            model(*example if isinstance(example, tuple) else (example,))
    finally:
        for handle in handles:
            handle.remove()
        _restore(model.buffers(), before)
    return inputs


def _restore(buffers: Iterable[torch.Tensor], before: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def _times(layer: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Return the microseconds of a call with our class and torch's, forward and, in training, backward.

    All calls use one side stream: gradients of leaves are added on the stream of their first use, which must be the
    captured one.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        times = _times_on_stream(layer, x)
    torch.cuda.current_stream().wait_stream(stream)
    return times


def _times_on_stream(layer: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    before = [buffer.clone() for buffer in layer.buffers()]
    kind = type(layer)
    parameters = [p for p in layer.parameters() if p.requires_grad] if layer.training else []
    x = torch.randn_like(x).requires_grad_(layer.training)

    def call() -> None:
        y = layer(x)
        if layer.training and isinstance(y, torch.Tensor):
            torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))

    with torch.set_grad_enabled(layer.training):
        layer.__class__ = CLASSES[kind]
        try:
            if __name__.startswith("minidl."):  # compiler processes cannot import a renamed copy
                compile_ahead(call)
            ours = _time(call)
        finally:
            layer.__class__ = kind
        theirs = _time(call)
    _restore(layer.buffers(), before)
    return ours, theirs


def _time(call: Callable[[], None]) -> float:
    """Return the minimum over rounds of calls, after warm-up.

    Calls are replayed in a CUDA graph, because the time of single launches of a small layer is that of Python.
    """
    cached = torch.is_autocast_cache_enabled()
    # Each call casts weights, as each training step does.
    torch.set_autocast_cache_enabled(False)
    try:
        for _ in range(3):
            call()
        run = _captured(call)
        return min(_time_on_device(run) for _ in range(ROUNDS)) / REPEATS
    finally:
        torch.set_autocast_cache_enabled(cached)


def _time_on_device(run: Callable[[], None]) -> float:
    """Return the microseconds of `run` on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays some calls as a graph, or calls them if the layer synchronises."""

    def calls() -> None:
        for _ in range(REPEATS):
            call()

    torch.cuda.synchronize()
    try:
        graph = _graph(calls)
    except RuntimeError:
        torch.cuda.synchronize()
        # torch's random generator stays in capture mode until a capture succeeds.
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
