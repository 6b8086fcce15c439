"""The rows of whole networks, both sides from one definition: `minidl.models`, whose code torch runs as it is."""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from minidl import models, ops, optim
from minidl.autograd import no_grad
from minidl.tensors import Tensor
from minidl.workbench.bench import sides
from minidl.workbench.bench.measure import Row, Work, floor_ms

DEVICE = "cuda"
LAST = torch.channels_last
# What a row is chosen by: a run without words leaves these out, as torch.compile takes minutes for them.
WORD = "networks"
# (network, options, images, size): the goals for inference and for training.
ROWS: dict[tuple[str, tuple[tuple[str, Any], ...], int, int], tuple[float, float]] = {
    ("resnet50", (), 1, 224): (1.1, 0.0),
    ("resnet50", (), 64, 224): (1.15, 1.4),
    ("resnet50", (), 256, 224): (1.2, 1.5),
    ("resnet18", (("small", True),), 512, 32): (1.2, 1.2),
    ("mobilenet_v2", (), 64, 224): (1.2, 1.2),
    ("vgg16_bn", (), 64, 224): (1.2, 1.2),
    ("densenet121", (), 64, 224): (1.2, 1.2),
    ("unet", (), 16, 256): (1.2, 1.2),
}
CLASSES = 1000
JUDGED = 8  # images
# How far, in the norm, 50 layers of a dtype may be off. Batch norms of few images make it more in training.
OFF = {torch.float16: 2.0**-6, torch.bfloat16: 2.0**-4}


def rows() -> Iterator[Row]:
    """The rows in order."""
    for what, make in (("inference", _inference), ("training", _training)):
        for (name, options, images, size), goals in ROWS.items():
            goal = goals[what == "training"]
            if goal:
                yield (
                    f"{WORD} {name} {what} {images}x{size}x{size}",
                    goal,
                    partial(make, name, dict(options), images, size),
                )


def in_torch(name: str, *args: Any, **options: Any) -> torch.nn.Module:
    """A network of `minidl.models` made by torch: its module's code, with torch's layers and functions for ours."""
    module = importlib.import_module(getattr(models, name).__module__)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    tree.body = [
        line for line in tree.body if not (isinstance(line, ast.ImportFrom) and str(line.module).startswith("minidl"))
    ]
    functions = types.SimpleNamespace(cat=torch.cat, relu=F.relu, adaptive_avg_pool2d=F.adaptive_avg_pool2d)
    names: dict[str, Any] = {"__name__": module.__name__, "nn": torch.nn, "ops": functions, "Tensor": torch.Tensor}
    exec(compile(tree, str(module.__file__), "exec"), names)  # noqa: S102 (minidl's own file)
    made = names[name](*args, **options)
    assert isinstance(made, torch.nn.Module)
    return made


