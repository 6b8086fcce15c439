"""The settings of `minidl train images`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from minidl.errors import ConfigError
from minidl.training.settings import fields
from minidl.training.settings.command import Session, Training, TrainSettings
from minidl.training.settings.declaration import FLOAT32, IN_FLOAT32

DROPOUT = {"small": 0.0, "mobilenet_v2": 0.2, "vgg16_bn": 0.5}  # the default of each network that has dropout
_BUILT_IN_NETWORKS = ("small", "ece408")  # torchvision has all others
_SMALL_SIDE = 64  # pixels: the full stem would reduce a shorter side to less than 2 positions


class ImageSession(Session):
    """How one process trains on pictures."""

    cache: Annotated[bool, Field(description="Cache the decoded pictures of a folder for the next run.")] = False

    @classmethod
    def of_process(cls) -> type[Session]:
        return ImageSession


class PictureSettings(TrainSettings):
    """The settings that every training command for pictures declares."""

    if TYPE_CHECKING:
        size: tuple[int, int] | None


class TrainImages(Training, PictureSettings, ImageSession):
    """Train an image classifier: a convolutional network on pictures of one size.

    --data FOLDER has one folder of pictures (PNG, JPEG, BMP, GIF, TIFF, WebP, PPM) per class. The report compares the
    test scores with a majority-class baseline and a linear classifier on the pixels. The test split is used once, at
    the end.
    """

    examples = (
        "minidl train images --data digits --out runs/digits",
        "minidl train images --data mnist --precision bfloat16 --out runs/mnist",
        "minidl train images --data photos --size 64 --flip --out runs/photos",
        "minidl train images --data pets --model resnet18 --init runs/a --out runs/b",
    )
    data: Annotated[
        fields.Data,
        Field(description="digits, mnist, fashion-mnist, or a folder with one folder of pictures per class."),
    ]
    model: Annotated[
        Literal["small", "ece408", "resnet18", "resnet34", "resnet50", "mobilenet_v2", "vgg16_bn", "densenet121"],
        Field(
            description="small (3x3 convolutions with batch norm), ece408 (two 5x5 convolutions, for 28x28), or a "
            "torchvision architecture: resnet18, resnet34, resnet50, mobilenet_v2, vgg16_bn, densenet121."
        ),
    ] = "small"
    init: Annotated[
        fields.Part,
        Field(
            description="Initial weights: a safetensors file with a torchvision state_dict, or the model of a run. "
            "The last layer is replaced if the classes differ.",
        ),
    ] = None
    freeze: Annotated[
        bool | None, Field(description="Train only the last layer; the others keep the weights of --init.")
    ] = None
    unfreeze: Annotated[
        int | None,
        Field(ge=1, le=10**6, description="With --freeze: train all layers after this many epochs."),
    ] = None
    unfreeze_lr: Annotated[
        float | None,
        Field(
            gt=0,
            le=FLOAT32,
            description="With --unfreeze: learning rate once all layers are trained. Default: --lr if it is set, else"
            " the default of --init without --freeze.",
        ),
        IN_FLOAT32,
    ] = None
    stem: Annotated[
        Literal["full", "small"] | None,
        Field(
            description="First layers of a torchvision architecture: full (as published, for 224x224) or small (fewer"
            " strides). Default: small for sides below 64 pixels, or the stem of --init."
        ),
    ] = None
    normalize: Annotated[
        Literal["data", "imagenet"] | None,
        Field(
            description="Mean and standard deviation used to normalize pictures: of the training split (data) or of "
            "ImageNet (imagenet). Default: imagenet if --init is a torchvision state_dict, else data."
        ),
    ] = None
    size: fields.Size = None
    shift: Annotated[
        int | None,
        Field(
            ge=0,
            le=1024,
            description="Shift training pictures randomly by up to this many pixels. Default: depends on the data.",
        ),
    ] = None
    flip: Annotated[
        bool | None,
        Field(
            description="Flip half of the training pictures horizontally. Default: on for fashion-mnist and with "
            "--crop below 1."
        ),
    ] = None
    crop: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="Randomly crop training pictures to at least this share of their area and resize the crop; 1:"
            " no cropping. Default: 0.08 for torchvision architectures on a folder of pictures of 128x128"
            " or more, else 1.",
        ),
    ] = None
    mixup: Annotated[
        float | None,
        Field(
            gt=0,
            le=100,
            description="Blend each training picture and label with another one; the share is drawn from Beta(A, A), "
            "where A is this value: 0.2 blends little, 1 evenly.",
        ),
    ] = None
    cutmix: Annotated[
        float | None,
        Field(
            gt=0,
            le=100,
            description="Replace a rectangle of each training picture by another picture; the share is drawn as for "
            "--mixup. With both, each picture gets one of them.",
        ),
    ] = None
    progressive: Annotated[
        int | None,
        Field(
            ge=1,
            le=1024,
            description="Start with pictures whose shorter side has this many pixels, at least a quarter of the full "
            "size. The size grows in four steps; the last quarter of the epochs uses full size.",
        ),
    ] = None
    ema: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="Validate and save a moving average of the weights with this decay per step, such as 0.999.",
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
            description="Learning rate. Default: 0.01 for small and ece408, 0.001 for other networks; a tenth of that"
            " with --init; 0.01 with --freeze until --unfreeze.",
        ),
        IN_FLOAT32,
    ] = None
    dropout: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="Dropout probability before the last layer. Default: 0.2 for "
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
            "float32 master weights. Default: bfloat16 for torchvision architectures on a GPU, else float32."
        ),
    ] = None

    @property
    def published(self) -> bool:
        """Return whether torchvision has the network, too."""
        return self.model not in _BUILT_IN_NETWORKS

    @model_validator(mode="after")
    def _check_network(self) -> Self:
        if self.stem is not None and not self.published:
            raise ConfigError(f"--stem is for torchvision architectures; --model {self.model} has only one stem")
        if self.crop is not None and self.crop < 1 and self.shift:
            raise ConfigError("--crop already moves the pictures at random: remove --shift or --crop")
        if self.freeze and self.init is None:
            raise ConfigError("--freeze requires --init, the file with the weights to keep")
        if self.unfreeze is not None and not self.freeze:
            raise ConfigError("--unfreeze requires --freeze")
        if self.unfreeze is not None and self.unfreeze >= self.epochs:
            raise ConfigError(f"--unfreeze {self.unfreeze} must be less than --epochs {self.epochs}")
        if self.unfreeze_lr is not None and self.unfreeze is None:
            raise ConfigError("--unfreeze-lr requires --unfreeze")
        if self.sync_batch_norm and self.model == "ece408":
            raise ConfigError("--sync-batch-norm requires a network with batch norm; ece408 has none")
        mixing = "--mixup" if self.mixup else "--cutmix" if self.cutmix else None
        if mixing and self.batch_size == 1:
            raise ConfigError(f"{mixing} mixes the pictures of a batch, but --batch-size is 1; use 2 or more")
        if self.dropout and self.model not in DROPOUT:
            *others, last = DROPOUT
            raise ConfigError(f"--dropout is for --model {', '.join(others)} and {last}; {self.model} has none")
        return self


def suited(config: TrainImages, size: tuple[int, int], half: bool) -> dict[str, Any]:
    """Return defaults of unset settings for pictures of this size; with `half` the device computes in bfloat16.

    With `--init` the defaults of stem and normalize follow from its file and are not included.
    """
    rate = 0.001 if config.published else 0.01
    if config.init is not None:
        rate = rate / 10
    defaults: dict[str, Any] = {
        "lr": 0.01 if config.freeze else rate,
        "dropout": DROPOUT.get(config.model, 0.0),
        "precision": "bfloat16" if half and config.published else "float32",
    }
    if config.unfreeze is not None and config.lr is None:
        defaults["unfreeze_lr"] = rate
    if config.published and config.init is None:
        defaults["stem"] = default_stem(size)
    return {name: value for name, value in defaults.items() if getattr(config, name) is None}


def default_stem(size: tuple[int, int]) -> Literal["full", "small"]:
    """Return the stem of a published network that suits pictures of this size."""
    return "small" if min(size) < _SMALL_SIDE else "full"
