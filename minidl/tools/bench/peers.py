"""Other projects' Triton kernels, called by their public functions: attorch, FlagGems and Liger, if installed.

All are optional and imported only when measured. Their kernels expect contiguous inputs in torch's layout; their
convolutions have no bias and no activation.
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

from minidl.tools.bench.sides import Call, torch_gradients

# Peers by name, each with a function that returns its calls, one per set of inputs; it imports the peer and may fail.
Others = Iterator[tuple[str, Callable[[], Sequence[Call]]]]


@dataclass(frozen=True)
class Peer:
    """A project: its module, its package and how to install it."""

    module: str
    package: str
    install: str

    @property
    def is_installed(self) -> bool:
        """Return whether the module can be imported; does not import it."""
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """Return the version of the installed package."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "unknown"


PEERS = {
    "attorch": Peer("attorch", "attorch", "pip install git+https://github.com/BobMcDear/attorch"),
    "FlagGems": Peer("flag_gems", "flag-gems", "pip install flag-gems"),
    "Liger": Peer("liger_kernel", "liger-kernel", "pip install liger-kernel"),
}


# Peers that read a value on the host, so no CUDA graph can contain them, by the first word of the row.
READ_THE_DEVICE = {"cross-entropy": ("Liger",)}


def installed() -> dict[str, str]:
    """Return the installed peers with their versions."""
    return {name: peer.version for name, peer in PEERS.items() if peer.is_installed}


def missing() -> list[str]:
    """Return a line for each missing peer: how to install it."""
    return [f"{name} is not installed: {peer.install}" for name, peer in PEERS.items() if not peer.is_installed]


def _of(**makers: Callable[[Any], Sequence[Call]]) -> Others:
    """Yield the installed peers with functions that make their calls from the peer's module."""

    def calls(name: str) -> Sequence[Call]:
        return makers[name](importlib.import_module(PEERS[name].module))

    for name in makers:
        if PEERS[name].is_installed:
            yield name, partial(calls, name)


def products(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Others:
    """Return calls of a @ b for each pair."""
    return _of(FlagGems=lambda gems: [partial(gems.mm, a, b) for a, b in pairs])


def softmax(xs: Sequence[torch.Tensor]) -> Others:
    """Return calls of softmax along the last dimension."""

    def liger(_: Any) -> Sequence[Call]:
        function = _liger("softmax", "LigerSoftmaxFunction")
        return [partial(function.apply, x) for x in xs]

    def attorch(module: Any) -> Sequence[Call]:
        layer = module.Softmax(dim=-1)
        return [partial(layer, x) for x in xs]

    return _of(attorch=attorch, FlagGems=lambda gems: [partial(gems.softmax, x, -1) for x in xs], Liger=liger)


def cross_entropy(x: torch.Tensor, target: torch.Tensor) -> Others:
    """Return calls of the mean loss with its gradient. Liger gets a copy of the logits, which it overwrites."""

    def liger(_: Any) -> Sequence[Call]:
        function = _liger("cross_entropy", "LigerCrossEntropyFunction")
        leaf = x.clone().requires_grad_()
        return [lambda: torch_gradients(lambda x: function.apply(x, target, None, -100, 0.0, 0.0, "mean")[0], [leaf])]

    return _of(Liger=liger)


def conv2d(xs: Sequence[torch.Tensor], w: torch.Tensor, padding: Sequence[int]) -> Others:
    """Return calls of a convolution with stride 1."""
    weight = w.contiguous()

    def attorch(module: Any) -> Sequence[Call]:
        M, C, R, S = weight.shape
        layer = module.Conv2d(C, M, (R, S), padding=tuple(padding), bias=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        return [partial(layer, x.contiguous()) for x in xs]

    def gems(module: Any) -> Sequence[Call]:
        return [partial(module.conv2d, x.contiguous(), weight, None, 1, list(padding)) for x in xs]

    return _of(attorch=attorch, FlagGems=gems)


def conv_transpose2d(
    xs: Sequence[torch.Tensor], w: torch.Tensor, stride: int, padding: int, output_padding: int
) -> Others:
    """Return calls of a transposed convolution."""

    def gems(module: Any) -> Sequence[Call]:
        how = w.contiguous(), None, stride, padding, output_padding
        return [partial(module.conv_transpose2d, x.contiguous(), *how) for x in xs]

    return _of(FlagGems=gems)


def batch_norm_relu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor) -> Others:
    """Return calls of batch norm in training with ReLU: the result, and the gradients of x, weight and bias."""

    def attorch(module: Any) -> Sequence[Call]:
        try:
            layer, act = module.BatchNorm2d(x.shape[1], act_func="relu", device=x.device), None
        except TypeError:  # a version that does not fuse it
            layer, act = module.BatchNorm2d(x.shape[1], device=x.device), module.ReLU()
        layer.weight, layer.bias = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(bias.clone())
        leaves = x.contiguous().requires_grad_(), layer.weight, layer.bias
        cotangent = dy.contiguous()

        def forward(x: torch.Tensor, *_: Any) -> torch.Tensor:
            return layer(x) if act is None else act(layer(x))

        return [lambda: torch_gradients(forward, leaves, cotangent)]

    return _of(attorch=attorch)


def _liger(module: str, name: str) -> Any:
    """Return an operator of Liger: from `liger_kernel.ops`, which chooses by device, else from its module."""
    function = getattr(importlib.import_module("liger_kernel.ops"), name, None)
    return function or getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
