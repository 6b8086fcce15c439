"""Which layers of a model are slower with minidl's operators than with torch's, on an example of its input."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from minidl.runtime import launch
from minidl.torch.layers import CLASSES

# A layer is torch's where it takes longer than that with these: clocks differ by this from one run to the next.
NEVER_SLOWER = 1.02
REPEATS, ROUNDS = 10, 3


def slower(model: nn.Module, example: Any, modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Of modules with torch's classes, those that are slower with ours, and how much; also those not called.

    Raises what the model does with the example. Nothing is timed where kernels are interpreted.
    """
    seen = _inputs(model, example, modules)
    if launch.INTERPRETED:
        return {}
    known: dict[Hashable, tuple[float, float]] = {}
    found = {}
    for module, x in seen.items():
        key = repr(module), tuple(x.shape), x.dtype, x.stride(), module.training, torch.is_autocast_enabled("cuda")
        if key not in known:
            known[key] = _times(module, x)
        ours, torchs = known[key]
        if ours > NEVER_SLOWER * torchs:
            found[module] = f"torch takes {torchs:.1f} us, these {ours:.1f}"
    return found


def _inputs(model: nn.Module, example: Any, modules: Iterable[nn.Module]) -> dict[nn.Module, torch.Tensor]:
    """What each module gets first, without its values."""
    seen: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module not in seen and len(args) == 1 and isinstance(args[0], torch.Tensor):
            seen[module] = args[0].detach()

    handles = [module.register_forward_pre_hook(keep) for module in modules]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad():
            model(*example if isinstance(example, tuple) else (example,))
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    return seen


def _times(module: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Microseconds of a call with our class and with torch's, forward and, in training, back; module is left as it
    was."""
    buffers = [buffer.clone() for buffer in module.buffers()]
    torchs = type(module)
    x = x.clone().requires_grad_(module.training)
    parameters = [p for p in module.parameters() if p.requires_grad] if module.training else []
    with torch.set_grad_enabled(module.training):
        module.__class__ = CLASSES[torchs]
        try:
            ours = _time(lambda: _call(module, x, parameters))
        finally:
            module.__class__ = torchs
        theirs = _time(lambda: _call(module, x, parameters))
    with torch.no_grad():
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return ours, theirs


def _call(module: nn.Module, x: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    y = module(x)
    if module.training:
        torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))


def _time(call: Callable[[], None]) -> float:
    """The least of some rounds of calls, after those that compile."""
    for _ in range(3):
        call()
    best = float("inf")
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        for _ in range(REPEATS):
            call()
        end.record()
        end.synchronize()
        best = min(best, 1e3 * start.elapsed_time(end) / REPEATS)
    return best
