"""A network with its optimizers, for both sides from one definition: steps, calls, losses and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.bench.in_torch import CLASSES, in_torch
from benchmarks.bench.network_rows import Net
from minidl import models, ops, optim
from minidl.autograd import no_grad
from minidl.tensors import Tensor

LAST = torch.channels_last
# The number of images to compare sides on, or more small ones with as many pixels: a sum near 0 may fall on either side
# of a ReLU. ECE408's worst gradient, torch in bfloat16: 0.03 to 0.12 with 8 images, 0.05 to 0.06 with 512.
JUDGED, JUDGED_PIXELS = 8, 8 * 224 * 224
# The largest relative error, in the norm, of 50 layers. In training, batch norms of few images increase it.
OFF = {torch.float16: 2.0**-6, torch.bfloat16: 2.0**-4, torch.float32: 2.0**-12}
# Gradients of a step in bfloat16 may have this many times torch's error under autocast.
AS_TORCH = 2.0


@dataclass(frozen=True)
class Kit:
    """The library of a side: `make(name, *args, **options)` returns a network, `tensor` converts inputs."""

    make: Callable[..., Any]
    tensor: Callable[[torch.Tensor], Any]
    functions: Any
    sgd: Callable[[Any], Any]
    adam: Callable[[Any], Any]
    casting: Callable[[], contextlib.AbstractContextManager[Any]]
    no_grad: Callable[[], contextlib.AbstractContextManager[Any]]


def ours(device: str, dtype: torch.dtype) -> Kit:
    """Return minidl's kit, with weights of a dtype."""

    def make(name: str, *args: Any, **options: Any) -> Any:
        return getattr(models, CLASSES.get(name, name))(*args, **options, device=device, dtype=dtype)

    return Kit(
        make, Tensor, ops, lambda weights: optim.SGD(weights, lr=1e-3, momentum=0.9),
        lambda weights: optim.Adam(weights, lr=1e-3), contextlib.nullcontext, no_grad,
    )  # fmt: skip


def torchs(device: str, dtype: torch.dtype, autocast: torch.dtype | None = None) -> Kit:
    """Return torch's kit, with weights of a dtype in channels-last memory, under autocast to another dtype."""

    class Functions:
        cat = staticmethod(torch.cat)
        cross_entropy = staticmethod(F.cross_entropy)
        binary_cross_entropy_with_logits = staticmethod(F.binary_cross_entropy_with_logits)

    def make(name: str, *args: Any, **options: Any) -> Any:
        return in_torch(name, *args, **options).to(device, dtype).to(memory_format=LAST)  # type: ignore[call-overload]

    def casting() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if autocast is None else torch.autocast(device, autocast)

    fused: dict[str, Any] = {"fused": True} if device == "cuda" else {}
    return Kit(
        make, lambda x: x.to(dtype) if x.is_floating_point() and autocast is None else x, Functions,
        lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, **fused),
        lambda weights: torch.optim.Adam(weights, lr=1e-3, capturable=device == "cuda", **fused), casting,
        torch.no_grad,
    )  # fmt: skip


Batch = tuple[torch.Tensor, ...]


def batch_of(net: Net, device: str, dtype: torch.dtype) -> Batch:
    """Return images in channels-last memory, and the classes of images or pixels; for a DCGAN latents."""
    x = torch.randn(net.images, net.channels, net.size, net.size, device=device, dtype=dtype).to(memory_format=LAST)
    if net.name == "dcgan":
        return x, torch.randn(net.images, dict(net.options)["latent"], device=device, dtype=dtype)
    shape = (net.images, net.size, net.size) if net.name == "unet" else (net.images,)
    classes = net.arguments[-1]
    return x, torch.randint(classes, shape, device=device)


