"""The settings of `minidl train images`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from minidl.errors import ConfigError
from minidl.training.settings import fields
from minidl.training.settings.command import Session, Training
from minidl.training.settings.declaration import FLOAT32, IN_FLOAT32

# What the networks of torchvision's names have where no --dropout is given; those not named here have no place for it.
DROPOUT = {"small": 0.0, "mobilenet_v2": 0.2, "vgg16_bn": 0.5}
_OWN = ("small", "ece408")  # networks of no other library
_SMALL_SIDE = 64  # pixels: the full beginning would leave fewer than 2x2 places of a shorter side


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
        "minidl train images --data pets --model resnet18 --init runs/a --out runs/b",
    )
    data: Annotated[
        fields.Data, Field(description="digits, mnist, fashion-mnist, or a folder with a folder per class.")
    ]
    model: Annotated[
        Literal["small", "ece408", "resnet18", "resnet34", "resnet50", "mobilenet_v2", "vgg16_bn", "densenet121"],
        Field(
            description="small (3x3 convolutions with batch norm), ece408 (two 5x5 convolutions, for 28x28), or a "
            "network as torchvision has it: resnet18, resnet34, resnet50, mobilenet_v2, vgg16_bn, densenet121."
        ),
    ] = "small"
    init: Annotated[
        fields.Part,
        Field(
            description="Weights to begin with: a state_dict of torchvision's network as a safetensors file, or the "
            "model of a run. The last layer is made anew where the classes differ.",
        ),
    ] = None
    freeze: Annotated[
        bool | None, Field(description="Train the last layer alone; all before it stays as --init has it.")
    ] = None
    unfreeze: Annotated[
        int | None,
        Field(ge=1, le=10**6, description="With --freeze: train all layers after so many epochs."),
    ] = None
    unfreeze_lr: Annotated[
        float | None,
        Field(
            gt=0,
            le=FLOAT32,
            description="With --unfreeze: learning rate of the epochs that train all layers. Default: --lr where it is "
            "given, else that of --init without --freeze.",
        ),
        IN_FLOAT32,
    ] = None
    stem: Annotated[
        Literal["full", "small"] | None,
        Field(
            description="Beginning of a network as torchvision has it: full, as published for 224x224, or small, with "
            "fewer strides. Default: small where a side has fewer than 64 pixels, or what fits --init."
        ),
    ] = None
    normalize: Annotated[
        Literal["data", "imagenet"] | None,
        Field(
            description="Mean and deviation that pictures are standardised by: of the training split (data), or of "
            "ImageNet. Default: imagenet with --init but for the model of a run, else data."
        ),
    ] = None
    size: fields.Size = None
    shift: Annotated[
        int | None,
        Field(
            ge=0, le=1024, description="Move training pictures by up to so many pixels. Default: what suits the data."
        ),
    ] = None
    flip: Annotated[
        bool | None, Field(description="Mirror half of the pictures. Default: fashion-mnist, and with crops.")
    ] = None
    crop: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="Cut out parts of training pictures of at least this share of the area, and make them as large "
            "as the picture; 1: none. Default: 0.08 for networks as torchvision has them on your pictures from 128x128 "
            "on, else 1.",
        ),
    ] = None
    mixup: Annotated[
        float | None,
        Field(
            gt=0,
            le=100,
            description="Mix training pictures and their labels, by shares of the beta distribution of this number "
            "twice: 0.2 mixes little, 1 evenly.",
        ),
    ] = None
    cutmix: Annotated[
        float | None,
        Field(
            gt=0,
            le=100,
            description="Put a part of another training picture into each, with shares as of --mixup; with both, one "
            "of them for each picture.",
        ),
    ] = None
    progressive: Annotated[
        int | None,
        Field(
            ge=1,
            le=1024,
            description="Begin with pictures whose shorter side has so many pixels, at least a quarter of its own; "
            "they grow in four steps to full size, which the last quarter of the epochs has.",
        ),
    ] = None
    ema: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="Judge and keep a moving average of the weights with this decay a step, such as 0.999.",
        ),
    ] = None
    sync_batch_norm: fields.SyncBatchNorm = None
    epochs: fields.Epochs = 20
    batch_size: fields.BatchSize = 128
    lr: Annotated[
        float | None,
        Field(
            gt=0,
            le=FLOAT32,
            description="Learning rate. Default: 0.01 for small and ece408, 0.001 for other networks, a tenth of it "
            "with --init, 0.01 with --freeze until --unfreeze.",
        ),
        IN_FLOAT32,
    ] = None
    dropout: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="Share of the values before the last layer dropped in training. Default: 0.2 for "
            "mobilenet_v2, 0.5 for vgg16_bn, else 0.",
        ),
    ] = None
    weight_decay: fields.WeightDecay = 0.05
    warmup: fields.Warmup = 0.5
    patience: fields.Patience = 5
    precision: Annotated[
        Literal["float32", "tf32", "bfloat16", "float16"] | None,
        Field(
            description="Precision of weights and activations: float32, tf32, bfloat16 or float16; the last two keep "
            "float32 master weights. Default: bfloat16 for networks as torchvision has them on a GPU, else float32."
        ),
    ] = None

    @property
    def published(self) -> bool:
        """Whether the network is one that torchvision has, too."""
        return self.model not in _OWN

    @model_validator(mode="after")
    def _check_network(self) -> Self:
        if self.stem is not None and not self.published:
            raise ConfigError(f"--stem is for networks as torchvision has them; {self.model} has one beginning")
        if self.crop is not None and self.crop < 1 and self.shift:
            raise ConfigError("--crop cuts out parts of pictures at any place, which --shift would move: give one")
        if self.freeze and self.init is None:
            raise ConfigError("--freeze keeps the layers of --init as they are: name its file")
        if self.unfreeze is not None and not self.freeze:
            raise ConfigError("--unfreeze ends what --freeze begins: give both")
        if self.unfreeze is not None and self.unfreeze >= self.epochs:
            raise ConfigError(f"--unfreeze {self.unfreeze} must be less than --epochs {self.epochs}")
        if self.unfreeze_lr is not None and self.unfreeze is None:
            raise ConfigError("--unfreeze-lr is the rate from --unfreeze on: give both")
        if self.sync_batch_norm and self.model == "ece408":
            raise ConfigError("--sync-batch-norm is for networks with batch norm; ece408 has none")
        mixing = "--mixup" if self.mixup else "--cutmix" if self.cutmix else None
        if mixing and self.batch_size == 1:
            raise ConfigError(f"{mixing} mixes the pictures of a batch, and --batch-size 1 has one; give 2 or more")
        if self.dropout and self.model not in DROPOUT:
            *others, last = DROPOUT
            raise ConfigError(f"--dropout is for --model {', '.join(others)} and {last}; {self.model} has none")
        return self


def suited(config: TrainImages, size: tuple[int, int], half: bool) -> dict[str, Any]:
    """The settings that are not given: for pictures of this size, where the device computes in bfloat16 if `half`.

    Those of `--init`, stem and normalize, follow from its file and are not among them.
    """
    rate = 0.001 if config.published else 0.01
    if config.init is not None:
        rate = rate / 10
    found: dict[str, Any] = {
        "lr": 0.01 if config.freeze else rate,
        "dropout": DROPOUT.get(config.model, 0.0),
        "precision": "bfloat16" if half and config.published else "float32",
    }
    if config.unfreeze is not None and config.lr is None:
        found["unfreeze_lr"] = rate
    if config.published and config.init is None:
        found["stem"] = usual_stem(size)
    return {name: value for name, value in found.items() if getattr(config, name) is None}


def usual_stem(size: tuple[int, int]) -> Literal["full", "small"]:
    """The beginning of a published network that suits pictures of this size."""
    return "small" if min(size) < _SMALL_SIDE else "full"
