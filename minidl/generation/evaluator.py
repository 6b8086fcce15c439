"""The network whose features measure the quality of pictures: a small classifier, trained once and then fixed.

It is a `models.SmallCNN` trained by minidl; a picture's features are the inputs of its last layer (the mean of each
channel over the pixels). The file has the settings, the training command, and the accuracy on the test split.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minidl import models, nn
from minidl.common import write_files
from minidl.data.parsing import parse_json
from minidl.data.saved import validate
from minidl.errors import ConfigError, DamagedError, damaged
from minidl.generation import built_in as built_in_weights
from minidl.training.loop.forward import saved_outputs
from minidl.training.run_folder import files, weights
from minidl.training.run_folder.files import sha256
from minidl.training.tasks.images import PictureClassifier, PictureFormat

FORMAT = "minidl evaluator"


@dataclass(frozen=True)
class Evaluator:
    """`about` is the metadata of the evaluator's file: command, seed, commit and accuracy; `sha256` is of the file."""

    model: models.SmallCNN
    labels: list[str]
    format: PictureFormat
    name: str
    sha256: str
    about: dict[str, str]

    def read(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (features float32 [N, d], classes int64 [N]) of pixels uint8 [N, H, W, C].

        Raises ValueError for pictures of another shape.
        """
        if pixels.shape[1:] != self.format.shape:
            raise ValueError(f"pictures have shape {list(pixels.shape[1:])}, expected {list(self.format.shape)}")
        parts = saved_outputs(nn.Sequential(self.model.features, self.model.pool), self.format.pictures(pixels))
        features = np.concatenate(list(parts)).reshape(len(pixels), -1)
        return features, np.concatenate([part.argmax(1) for part in saved_outputs(self.model.classifier, features)])


def built_in(data: str) -> Path:
    """Return the file of the evaluator for a data set. Raises ConfigError if minidl has none."""
    path = built_in_weights.FOLDER / f"{data}-evaluator.safetensors"
    if not path.exists():
        names = ", ".join(
            sorted(path.name.partition("-evaluator")[0] for path in built_in_weights.FOLDER.glob("*-evaluator.*"))
        )
        raise ConfigError(
            f"minidl has no evaluator for {data} (it has: {names or 'none'}): train a classifier of the same pictures "
            f"with `minidl train images --data {data} --out RUN`, and give --evaluator RUN"
        )
    return path


def load(path: Path) -> Evaluator:
    """Load an evaluator from a file of `save`. Raises DamagedError for any other content, and FileNotFoundError."""
    digest = sha256(path)
    built_in_weights.check(path, digest)
    try:
        tensors, about = write_files.read_tensors(path)
        if about.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        settings = parse_json(about.pop("settings"))
        labels, (height, width) = settings.pop("labels"), settings.pop("size")
        described = validate(PictureFormat, {**settings, "height": height, "width": width})
        if not isinstance(labels, list) or len(labels) < 2 or not all(isinstance(label, str) for label in labels):
            raise ValueError("its labels are not a list of two names or more")
        model = models.SmallCNN(described.channels, described.size, len(labels))
        weights.load(model, tensors, path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error) from None
    nn.fold_batch_norms(model.eval().requires_grad_(False))
    return Evaluator(model, labels, described, path.stem, digest, about)


def from_run(folder: Path) -> Evaluator:
    """Load an evaluator from a run of `minidl train images`. Raises ConfigError for another run, and DamagedError."""
    classifier, model = _small(folder, f"--evaluator {folder}")
    nn.fold_batch_norms(model.to(dtype=torch.float32).eval().requires_grad_(False))
    digest = sha256(folder / "model.safetensors")
    return Evaluator(model, classifier.targets.labels, classifier.format, folder.name, digest, {})


def save(run: Path, path: Path, about: dict[str, str]) -> None:
    """Write the model of an image run as an evaluator's file, with its test accuracy.

    Raises ConfigError unless the run is of `minidl train images --model small`.
    """
    classifier, model = _small(run, str(run))
    report = files.read_json(run / "report.json")
    described = classifier.format
    settings: dict[str, Any] = {
        "channels": described.channels, "size": list(described.size), "labels": classifier.targets.labels,
        "mean": list(described.mean), "std": list(described.std),
    }  # fmt: skip
    if not isinstance(report.get("accuracy"), float):
        raise DamagedError(f"{run / 'report.json'} has no accuracy")
    metadata = {"format": FORMAT, "settings": json.dumps(settings), "accuracy": f"{report['accuracy']:.4f}", **about}
    content, _ = write_files.tensor_bytes(
        {name: tensor.to(torch.float32) for name, tensor in model.state_dict().items()}, metadata
    )
    write_files.write_bytes(path, content)


def _small(run: Path, what: str) -> tuple[PictureClassifier, models.SmallCNN]:
    from minidl.training.prediction import predict

    classifier = predict.load(run)
    if not isinstance(classifier, PictureClassifier) or not isinstance(classifier.model, models.SmallCNN):
        raise ConfigError(f"{what} is not a run of `minidl train images --model small`")
    return classifier, classifier.model
