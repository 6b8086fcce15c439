"""The weights that a training begins with: `--init`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl.training import files
from minidl.training.checkpoints import FOLDER
from minidl.training.errors import ConfigError, DamagedError
from minidl.training.manifest import MODEL, OF_RUN
from minidl.training.tasks.images.networks import dtype_of, first_layer, last_layer, network_of
from minidl.training.tasks.images.pictures import PictureFormat
from minidl.training.tasks.images.settings import TrainImages

if TYPE_CHECKING:
    import torch

    from minidl import nn

# Of ImageNet's training pictures, red, green and blue, in units of 255: torchvision's transforms have these.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_COUNTS = ".num_batches_tracked"  # older files lack them, and training needs none
_NAMED = 3  # layers that an error names
_HOW = "a state_dict saved by safetensors.torch.save_file, or the model.safetensors of a run"


@dataclass(frozen=True)
class Start:
    """What a file of `--init` holds. `labels` are those of the run that it is the model of, where they are known."""

    path: Path
    sha256: str
    tensors: dict[str, torch.Tensor]
    of_run: bool
    labels: list[str] | None

    @classmethod
    def read(cls, name: str) -> Start:
        """Raises ConfigError for a file that cannot be read and for one of another kind."""
        path = Path(name)
        path = path / MODEL if path.is_dir() else path
        from minidl import storage

        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            tensors, about = storage.read_tensors(path)
        except OSError as error:
            raise ConfigError(f"--init {path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ConfigError(f"--init {path}: {error}; expected {_HOW}") from None
        labels = None
        if OF_RUN in about:
            try:
                labels = files.read_json(path.with_name("labels.json")).get("labels")
            except (OSError, DamagedError):
                labels = None
        return cls(path, digest, tensors, OF_RUN in about, labels)

    def stem(self, config: TrainImages, described: PictureFormat, classes: int, usual: str) -> str:
        """The beginning that fits the file: the usual one unless only the other does."""
        for stem in (usual, "full" if usual == "small" else "small"):
            make = network_of(config.model_copy(update={"stem": stem}), described, classes)
            if not self._misfits(make(dtype_of(config), "meta")):
                return stem
        return usual

    def check(self, config: TrainImages, model: nn.Module) -> None:
        """Raises ConfigError unless the file has the layers of the model, but for the last one, and finite numbers."""
        import torch

        misfits = self._misfits(model)
        if misfits:
            more = f", and {len(misfits) - _NAMED} more" if len(misfits) > _NAMED else ""
            raise ConfigError(
                f"--init {self.path} is not of --model {config.model}: {', '.join(misfits[:_NAMED])}{more}; expected "
                f"the same network, {_HOW}"
            )
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ConfigError(f"--init {self.path}: {name} has values that are not finite")

    def weights(self, model: nn.Module, labels: list[str]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """(what is loaded into the model by name, what is to be said of it)."""
        import torch

        own = {name: tensor.shape for name, tensor in model.state_dict().items()}
        found, said = dict(self.tensors), []
        last, first = last_layer(model)[0], f"{first_layer(model)[0]}.weight"
        reason = self._other_classes(last, own, labels)
        if reason:
            found = {name: tensor for name, tensor in found.items() if not name.startswith(last + ".")}
            said.append(f"the last layer, {last}, is made anew: {reason}")
        if found[first].shape != own[first]:
            found[first] = found[first].to(torch.float64).sum(1, keepdim=True)
            said.append(f"{first} reads grey pictures with the sums of its weights of red, green and blue")
        said.insert(0, f"{len(found)} of {len(own)} tensors are those of {self.path}")
        return found, said

    def _other_classes(self, last: str, own: Mapping[str, torch.Size], labels: list[str]) -> str:
        """Why the last layer is none for these labels; "" where it is."""
        has = self.tensors.get(f"{last}.weight")
        if has is None:
            return f"{self.path.name} has none"
        if len(has) != len(labels):
            return f"{self.path.name} knows {len(has)} classes, the data has {len(labels)}"
        if self.labels is not None and self.labels != labels:
            return f"the classes of {self.path.parent} are others"
        return ""

    def _misfits(self, model: nn.Module) -> list[str]:
        """A phrase for each tensor that the file lacks, that the model lacks, or of another shape."""
        last, first = last_layer(model)[0], f"{first_layer(model)[0]}.weight"
        own = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        has = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        found = []
        for name in [*own, *(name for name in has if name not in own)]:
            there, wanted = has.get(name), own.get(name)
            if wanted is None:
                found.append(f"it has {name}, which the network has not")
            elif there is None:
                if not name.startswith(last + ".") and not name.endswith(_COUNTS):
                    found.append(f"{name} is missing")
            elif there != wanted and not (
                (name.startswith(last + ".") and there[1:] == wanted[1:])
                or (name == first and there == [wanted[0], 3, *wanted[2:]] and wanted[1] == 1)
            ):
                found.append(f"{name} is {there}, expected {wanted}")
        return found


def imagenet(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ImageNet's mean and deviation of each channel, from 0 to 255; of grey pictures the means of both."""
    if channels == 3:
        return tuple(255 * v for v in MEAN), tuple(255 * v for v in STD)
    return (255 * sum(MEAN) / 3,), (255 * sum(STD) / 3,)


def beginning(
    config: TrainImages, model: nn.Module, labels: list[str]
) -> tuple[Callable[[nn.Module], None] | None, dict[str, Any] | None, str | None]:
    """(what loads the weights of `--init` into the model, what config.json has of them, what is said of them).

    `model` is on torch's device "meta". A training that goes on from a checkpoint has all weights there. Raises
    ConfigError for a file that does not fit, and for another one than the run was started from.
    """
    if config.init is None or (config.resume and (config.out / FOLDER / "last.json").exists()):
        return None, None, None
    start = Start.read(config.init)
    saved = config.out / "config.json"
    if config.resume and saved.exists():
        known = files.read_json(saved).get("model")
        if isinstance(known, dict) and known.get("init_sha256", start.sha256) != start.sha256:
            raise ConfigError(
                f"--init {start.path} is not the file that the run was started from; restore it, or train again with "
                "--overwrite"
            )
    start.check(config, model)
    weights, said = start.weights(model, labels)
    return (
        lambda model: model.load_state_dict(weights, strict=False),
        {"init_sha256": start.sha256},
        "\n".join(said),
    )
