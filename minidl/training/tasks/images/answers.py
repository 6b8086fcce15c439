"""The predictions of a finished image run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl import data
from minidl.common import console
from minidl.data import DataError, ImageDataset, Pictures
from minidl.data.parsing import listed, one_of
from minidl.errors import ConfigError, damaged
from minidl.training.prediction import inputs
from minidl.training.settings.command import Evaluate, Predict
from minidl.training.task import Predictor
from minidl.training.tasks.images.networks import dtype_of, network_of
from minidl.training.tasks.images.pictures import PictureFormat
from minidl.training.tasks.images.settings import TrainImages

if TYPE_CHECKING:
    import numpy as np

    from minidl import nn
    from minidl.training.loop.targets import Classification

_CHUNK, _CHUNK_BYTES = 2048, 2**27  # pictures, and bytes of their pixels, in a chunk


@dataclass(frozen=True)
class PictureClassifier(Predictor[TrainImages]):
    """The model of an image run with the format that turns picture files into its inputs."""

    format: PictureFormat
    no_columns_reason = "a folder names its classes"

    @cached_property
    def targets(self) -> Classification:
        from minidl.training.loop.targets import Classification

        return replace(Classification.of_run(self.run), reject=self.reject)

    @cached_property
    def model(self) -> nn.Module:
        import torch

        from minidl.runtime import launch
        from minidl.training.run_folder import weights

        dtype = dtype_of(self.config)
        if launch.INTERPRETED and dtype == torch.bfloat16:
            dtype = torch.float32  # represents every bfloat16 number
        try:
            model = network_of(self.config, self.format, self.targets.outputs)(dtype, "meta")
        except ConfigError as error:
            raise damaged(self.config.out / "config.json", error) from None
        return weights.materialize(model, self.run.weights(), self.run.model)

    def chunks(self, config: Predict) -> Iterable[Any]:
        if config.file is not None or config.text_column is not None:
            raise ConfigError(
                "--file and --text-column are for text and table runs; pass picture files as arguments, "
                "or their paths on standard input"
            )
        if "" in config.inputs:
            raise ConfigError("an empty name was given: give picture files or folders of them")
        if config.inputs:
            paths = [path for name in config.inputs for path in _files(Path(name))]
            size = min(_CHUNK, max(inputs.CHUNK, _CHUNK_BYTES // math.prod(self.format.shape)))
            return inputs.chunks(paths, size)
        lines = inputs.lines_as_they_come(inputs.standard_input())
        return ([Path(line.strip()) for _, line in chunk if line.strip()] for chunk in lines)

    def features(self, paths: list[Path]) -> Pictures:
        return self.format.pictures(data.read_pictures(paths, self.format.size, self.format.channels, self.workers))

    def answers(self, paths: list[Path], features: Pictures, top: int) -> list[dict[str, Any]]:
        """Return an answer per file: its path, label, probability and the `top` best labels."""
        answers = self.targets.answers(self.outputs(features), top)
        return [{"file": str(path), **answer} for path, answer in zip(paths, answers, strict=True)]

    def before_fault(self, paths: list[Path]) -> Iterable[list[Path]]:
        """Yield the files before the first invalid one; those of its part one by one."""
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
        shape, expected = dataset.test.pixels.shape[1:], self.format.shape
        if dataset.labels != self.targets.labels or shape != expected:
            raise DataError(
                f"{dataset.name} has pictures of {' x '.join(map(str, shape))} in {len(dataset.labels)} classes; the "
                f"model of {config.run} takes {' x '.join(map(str, expected))} and knows {listed(self.targets.labels)}"
            )
        return self.format.pictures(dataset.test.pixels), dataset.test.labels


def _files(path: Path) -> list[Path]:
    """Return the file, or the picture files in a folder and its folders. Raises DataError if there are none."""
    from minidl.data.picture_folders import left_out, pictures_in

    if not path.is_dir():
        return [path]
    skipped = Counter[str]()
    pictures = pictures_in(path, skipped)
    if not pictures:
        raise DataError(f"{path} is a folder without pictures; give picture files or a folder of them")
    if skipped_files := left_out(path, skipped):
        console.note(skipped_files)
    return pictures
