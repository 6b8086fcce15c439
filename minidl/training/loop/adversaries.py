"""The generator and discriminator of a GAN with their optimizers and one training step.

    discriminator  minimises  mean log(1 + exp(-D(x))) + mean log(1 + exp(D(G(z)))) + PENALTY / 2 mean |grad D(x)|^2
    generator      minimises  mean log(1 + exp(-D(G(z))))

D returns logits. This is the non-saturating loss of Goodfellow et al., arXiv 1406.2661, with the gradient penalty R1 of
Mescheder, Geiger and Nowozin, arXiv 1801.04406: the gradient with respect to the pixels of a real picture x. The run
saves and shows a generator whose weights are a moving average of the trained ones (Yazici et al., arXiv 1806.04498).

The gradient of the penalty needs no second derivatives. With u the direction of grad D(x), a constant,

    |grad D(x)| = (D(x + r u) - D(x - r u)) / 2r + O(r^2),  and the gradients of both squares by D's weights are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from minidl import nn, ops, optim
from minidl.autograd import no_grad
from minidl.compilation.capture import capture
from minidl.distributed.parallel import DataParallel
from minidl.distributed.parts import Shards
from minidl.kernels import random as random_kernels
from minidl.kernels.average import Averages
from minidl.models import Discriminator, Generator
from minidl.tensors import Tensor, default_device
from minidl.training.loop.averages import averaging_rate

BETAS = (0.5, 0.999)
DECAY = 0.999
PENALTY = 1.0
REACH = 0.3  # r above; the norm of a picture of 28 x 28 pixels from -1 to 1 is at most 28
FLAT = 1e-37  # a shorter gradient counts as zero: REACH over its length may be infinite
CALIBRATION = 8  # batches over which the average's running statistics are measured
_PARTS = ("generator", "discriminator", "average")
_CALIBRATION_STREAM = 2**40  # far from the streams that training uses


class Adversaries:
    """The networks, their optimizers and the average, initialized from the process's random state.

    `settings` are the arguments of `Generator`. `step` trains on one batch of `shards`, on a GPU as one CUDA graph
    unless `captured` is False. With `sync_batch_norm` the shards share batch norm statistics. Call `calibrate` before
    using `average`.
    """

    def __init__(
        self, settings: Mapping[str, Any], batch_size: int, lr: float, seed: int, captured: bool = True,
        shards: Shards | None = None, sync_batch_norm: bool = False,
    ) -> None:  # fmt: skip
        self.settings, self.lr, self.captured = settings, lr, captured
        self.generator = Generator(**settings)
        self.discriminator = Discriminator(**{name: value for name, value in settings.items() if name != "latent"})
        self.average = Generator(**settings)
        self.average.load_state_dict(self.generator.state_dict())
        for norm in self._norms():
            norm.momentum = None  # running statistics are means over the batches of `calibrate`
        self.average.requires_grad_(False)
        self.generator_optimizer = optim.Adam(self.generator.parameters(), lr=lr, betas=BETAS)
        self.discriminator_optimizer = optim.Adam(self.discriminator.parameters(), lr=lr, betas=BETAS)
        for optimizer in (self.generator_optimizer, self.discriminator_optimizer):
            optimizer.warns = False  # the report shows the number of skipped steps
        self.batch_size, self.seed, self.steps = batch_size, seed, 0
        self.shards = shards or Shards(1)
        if sync_batch_norm:
            nn.SyncBatchNorm.convert_sync_batchnorm(self.generator)
        self._parallel_generator = DataParallel(self.generator, self.shards, buffers=())
        self._parallel_discriminator = DataParallel(
            self.discriminator, self.shards, self.generator.buffers(), sync_batch_norm=sync_batch_norm
        )
        self._labels = {rows: _labels(rows) for rows in set(map(len, self.shards.rows(batch_size)))}
        self._rate = torch.zeros((), dtype=torch.float64, device=default_device())
        averages, values = ([p.data for p in each.parameters()] for each in (self.average, self.generator))
        self._update_average = Averages(averages, values)
        self._train = capture(self._train_both) if captured else self._train_both

    def step(self, *x: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Train both networks on the pictures [batch, C, H, W] of each shard, with values from -1 to 1.

        Returns, on the device and without waiting: the two losses [2], each a mean over its examples (the
        discriminator's over real and generated ones together, half of the sum above, without the penalty), and the
        means [2] of the probability of being real that the discriminator gave the real and the generated pictures.
        """
        self.steps += 1
        self._rate.fill_(averaging_rate(DECAY, self.steps))
        z = ops.randn(self.batch_size, self.generator.latent)
        rows = self.shards.rows(self.batch_size)
        latents = (z if self.shards.count == 1 else z[shard.start : shard.stop] for shard in rows)
        losses, probabilities = self._train(*x, *latents)
        return losses, probabilities

    def _train_both(self, *parts: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on the pictures of each shard, followed by the latents of each shard."""
        fakes: list[Tensor] = []
        pairs = zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)
        works = [partial(self._discriminator_loss, x, z, fakes) for x, z in pairs]
        loss, probabilities = self._parallel_discriminator.step(self.batch_size, works)
        self.discriminator_optimizer.step()

        self.discriminator.requires_grad_(False)
        generator_works = [partial(self._generator_loss, fake) for fake in fakes]
        (generator_loss,) = self._parallel_generator.step(self.batch_size, generator_works)
        self.generator_optimizer.step()
        self.discriminator.requires_grad_(True)

        self._update_average(self._rate)
        return torch.stack([loss.data, generator_loss.data]), probabilities.data

    def _discriminator_loss(self, x: Tensor, z: Tensor, fakes: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss with its penalty, then the loss alone and the probabilities; append to `fakes`."""
        x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # the memory layout of all results
        fake = self.generator(z)
        fakes.append(fake)
        ascent = self._ascent(x)
        logits = self.discriminator(ops.cat([x, fake.detach(), x + ascent, x - ascent])).reshape(4, -1)
        loss = ops.binary_cross_entropy_with_logits(logits[:2].flatten(0), self._labels[len(x)][1])
        with no_grad():
            probabilities = ops.mean(ops.sigmoid(logits[:2].detach()), 1)
        # Half of the sum above, as the loss is a mean over twice as many.
        return loss + PENALTY / 4.0 * squared_slope(logits[2], logits[3]), [loss, probabilities]

    def _generator_loss(self, fake: Tensor) -> Tensor:
        return ops.binary_cross_entropy_with_logits(self.discriminator(fake), self._labels[len(fake)][0])

    def _ascent(self, x: Tensor) -> Tensor:
        """Return the step of length REACH from each picture along which the discriminator's logit grows fastest."""
        start = Tensor(x.data).requires_grad_()
        self.discriminator.requires_grad_(False)
        try:
            ops.sum(self.discriminator(start)).backward()
        finally:
            self.discriminator.requires_grad_(True)
        assert start.grad is not None
        with no_grad():
            gradient = start.grad
            length = ops.norm(gradient.permute(0, 2, 3, 1).flatten(1), 2, 1)
            factor = ops.where(length > FLAT, REACH / length, 0.0)
            return gradient * factor.reshape(-1, 1, 1, 1)

    def with_batch_size(self, batch_size: int) -> Adversaries:
        """Return new networks of the same settings for another batch size; their steps are not captured."""
        return Adversaries(self.settings, batch_size, self.lr, self.seed, captured=False)

    def calibrate(self) -> Generator:
        """Measure the running statistics of the average's batch norms; return it in evaluation mode.

        The statistics of training belong to other weights (compare the standing statistics of Brock et al., arXiv
        1809.11096). The latents follow from the seed.
        """
        for norm in self._norms():
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked.data.zero_()
        self.average.train()
        shape = (self.batch_size, self.average.latent)
        with no_grad():
            for batch in range(CALIBRATION):
                stream = _CALIBRATION_STREAM + batch
                z = random_kernels.normal(shape, 0.0, 1.0, self.seed, stream, device=default_device())
                self.average(Tensor(z))
        return self.average.eval()

    @property
    def skipped(self) -> int:
        """Return the number of updates skipped for gradients that were not finite; wait for the device."""
        return self.generator_optimizer.skipped + self.discriminator_optimizer.skipped

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors of all networks, named by part: "generator.project.weight"."""
        return {
            f"{part}.{name}": tensor for part in _PARTS for name, tensor in getattr(self, part).state_dict().items()
        }

    def optimizers(self) -> dict[str, Any]:
        """Return the state of both optimizers."""
        return {
            "generator": self.generator_optimizer.flat_state(),
            "discriminator": self.discriminator_optimizer.flat_state(),
        }

    def restore(self, weights: Mapping[str, torch.Tensor], optimizers: Mapping[str, Any], steps: int) -> None:
        """Restore the `weights` and `optimizers` of step `steps`. Raises KeyError, ValueError."""
        for part in _PARTS:
            state = {name.removeprefix(part + "."): t for name, t in weights.items() if name.startswith(part + ".")}
            getattr(self, part).load_state_dict(state)
        self.generator_optimizer.load_flat_state(optimizers["generator"])
        self.discriminator_optimizer.load_flat_state(optimizers["discriminator"])
        self.steps = steps

    def _norms(self) -> list[nn.BatchNorm2d]:
        return [module for module in self.average.modules() if isinstance(module, nn.BatchNorm2d)]


def squared_slope(beyond: Tensor, before: Tensor) -> Tensor:
    """Return mean |grad D(x)|^2, from D's logits [N] at REACH along the gradient from each x and against it."""
    slope = (beyond - before) / (2.0 * REACH)
    return ops.mean(slope * slope)


def _labels(rows: int) -> tuple[Tensor, Tensor]:
    """Return the labels of `rows` real pictures, and of these followed by as many generated ones."""
    ones, zeros = torch.ones(rows), torch.zeros(rows)
    return Tensor(ones.to(default_device())), Tensor(torch.cat([ones, zeros]).to(default_device()))


def latents(seeds: range, latent: int) -> Tensor:
    """Return z [seeds, latent], standard normal numbers that depend only on the seed of their row."""
    return Tensor(random_kernels.normal_rows(seeds, latent, default_device()))
