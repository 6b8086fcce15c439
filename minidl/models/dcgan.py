"""The DCGAN: a generator of pictures and its discriminator.

Radford, Metz and Chintala, arXiv 1511.06434.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minidl import nn
from minidl.common import read_files, write_files
from minidl.common.console import cut
from minidl.data.parsing import parse_json
from minidl.nn import init
from minidl.tensors import Tensor

Device = torch.device | str | None
FORMAT = "minidl generator"
STD = 0.02  # of initial weights
KERNEL = 5
_DEEP = 64  # pixels from which four layers are used
_LARGEST = 2**20  # largest value of any setting in a file


class Generator(nn.Module):
    """z [N, latent] (or [N, latent, 1, 1]) -> pictures [N, channels, H, W] with values from -1 to 1.

    For 64 x 64 pixels, four layers, width 64 and kernel 5

        linear latent -> 4x4x512                4x4x512     batch norm, ReLU
        transposed convolution 5x5, stride 2    8x8x256     batch norm, ReLU
        transposed convolution 5x5, stride 2    16x16x128   batch norm, ReLU
        transposed convolution 5x5, stride 2    32x32x64    batch norm, ReLU
        transposed convolution 5x5, stride 2    64x64x3     tanh

    and for 28 x 28 pixels, two layers, width 64 and kernel 5

        linear latent -> 7x7x128                7x7x128     batch norm, ReLU
        transposed convolution 5x5, stride 2    14x14x64    batch norm, ReLU
        transposed convolution 5x5, stride 2    28x28x1     tanh

    `layers` None: 4 from 64 pixels on, else 2. Height and width are multiples of 2^layers. Weights start as normal
    values of standard deviation 0.02 around 0, those of batch norm around 1. Raises ValueError for sizes that do not
    fit.
    """

    def __init__(
        self, latent: int = 100, channels: int = 1, size: tuple[int, int] = (28, 28), width: int = 64,
        layers: int | None = None, kernel: int = KERNEL, device: Device = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        layers = _check_sizes(size, layers, kernel, latent=latent, channels=channels, width=width)
        self.latent, self.channels, self.size, self.width = latent, channels, (int(size[0]), int(size[1])), width
        self.layers, self.kernel = layers, kernel
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = width << (layers - 1)
        self.first = (size[0] >> layers, size[1] >> layers, inner)
        # In the order height, width, channel, which is the memory layout of pictures.
        self.project = nn.Linear(latent, self.first[0] * self.first[1] * inner, bias=False, **options)
        self.norm = nn.BatchNorm2d(inner, act="relu", device=device)
        steps: list[nn.Module] = []
        shape: dict[str, Any] = {"stride": 2, "padding": (kernel - 1) // 2, "output_padding": kernel % 2, **options}
        for _ in range(layers - 1):
            steps.append(nn.ConvTranspose2d(inner, inner // 2, kernel, bias=False, **shape))
            inner //= 2
            steps.append(nn.BatchNorm2d(inner, act="relu", device=device))
        steps.append(nn.ConvTranspose2d(inner, channels, kernel, act="tanh", **shape))
        self.upward = nn.Sequential(*steps)
        self.apply(_initialize)

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as plain JSON values."""
        names = ("latent", "channels", "size", "width", "layers", "kernel")
        return {name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in names}

    def forward(self, z: Tensor) -> Tensor:
        x = self.project(z.flatten(1)).reshape(-1, *self.first).permute(0, 3, 1, 2)
        return self.upward(self.norm(x))


