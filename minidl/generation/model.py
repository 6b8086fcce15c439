"""The generator of a command: built in, a run of `minidl train gan`, or a file, prepared for inference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from minidl import nn
from minidl.data.parsing import one_of
from minidl.errors import ConfigError, DamagedError
from minidl.generation import built_in
from minidl.generation.config import BUILT_IN
from minidl.models import dcgan
from minidl.runtime import launch
from minidl.training.run_folder import files
from minidl.training.run_folder.files import sha256
from minidl.training.run_folder.folder import RunFolder
from minidl.training.run_folder.saved_run import SavedRun


@dataclass(frozen=True)
class Loaded:
    """A generator in evaluation mode, its batch norms folded.

    `sha256` is of its file of weights; `run` is its run, if any.
    """

    generator: nn.Module
    name: str
    sha256: str
    latent: int
    channels: int
    size: tuple[int, int]
    dtype_name: str
    run: SavedRun | None = None

    def show_notes(self) -> None:
        """Print the notes on the run of the model, if it has one."""
        if self.run is not None:
            self.run.show_notes()


def load(model: str, precision: str = "float32") -> Loaded:
    """Read and prepare a generator. With `precision` tf32, also set the precision of this process's float32 products.

    Raises ConfigError for a missing model, DamagedError for a damaged file.
    """
    path = source = Path(model)
    run: SavedRun | None = None
    if model in BUILT_IN:
        path = source = built_in.FOLDER / f"{model}.safetensors"
        if not path.exists():
            raise ConfigError(
                f"this installation has no {path}: install minidl again, or train a model with "
                f"`minidl train gan --data {model} --out RUN` and give --model RUN"
            )
    elif files.is_folder(source):
        run = RunFolder(source).read_finished()
        if not run.task.generates:
            raise ConfigError(
                f"--model {model} is {run.task.run}, which cannot generate pictures; use a run of `minidl train gan`"
            )
        path = run.model
        run.weights()
    elif path.suffix != ".safetensors":
        raise ConfigError(
            f"--model {model[:200]} is neither {one_of(BUILT_IN)} nor a run of `minidl train gan` nor a .safetensors "
            "file"
        )
    try:
        digest = sha256(path)
        built_in.check(path, digest)
        trained = dcgan.load_generator(source)
        if run is not None and RunFolder(source).read_finished().identity != run.identity:
            raise DamagedError(f"{source} was replaced by another run while it was read; run the command again")
    except FileNotFoundError as error:
        raise ConfigError(f"--model {model}: {error.filename or path} is gone; restore it or train again") from None
    except OSError as error:
        raise ConfigError(f"--model {model}: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DamagedError(f"{error}; restore it or train again") from None
    for name, tensor in trained.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise DamagedError(f"{path}: {name} has values that are not finite; train the model again")
        if name.endswith("running_var") and (tensor < 0).any():
            raise DamagedError(f"{path}: {name} has negative values: no variance is below 0; train the model again")
    if precision == "tf32":
        launch.set_float32_precision("tf32")
    generator = prepared(trained, torch.float16 if precision == "float16" else torch.float32)
    dtype = "float16" if precision == "float16" else "float32"
    name = model if model in BUILT_IN else Path(model).name
    return Loaded(generator, name, digest, trained.latent, trained.channels, trained.size, dtype, run)


def prepared(generator: dcgan.Generator, dtype: torch.dtype = torch.float32) -> dcgan.Generator:
    """Return a copy of a generator for inference in a dtype, without gradients, its batch norms folded into the layers
    before them. In half precision the one after the linear layer stays: its shifts may exceed the range of float16."""
    model = dcgan.Generator(**{**generator.settings, "size": generator.size}, dtype=dtype)
    model.load_state_dict(generator.state_dict())
    model.eval()
    nn.fold_batch_norms(model)
    return model.requires_grad_(False)
