"""The rows of networks with batches and goals; the bytes and operations of a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.bench.in_torch import in_torch
from minidl.tools.bench.measure import floor_ms

WORD = "networks"
# The goal for the geometric mean of the ratios, in inference and in training.
MEAN_GOAL = 1.2
HALF, TF32 = "half", "tf32"


@dataclass(frozen=True)
class Net:
    """A row. `arguments` and `options` make the network; images are [images, channels, size, size].

    precision   "half"; "float32", without TF32 on both sides; or "tf32", with it on both
    """

    name: str
    images: int
    size: int
    training: bool
    goal: float = 1.0
    arguments: tuple[Any, ...] = (1000,)
    options: tuple[tuple[str, Any], ...] = ()
    channels: int = 3
    precision: str = HALF

    @property
    def row(self) -> str:
        what = "training" if self.training else "inference"
        precision = "" if self.precision == HALF else f" {self.precision}"
        return f"{WORD} {self.name} {what} {self.images}x{self.size}x{self.size}{precision}"

    @property
    def title(self) -> str:
        what = "training step" if self.training else "inference"
        precision = "" if self.precision == HALF else f", {self.precision}"
        return f"{self.name} {what}, {self.images} images of {self.size}x{self.size}{precision}"

    @property
    def dtype(self) -> torch.dtype:
        """Return float16 for inference, bfloat16 for training (with float32 masters; torch under autocast); float32 for
        precisions "float32" and "tf32"."""
        if self.precision != HALF:
            return torch.float32
        return torch.bfloat16 if self.training else torch.float16


def _both(name: str, images: int, size: int, goals: tuple[float, float] = (1.0, 1.0), **more: Any) -> tuple[Net, ...]:
    return tuple(Net(name, images, size, training, goals[training], **more) for training in (False, True))


_SMALL = (("small", True),)
_ALL = (
    Net("resnet50", 1, 224, False, 1.1),
    *_both("resnet50", 64, 224, (1.15, 1.4)),
    *_both("resnet50", 256, 224, (1.2, 1.5)),
    *_both("resnet18", 512, 32, options=_SMALL),
    *_both("unet", 16, 256, arguments=(2,)),
    *_both("mobilenet_v2", 64, 224),
    *_both("mobilenet_v2", 256, 224),
    *_both("vgg16_bn", 64, 224),
    *_both("densenet121", 64, 224),
    Net("dcgan", 128, 64, True, arguments=(), options=(("latent", 100),)),
    Net("dcgan", 512, 64, True, arguments=(), options=(("latent", 100),)),
    Net("ece408", 512, 28, True, arguments=(10,), channels=1),
    Net("small_cnn", 512, 28, True, arguments=(1, (28, 28), 10), channels=1),
    *(
        net
        for precision in ("float32", TF32)
        for name in ("resnet18", "resnet50", "mobilenet_v2", "vgg16_bn")
        for net in _both(name, 32, 224, (1.3, 1.3), precision=precision)
    ),
    *(Net("dcgan", 128, 64, True, 1.3, (), (("latent", 100),), precision=name) for name in ("float32", TF32)),
    *(Net("ece408", 512, 28, True, 1.3, (10,), channels=1, precision=name) for name in ("float32", TF32)),
)
NETS = {net.row: net for net in sorted(_ALL, key=lambda net: net.training)}


def chosen(words: tuple[str, ...]) -> list[Net]:
    """Return the rows whose name contains a word, all without words. Raises ValueError for an unknown word."""
    for word in words:
        if not word or not any(word in row for row in NETS):
            raise ValueError(
                f"no network's row contains {word!r}; `python -m benchmarks.bench {WORD} --list` shows them"
            )
    return [net for row, net in NETS.items() if not words or any(word in row for word in words)]


def work_of(network: torch.nn.Module, *inputs: torch.Tensor) -> tuple[float, float]:
    """Return (elements, operations) of the convolutions, products and pools of a call: each reads its input once and
    writes its result once; other operations cost nothing."""
    elements, flop = 0.0, 0.0

    def count(layer: torch.nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
        nonlocal elements, flop
        elements += args[0].numel() + result.numel()
        weight = getattr(layer, "weight", None)
        if weight is not None:
            elements += weight.numel()
            pool = getattr(layer, "pool", None)
            pixels = args[0] if isinstance(layer, torch.nn.ConvTranspose2d) else result
            flop += 2.0 * weight[0].numel() * pixels.numel() * (4 if pool else 1)

    kinds = (torch.nn.Conv2d, torch.nn.ConvTranspose2d, torch.nn.Linear, torch.nn.MaxPool2d, torch.nn.AvgPool2d)
    hooks = [layer.register_forward_hook(count) for layer in network.modules() if isinstance(layer, kinds)]
    with torch.no_grad():
        network(*inputs)
    for hook in hooks:
        hook.remove()
    return elements, flop


def floor_of(net: Net) -> float:
    """Return the floor in milliseconds: of elements moved once, or of the operations. A training step counts as
    three forward passes, because each gradient moves and computes as much. A DCGAN's step has the discriminator on real
    and generated images, the generator, and the discriminator forward and backward without gradients of its weights."""

    def counted(name: str, *args: Any, **options: Any) -> Callable[..., tuple[float, float]]:
        with torch.device("meta"):
            network = in_torch(name, *args, **options).eval()
            return lambda *shape: work_of(network, torch.empty(*shape, device="meta"))

    image = (net.channels, net.size, net.size)
    if net.name == "dcgan":
        options = dict(net.options)
        latent = options.pop("latent")
        generator = counted("Generator", latent, net.channels, image[1:], **options)(net.images, latent)
        discriminator = counted("Discriminator", net.channels, image[1:], **options)
        all_images, generated = discriminator(2 * net.images, *image), discriminator(net.images, *image)
        elements, flop = (3 * g + 3 * d + 2 * m for g, d, m in zip(generator, all_images, generated, strict=True))
    else:
        once = counted(net.name, *net.arguments, **dict(net.options))(net.images, *image)
        elements, flop = (value * (3 if net.training else 1) for value in once)
    if net.precision == HALF:
        return floor_ms(2.0 * elements, flop)
    return floor_ms(4.0 * elements, flop, TF32 if net.precision == TF32 else "tf32x3")