class Discriminator(nn.Module):
    """Pictures [N, channels, H, W] -> [N] logits of being real.

    For 28 x 28 pixels, two layers, width 64 and kernel 5

        convolution 5x5, stride 2    14x14x64    LeakyReLU 0.2
        convolution 5x5, stride 2    7x7x128     LeakyReLU 0.2
        linear 6272 -> 1

    and for other sizes as many layers as the generator. It has no batch norm, unlike the paper's: the gradient penalty
    requires that each logit depends on its own picture only. Settings, initial values and errors as in `Generator`.
    """

    def __init__(
        self, channels: int = 1, size: tuple[int, int] = (28, 28), width: int = 64, layers: int | None = None,
        kernel: int = KERNEL, device: Device = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        layers = _check_sizes(size, layers, kernel, channels=channels, width=width)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        steps: list[nn.Module] = []
        for layer in range(layers):
            steps.append(
                nn.Conv2d(
                    channels, width << layer, kernel, stride=2, padding=(kernel - 1) // 2, act=("leaky_relu", 0.2),
                    **options,
                )
            )  # fmt: skip
            channels = width << layer
        self.downward = nn.Sequential(*steps)
        self.judge = nn.Linear((size[0] >> layers) * (size[1] >> layers) * channels, 1, **options)
        self.apply(_initialize)

    def forward(self, x: Tensor) -> Tensor:
        features = self.downward(x).permute(0, 2, 3, 1)
        return self.judge(features.flatten(1)).flatten(0)


def default_layers(size: tuple[int, int]) -> int:
    """Return the number of layers for pictures of this size: 4 from 64 pixels on, else 2."""
    return 4 if min(size) >= _DEEP else 2


def from_pytorch_examples(state: Mapping[str, torch.Tensor], device: Device = None) -> Generator:
    """Return pytorch/examples' DCGAN generator with the weights of its `state_dict` (main.0.weight, main.1.weight ...).

    Its first transposed convolution, of z [N, latent, 1, 1], equals the linear layer here, and its last layer has no
    bias. Raises ValueError for a state of another network.
    """
    first = state.get("main.0.weight")
    convolutions = [name for name in state if getattr(state[name], "ndim", 0) == 4]
    if first is None or first.ndim != 4 or convolutions[0] != "main.0.weight" or len(convolutions) < 3:
        raise ValueError(
            f"no generator of pytorch/examples: expected main.0.weight [latent, channels, 4, 4] and the "
            f"weights of its other layers, got {', '.join(state) or 'nothing'}"
        )
    layers = len(convolutions) - 1
    inner, last = first.shape[1], state[convolutions[-1]]
    size = (first.shape[2] << layers, first.shape[3] << layers)
    if inner % (1 << layers - 1):
        raise ValueError(f"no generator of pytorch/examples: {inner} channels are not halved {layers - 1} times")
    model = Generator(
        first.shape[0], last.shape[1], size, inner >> (layers - 1), layers, last.shape[2], device, first.dtype
    )
    # [latent, C, H, W] -> [H W C, latent]
    mapped = {"project.weight": first.permute(2, 3, 1, 0).reshape(-1, first.shape[0])}
    mapped[f"upward.{2 * layers - 2}.bias"] = torch.zeros(last.shape[1])
    for name, tensor in state.items():
        if name == "main.0.weight":
            continue
        index, _, part = name.removeprefix("main.").partition(".")
        if not (name.startswith("main.") and index.isdecimal()):
            raise ValueError(f"no generator of pytorch/examples: unknown {name}")
        number = int(index)
        # Three layers there (convolution, norm, ReLU) are two here: the norm includes the ReLU.
        mapped[f"norm.{part}" if number == 1 else f"upward.{number // 3 * 2 - 2 + number % 3}.{part}"] = tensor
    try:
        model.load_state_dict(mapped)
    except RuntimeError as error:
        raise ValueError(f"no generator of pytorch/examples: {' '.join(str(error).split())}") from None
    return model


def save_generator(model: Generator, path: str | Path, *, command: str = "", seed: int = 0, commit: str = "") -> None:
    """Write a generator as a safetensors file, with its settings and the command, seed and commit that trained it."""
    metadata = {
        "format": FORMAT,
        "settings": json.dumps(model.settings),
        "command": command,
        "seed": str(seed),
        "commit": commit,
    }
    content, _ = write_files.tensor_bytes(model.state_dict(), metadata)
    write_files.write_bytes(Path(path), content)


def load_generator(path: str | Path, device: Device = None) -> Generator:
    """Return the generator of a `minidl train gan` run or of a file that `save_generator` wrote, in evaluation mode.

    Raises FileNotFoundError if there is no file, ValueError, with the file's name, for anything else.
    """
    folder = Path(path)
    file = folder / "model.safetensors" if folder.is_dir() else folder
    try:
        tensors, metadata = write_files.read_tensors(file)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {cut(error)}") from None
    source = folder / "config.json" if folder.is_dir() else file
    try:
        settings = _settings_of_run(source) if folder.is_dir() else parse_json(_stored_settings(metadata))
        _check_fit(settings, tensors)
        model = Generator(**{**settings, "size": tuple(settings["size"])}, device=device)
        model.load_state_dict(tensors)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{source} describes no generator: {cut(error)}") from None
    return model.eval()


def _settings_of_run(path: Path) -> dict[str, Any]:
    content = parse_json(read_files.read_bytes(path))
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError("it has no settings of a model; give a run of `minidl train gan`")
    return content["model"]


def _check_fit(settings: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError or KeyError unless the tensors fit the settings.

    Checked before the generator is created, which could be far larger than its file.
    """
    if not isinstance(settings, dict):
        raise ValueError(f"its settings are {settings!r}, expected an object")
    size = settings["size"]
    if not isinstance(size, list) or len(size) != 2:
        raise ValueError(f"size is {size!r}, expected height and width")
    for name, value in [("size", side) for side in size] + [item for item in settings.items() if item[0] != "size"]:
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise ValueError(f"{name} is {value!r}, expected a whole number from 1 to {_LARGEST}")
    layers, width, kernel = settings["layers"], settings["width"], settings.get("kernel", KERNEL)
    _check_sizes((size[0], size[1]), layers, kernel)
    inner = width << layers - 1
    shapes = {"project.weight": [(size[0] >> layers) * (size[1] >> layers) * inner, settings["latent"]]}
    for layer in range(layers):
        outputs = settings["channels"] if layer == layers - 1 else inner // 2
        shapes[f"upward.{2 * layer}.weight"] = [inner, outputs, kernel, kernel]
        inner = outputs
    for name, shape in shapes.items():
        if list(tensors[name].shape) != shape:
            raise ValueError(f"{name} is {list(tensors[name].shape)}, its settings expect {shape}")
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() or name.endswith("num_batches_tracked")):
            raise ValueError(
                f"{name} is of {str(tensor.dtype).removeprefix('torch.')}, expected floating-point numbers"
            )


def _stored_settings(metadata: Mapping[str, str]) -> str:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"its format is {metadata.get('format')!r}, expected {FORMAT!r}")
    return metadata["settings"]


def _check_sizes(size: tuple[int, int], layers: int | None, kernel: int, **counts: int) -> int:
    """Return the number of layers, by default for `size`. Raises ValueError for sizes that do not fit."""
    layers = default_layers(size) if layers is None else layers
    for name, value in {**counts, "layers": layers}.items():
        if value < 1:
            raise ValueError(f"DCGAN: {name} is {value}, expected 1 or more")
    if kernel < 2:
        raise ValueError(f"DCGAN: kernel is {kernel}, expected 2 or more")
    step = 1 << layers
    if min(size) < step or size[0] % step or size[1] % step:
        raise ValueError(
            f"DCGAN: pictures of {size[0]} x {size[1]} cannot be halved {layers} times; expected multiples of {step}"
        )
    return layers


def _initialize(module: nn.Module) -> None:
    """Set the initial values of a layer."""
    if isinstance(module, nn.BatchNorm2d):
        assert module.weight is not None
        init.normal_(module.weight, 1.0, STD)
    elif isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        init.normal_(module.weight, 0.0, STD)
        if module.bias is not None:
            init.zeros_(module.bias)
