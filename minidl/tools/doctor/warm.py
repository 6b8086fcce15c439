"""`minidl doctor --warm`: compile the kernels of usual commands into Triton's cache before they run.

A command is rehearsed (`minidl.compilation.rehearsal`): its Python code runs on data of the same sizes, and its
launches are listed with their keys in Triton's cache. Requires a process that does not interpret kernels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minidl import data, nn
from minidl.compilation.capture import capture
from minidl.compilation.job import Job
from minidl.compilation.rehearsal import launched, rehearse
from minidl.data import ImageDataset, Images
from minidl.errors import ConfigError
from minidl.generation import latents, passes
from minidl.generation import model as models
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from minidl.tools.doctor.jobs import target_name
from minidl.training.loop import forward
from minidl.training.prediction import predict
from minidl.training.process.display import Display
from minidl.training.run_folder.folder import RunFolder
from minidl.training.run_folder.train_settings import train_settings
from minidl.training.settings.command import Evaluate
from minidl.training.tasks import TASKS

# Data of the trainings: built-in data, pictures of MNIST's sizes, and small photos.
_TRAININGS: dict[str, tuple[str, ...]] = {
    "text": ("docstrings",),
    "table": ("diabetes",),
    "images": ("digits", "mnist", "photos"),
    "gan": ("digits", "mnist"),
}
NAMES = (*_TRAININGS, "generate")
_INPUTS = (1, 2, 16, forward.BATCH)  # of predict: 1 and multiples of 16 have their own kernels


def jobs(names: Sequence[str], arch: int | None) -> Iterator[list[Job]]:
    """Yield the kernels of each name in NAMES or finished run, for this machine's GPU or an architecture.

    Raises ConfigError for another name, ValueError for an unknown architecture, DataError and DamagedError for a run
    that cannot be read.
    """
    target = None if arch is None else target_name(arch)
    for name in names:
        if name not in NAMES and not RunFolder(Path(name)).is_finished:
            raise ConfigError(f"{name} is neither one of {', '.join(NAMES)} nor the folder of a finished run")
    for name in names:
        by_key = {}
        with np.errstate(all="ignore"):  # memory is uninitialised
            for work in works(name):
                by_key.update(
                    {job.key: job for job in launched(work, launch.architecture() if arch is None else arch, target)}
                )
        yield list(by_key.values())


def works(name: str, inputs: Sequence[int] = _INPUTS) -> Iterator[Callable[[], object]]:
    """Yield the functions to rehearse for a name, with these numbers of `inputs` of predict."""
    if name in _TRAININGS:
        for source in _TRAININGS[name]:
            yield partial(_train, name, source, inputs)
    elif name == "generate":
        for precision in ("float32", "float16"):
            yield partial(_generate, "mnist", precision)
    elif RunFolder(Path(name)).read().task.generates:
        yield partial(_generate, name, "float32")
    else:
        yield partial(_predict, Path(name), inputs)


def _train(kind: str, source: str, inputs: Sequence[int]) -> None:
    """Run training at default settings, its evaluation on the test split, and predictions of its model."""
    task = TASKS[kind]
    with tempfile.TemporaryDirectory() as folder:
        config = train_settings(kind, {"data": source, "out": Path(folder) / "run", "quiet": True})
        dataset = _LIKE[source]() if source in _LIKE else task.load(config)
        config = task.settled(config, dataset)
        experiment = task.prepare(config, dataset)
        launch.set_float32_precision("tf32" if config.precision == "tf32" else "tf32x3")
        trainer = experiment.trainer(Display(quiet=True), {}, "")
        trainer.rehearse()
        if not task.generates:
            features, _ = experiment.test()  # type: ignore[attr-defined]
            _outputs(trainer.model, features, experiment.targets, inputs)  # type: ignore[attr-defined]


def _predict(run: Path, inputs: Sequence[int]) -> None:
    """Run `evaluate` and `predict` of a finished run."""
    predictor = predict.load(run)
    features, _ = predictor.test(RunFolder(run).read_finished().load_data(), Evaluate(run=run))
    _outputs(predictor.model, features, predictor.targets, inputs)


def _outputs(model: nn.Module, features: Any, targets: Any, inputs: Sequence[int]) -> None:
    total = features.shape[0]
    for count in (total, *inputs):
        batch = replace(features, pixels=features.pixels[:count]) if hasattr(features, "pixels") else features[:count]
        forward.rehearse(model, batch, targets.outputs)
        targets.rehearse(min(count, total))


def _generate(model: str, precision: str) -> None:
    loaded = models.load(model, precision)
    for count in _INPUTS:
        latents.from_seeds(range(count), loaded.latent)
    count = passes.pass_size(loaded.channels, loaded.size)
    dtype = next(loaded.generator.parameters()).dtype
    step = capture(partial(passes.pictures, loaded.generator, dtype))
    rehearse(step, Tensor(torch.zeros(count, loaded.latent, device=default_device())))


def _black(sizes: Sequence[int], shape: tuple[int, int, int], augment: data.Augment) -> ImageDataset:
    """Return black pictures [H, W, C] of ten classes, with these `sizes` of training, validation and test data."""
    train, validation, test = (
        Images(np.zeros((count, *shape), dtype=np.uint8), np.arange(count, dtype=np.int64) % 10) for count in sizes
    )
    mean = (128.0,) * shape[-1]
    return replace(
        data.load_images("digits"), train=train, validation=validation, test=test, augment=augment, mean=mean, std=mean
    )


_LIKE = {
    "mnist": partial(_black, (55_000, 5_000, 10_000), (28, 28, 1), data.Augment(2)),
    "photos": partial(_black, (7_000, 1_000, 2_000), (64, 64, 3), data.Augment(4, replicate=True)),
}
