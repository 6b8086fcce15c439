"""The base of tasks, the kinds of runs: each is one file in `training/tasks`.

A `Task` makes an `Experiment` from settings and a data set, and a `Predictor` from a finished run. Training, runs,
prediction and the command line use these three and know no task. Importing a task imports neither torch nor numpy, so
that the help of its command is shown quickly.
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
    accepts; `files` are those that only runs of this kind have. `updates` counts optimizer steps in a training step.
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
        """The data set of a name or from the user's files, without torch: bad data is told at once. Raises DataError.

        It has the splits `train`, `validation` and `test`.
        """

    @abstractmethod
    def options(self, config: SettingsT) -> dict[str, Any]:
        """Those of `read` by the settings. Raises ConfigError for flags that the data does not take."""

    @abstractmethod
    def fingerprints(self, dataset: Any) -> Iterator[str]:
        """SHA-256 of every example with its target and split, and of the names of columns and classes: a run is
        continued on the same data only. After it those that earlier versions took, for their runs."""

    @abstractmethod
    def prepare(self, config: SettingsT, dataset: Any) -> Experiment[SettingsT]:
        """Raises DataError when no feature is left, ConfigError for flags that do not fit the data."""

    @abstractmethod
    def predictor(self, config: SettingsT, own: RunFiles) -> Predictor[SettingsT]:
        """What answers for the finished run in `config.out`, from its own documents and without torch.

        Raises ConfigError for runs that make no predictions, DamagedError and DataError for a missing or invalid file.
        """

    def load(self, config: SettingsT) -> Any:
        """The data set that the settings name. Raises DataError, ConfigError."""
        with out_of_memory.used_for("the data", "less data"):
            return self.read(config.data, **self.options(config))

    def settled(self, config: SettingsT, dataset: Any) -> SettingsT:
        """The settings with those that the data decides. Raises ConfigError where they contradict given ones."""
        return config

    def as_text(self, report: dict[str, Any]) -> str:
        """The text of a report of training or of an evaluation."""
        from minidl.training.report import report_files

        return report_files.as_text(report)


class Experiment(ABC, Generic[SettingsT]):
    """One training: what a task made of its settings and a data set.

    `documents` are the JSON files needed to use the model, by name; `model` are the settings of its networks, None if
    they follow from those of the run. `batch_size` counts the examples in a full batch; `scaled_by` are the settings
    that make the networks smaller.
    """

    config: SettingsT
    documents: dict[str, str]
    model: dict[str, Any] | None = None
    batch_size: int
    scaled_by: tuple[str, ...] = ()

    @property
    @abstractmethod
    def introduction(self) -> str:
        """A description of the data, for display."""

    @abstractmethod
    def networks(self, config: SettingsT) -> out_of_memory.Networks:
        """The networks of settings on torch's device "meta", without memory, with the optimizers of those trained."""

    def load(self) -> None:
        """Put the data where training reads it."""

    @abstractmethod
    def trainer(self, display: Display, state: dict[str, Any], hint: str) -> BaseTrainer:
        """Networks, optimizers and batches, all determined by the settings and the seed.

        `state` is stored with every checkpoint; `hint` is the command that continues the run.
        """

    def alongside(self) -> AbstractContextManager[None]:
        """A block, of the training and its report, in which other processes may do what the report needs."""
        return nullcontext()

    def advice(self, trainer: Any, report: dict[str, Any]) -> str | None:
        """Return advice for a run with poor scores, None if there is none."""
        return None

    @abstractmethod
    def report(self, trainer: Any, device: str) -> dict[str, Any]:
        """The content of report.json, once `trainer` has run. Only this reads the test split."""

    @abstractmethod
    def plot(self, trainer: Any, report: dict[str, Any]) -> None:
        """Draw the plots of the run; matplotlib is installed."""

    def mistakes(self, trainer: Any) -> list[dict[str, Any]]:
        """Return the most confident mistakes on the test split, for `page`, if the features have names."""
        return []

    def ending(self) -> str:
        """The last line shown: where the results are."""
        return f"the run is in {self.config.out}"


@dataclass(frozen=True)
class Predictor(ABC, Generic[SettingsT]):
    """The features that a finished run makes of inputs, which needs no torch, and its model's answers.

    `own` are the run's files, `workers` the processes that prepare many inputs, `devices` those that share the model's
    work, if it is shared.
    """

    config: SettingsT
    own: RunFiles
    workers: Workers = field(default=Workers(1), kw_only=True)
    devices: Any = field(default=None, kw_only=True)  # a `spread.Spread`, which knows the tasks
    argument: ClassVar[str] = ""  # what an argument is taken as, where it is not the name of a file
    fixed: ClassVar[str] = ""  # why an evaluation chooses no columns

    @property
    @abstractmethod
    def targets(self) -> Any:
        """The meaning of the model's outputs. Raises DamagedError."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The model with its weights. Raises DamagedError."""

    def outputs(self, features: Any) -> Iterator[np.ndarray]:
        """`forward.saved_outputs` of the model, shared out where there is more than a batch."""
        from minidl.training.loop import forward

        width = self.targets.outputs
        shared = self.devices is not None and self.devices.processes.count > 1
        if not shared or features.shape[0] <= forward.batch_and_part(features, width)[0]:
            return forward.saved_outputs(self.model, features, width)
        found: Iterator[np.ndarray] = self.devices.outputs(features, width)
        return found

    @abstractmethod
    def chunks(self, config: Predict) -> Iterable[Any]:
        """The inputs of a command, a few at a time. Raises ConfigError for flags that the run does not support."""

    @abstractmethod
    def features(self, chunk: Any) -> Any:
        """What the model takes, without torch. Raises DataError for an invalid input."""

    @abstractmethod
    def answers(self, chunk: Any, features: Any, top: int) -> list[dict[str, Any]]:
        """One answer per input of a chunk with these features, with the `top` best labels."""

    def lines(self, chunk: Any, features: Any, top: int) -> Iterable[str]:
        """The answers as lines of JSON; may be several in one."""
        return [_line(answer) for answer in self.answers(chunk, features, top)]

    def before_fault(self, chunk: Any) -> Iterable[Any]:
        """The parts of a chunk before its invalid input."""
        return ()

    def check_columns(self, config: Evaluate) -> None:
        """Raises ConfigError when an evaluation names columns of data without a choice of columns."""
        if config.text_column or config.label_column:
            raise ConfigError(f"--text-column and --label-column are for text runs; {self.fixed}")

    @abstractmethod
    def labelled(self, config: Evaluate) -> tuple[Any, np.ndarray, dict[str, Any]]:
        """(features, targets, source) of the user's own data, `config.data`. Raises DataError."""

    @abstractmethod
    def test(self, dataset: Any, config: Evaluate) -> tuple[Any, np.ndarray]:
        """(features, targets) of a data set's test split. Raises DataError when it does not fit the model."""


def _line(answer: dict[str, Any]) -> str:
    """An answer as a line of JSON. Bytes of a file name that are not UTF-8 become escapes, which Python reads back as
    the same name."""
    return encoded(answer) + "\n"


def only_for_files(name: str, options: Mapping[str, Any], why: str) -> None:
    """Raises ConfigError when an option is given that the data set of this name does not take."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"{flag(option)} is for your own file; {name} takes none: {why}")