def work_of(network: torch.nn.Module, image: torch.Tensor) -> tuple[float, float]:
    """(elements, operations) of the convolutions, products and pools of a call: each reads its input once and writes
    its result once, and what lies between them costs nothing."""
    elements, flop = 0.0, 0.0

    def count(layer: torch.nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
        nonlocal elements, flop
        elements += given[0].numel() + result.numel()
        weight = getattr(layer, "weight", None)
        if weight is not None:
            elements += weight.numel()
            places = given[0] if isinstance(layer, torch.nn.ConvTranspose2d) else result
            flop += 2.0 * weight[0].numel() * places.numel()

    kinds = (torch.nn.Conv2d, torch.nn.ConvTranspose2d, torch.nn.Linear, torch.nn.MaxPool2d, torch.nn.AvgPool2d)
    hooks = [layer.register_forward_hook(count) for layer in network.modules() if isinstance(layer, kinds)]
    with torch.no_grad():
        network(image)
    for hook in hooks:
        hook.remove()
    return elements, flop


def _counted(name: str, options: dict[str, Any], images: int, size: int) -> tuple[float, float]:
    with torch.device("meta"):
        return work_of(in_torch(name, CLASSES, **options).eval(), torch.empty(images, 3, size, size))


def _last(network: torch.nn.Module) -> torch.nn.Module:
    """The network with its weights in channels-last memory."""
    return network.to(memory_format=LAST)  # type: ignore[call-overload]


def _pictures(images: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(images, 3, size, size, device=DEVICE, dtype=dtype).to(memory_format=LAST)


def _inference(name: str, options: dict[str, Any], images: int, size: int) -> Work:
    dtype = torch.float16
    ours = getattr(models, name)(CLASSES, **options, device=DEVICE, dtype=dtype).eval()
    theirs = in_torch(name, CLASSES, **options).to(DEVICE)
    theirs.load_state_dict(ours.state_dict())
    exact = in_torch(name, CLASSES, **options).to(DEVICE, torch.float64).eval()
    exact.load_state_dict(ours.state_dict())
    theirs = _last(theirs.half()).eval()
    x = _pictures(images, size, dtype)

    def mine() -> Tensor:
        with no_grad():
            return ours(Tensor(x))

    @torch.no_grad()
    def answer(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return model(x)

    def judge(y: Tensor) -> bool:
        with torch.no_grad():
            wanted = exact(x[:JUDGED].double())
        return bool((y.data[:JUDGED].double() - wanted).norm() <= OFF[dtype] * wanted.norm())

    elements, flop = _counted(name, options, images, size)
    return Work(
        f"{name} inference, {images} images of {size}x{size}", "float16", [mine],
        sides.eager_and_compiled(theirs, call=answer, mode="max-autotune-no-cudagraphs"),
        floor_ms(2.0 * elements, flop), judge, whole_step=True,
    )  # fmt: skip


def _training(name: str, options: dict[str, Any], images: int, size: int) -> Work:
    """Ours in bfloat16 with float32 masters; torch under autocast. SGD with momentum on both sides."""
    dtype = torch.bfloat16
    ours = getattr(models, name)(CLASSES, **options, device=DEVICE, dtype=dtype)
    theirs = _last(in_torch(name, CLASSES, **options).to(DEVICE))
    exact = in_torch(name, CLASSES, **options).to(DEVICE, torch.float64)
    for layer in (*ours.modules(), *theirs.modules(), *exact.modules()):
        if type(layer).__name__ == "Dropout":
            layer.p = 0.0
    x = _pictures(images, size, dtype)
    of_pixels = (images, size, size) if name == "unet" else (images,)
    labels = torch.randint(CLASSES, of_pixels, device=DEVICE)
    sgd = optim.SGD(ours.parameters(), lr=1e-3, momentum=0.9)
    fused = torch.optim.SGD(theirs.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def loss_of(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", dtype):
            return F.cross_entropy(model(x), labels)

    def judge(_: Tensor) -> bool:
        exact.load_state_dict(ours.state_dict())
        with no_grad(), torch.no_grad():
            got = ops.cross_entropy(ours(Tensor(x[:JUDGED])), Tensor(labels[:JUDGED]))
            wanted = F.cross_entropy(exact(x[:JUDGED].double()), labels[:JUDGED])
        return abs(float(got) - float(wanted)) <= OFF[dtype] * abs(float(wanted))

    compiled = torch.compile(theirs, dynamic=False)
    elements, flop = _counted(name, options, images, size)
    return Work(
        f"{name} training step, {images} images of {size}x{size}", "bfloat16",
        [sides.training_step(sgd, lambda: ops.cross_entropy(ours(Tensor(x)), Tensor(labels)))],
        {
            "torch": [sides.training_step(fused, lambda: loss_of(theirs))],
            "torch.compile": [sides.training_step(fused, lambda: loss_of(compiled))],
        },
        floor_ms(3 * 2.0 * elements, 3 * flop), judge, whole_step=True,
    )  # fmt: skip
