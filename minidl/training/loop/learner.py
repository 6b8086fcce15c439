"""The model, optimizer and data of a training, and the result of a validation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minidl import nn
from minidl.data.batches import Batches
from minidl.data.image_batches import ImageBatches
from minidl.distributed.parallel import DataParallel
from minidl.optim import Optimizer, Schedule
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device
from minidl.training.loop.averages import ModelAverage


@dataclass(frozen=True)
class Judgement:
    """Validation scores by name, and the deciding one (greater is better) with its standard error `margin`.

    The margin is due to the choice of validation examples: scores that are closer do not differ.
    """

    scores: dict[str, float]
    score: float
    margin: float


@dataclass
class Learner:
    """The model, optimizer, batches and validation of a training. `loss(x, y)` returns a scalar Tensor.

    `rehearse()` launches the kernels of `validate`, see `rehearsal`; None: `validate` itself is rehearsed.
    `stage_starts` are the epochs from which the step differs (0 is the first), and `enter(epoch)` prepares the model
    for the steps of an epoch; None: training mode. An `average` is validated and saved in place of the model.
    `sizes` are pairs (epoch, (height, width)) of pictures whose size changes. With `parallel` a step runs by shards.
    """

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    batches: Batches | ImageBatches
    loss: Callable[[CSR | Tensor, Tensor], Tensor]
    validate: Callable[[], Judgement]
    rehearse: Callable[[], object] | None = None
    stage_starts: Sequence[int] = (0,)
    enter: Callable[[int], None] | None = None
    average: ModelAverage | None = None
    sizes: Sequence[tuple[int, tuple[int, int]]] = ()
    parallel: DataParallel | None = None

    def prepare(self, epoch: int) -> None:
        """Prepare the model for the steps of an epoch."""
        if self.enter is None:
            self.model.train()
        else:
            self.enter(epoch)

    def inputs(self, batches: Batches | ImageBatches, epoch: int, step: int) -> Iterator[tuple[Any, ...]]:
        """Yield the inputs of each step of an epoch: x and y, or an empty tensor and then x and y of each shard.

        The empty tensor is as wide as the batch has rows: a CUDA graph is recorded for each number of rows.
        """
        if self.parallel is None:
            yield from (_on_device(x, y) for x, y in batches.epoch(epoch, step))
            return
        for rows, parts in batches.sharded(epoch, step, self.parallel.shards.rows):
            size = torch.empty(0, rows, device=default_device())
            yield size, *(tensor for x, y in parts for tensor in _on_device(x, y))

    def step(self, *inputs: Any) -> torch.Tensor:
        """Train on a batch of `inputs`; return the loss."""
        scale = self.optimizer.loss_scale
        if self.parallel is None:
            self.optimizer.zero_grad()
            loss = self.loss(*inputs)
            loss.backward(scale)
        else:
            size, *tensors = inputs
            works = [functools.partial(self.loss, *tensors[i : i + 2]) for i in range(0, len(tensors), 2)]
            loss = self.parallel.step(size.shape[1], works, scale)[0]
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        return loss.data


def _on_device(x: CSR | torch.Tensor, y: torch.Tensor) -> tuple[CSR | Tensor, Tensor]:
    device = default_device()
    return x.to(device) if isinstance(x, CSR) else Tensor(x.to(device)), Tensor(y.to(device))
