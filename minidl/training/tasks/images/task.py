"""The task: from settings and a set of pictures to a training, and from its run to answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minidl.data import IMAGE_DATA, Augment, ImageDataset, Pictures
from minidl.errors import ConfigError
from minidl.training.tasks.images import settings
from minidl.training.tasks.images.answers import PictureClassifier
from minidl.training.tasks.images.course import Course
from minidl.training.tasks.images.networks import check_sizes, dtype_of, first_layer, network_of
from minidl.training.tasks.images.pictures import PictureFormat, PictureTask
from minidl.training.tasks.images.settings import TrainImages
from minidl.training.tasks.images.start import Start, beginning, imagenet

if TYPE_CHECKING:
    import numpy as np

    from minidl import nn
    from minidl.training.loop.supervised import Supervised
    from minidl.training.loop.targets import Found
    from minidl.training.run_folder.manifest import RunFiles

_CROP = 0.08  # of torchvision's RandomResizedCrop
_LARGE = 128  # pixels of the shorter side, from which on photos may be assumed


class ImagesTask(PictureTask[TrainImages]):
    """Pictures and their classes."""

    name = "images"
    run = "an image run"
    settings = TrainImages
    files = ("labels.json", "pictures.json", "confusion.png", "mistakes.png", "activations.png", "filters.png")

    def settled(self, config: TrainImages, dataset: ImageDataset) -> TrainImages:
        """The settings with those that suit network, pictures and device, where none are given."""
        from minidl.runtime import launch

        height, width = dataset.train.pixels.shape[1:3]
        found = settings.suited(config, (height, width), half=not launch.INTERPRETED)
        if config.init is not None and (config.normalize is None or (config.published and config.stem is None)):
            start = Start.read(config.init)
            if config.normalize is None:
                found["normalize"] = "data" if start.of_run else "imagenet"
            if config.published and config.stem is None:
                usual = settings.usual_stem((height, width))
                found["stem"] = start.stem(config, described_by(config, dataset), len(dataset.labels), usual)
        return TrainImages(**{**dict(config), **found}) if found else config

    def prepare(self, config: TrainImages, dataset: ImageDataset) -> Supervised[TrainImages]:
        """Raises ConfigError for pictures that the network or the settings do not take."""
        from minidl.data.image_batches import ImageBatches
        from minidl.training.loop.supervised import Supervised, sizes
        from minidl.training.loop.targets import Classification

        described = described_by(config, dataset)
        height, width, channels = described.shape
        augment, course = augment_of(config, dataset), Course.of(config, described.size)
        if augment.shift >= min(height, width):
            raise ConfigError(f"--shift {augment.shift} moves pictures of {height} x {width} out of sight; give less")
        make_model = network_of(config, described, len(dataset.labels))
        check_sizes(config, course.smallest or described.size, len(dataset.train))
        dtype = dtype_of(config)
        begin, model, said = beginning(config, described, dataset.labels)
        targets = Classification(dataset.labels)
        train = described.pictures(dataset.train.pixels), dataset.train.labels
        return Supervised(
            name=self.name,
            config=config,
            source={
                **dataset.source,
                "sizes": sizes(dataset),
                "features": height * width * channels,
                "augment": {"shift": augment.shift, "flip": augment.flip, **_more(augment, config)},
            },
            features=f"{described.colours} pictures of {height} x {width} pixels",
            targets=targets,
            train=train,
            validation=(described.pictures(dataset.validation.pixels), dataset.validation.labels),
            test=lambda: (described.pictures(dataset.test.pixels), dataset.test.labels),
            make_model=lambda config, device: make_model(dtype, device),
            documents={**targets.documents, "pictures.json": described.to_json()},
            model=model,
            # A folder may have fewer pictures than a batch, and a step with fewer of them is quicker.
            more_steps=_smaller(config),
            make_batches=lambda: ImageBatches(
                *train,
                config.batch_size,
                config.seed,
                augment=augment,
                dtype=dtype,
                sizes=course.sizes,
                classes=targets.outputs,
            ),
            draw=lambda *tested: _draw(config.out, dataset.labels, *tested),
            begin=begin,
            said="\n".join(filter(None, (said, course.said))) or None,
            network=_shown(config),
            course=course,
        )

    def predictor(self, config: TrainImages, own: RunFiles) -> PictureClassifier:
        described = PictureFormat.from_json(own.text("pictures.json"), str(config.out / "pictures.json"))
        return PictureClassifier(config, own, described)


def described_by(config: TrainImages, dataset: ImageDataset) -> PictureFormat:
    """Size, channels and standardising of the pictures that the network takes."""
    height, width, channels = dataset.train.pixels.shape[1:]
    mean, std = imagenet(channels) if config.normalize == "imagenet" else (dataset.mean, dataset.std)
    return PictureFormat(height, width, channels, mean, std)


def augment_of(config: TrainImages, dataset: ImageDataset) -> Augment:
    """What the settings make of training pictures, and where they say nothing, what suits the data."""
    suited, own_pictures = dataset.augment, config.data not in IMAGE_DATA
    crop = config.crop
    if crop is None:
        large = min(dataset.train.pixels.shape[1:3]) >= _LARGE
        crop = _CROP if config.published and own_pictures and large and not config.shift else 1.0
    shift = 0 if crop < 1 else suited.shift
    return Augment(
        shift=shift if config.shift is None else config.shift,
        flip=suited.flip or crop < 1 if config.flip is None else config.flip,
        replicate=suited.replicate,
        crop=crop,
        mixup=config.mixup or 0.0,
        cutmix=config.cutmix or 0.0,
    )


def _shown(config: TrainImages) -> str:
    """The network, and where it began, for people."""
    stem = f", {config.stem} stem" if config.stem else ""
    frozen = "" if not config.freeze else f" before epoch {config.unfreeze + 1}" if config.unfreeze else " throughout"
    begun = f"; from {config.init}" if config.init else ""
    average = f"; average of decay {config.ema:g}" if config.ema else ""
    return f"{config.model}{stem}{begun}{', frozen' + frozen if config.freeze else ''}{average}"


def _smaller(config: TrainImages) -> str:
    """The advice of a smaller batch, where there is one: what is mixed takes two pictures."""
    least = 2 if config.mixup or config.cutmix else 1
    return f" or a smaller --batch-size than {config.batch_size}" if config.batch_size > least else ""


def _more(augment: Augment, config: TrainImages) -> dict[str, float]:
    """What the report says of an augmentation that not every run has, and of the other parts of a recipe."""
    usual = Augment()
    names = ("crop", "mixup", "cutmix")
    found = {name: getattr(augment, name) for name in names if getattr(augment, name) != getattr(usual, name)}
    recipe = {"progressive": config.progressive, "ema": config.ema}
    return {**found, **{name: value for name, value in recipe.items() if value is not None}}


def _draw(
    folder: Path,
    labels: list[str],
    model: nn.Module,
    pictures: Pictures,
    truth: np.ndarray,
    found: Found,
    title: str,
) -> None:
    """mistakes.png, activations.png and filters.png."""
    import torch

    from minidl.training.report import plots
    from minidl.training.tasks.images import cam

    assert found.sure is not None

    def maps(chosen: np.ndarray) -> np.ndarray | None:
        return cam.maps(model, replace(pictures, pixels=pictures.pixels[chosen]), found.values[chosen])

    plots.mistakes(folder, pictures.pixels, truth, found.values, found.sure, labels, title, maps)
    plots.filters(folder, first_layer(model)[1].weight.data.to(torch.float32).cpu().numpy(), title)
