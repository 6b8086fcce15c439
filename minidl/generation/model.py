"""The generator of a command: built in, a run of `minidl train gan`, or a file, made ready for inference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from minidl import nn, ops
from minidl.autograd import no_grad
from minidl.generation import built_in
from minidl.generation.config import BUILT_IN
from minidl.generation.output import sha256
from minidl.kernels import launch
from minidl.models import dcgan
from minidl.tensor import Tensor
from minidl.training import files, runs
from minidl.training.errors import ConfigError, DamagedError


@dataclass(frozen=True)
class Loaded:
    """A generator in evaluation mode, its batch norms folded; `sha256` is that of its file of weights."""

    generator: nn.Module
    name: str
    sha256: str
    latent: int
    channels: int
    size: tuple[int, int]
    dtype_name: str


def weights_file(model: str) -> Path:
    """The file of a built-in name, a run's folder or a file. Raises ConfigError when there is none."""
    if model in BUILT_IN:
        path = built_in.FOLDER / f"{model}.safetensors"
        if not path.exists():
            raise ConfigError(
                f"this installation has no {path}: install minidl again, or train a model with "
                f"`minidl train gan --data {model} --out RUN` and give --model RUN"
            )
        return path
    path = Path(model)
    if files.is_folder(path):
        run = runs.finished_run(path)
        if run.kind != "gan":
            what = "an image" if run.kind == "images" else f"a {run.kind}"
            raise ConfigError(
                f"--model {model} is {what} run, which generates nothing; give a run of `minidl train gan`"
            )
        return path / "model.safetensors"
    if path.suffix == ".safetensors":
        return path
    raise ConfigError(
        f"--model {model[:200]} is neither one of {', '.join(BUILT_IN)} nor a run of `minidl train gan` nor a "
        ".safetensors file"
    )


def load(model: str, precision: str = "float32") -> Loaded:
    """Read a generator and make it ready. Sets how this process computes float32 products when `precision` is tf32.

    Raises ConfigError when there is no such model, DamagedError for a file that is not what minidl wrote.
    """
    path = weights_file(model)
    source = path.parent if files.is_folder(Path(model)) else path
    try:
        digest = sha256(path)
        built_in.check(path, digest)
        if source != path:
            files.read_tensors(path)  # of a run, and so with a checksum
        read = dcgan.load_generator(source)
    except FileNotFoundError as error:
        raise ConfigError(f"--model {model}: {error.filename or path} is gone; restore it or train again") from None
    except OSError as error:
        raise ConfigError(f"--model {model}: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DamagedError(f"{error}; restore it or train again") from None
    for name, tensor in read.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise DamagedError(f"{path}: {name} has values that are not finite; train the model again")
        if name.endswith("running_var") and (tensor < 0).any():
            raise DamagedError(f"{path}: {name} has values below 0, which no variance has; train the model again")
    if precision == "tf32":
        launch.set_float32_precision("tf32")
    generator = prepared(read, torch.float16 if precision == "float16" else torch.float32)
    dtype = "float16" if precision == "float16" else "float32"
    name = model if model in BUILT_IN else Path(model).name
    return Loaded(generator, name, digest, read.latent, read.channels, read.size, dtype)


def prepared(generator: dcgan.Generator, dtype: torch.dtype = torch.float32) -> dcgan.Generator:
    """A copy of a generator for inference in a dtype: no gradients, no dropout of bits by batch norms, which are folded
    into the layers before them (in half precision the one after the linear layer stays: a shift may be above all
    float16 numbers)."""
    model = dcgan.Generator(**{**generator.settings, "size": generator.size}, dtype=dtype)
    model.load_state_dict(generator.state_dict())
    model.eval()
    nn.fold_batch_norms(model)
    if dtype == torch.float32:
        _fold_projection(model)
    return model.requires_grad_(False)


def _fold_projection(model: dcgan.Generator) -> None:
    """The batch norm after the linear layer, whose outputs lie as height, width, channel, becomes part of it."""
    linear, norm = model.project, model.norm
    assert norm.running_mean is not None
    assert norm.running_var is not None
    height, width, channels = model.first
    with no_grad():
        scale, shift = ops.fold_batch_norm(
            Tensor(linear.weight.data.new_empty(channels)), None, norm.running_mean, norm.running_var, norm.weight,
            norm.bias, norm.eps,
        )  # fmt: skip
        folded = nn.Linear(model.latent, height * width * channels, act=norm.act, device=linear.weight.data.device)
        weight = linear.weight.reshape(height * width, channels, model.latent) * scale.reshape(1, channels, 1)
        folded.load_state_dict(
            {
                "weight": weight.data.reshape(linear.weight.shape),
                "bias": shift.data.expand(height * width, channels).reshape(-1),
            }
        )
    model.project = folded
    model.norm = nn.Sequential()  # type: ignore[assignment]  # nothing is left to do in its place