class Side:
    """A network of one side. `calls` has its networks, or compiled versions of them."""

    def __init__(self, net: Net, kit: Kit) -> None:
        self.net, self.kit = net, kit
        self._labels: dict[int, tuple[Any, Any]] = {}
        if net.name == "dcgan":
            image, options = (net.channels, (net.size, net.size)), dict(net.options)
            latent = options.pop("latent")
            self.networks = {
                "generator": kit.make("Generator", latent, *image, **options),
                "discriminator": kit.make("Discriminator", *image, **options),
            }
        else:
            self.networks = {"": kit.make(net.name, *net.arguments, **dict(net.options))}
        for network in self.networks.values():
            network.train(net.training)
            for layer in network.modules():
                if type(layer).__name__ == "Dropout":
                    layer.p = 0.0
        optimizer = kit.adam if net.name == "dcgan" else kit.sgd
        self.calls = dict(self.networks)
        self.optimizers = {
            name: optimizer(list(network.parameters())) for name, network in self.networks.items() if net.training
        }

    def load(self, other: Side) -> None:
        """Load the weights and buffers of another side."""
        for name, network in self.networks.items():
            network.load_state_dict(other.networks[name].state_dict())

    def take_statistics(self, batch: Batch) -> None:
        """Set running statistics of torch's batch norms that preserve the size of a batch's values: variances of 1/2 to
        3/2 of their mean square, and means of -1/2 to 1/2 of its root, by channel.

        With the initial means of 0 and variances of 1, an untrained MobileNetV2 ends in values of 3e-9, which are 0 in
        float16. With the statistics of the batch, values are mostly rounding: 1e-1 of ResNet-50's.
        """

        def take(norm: Any, args: tuple[torch.Tensor, ...]) -> None:
            square, spread = args[0].square().mean(), torch.linspace(-0.5, 0.5, norm.num_features).to(args[0])
            norm.running_mean.copy_(square.sqrt() * spread)
            norm.running_var.copy_(square * (1 + spread))

        kind = torch.nn.modules.batchnorm._BatchNorm
        layers = [layer for network in self.networks.values() for layer in network.modules() if isinstance(layer, kind)]
        hooks = [layer.register_forward_pre_hook(take) for layer in layers]
        self.answer(batch)
        for hook in hooks:
            hook.remove()

    def call_on(self, batch: Batch) -> Callable[[], Any]:
        """Return the call to time: a step on a batch, or an inference."""
        if self.net.training:
            return lambda: self.step(batch)
        return lambda: self.answer(batch)

    def answer(self, batch: Batch) -> Any:
        """Return the network's result on the images."""
        x = self.kit.tensor(batch[0])
        with self.kit.no_grad(), self.kit.casting():
            return self.calls[""](x)

    def step(self, batch: Batch) -> list[Any]:
        """Run a training step and return its losses in order."""
        values = []
        for optimizer, loss in self._losses(batch):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.detach())
        return values

    def gradients(self, batch: Batch) -> tuple[list[float], list[torch.Tensor]]:
        """Return the losses and the gradients of all weights; updates nothing."""
        values = []
        for optimizer, loss in self._losses(batch):
            optimizer.zero_grad()
            loss.backward()
            values.append(loss.detach().data)
        gradients = [weight.grad.data for network in self.networks.values() for weight in network.parameters()]
        return [float(value) for value in values], gradients

    def compared(self, batch: Batch) -> Any:
        """Return the values to compare with float64."""
        return self.gradients(batch) if self.net.training else self.answer(batch)

    def forget_gradients(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def _losses(self, batch: Batch) -> Iterator[tuple[Any, Any]]:
        """Yield each optimizer with its loss."""
        kit = self.kit
        if self.net.name != "dcgan":
            with kit.casting():
                loss = kit.functions.cross_entropy(self.calls[""](kit.tensor(batch[0])), kit.tensor(batch[1]))
            yield self.optimizers[""], loss
            return
        generator, discriminator = self.calls["generator"], self.calls["discriminator"]
        bce = kit.functions.binary_cross_entropy_with_logits
        x, z = (kit.tensor(each) for each in batch)
        real, all_labels = self._labels_of(batch[0])
        with kit.casting():
            fake = generator(z)
            loss = bce(discriminator(kit.functions.cat([x, fake.detach()])), all_labels)
        yield self.optimizers["discriminator"], loss
        self.networks["discriminator"].requires_grad_(False)
        with kit.casting():
            loss = bce(discriminator(fake), real)
        yield self.optimizers["generator"], loss
        self.networks["discriminator"].requires_grad_(True)

    def _labels_of(self, x: torch.Tensor) -> tuple[Any, Any]:
        """Return cached labels of real images, and of as many real and generated ones."""
        if len(x) not in self._labels:
            real = torch.ones(len(x), dtype=x.dtype, device=x.device)
            both = torch.cat([real, torch.zeros_like(real)])
            self._labels[len(x)] = self.kit.tensor(real), self.kit.tensor(both)
        return self._labels[len(x)]


@dataclass(frozen=True)
class Errors:
    """Relative errors of a side on a small batch: of losses (or results), all gradients, and the worst gradient."""

    loss: float
    gradients: float = 0.0
    worst: float = 0.0

    def as_json(self) -> dict[str, float]:
        return {name: float(f"{value:.3g}") for name, value in vars(self).items()}


def few_of(batch: Batch) -> Batch:
    """Return the part of a batch on which sides are compared."""
    count = max(JUDGED, JUDGED_PIXELS // max(1, batch[0][0, 0].numel()))
    return tuple(each[:count] for each in batch)


def errors_of(sides: Sequence[Side], exact: Side, batch: Batch) -> list[Errors]:
    """Return the errors of sides with the weights of `exact`, which computes in float64."""
    few = few_of(batch)
    if not exact.net.training:
        result = exact.answer(few).data.double()
        return [Errors(float((side.answer(few).data.double() - result).norm() / result.norm())) for side in sides]
    losses, gradients = exact.gradients(few)
    exact.forget_gradients()
    return [_errors(*side.gradients(few), losses, gradients) for side in sides]


def _errors(losses: list[float], gradients: list[torch.Tensor], exact: list[float], exact_gradients: Any) -> Errors:
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, exact, strict=True))
    distance = torch.stack([(a.double() - b).norm() for a, b in zip(gradients, exact_gradients, strict=True)])
    size = torch.stack([gradient.norm() for gradient in exact_gradients])
    # Gradients near zero, such as those of biases before batch norms, are mostly rounding.
    least = size.norm() / 32
    return Errors(loss, float(distance.norm() / size.norm()), float((distance / size.clamp(min=least)).max()))


def right(errors: Errors, torch_errors: Errors, dtype: torch.dtype) -> bool:
    """Return whether errors are only rounding: within OFF, gradients alternatively within AS_TORCH times torch's."""
    allowed = OFF[dtype]
    pairs = (errors.gradients, torch_errors.gradients), (errors.worst, torch_errors.worst)
    # False for a NaN.
    return errors.loss <= allowed and all(a <= max(allowed, AS_TORCH * b) for a, b in pairs)
