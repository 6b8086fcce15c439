"""The initial weights of a training: `--init`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
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

# Of the red, green and blue pixels of ImageNet in units of 255, as in torchvision's transforms.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_VARIANCE = ".running_var"
_COUNTS = ".num_batches_tracked"  # optional: older files lack these
_MOST_NAMED = 4  # layers that an error names
_EXPECTED = "a state_dict saved by safetensors.torch.save_file, or the model.safetensors of a run"
_PREFIXES = "module.", "_orig_mod."  # of all names, by torch's DataParallel and compile
_PICKLED = b"PK\x03\x04", b"\x80"  # the first bytes of files of torch.save, of new and old versions


@dataclass(frozen=True)
class InitialWeights:
    """The content of a file of `--init`. If it is the model of a run, `labels` are the run's labels, if they are known.

    `prefix` is the common prefix that was removed from the names of all tensors.
    """

    path: Path
    sha256: str
    tensors: dict[str, torch.Tensor]
    of_run: bool
    labels: list[str] | None
    prefix: str = ""

    @classmethod
    def read(cls, name: str) -> InitialWeights:
        """Read a file. Raises ConfigError if it cannot be read or has another format."""
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
            reason = "it is a file of torch.save" if raw.startswith(_PICKLED) else error
            raise ConfigError(f"--init {path}: {reason}; expected {_EXPECTED}") from None
        labels = None
        if OF_RUN in about:
            try:
                labels = files.read_json(path.with_name("labels.json")).get("labels")
            except (OSError, DamagedError):
                labels = None
        prefix = next((prefix for prefix in _PREFIXES if all(key.startswith(prefix) for key in tensors)), "")
        tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
        return cls(path, digest, tensors, OF_RUN in about, labels, prefix if tensors else "")

    def stem(self, config: TrainImages, format: PictureFormat, classes: int, default: str) -> str:
        """Return the stem that fits the file: the default unless the other one has more matching shapes."""

        def count_mismatches(stem: str) -> int:
            model = network_of(config.model_copy(update={"stem": stem}), format, classes)(dtype_of(config), "meta")
            name, first = first_layer(model)
            weight = self.tensors.get(f"{name}.weight")
            # The first layer counts twice, as its mismatch may also be due to the number of channels.
            is_other = weight is None or weight.shape[2:] != first.weight.shape[2:]
            return sum(map(len, self._mismatches(model))) + is_other

        return min((default, _other_stem(default)), key=count_mismatches)

    def check(self, config: TrainImages, format: PictureFormat, model: nn.Module) -> None:
        """Raise ConfigError unless the file has valid weights for all layers of the model but the last."""
        import torch

        wrong, extra = self._mismatches(model)
        if wrong or extra:
            expected = self._advice(config, format) or f"expected the same network, {_EXPECTED}"
            named = wrong[: _MOST_NAMED - min(len(extra), 2)]
            named += extra[: _MOST_NAMED - len(named)]
            more = len(wrong) + len(extra) - len(named)
            raise ConfigError(
                f"--init {self.path} does not fit --model {config.model}: {', '.join(named)}"
                f"{f', and {more} more' if more else ''}; {expected}"
            )
        integers = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
        for name, tensor in self.tensors.items():
            fault = None
            if not tensor.is_floating_point():
                fault = None if name in integers else f"is of {tensor.dtype}, expected floating-point numbers"
            elif not torch.isfinite(tensor).all():
                fault = "has values that are not finite"
            elif name.endswith(_VARIANCE) and (tensor < 0).any():
                fault = "has variances below 0"
            if fault is not None:
                raise ConfigError(f"--init {self.path}: {name} {fault}")

    def _advice(self, config: TrainImages, format: PictureFormat) -> str | None:
        """Return which setting names the network of the file; None if the network is unknown."""
        names = [config.model, *get_args(TrainImages.model_fields["model"].annotation)]
        for name in names:
            default = config.stem or "full"
            for stem in (default, _other_stem(default)):
                other = config.model_copy(update={"model": name, "stem": stem})
                try:
                    model = network_of(other, format, 1)(dtype_of(config), "meta")
                except ConfigError:  # the network does not accept these pictures
                    continue
                if not any(self._mismatches(model)):
                    if name == config.model:
                        return f"it has the {stem} stem: use --stem {stem}, or remove --stem"
                    return f"it looks like {name}: give --model {name}"
                if not other.published:
                    break
        return None

    def weights(self, model: nn.Module, labels: list[str]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return the tensors to load into the model by name, and notes for display."""
        import torch

        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        tensors, notes = dict(self.tensors), []
        last, first = last_layer(model)[0], f"{first_layer(model)[0]}.weight"
        reason = self._other_classes(last, labels)
        if reason:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(last + ".")}
            notes.append(f"the last layer, {last}, is replaced: {reason}")
        if tensors[first].shape != shapes[first]:
            tensors[first] = tensors[first].to(torch.float64).sum(1, keepdim=True)
            notes.append(f"{first} reads grey pictures with the sum of its red, green and blue weights")
        missing = [name for name in shapes if name.endswith(_COUNTS) and name not in tensors]
        counts = f"; {len(missing)} missing num_batches_tracked start at 0" if missing else ""
        notes.insert(0, f"{len(tensors)} of {len(shapes)} tensors are loaded from {self.path}{counts}")
        if self.prefix:
            notes.insert(1, f"the prefix {self.prefix} of all names is ignored")
        return tensors, notes

    def _other_classes(self, last: str, labels: list[str]) -> str:
        """Return why the last layer does not fit these labels; "" if it does."""
        weight = self.tensors.get(f"{last}.weight")
        if weight is None:
            return f"{self.path.name} has none"
        if len(weight) != len(labels):
            return f"{self.path.name} knows {len(weight)} classes, the data has {len(labels)}"
        if self.labels is not None and self.labels != labels:
            return f"{self.path.parent} has other classes"
        return ""

    def _mismatches(self, model: nn.Module) -> tuple[list[str], list[str]]:
        """Return a phrase for each tensor that the file lacks or has in another shape, and for each extra tensor."""
        last, first = last_layer(model)[0], f"{first_layer(model)[0]}.weight"
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        expected_shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        wrong = []
        for name, expected in expected_shapes.items():
            shape = shapes.get(name)
            if shape is None:
                if not name.startswith(last + ".") and not name.endswith(_COUNTS):
                    wrong.append(f"{name} is missing")
            elif shape != expected and not (
                (name.startswith(last + ".") and shape[1:] == expected[1:])
                or (name == first and shape == [expected[0], 3, *expected[2:]] and expected[1] == 1)
            ):
                is_grey = name == first and shape == [expected[0], 1, *expected[2:]]
                reason = ": it expects grey pictures, but these are in colour" if is_grey else ""
                wrong.append(f"{name} is {shape}, expected {expected}{reason}")
        return wrong, [f"it has {name}, which the network lacks" for name in shapes if name not in expected_shapes]


