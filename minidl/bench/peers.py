"""Other projects' Triton kernels, as their public functions call them: attorch, FlagGems and Liger, where installed.

None of them is needed, and none is imported before it is asked for. Their kernels get contiguous inputs in torch's
layout, which is what they are written for; a convolution of theirs has no bias and no activation.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch

Call = Callable[[], Any]
# By name: calls on each set of inputs. Making them imports the peer, and may fail as that may.
Others = Iterator[tuple[str, Callable[[], Sequence[Call]]]]


@dataclass(frozen=True)
class Peer:
    """A project: the module it is imported as, the name it is installed under, and how to get it."""

    module: str
    package: str
    install: str

    @property
    def there(self) -> bool:
        """Whether it can be imported, without importing it."""
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """Of the installed package."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "unknown"


PEERS = {
    "attorch": Peer("attorch", "attorch", "pip install git+https://github.com/BobMcDear/attorch"),
    "FlagGems": Peer("flag_gems", "flag-gems", "pip install flag-gems"),
    "Liger": Peer("liger_kernel", "liger-kernel", "pip install liger-kernel"),
}


# By the first word of a row: whose functions read a value on the host, so that a CUDA graph cannot hold them.
READ_THE_DEVICE = {"cross-entropy": ("Liger",)}


def there() -> dict[str, str]:
    """The installed peers with their versions."""
    return {name: peer.version for name, peer in PEERS.items() if peer.there}


def missing() -> list[str]:
    """A line for each peer that is not installed: how to install it."""
    return [f"{name} is not installed: {peer.install}" for name, peer in PEERS.items() if not peer.there]


def _having(name: str, make: Callable[[Any], Sequence[Call]]) -> Others:
    """The peer's calls, if it is installed; `make` gets its module."""
    if PEERS[name].there:
        yield name, lambda: make(importlib.import_module(PEERS[name].module))


def products(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Others:
    """a @ b of each pair."""
    yield from _having("FlagGems", lambda gems: [partial(gems.mm, a, b) for a, b in pairs])


def softmax(xs: Sequence[torch.Tensor]) -> Others:
    """Softmax along the last dimension."""

    def liger(_: Any) -> Sequence[Call]:
        function = _liger("softmax", "LigerSoftmaxFunction")
        return [partial(function.apply, x) for x in xs]

    def attorch(module: Any) -> Sequence[Call]:
        layer = module.Softmax(dim=-1)
        return [partial(layer, x) for x in xs]

    yield from _having("attorch", attorch)
    yield from _having("FlagGems", lambda gems: [partial(gems.softmax, x, -1) for x in xs])
    yield from _having("Liger", liger)


def cross_entropy(x: torch.Tensor, target: torch.Tensor) -> Others:
    """The mean loss with its gradient. Liger writes the gradient over the logits, so it has its own."""

    def liger(_: Any) -> Sequence[Call]:
        function = _liger("cross_entropy", "LigerCrossEntropyFunction")
        leaf = x.clone().requires_grad_()

        def both() -> tuple[torch.Tensor, torch.Tensor]:
            value = function.apply(leaf, target, None, -100, 0.0, 0.0, "mean")[0]
            return value, torch.autograd.grad(value, leaf)[0]

        return [both]

    yield from _having("Liger", liger)


def conv2d(xs: Sequence[torch.Tensor], w: torch.Tensor, padding: Sequence[int]) -> Others:
    """Convolution with stride 1."""

    def attorch(module: Any) -> Sequence[Call]:
        M, C, R, S = weight.shape
        layer = module.Conv2d(C, M, (R, S), padding=tuple(padding), bias=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        return [partial(layer, x) for x in plain()]

    def gems(module: Any) -> Sequence[Call]:
        return [partial(module.conv2d, x, weight, None, 1, list(padding)) for x in plain()]

    def plain() -> list[torch.Tensor]:
        return [x.contiguous() for x in xs]

    weight = w.contiguous()
    yield from _having("attorch", attorch)
    yield from _having("FlagGems", gems)


def conv_transpose2d(
    xs: Sequence[torch.Tensor], w: torch.Tensor, stride: int, padding: int, output_padding: int
) -> Others:
    """Transposed convolution."""

    def gems(module: Any) -> Sequence[Call]:
        weight = w.contiguous()
        plain = [x.contiguous() for x in xs]
        return [partial(module.conv_transpose2d, x, weight, None, stride, padding, output_padding) for x in plain]

    yield from _having("FlagGems", gems)


def batch_norm_relu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor) -> Others:
    """Batch norm in training with ReLU: the result, and the gradients of x, weight and bias."""

    def attorch(module: Any) -> Sequence[Call]:
        try:
            layer, act = module.BatchNorm2d(x.shape[1], act_func="relu", device=x.device), None
        except TypeError:  # a version that does not fuse it
            layer, act = module.BatchNorm2d(x.shape[1], device=x.device), module.ReLU()
        layer.weight, layer.bias = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(bias.clone())
        leaf, cotangent = x.contiguous().requires_grad_(), dy.contiguous()

        def both() -> tuple[torch.Tensor, ...]:
            y = layer(leaf) if act is None else act(layer(leaf))
            return y, *torch.autograd.grad(y, (leaf, layer.weight, layer.bias), cotangent)

        return [both]

    yield from _having("attorch", attorch)


def _liger(module: str, name: str) -> Any:
    """A function of Liger's operators: from the package, which picks one for the device, or from its own module."""
    found = getattr(importlib.import_module("liger_kernel.ops"), name, None)
    return found or getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
