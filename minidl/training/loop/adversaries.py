"""Generator and discriminator with everything that a step of their training changes.

    discriminator  minimises  mean log(1 + exp(-D(x))) + mean log(1 + exp(D(G(z)))) + PENALTY / 2 mean |grad D(x)|^2
    generator      minimises  mean log(1 + exp(-D(G(z))))

D gives logits. This is the non-saturating loss of Goodfellow et al., arXiv 1406.2661, with the gradient penalty R1 of
Mescheder, Geiger and Nowozin, arXiv 1801.04406: the gradient is that by the pixels of a real picture x. What is kept
and shown is a generator whose weights are a moving average of those of training (Yazici et al., arXiv 1806.04498).

The gradient of the penalty needs no second derivatives. With u the direction of grad D(x), held fixed,

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

BETAS = (0.5, 0.999)
DECAY = 0.999
PENALTY = 1.0
REACH = 0.3  # r above, where a picture of 28 x 28 pixels from -1 to 1 is 28 long
FLAT = 1e-37  # a gradient no longer than this is none: REACH over a smaller length may be infinite
CALIBRATION = 8  # batches that the average's running statistics are measured over
_PARTS = ("generator", "discriminator", "average")
_CALIBRATION_STREAM = 2**40  # far from the streams that a seed's training takes


class Adversaries:
    """The networks, their optimisers and the average, all made from `settings` and the process's random state.

    `settings` are the arguments of `Generator`. `step` trains on one batch, on a GPU as one CUDA graph unless
    `captured` is False, and by shards, of which `sync_batch_norm` joins the statistics; `statistics` readies `average`
    for use.
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
            norm.momentum = None  # running statistics are means over the batches of `statistics`
        self.average.requires_grad_(False)
        self.generator_optimizer = optim.Adam(self.generator.parameters(), lr=lr, betas=BETAS)
        self.discriminator_optimizer = optim.Adam(self.discriminator.parameters(), lr=lr, betas=BETAS)
        for optimizer in (self.generator_optimizer, self.discriminator_optimizer):
            optimizer.warns = False  # the loop counts skipped steps, and the report tells them
        self.batch_size, self.seed, self.steps = batch_size, seed, 0
        self.shards = shards or Shards(1)
        if sync_batch_norm:
            nn.SyncBatchNorm.convert_sync_batchnorm(self.generator)
        self._of_generator = DataParallel(self.generator, self.shards, buffers=())
        self._of_discriminator = DataParallel(
            self.discriminator, self.shards, self.generator.buffers(), sync_batch_norm=sync_batch_norm
        )
        self._labels = {rows: _labels(rows) for rows in set(map(len, self.shards.rows(batch_size)))}
        self._share = torch.zeros((), dtype=torch.float64, device=default_device())
        kept, followed = ([p.data for p in each.parameters()] for each in (self.average, self.generator))
        self._follow = Averages(kept, followed)
        self._train = capture(self._both) if captured else self._both

    def step(self, *x: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Train both networks on pictures [batch, C, H, W] with values from -1 to 1, those of each of the shards.

        Returns, on the device and without waiting: the two losses [2], each a mean over its examples (the
        discriminator's over real and made ones together, half of the sum above, without the penalty), and the means [2]
        of the probability of being real that the discriminator gave the real and the made pictures.
        """
        self.steps += 1
        # More in the first steps, so that the first weights are soon forgotten.
        self._share.fill_(1.0 - min(DECAY, (1.0 + self.steps) / (10.0 + self.steps)))
        z = ops.randn(self.batch_size, self.generator.latent)
        rows = self.shards.rows(self.batch_size)
        losses, believed = self._train(*x, *(z if self.shards.count == 1 else z[own.start : own.stop] for own in rows))
        return losses, believed

    def _both(self, *parts: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A step on the pictures of the shards and the latents of them."""
        made: list[Tensor] = []
        half = len(parts) // 2
        judging = [partial(self._judged, x, z, made) for x, z in zip(parts[:half], parts[half:], strict=True)]
        loss, believed = self._of_discriminator.step(self.batch_size, judging)
        self.discriminator_optimizer.step()

        self.discriminator.requires_grad_(False)
        (opposed,) = self._of_generator.step(self.batch_size, [partial(self._opposed, each) for each in made])
        self.generator_optimizer.step()
        self.discriminator.requires_grad_(True)

        self._follow(self._share)
        return torch.stack([loss.data, opposed.data]), believed.data

    def _judged(self, x: Tensor, z: Tensor, made: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What the discriminator minimises, with its loss and what it believes; adds the pictures `made`."""
        x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # to lie as all that is made of it does
        fake = self.generator(z)
        made.append(fake)
        ahead = self._ahead(x)
        logits = self.discriminator(ops.cat([x, fake.detach(), x + ahead, x - ahead])).reshape(4, -1)
        loss = ops.binary_cross_entropy_with_logits(logits[:2].flatten(0), self._labels[len(x)][1])
        with no_grad():
            believed = ops.mean(ops.sigmoid(logits[:2].detach()), 1)
        # Half of the sum above, as the loss is a mean over twice as many.
        return loss + PENALTY / 4.0 * squared_slope(logits[2], logits[3]), [loss, believed]

    def _opposed(self, made: Tensor) -> Tensor:
        """What the generator minimises."""
        return ops.binary_cross_entropy_with_logits(self.discriminator(made), self._labels[len(made)][0])

    def _ahead(self, x: Tensor) -> Tensor:
        """The step of length REACH from each picture along which the discriminator's logit grows fastest."""
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
            # Without a slope there is no direction, and no step.
            factor = ops.where(length > FLAT, REACH / length, 0.0)
            return gradient * factor.reshape(-1, 1, 1, 1)

    def others(self, batch_size: int) -> Adversaries:
        """New networks of the same settings, for another batch size; their steps are not captured."""
        return Adversaries(self.settings, batch_size, self.lr, self.seed, captured=False)

    def statistics(self) -> Generator:
        """The average in evaluation mode, its batch norms' running statistics measured anew.

        Those of training belong to other weights (as the standing statistics of Brock et al., arXiv 1809.11096). The
        latents follow from the seed.
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
        """How many updates met a gradient that was not finite. Waits for the device."""
        return self.generator_optimizer.skipped + self.discriminator_optimizer.skipped

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of all networks, named by part: "generator.project.weight"."""
        return {
            f"{part}.{name}": tensor for part in _PARTS for name, tensor in getattr(self, part).state_dict().items()
        }

    def optimizers(self) -> dict[str, Any]:
        """The state of both optimisers."""
        return {
            "generator": self.generator_optimizer.flat_state(),
            "discriminator": self.discriminator_optimizer.flat_state(),
        }

    def restore(self, weights: Mapping[str, torch.Tensor], optimizers: Mapping[str, Any], steps: int) -> None:
        """Go on from what `weights` and `optimizers` gave after so many steps. Raises KeyError, ValueError."""
        for part in _PARTS:
            own = {name.removeprefix(part + "."): t for name, t in weights.items() if name.startswith(part + ".")}
            getattr(self, part).load_state_dict(own)
        self.generator_optimizer.load_flat_state(optimizers["generator"])
        self.discriminator_optimizer.load_flat_state(optimizers["discriminator"])
        self.steps = steps

    def _norms(self) -> list[nn.BatchNorm2d]:
        return [module for module in self.average.modules() if isinstance(module, nn.BatchNorm2d)]


def squared_slope(beyond: Tensor, before: Tensor) -> Tensor:
    """mean |grad D(x)|^2, from D's logits [N] at REACH along the gradient from each x and as far against it."""
    slope = (beyond - before) / (2.0 * REACH)
    return ops.mean(slope * slope)


def _labels(rows: int) -> tuple[Tensor, Tensor]:
    """What is said of so many real pictures, and of them and as many made ones."""
    ones, zeros = torch.ones(rows), torch.zeros(rows)
    return Tensor(ones.to(default_device())), Tensor(torch.cat([ones, zeros]).to(default_device()))


def latents(seeds: range, latent: int) -> Tensor:
    """z [seeds, latent]: the standard normal numbers of each seed, whatever other seeds there are."""
    return Tensor(random_kernels.normal_rows(seeds, latent, default_device()))
