"""The weights that a training begins with: `--init`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from minidl.errors import ConfigError, DamagedError
from minidl.training.run_folder import files
from minidl.training.run_folder.checkpoints import FOLDER
from minidl.training.run_folder.manifest import MODEL, OF_RUN
from minidl.training.tasks.images.networks import dtype_of, first_layer, last_layer, network_of
from minidl.training.tasks.images.pictures import PictureFormat
from minidl.training.tasks.images.settings import TrainImages

if TYPE_CHECKING:
    import torch

    from minidl import nn

# Of ImageNet's training pictures, red, green and blue, in units of 255: torchvision's transforms have these.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_VARIANCE = ".running_var"
_COUNTS = ".num_batches_tracked"  # older files lack them, and training needs none
_NAMED = 4  # layers that an error names
_HOW = "a state_dict saved by safetensors.torch.save_file, or the model.safetensors of a run"
_WRAPPED = "module.", "_orig_mod."  # what torch's DataParallel and compile put before all names
_PICKLED = b"PK\x03\x04", b"\x80"  # a file of torch.save begins so, and one of old versions


@dataclass(frozen=True)
class Start:
    """What a file of `--init` holds. `labels` are those of the run that it is the model of, where they are known.

    `prefix` stood before the names of all tensors, which are without it here.
    """

    path: Path
    sha256: str
    tensors: dict[str, torch.Tensor]
    of_run: bool
    labels: list[str] | None
    prefix: str = ""

    @classmethod
    def read(cls, name: str) -> Start:
        """Raises ConfigError for a file that cannot be read and for one of another kind."""
        path = Path(name)
        path = path / MODEL if path.is_dir() else path
        from minidl.common import read_files, write_files

        raw = b""
        try:
            raw = read_files.read_bytes(path)
            digest = hashlib.sha256(raw).hexdigest()
            tensors, about = write_files.read_tensors(path)
        except OSError as error:
            _check_finished(Path(name))
            raise ConfigError(f"--init {path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            what = "it is a file of torch.save" if raw.startswith(_PICKLED) else error
            raise ConfigError(f"--init {path}: {what}; expected {_HOW}") from None
        labels = None
        if OF_RUN in about:
            try:
                labels = files.read_json(path.with_name("labels.json")).get("labels")
            except (OSError, DamagedError):
                labels = None
        prefix = next((each for each in _WRAPPED if all(key.startswith(each) for key in tensors)), "")
        tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
        return cls(path, digest, tensors, OF_RUN in about, labels, prefix if tensors else "")

    def stem(self, config: TrainImages, described: PictureFormat, classes: int, usual: str) -> str:
        """The beginning that fits the file best: the usual one unless the other has more of the shapes."""

        def others(stem: str) -> int:
            model = network_of(config.model_copy(update={"stem": stem}), described, classes)(dtype_of(config), "meta")
            name, first = first_layer(model)
            has = self.tensors.get(f"{name}.weight")
            # Counted twice, as it may also be of other colours.
            return sum(map(len, self._misfits(model))) + (has is None or has.shape[2:] != first.weight.shape[2:])

        return min((usual, _other(usual)), key=others)

    def check(self, config: TrainImages, described: PictureFormat, model: nn.Module) -> None:
        """Raises ConfigError unless the file has the layers of the model, but for the last one, and numbers that can be
        its weights."""
        import torch

        wrong, extra = self._misfits(model)
        if wrong or extra:
            expected = self._fitting(config, described) or f"expected the same network, {_HOW}"
            named = wrong[: _NAMED - min(len(extra), 2)]
            named += extra[: _NAMED - len(named)]
            more = len(wrong) + len(extra) - len(named)
            raise ConfigError(
                f"--init {self.path} does not fit --model {config.model}: {', '.join(named)}"
                f"{f', and {more} more' if more else ''}; {expected}"
            )
        whole = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
        for name, tensor in self.tensors.items():
            what = None
            if not tensor.is_floating_point():
                what = None if name in whole else f"is of {tensor.dtype}, expected floating-point numbers"
            elif not torch.isfinite(tensor).all():
                what = "has values that are not finite"
            elif name.endswith(_VARIANCE) and (tensor < 0).any():
                what = "has variances below 0"
            if what is not None:
                raise ConfigError(f"--init {self.path}: {name} {what}")

    def _fitting(self, config: TrainImages, described: PictureFormat) -> str | None:
        """Which setting names the network that the file is of; None for one that is not known."""
        names = [config.model, *get_args(TrainImages.model_fields["model"].annotation)]
        for name in names:
            usual = config.stem or "full"
            for stem in (usual, _other(usual)):
                other = config.model_copy(update={"model": name, "stem": stem})
                try:
                    model = network_of(other, described, 1)(dtype_of(config), "meta")
                except ConfigError:  # one that does not take these pictures
                    continue
                if not any(self._misfits(model)):
                    if name == config.model:
                        return f"it has the {stem} stem: use --stem {stem}, or remove --stem"
                    return f"it looks like {name}: give --model {name}"
                if not other.published:
                    break
        return None

    def weights(self, model: nn.Module, labels: list[str]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """(what is loaded into the model by name, what is to be said of it)."""
        import torch

        own = {name: tensor.shape for name, tensor in model.state_dict().items()}
        found, said = dict(self.tensors), []
        last, first = last_layer(model)[0], f"{first_layer(model)[0]}.weight"
        reason = self._other_classes(last, own, labels)
        if reason:
            found = {name: tensor for name, tensor in found.items() if not name.startswith(last + ".")}
            said.append(f"the last layer, {last}, is replaced: {reason}")
        if found[first].shape != own[first]:
            found[first] = found[first].to(torch.float64).sum(1, keepdim=True)
            said.append(f"{first} reads grey pictures with the sum of its red, green and blue weights")
        counts = [name for name in own if name.endswith(_COUNTS) and name not in found]
        lacked = f"; {len(counts)} missing num_batches_tracked start at 0" if counts else ""
        said.insert(0, f"{len(found)} of {len(own)} tensors are loaded from {self.path}{lacked}")
        if self.prefix:
            said.insert(1, f"the prefix {self.prefix} of all names is ignored")
        return found, said

    def _other_classes(self, last: str, own: Mapping[str, torch.Size], labels: list[str]) -> str:
        """Why the last layer is none for these labels; "" where it is."""
        has = self.tensors.get(f"{last}.weight")
        if has is None:
            return f"{self.path.name} has none"
        if len(has) != len(labels):
            return f"{self.path.name} knows {len(has)} classes, the data has {len(labels)}"
        if self.labels is not None and self.labels != labels:
            return f"{self.path.parent} has other classes"
        return ""

    def _misfits(self, model: nn.Module) -> tuple[list[str], list[str]]:
        """A phrase for each tensor that the file lacks or has in another shape, and for each that the model lacks."""
        last, first = last_layer(model)[0], f"{first_layer(model)[0]}.weight"
        own = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        has = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        found = []
        for name, wanted in own.items():
            there = has.get(name)
            if there is None:
                if not name.startswith(last + ".") and not name.endswith(_COUNTS):
                    found.append(f"{name} is missing")
            elif there != wanted and not (
                (name.startswith(last + ".") and there[1:] == wanted[1:])
                or (name == first and there == [wanted[0], 3, *wanted[2:]] and wanted[1] == 1)
            ):
                grey = name == first and there == [wanted[0], 1, *wanted[2:]]
                why = ": it expects grey pictures, but these are in colour" if grey else ""
                found.append(f"{name} is {there}, expected {wanted}{why}")
        return found, [f"it has {name}, which the network lacks" for name in has if name not in own]


def _other(stem: str) -> str:
    return "full" if stem == "small" else "small"


def _check_finished(folder: Path) -> None:
    """Raises ConfigError for the folder of a run that is not finished: it has no model yet."""
    if (folder / "config.json").is_file() and not (folder / "report.json").is_file():
        raise ConfigError(
            f"--init {folder} is a run that is not finished: continue it with --resume, then give it here"
        )


def imagenet(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """ImageNet's mean and deviation of each channel, from 0 to 255; of grey pictures the means of both."""
    if channels == 3:
        return tuple(255 * v for v in MEAN), tuple(255 * v for v in STD)
    return (255 * sum(MEAN) / 3,), (255 * sum(STD) / 3,)


def beginning(
    config: TrainImages, described: PictureFormat, labels: list[str]
) -> tuple[Callable[[nn.Module], object] | None, dict[str, Any] | None, str | None]:
    """(what loads the weights of `--init` into the model, what config.json has of them, what is said of them).

    A training that goes on from a checkpoint has all weights there. Raises ConfigError for a file that does not fit,
    and for another one than the run was started from.
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
    model = network_of(config, described, len(labels))(dtype_of(config), "meta")
    start.check(config, described, model)
    weights, said = start.weights(model, labels)
    return (
        lambda model: model.load_state_dict(weights, strict=False),
        {"init_sha256": start.sha256},
        "\n".join(said),
    )
