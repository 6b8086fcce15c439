"""`minidl train images`: a convolutional network on pictures of one size."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from minidl import data
from minidl.data import Augment, DataError, ImageDataset, Pictures
from minidl.data.parsing import listed, one_of
from minidl.data.saved import Record
from minidl.data.workers import Workers, available
from minidl.training import fields, inputs
from minidl.training.config import SPLITS, Evaluate, Predict, Session, Training
from minidl.training.display import Display
from minidl.training.errors import ConfigError, damaged
from minidl.training.settings import flag
from minidl.training.task import Predictor, Task

if TYPE_CHECKING:
    import numpy as np
    import torch

    from minidl import nn
    from minidl.training.manifest import RunFiles
    from minidl.training.supervised import Supervised
    from minidl.training.targets import Classification, Found


# Pictures, and their pixels, that `predict` reads at a time, while it answers as many.
_TOGETHER, _TOGETHER_BYTES = 2048, 2**27
_Side = Annotated[int, Field(ge=1, le=1024)]


class ImageSession(Session):
    """How one process trains on pictures."""

    cache: Annotated[
        bool, Field(description="Keep the decoded pictures of your folder in the user's cache for the next run.")
    ] = False

    @classmethod
    def of_process(cls) -> type[Session]:
        return ImageSession


class TrainImages(Training, ImageSession):
    """Train an image classifier: a convolutional network on pictures of one size.

    A folder holds one folder of pictures (PNG, JPEG, BMP, GIF, TIFF, WebP, PPM) per class. The test split is read once,
    at the end; the report has the majority class and a linear machine on the pixels beside the result.
    """

    examples = (
        "minidl train images --data digits --out runs/digits",
        "minidl train images --data mnist --precision bfloat16 --out runs/mnist",
        "minidl train images --data photos --size 64 --flip --out runs/photos",
    )
    data: Annotated[
        fields.Data, Field(description="digits, mnist, fashion-mnist, or a folder with a folder per class.")
    ]
    model: Annotated[
        Literal["small", "ece408"],
        Field(description="small (3x3 convolutions with batch norm) or ece408 (two 5x5 convolutions, for 28x28)."),
    ] = "small"
    size: fields.Size = None
    shift: Annotated[
        int | None,
        Field(
            ge=0, le=1024, description="Move training pictures by up to so many pixels. Default: what suits the data."
        ),
    ] = None
    flip: Annotated[bool | None, Field(description="Mirror half of the pictures. Default: fashion-mnist only.")] = None
    epochs: fields.Epochs = 20
    batch_size: fields.BatchSize = 128
    lr: fields.LearningRate = 0.01
    dropout: Annotated[
        fields.Dropout, Field(description="Share of the values before the last layer dropped in training.")
    ] = 0.0
    weight_decay: fields.WeightDecay = 0.05
    warmup: fields.Warmup = 0.5
    patience: fields.Patience = 5
    precision: fields.ImagePrecision = "float32"


@dataclass(frozen=True)
class PictureFormat(Record):
    """Size and channels of a model's input pictures, with each channel's mean and standard deviation."""

    format = "minidl-pictures"
    height: _Side
    width: _Side
    channels: int
    mean: tuple[Annotated[float, Field(ge=0, le=255)], ...]
    std: tuple[Annotated[float, Field(ge=1e-9, le=255)], ...]

    def __post_init__(self) -> None:
        if self.channels not in (1, 3) or not len(self.mean) == len(self.std) == self.channels:
            raise ValueError(
                f"{self.channels} channels with means {list(self.mean)} and deviations {list(self.std)}, expected 1 or "
                "3 channels with one of each"
            )

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        return self.height, self.width, self.channels

    @property
    def colours(self) -> str:
        """For display."""
        return "grey" if self.channels == 1 else "colour"

    def pictures(self, pixels: np.ndarray) -> Pictures:
        """Pixels uint8 [N, H, W, C] with the mean and deviation that they are standardised by."""
        return Pictures(pixels, self.mean, self.std)


class PictureTask(Task):
    """Tasks on sets of pictures."""

    data_sets = data.IMAGE_DATA
    convolves = True

    def read(self, name: str, **options: Any) -> ImageDataset:
        return data.load_images(name, **options)

    def load(self, config: Any) -> ImageDataset:
        if config.data in data.IMAGE_DATA:
            return super().load(config)
        options = self.options(config)
        if getattr(config, "cache", False):
            from minidl.data.picture_cache import PictureCache

            options["cache"] = PictureCache(Display(config.quiet).note)
        with Workers(config.workers or available()) as workers:
            return self.read(config.data, **options, workers=workers)

    def options(self, config: Any) -> dict[str, Any]:
        if config.data not in data.IMAGE_DATA:
            return {"size": config.size, **getattr(config, "splits", {})}
        for option, value in {"size": config.size, **config.model_dump(include=SPLITS)}.items():
            if value is not None:
                raise ConfigError(
                    f"{flag(option)} is for your own folder: the size and splits of {config.data} are fixed"
                )
        if getattr(config, "cache", False):
            raise ConfigError(f"--cache is for your own folder: {config.data} is not decoded")
        return {} if config.data == "digits" else {"progress": not config.quiet}

    def fingerprints(self, dataset: ImageDataset) -> Iterator[str]:
        import numpy as np

        digest = hashlib.sha256(json.dumps(dataset.labels).encode())
        for part in (dataset.train, dataset.validation, dataset.test):
            digest.update(f"{part.pixels.shape}\n".encode())
            digest.update(np.ascontiguousarray(part.pixels).data)
            digest.update(part.labels.tobytes())
        yield digest.hexdigest()


class ImagesTask(PictureTask):
    """Pictures and their classes."""

    name = "images"
    run = "an image run"
    settings = TrainImages
    files = ("labels.json", "pictures.json", "confusion.png", "mistakes.png", "filters.png")

    def prepare(self, config: TrainImages, dataset: ImageDataset) -> Supervised:
        """Raises ConfigError for pictures that the network or the settings do not take."""
        from minidl.data.image_batches import ImageBatches
        from minidl.training.supervised import Supervised, sizes
        from minidl.training.targets import Classification

        height, width, channels = dataset.train.pixels.shape[1:]
        described = PictureFormat(height, width, channels, dataset.mean, dataset.std)
        suited = dataset.augment
        augment = Augment(
            shift=suited.shift if config.shift is None else config.shift,
            flip=suited.flip if config.flip is None else config.flip,
            replicate=suited.replicate,
        )
        if augment.shift >= min(height, width):
            raise ConfigError(f"--shift {augment.shift} moves pictures of {height} x {width} out of sight; give less")
        make_model = model_of(config, described, len(dataset.labels))
        if height * width == 1 and (len(dataset.train) - 1) % config.batch_size == 0:
            raise ConfigError(
                f"--batch-size {config.batch_size} leaves a batch of one picture of one pixel, which batch norm cannot "
                "learn from; give another, or a --size of 2 or more"
            )
        dtype = _dtype(config)
        targets = Classification(dataset.labels)
        train = described.pictures(dataset.train.pixels), dataset.train.labels
        return Supervised(
            name=self.name,
            config=config,
            source={
                **dataset.source,
                "sizes": sizes(dataset),
                "features": height * width * channels,
                "augment": {"shift": augment.shift, "flip": augment.flip},
            },
            features=f"{described.colours} pictures of {height} x {width} pixels",
            targets=targets,
            train=train,
            validation=(described.pictures(dataset.validation.pixels), dataset.validation.labels),
            test=lambda: (described.pictures(dataset.test.pixels), dataset.test.labels),
            make_model=lambda config, device: make_model(dtype, device),
            documents={**targets.documents, "pictures.json": described.to_json()},
            # A folder may have fewer pictures than a batch, and a step with fewer of them is quicker.
            more_steps=f" or a smaller --batch-size than {config.batch_size}",
            make_batches=lambda: ImageBatches(*train, config.batch_size, config.seed, augment=augment, dtype=dtype),
            draw=lambda *tested: _draw(config.out, dataset.labels, *tested),
        )

    def predictor(self, config: TrainImages, own: RunFiles) -> PictureClassifier:
        described = PictureFormat.from_json(own.text("pictures.json"), str(config.out / "pictures.json"))
        return PictureClassifier(config, own, described)


@dataclass(frozen=True)
class PictureClassifier(Predictor):
    """The model of an image run with what turns a picture file into its input."""

    format: PictureFormat
    fixed = "a folder names its classes"

    @cached_property
    def targets(self) -> Classification:
        from minidl.training.targets import Classification

        return Classification.of_run(self.own)

    @cached_property
    def model(self) -> nn.Module:
        import torch

        from minidl.runtime import launch
        from minidl.training import weights

        dtype = _dtype(self.config)
        if launch.INTERPRETED and dtype == torch.bfloat16:
            dtype = torch.float32  # which holds every bfloat16
        try:
            model = model_of(self.config, self.format, self.targets.outputs)(dtype, "meta")
        except ConfigError as error:
            raise damaged(self.config.out / "config.json", error) from None
        return weights.filled(model, self.own.weights(), self.own.model)

    def chunks(self, config: Predict) -> Iterable[Any]:
        if config.file is not None or config.text_column is not None:
            raise ConfigError(
                "--file and --text-column are for text and table runs; give picture files as arguments, or their paths "
                "on standard input"
            )
        if "" in config.inputs:
            raise ConfigError("an empty name was given: give picture files or folders of them")
        if config.inputs:
            paths = [path for name in config.inputs for path in _files(Path(name))]
            # The workers wait for one another at the end of each chunk.
            return inputs.chunks(
                paths, min(_TOGETHER, max(inputs.CHUNK, _TOGETHER_BYTES // math.prod(self.format.shape)))
            )
        lines = inputs.lines_as_they_come(inputs.standard_input())
        return ([Path(line.strip()) for _, line in chunk if line.strip()] for chunk in lines)

    def features(self, paths: list[Path]) -> Pictures:
        return self.format.pictures(data.read_pictures(paths, self.format.size, self.format.channels, self.workers))

    def answers(self, paths: list[Path], features: Pictures, top: int) -> list[dict[str, Any]]:
        """One answer per file: its path, label, probability and the `top` best labels."""
        from minidl.training.forward import saved_outputs

        parts = saved_outputs(self.model, features, self.targets.outputs)
        ranked = self.targets.answers(parts, top)
        return [{"file": str(path), **answer} for path, answer in zip(paths, ranked, strict=True)]

    def before_fault(self, paths: list[Path]) -> Iterable[list[Path]]:
        """See `Predictor`: where a file cannot be read, one by one up to it."""
        for part in inputs.chunks(paths):
            try:
                self.features(part)
            except DataError:
                yield from ([path] for path in part)
            else:
                yield part

    def labelled(self, config: Evaluate) -> tuple[Pictures, np.ndarray, dict[str, Any]]:
        assert config.data is not None
        if not Path(config.data).is_dir():
            raise DataError(
                f"{config.data} is neither {one_of(data.IMAGE_DATA)} nor a folder of class folders with pictures"
            )
        images, source = data.read_labelled_pictures(
            config.data, self.targets.labels, self.format.size, self.format.channels
        )  # fmt: skip
        return self.format.pictures(images.pixels), images.labels, source

    def test(self, dataset: ImageDataset, config: Evaluate) -> tuple[Pictures, np.ndarray]:
        shape, own = dataset.test.pixels.shape[1:], self.format.shape
        if dataset.labels != self.targets.labels or shape != own:
            raise DataError(
                f"{dataset.name} has pictures of {' x '.join(map(str, shape))} in {len(dataset.labels)} classes; the "
                f"model of {config.run} takes {' x '.join(map(str, own))} and knows {listed(self.targets.labels)}"
            )
        return self.format.pictures(dataset.test.pixels), dataset.test.labels


def model_of(config: TrainImages, described: PictureFormat, classes: int) -> Callable[..., nn.Module]:
    """What makes the model in a dtype, on a device. Raises ConfigError when it does not take the pictures."""
    from minidl import models

    if config.model == "small":
        return lambda dtype, device=None: models.SmallCNN(
            described.channels, described.size, classes, config.dropout, dtype=dtype, device=device
        )
    if described.shape != (28, 28, 1):
        raise ConfigError(
            f"--model ece408 takes grey pictures of 28 x 28 pixels, {config.data} has {described.colours} ones of "
            f"{described.height} x {described.width}; use --model small"
        )
    if config.dropout:
        raise ConfigError("--dropout is for --model small; ece408 has none")
    return lambda dtype, device=None: models.ECE408(classes, dtype=dtype, device=device)


def _dtype(config: TrainImages) -> torch.dtype:
    """Of weights and activations."""
    import torch

    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(config.precision, torch.float32)


def _draw(
    folder: Path,
    labels: list[str],
    model: nn.Module,
    pictures: Pictures,
    truth: np.ndarray,
    found: Found,
    title: str,
) -> None:
    """mistakes.png and filters.png."""
    import torch

    from minidl.training import plots

    assert found.sure is not None
    plots.mistakes(folder, pictures.pixels, truth, found.values, found.sure, labels, title)
    first = next(parameter for parameter in model.parameters() if parameter.ndim == 4)
    plots.filters(folder, first.data.to(torch.float32).cpu().numpy(), title)


def _files(path: Path) -> list[Path]:
    """The file, or the picture files in a folder. Raises DataError for a folder without pictures."""
    from minidl.data.pictures import picture_files

    if not path.is_dir():
        return [path]
    found = picture_files(path)
    if not found:
        raise DataError(f"{path} is a folder without pictures; give picture files or a folder of them")
    return found
