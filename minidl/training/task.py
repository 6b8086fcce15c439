"""The base classes of tasks, the kinds of runs. Each task is one file or folder in `training/tasks`.

A `Task` makes an `Experiment` from settings and a data set, and a `Predictor` from a finished run. Training, runs,
prediction and the command line use these three classes and know no task. Importing a task imports neither torch nor
numpy, so that the help of its command appears quickly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from minidl.data.parsing import encoded
from minidl.data.workers import Workers
from minidl.errors import ConfigError
from minidl.training.process import out_of_memory
from minidl.training.settings.command import TrainSettings
from minidl.training.settings.declaration import flag

if TYPE_CHECKING:
    import numpy as np

    from minidl import nn
    from minidl.training.loop.trainer import BaseTrainer
    from minidl.training.process.display import Display
    from minidl.training.run_folder.manifest import RunFiles
    from minidl.training.settings.command import Evaluate, Predict


SettingsT = TypeVar("SettingsT", bound=TrainSettings)


class Task(ABC, Generic[SettingsT]):
    """A kind of run.

    `name` is used for the command and in config.json, `run` in messages. `data_sets` are the names that `--data`
    accepts; `files` are the files that only runs of this kind have. `updates` is the number of optimizer steps in a
    training step.
    """

    name: str
    run: str
    settings: type[SettingsT]
    data_sets: Mapping[str, str]
    files: tuple[str, ...] = ()
    updates: int = 1
    convolves: bool = False
    generates: bool = False
    has_terms: bool = False

    @abstractmethod
    def read(self, name: str, **options: Any) -> Any:
        """Return a data set by its name or from the user's files, without importing torch. Raises DataError.

        It has the splits `train`, `validation` and `test`.
        """

    @abstractmethod
    def options(self, config: SettingsT) -> dict[str, Any]:
        """Return the options of `read` from the settings. Raises ConfigError for flags that do not fit the data."""

    @abstractmethod
    def fingerprints(self, dataset: Any) -> Iterator[str]:
        """Yield the SHA-256 of all examples, targets, splits and names of columns and classes, then those of earlier
        versions. A run can only be resumed on data with one of these fingerprints."""

    @abstractmethod
    def prepare(self, config: SettingsT, dataset: Any) -> Experiment[SettingsT]:
        """Return the experiment. Raises DataError for data without features, ConfigError for flags that do not fit."""

    @abstractmethod
    def predictor(self, config: SettingsT, run: RunFiles) -> Predictor[SettingsT]:
        """Return the predictor of the finished run in `config.out`, without importing torch.

        Raises ConfigError for runs that make no predictions, DamagedError and DataError for a missing or invalid file.
        """

    def load(self, config: SettingsT) -> Any:
        """Return the data set that the settings name. Raises DataError, ConfigError."""
        with out_of_memory.used_for("the data", "less data"):
            return self.read(config.data, **self.options(config))

    def settled(self, config: SettingsT, dataset: Any) -> SettingsT:
        """Return the settings with defaults that depend on the data. Raises ConfigError if settings contradict."""
        return config

    def as_text(self, report: dict[str, Any]) -> str:
        """Return the text of a report of training or of an evaluation."""
        from minidl.training.report import report_files

        return report_files.as_text(report)


class Experiment(ABC, Generic[SettingsT]):
    """One training of a task, with its settings and data set.

    `documents` are the JSON files needed to use the model, by name; `model` are the settings of its networks, None if
    they follow from the run's settings. `batch_size` is the number of examples in a full batch; `scaled_by` are the
    settings that make the networks smaller.
    """

    config: SettingsT
    documents: dict[str, str]
    model: dict[str, Any] | None = None
    batch_size: int
    scaled_by: tuple[str, ...] = ()

    @property
    @abstractmethod
    def introduction(self) -> str:
        """Return a description of the data, for display."""

    @abstractmethod
    def networks(self, config: SettingsT) -> out_of_memory.Networks:
        """Return the networks on torch's device "meta", without memory, each with its optimizer if it is trained."""

    def load(self) -> None:
        """Copy the data to the device if it fits there."""

    @abstractmethod
    def trainer(self, display: Display, state: dict[str, Any], hint: str) -> BaseTrainer:
        """Return the trainer; it depends only on the settings and the seed.

        `state` is stored with every checkpoint; `hint` is the command that continues the run.
        """

    def background_work(self) -> AbstractContextManager[None]:
        """Return a context for the training, during which other processes may prepare the report."""
        return nullcontext()

    def advice(self, trainer: Any, report: dict[str, Any]) -> str | None:
        """Return advice for a run with poor scores, None if there is none."""
        return None

    @abstractmethod
    def report(self, trainer: Any, device: str) -> dict[str, Any]:
        """Return the content of report.json, after `trainer` has run. Only this method reads the test split."""

    @abstractmethod
    def plot(self, trainer: Any, report: dict[str, Any]) -> None:
        """Draw the plots of the run; call this only if matplotlib is installed."""

    def mistakes(self, trainer: Any) -> list[dict[str, Any]]:
        """Return the most confident mistakes on the test split, for `page`, if the features have names."""
        return []

    def closing_note(self) -> str:
        """Return the last line of the output: the location of the results."""
        return f"the run is in {self.config.out}"