def _other_stem(stem: str) -> str:
    return "full" if stem == "small" else "small"


def _check_finished(folder: Path) -> None:
    """Raise ConfigError for the folder of an unfinished run, which has no model yet."""
    if (folder / "config.json").is_file() and not (folder / "report.json").is_file():
        raise ConfigError(
            f"--init {folder} is a run that is not finished: continue it with --resume, then give it here"
        )


def imagenet(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return ImageNet's mean and deviation of each channel, from 0 to 255; for grey pictures, their means."""
    if channels == 3:
        return tuple(255 * v for v in MEAN), tuple(255 * v for v in STD)
    return (255 * sum(MEAN) / 3,), (255 * sum(STD) / 3,)


def initialization(
    config: TrainImages, format: PictureFormat, labels: list[str]
) -> tuple[Callable[[nn.Module], object] | None, dict[str, Any] | None, str | None]:
    """Return (function that loads the weights of `--init` into a model, entries of config.json, notes for display).

    All are None if training resumes at a checkpoint. Raises ConfigError for a file that does not fit, and for another
    file than the one that the run was started from.
    """
    if config.init is None or (config.resume and (config.out / FOLDER / "last.json").exists()):
        return None, None, None
    start = InitialWeights.read(config.init)
    saved = config.out / "config.json"
    if config.resume and saved.exists():
        model_settings = files.read_json(saved).get("model")
        if isinstance(model_settings, dict) and model_settings.get("init_sha256", start.sha256) != start.sha256:
            raise ConfigError(
                f"--init {start.path} is not the file that the run was started from; restore it, or train again with "
                "--overwrite"
            )
    model = network_of(config, format, len(labels))(dtype_of(config), "meta")
    start.check(config, format, model)
    weights, notes = start.weights(model, labels)
    return lambda model: model.load_state_dict(weights, strict=False), {"init_sha256": start.sha256}, "\n".join(notes)
