"""Networks of `minidl.models` in torch: their code runs with torch's layers and functions."""

from __future__ import annotations

import ast
import importlib
import types
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from minidl import models

# Rows have the names of the functions in `models`.
CLASSES = {"ece408": "ECE408", "small_cnn": "SmallCNN"}


def in_torch(name: str, *args: Any, **options: Any) -> torch.nn.Module:
    """Return a network of `minidl.models` in torch, from the same code."""
    name = CLASSES.get(name, name)
    module = importlib.import_module(getattr(models, name).__module__)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    tree.body = [
        line for line in tree.body if not (isinstance(line, ast.ImportFrom) and str(line.module).startswith("minidl"))
    ]
    names: dict[str, Any] = {
        "__name__": module.__name__, "nn": _Layers(), "init": torch.nn.init, "ops": _FUNCTIONS, "Tensor": torch.Tensor,
    }  # fmt: skip
    exec(compile(tree, str(module.__file__), "exec"), names)  # noqa: S102 (minidl's own file)
    network = names[name](*args, **options)
    assert isinstance(network, torch.nn.Module)
    return network


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: Any = None) -> torch.Tensor:
    return _act_and_pool(F.linear(x, weight, bias), act)


def _act_and_pool(x: torch.Tensor, act: Any, pool: str | None = None) -> torch.Tensor:
    """Apply the activation and the pool that a layer of minidl includes."""
    kind, *numbers = act if isinstance(act, tuple) else (act,)
    if kind is not None:
        x = torch.tanh(x) if kind == "tanh" else getattr(F, kind)(x, *numbers)
    if pool is None:
        return x
    return F.max_pool2d(x, 2) if pool == "max" else F.avg_pool2d(x, 2)


def _with_act(kind: type[Any]) -> type[Any]:
    """Return a layer class of torch with the arguments `act` and `pool`."""

    class Layer(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, act: Any = None, pool: str | None = None, **options: Any) -> None:
            super().__init__(*args, **options)
            self.act, self.pool = act, pool

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _act_and_pool(super().forward(x), self.act, self.pool)

    return Layer


class _Layers:
    """torch.nn, whose layers have the arguments of `minidl.nn`."""

    Conv2d, ConvTranspose2d = _with_act(torch.nn.Conv2d), _with_act(torch.nn.ConvTranspose2d)
    Linear, BatchNorm2d = _with_act(torch.nn.Linear), _with_act(torch.nn.BatchNorm2d)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn, name)


_FUNCTIONS = types.SimpleNamespace(
    cat=torch.cat, relu=F.relu, adaptive_avg_pool2d=F.adaptive_avg_pool2d, linear=_linear
)
