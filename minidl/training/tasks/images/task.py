"""The task of classifying pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minidl.data import IMAGE_DATA, Augment, ImageDataset, Pictures
from minidl.errors import ConfigError
from minidl.training.tasks.images import settings
from minidl.training.tasks.images.answers import PictureClassifier
from minidl.training.tasks.images.initial_weights import InitialWeights, imagenet, initialization
from minidl.training.tasks.images.networks import check_sizes, dtype_of, first_layer, network_of
from minidl.training.tasks.images.pictures import PictureFormat, PictureTask
from minidl.training.tasks.images.settings import TrainImages
from minidl.training.tasks.images.stages import Stages

if TYPE_CHECKING:
    import numpy as np

    from minidl import nn
    from minidl.training.loop.supervised import Supervised
    from minidl.training.loop.targets import Predictions
    from minidl.training.run_folder.manifest import RunFiles

_CROP = 0.08  # the default of torchvision's RandomResizedCrop
_LARGE = 128  # pixels of the shorter side of photos, as opposed to icons


class ImagesTask(PictureTask[TrainImages]):
    """The task of classifying pictures."""

    name = "images"
    run = "an image run"
    settings = TrainImages
    files = (
        "labels.json", "calibration.json", "pictures.json", "confusion.png", "reliability.png", "mistakes.png",
        "activations.png", "filters.png",
    )  # fmt: skip

    def settled(self, config: TrainImages, dataset: ImageDataset) -> TrainImages:
        """Return the settings with defaults that suit network, pictures and device."""
        from minidl.runtime import launch

        height, width = dataset.train.pixels.shape[1:3]
        defaults = settings.suited(config, (height, width), half=not launch.ON_CPU)
        if config.init is not None and (config.normalize is None or (config.published and config.stem is None)):
            start = InitialWeights.read(config.init)
            if config.normalize is None:
                defaults["normalize"] = "data" if start.of_run else "imagenet"
            if config.published and config.stem is None:
                stem = settings.default_stem((height, width))
                defaults["stem"] = start.stem(config, format_of(config, dataset), len(dataset.labels), stem)
        return TrainImages(**{**dict(config), **defaults}) if defaults else config

    def prepare(self, config: TrainImages, dataset: ImageDataset) -> Supervised[TrainImages]:
        """Return the experiment. Raises ConfigError for pictures that the network or the settings do not accept."""
        from minidl.data.image_batches import ImageBatches
        from minidl.training.loop.supervised import Supervised, sizes
        from minidl.training.loop.targets import Classification

        format = format_of(config, dataset)
        height, width, channels = format.shape
        augment, stages = augmentation(config, dataset), Stages.from_settings(config, format.size)
        if augment.shift >= min(height, width):
            raise ConfigError(f"--shift {augment.shift} moves pictures of {height} x {width} out of sight; give less")
        make_model = network_of(config, format, len(dataset.labels))
        check_sizes(config, stages.smallest or format.size, len(dataset.train))
        dtype = dtype_of(config)
        initialize, model, note = initialization(config, format, dataset.labels)
        targets = Classification(dataset.labels)
        train = format.pictures(dataset.train.pixels), dataset.train.labels
        return Supervised(
            name=self.name,
            config=config,
            source={
                **dataset.source,
                "sizes": sizes(dataset),
                "features": height * width * channels,
                "augment": {"shift": augment.shift, "flip": augment.flip, **_optional_entries(augment, config)},
            },
            features=f"{format.colours} pictures of {height} x {width} pixels",
            targets=targets,
            train=train,
            validation=(format.pictures(dataset.validation.pixels), dataset.validation.labels),
            test=lambda: (format.pictures(dataset.test.pixels), dataset.test.labels),
            make_model=lambda config, device: make_model(dtype, device),
            documents={**targets.documents, "pictures.json": format.to_json()},
            model=model,
            more_steps=_batch_size_advice(config),
            make_batches=lambda: ImageBatches(
                *train, config.batch_size, config.seed, augment=augment, dtype=dtype, sizes=stages.sizes,
                classes=targets.outputs,
            ),
            draw=lambda *results: _draw(config.out, dataset.labels, *results),
            initialize=initialize,
            note="\n".join(filter(None, (note, stages.description))) or None,
            network=_describe_network(config),
            stages=stages,
        )  # fmt: skip

    def predictor(self, config: TrainImages, run: RunFiles) -> PictureClassifier:
        format = PictureFormat.from_json(run.text("pictures.json"), str(config.out / "pictures.json"))
        return PictureClassifier(config, run, format)


def format_of(config: TrainImages, dataset: ImageDataset) -> PictureFormat:
    """Return the format of the pictures that the network accepts."""
    height, width, channels = dataset.train.pixels.shape[1:]
    mean, std = imagenet(channels) if config.normalize == "imagenet" else (dataset.mean, dataset.std)
    return PictureFormat(height, width, channels, mean, std)


def augmentation(config: TrainImages, dataset: ImageDataset) -> Augment:
    """Return the augmentation of the settings, with defaults that suit the data."""
    default, is_folder = dataset.augment, config.data not in IMAGE_DATA
    crop = config.crop
    if crop is None:
        is_large = min(dataset.train.pixels.shape[1:3]) >= _LARGE
        crop = _CROP if config.published and is_folder and is_large and not config.shift else 1.0
    shift = 0 if crop < 1 else default.shift
    return Augment(
        shift=shift if config.shift is None else config.shift,
        flip=default.flip or crop < 1 if config.flip is None else config.flip,
        replicate=default.replicate,
        crop=crop,
        mixup=config.mixup or 0.0,
        cutmix=config.cutmix or 0.0,
    )


def _describe_network(config: TrainImages) -> str:
    """Return the network and its initial weights, for display."""
    stem = f", {config.stem} stem" if config.stem else ""
    epochs = f"before epoch {config.unfreeze + 1}" if config.unfreeze else "throughout"
    frozen = f", frozen {epochs}" if config.freeze else ""
    init = f"; from {config.init}" if config.init else ""
    average = f"; average of decay {config.ema:g}" if config.ema else ""
    return f"{config.model}{stem}{init}{frozen}{average}"


def _batch_size_advice(config: TrainImages) -> str:
    """Return the advice to use smaller batches, "" for the smallest; mixing needs two pictures."""
    least = 2 if config.mixup or config.cutmix else 1
    return f" or a smaller --batch-size than {config.batch_size}" if config.batch_size > least else ""


def _optional_entries(augment: Augment, config: TrainImages) -> dict[str, float]:
    """Return the report's entries on augmentations and other settings that differ from their defaults."""
    default = Augment()
    names = ("crop", "mixup", "cutmix")
    entries = {name: getattr(augment, name) for name in names if getattr(augment, name) != getattr(default, name)}
    others = {"progressive": config.progressive, "ema": config.ema}
    return {**entries, **{name: value for name, value in others.items() if value is not None}}


def _draw(
    folder: Path, labels: list[str], model: nn.Module, pictures: Pictures, truth: np.ndarray, predictions: Predictions,
    title: str,
) -> None:  # fmt: skip
    """Draw mistakes.png, activations.png and filters.png."""
    import torch

    from minidl.training.report import plots
    from minidl.training.tasks.images import cam

    predicted, confidence, _ = predictions
    assert confidence is not None

    def maps(rows: np.ndarray) -> np.ndarray | None:
        return cam.maps(model, replace(pictures, pixels=pictures.pixels[rows]), predicted[rows])

    plots.mistakes(folder, pictures.pixels, truth, predicted, confidence, labels, title, maps)
    plots.filters(folder, first_layer(model)[1].weight.data.to(torch.float32).cpu().numpy(), title)