@dataclass(frozen=True)
class Predictor(ABC, Generic[SettingsT]):
    """The predictions of a finished run: features of inputs, computed without torch, and the model's answers.

    `reject` is the probability below which an answer has no label.
    `run` are the run's files, `workers` the processes that prepare many inputs, `devices` the processes with a GPU
    each that share the model's work, if there are several.
    """

    config: SettingsT
    run: RunFiles
    workers: Workers = field(default=Workers(1), kw_only=True)
    reject: float = field(default=0.0, kw_only=True)
    devices: Any = field(default=None, kw_only=True)  # a `multi_gpu.Spread`, which imports the tasks
    argument: ClassVar[str] = ""  # the kind of an argument that is not the name of a file
    no_columns_reason: ClassVar[str] = ""  # why an evaluation accepts no column flags

    @property
    @abstractmethod
    def targets(self) -> Any:
        """Return the meaning of the model's outputs. Raises DamagedError."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model with its weights. Raises DamagedError."""

    def outputs(self, features: Any) -> Iterator[np.ndarray]:
        """Return `forward.saved_outputs` of the model, computed by several GPUs if there is more than a batch."""
        from minidl.training.loop import forward

        width = self.targets.outputs
        is_shared = self.devices is not None and self.devices.processes.count > 1
        if not is_shared or features.shape[0] <= forward.batch_and_part(features, width)[0]:
            return forward.saved_outputs(self.model, features, width)
        return self.devices.outputs(features, width)

    @abstractmethod
    def chunks(self, config: Predict) -> Iterable[Any]:
        """Return the inputs of a command, in chunks. Raises ConfigError for flags that the run does not support."""

    @abstractmethod
    def features(self, chunk: Any) -> Any:
        """Return the model's inputs for a chunk, without importing torch. Raises DataError for an invalid input."""

    @abstractmethod
    def answers(self, chunk: Any, features: Any, top: int) -> list[dict[str, Any]]:
        """Return one answer per input of a chunk with these features, with the `top` best labels."""

    def lines(self, chunk: Any, features: Any, top: int) -> Iterable[str]:
        """Return the answers as lines of JSON; a string may contain several lines."""
        # JSON escapes bytes of a file name that are not UTF-8, and Python reads these back as the same name.
        return [encoded(answer) + "\n" for answer in self.answers(chunk, features, top)]

    def before_fault(self, chunk: Any) -> Iterable[Any]:
        """Return the parts of a chunk before its invalid input."""
        return ()

    def check_columns(self, config: Evaluate) -> None:
        """Raise ConfigError when an evaluation names columns of data without a choice of columns."""
        if config.text_column or config.label_column:
            raise ConfigError(f"--text-column and --label-column are for text runs; {self.no_columns_reason}")

    @abstractmethod
    def labelled(self, config: Evaluate) -> tuple[Any, np.ndarray, dict[str, Any]]:
        """Return (features, targets, source) of the user's own data, `config.data`. Raises DataError."""

    @abstractmethod
    def test(self, dataset: Any, config: Evaluate) -> tuple[Any, np.ndarray]:
        """Return (features, targets) of a data set's test split. Raises DataError when it does not fit the model."""


def only_for_files(name: str, options: Mapping[str, Any], reason: str) -> None:
    """Raise ConfigError when an option has a value that the data set of this name does not accept."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"{flag(option)} is for your own file; {name} takes none: {reason}")
