"""Which layers and blocks of a model are slower with minidl's operators than with torch's, on an example of input."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from minidl.rehearsal import compile_ahead
from minidl.runtime import launch
from minidl.torch import blocks
from minidl.torch.layers import CLASSES

# A layer is torch's where these take longer than that: clocks differ by as much from one run to the next.
NEVER_SLOWER = 1.02
REPEATS, ROUNDS = 10, 5


class Unit(NamedTuple):
    """What is timed at once: a layer, a norm or both, with the activation and sum of a block."""

    layer: nn.Module | None
    norm: nn.Module | None
    act: tuple[str | None, float] = (None, 0.0)
    sum: bool = False

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(each for each in (self.layer, self.norm) if each is not None)


def slower(model: nn.Module, example: Any, units: Iterable[Unit]) -> dict[nn.Module, str]:
    """Modules of units that are slower with our classes than with torch's, and by how much.

    Raises what the model does with the example. Nothing is timed where kernels are interpreted, nor what is not called.
    """
    units = list(units)
    seen = _inputs(model, example, [unit.modules[0] for unit in units])
    if launch.INTERPRETED:
        return {}
    known: dict[Hashable, tuple[float, float]] = {}
    found: dict[nn.Module, str] = {}
    for unit in units:
        x = seen.get(unit.modules[0])
        if x is None:
            continue
        key = repr(unit), tuple(x.shape), x.dtype, x.stride(), [m.training for m in unit.modules].__repr__()
        if key not in known:
            known[key] = _times(unit, x)
        ours, theirs = known[key]
        if ours > NEVER_SLOWER * theirs:
            found.update(dict.fromkeys(unit.modules, f"torch takes {theirs:.1f} us, these {ours:.1f}"))
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


def _times(unit: Unit, x: torch.Tensor) -> tuple[float, float]:
    """Microseconds of a call with our classes and with torch's, forward and, in training, back; modules are left as
    they were.

    All of it is on one stream beside the others: gradients of leaves are added on the stream of their first use, which
    a capture must not leave.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = _both(unit, x)
    torch.cuda.current_stream().wait_stream(stream)
    return found


def _both(unit: Unit, x: torch.Tensor) -> tuple[float, float]:
    buffers = [buffer for module in unit.modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    kinds = [type(module) for module in unit.modules]
    training = any(module.training for module in unit.modules)
    wanted = [p for module in unit.modules for p in module.parameters() if p.requires_grad] if training else []
    x = torch.randn_like(x).requires_grad_(training)
    with torch.set_grad_enabled(training):
        added = torch.zeros_like(blocks.apart(unit.layer, unit.norm, None, 0.0, x, None)) if unit.sum else None
        given = unit.layer, unit.norm, *unit.act, x, None if added is None else added.detach()

        def call(run: Callable[..., torch.Tensor]) -> None:
            y = run(*given)
            if training:
                torch.autograd.grad(y, [x, *wanted], torch.ones_like(y))

        for module, kind in zip(unit.modules, kinds, strict=True):
            module.__class__ = CLASSES[kind]
        alone = unit.act[0] is None and len(unit.modules) == 1 and not unit.sum
        run: Callable[..., torch.Tensor] = blocks.apart if alone else blocks.block
        try:
            if __name__.startswith("minidl."):  # a copy of another name cannot be imported by processes that compile
                compile_ahead(lambda: call(run))
            ours = _time(lambda: call(run))
        finally:
            for module, kind in zip(unit.modules, kinds, strict=True):
                module.__class__ = kind
        theirs = _time(lambda: call(blocks.apart))
    _put_back(buffers, before)
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
