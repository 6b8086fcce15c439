"""The protocol of tasks, the kinds of runs: each is one file in `training/tasks`.

A `Task` makes an `Experiment` from settings and a data set, and a `Predictor` from a finished run. Training, runs,
prediction and the command line use these three and know no task. Importing a task imports neither torch nor numpy, so
that the help of its command is shown quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from minidl.training.errors import ConfigError
from minidl.training.settings import flag

if TYPE_CHECKING:
    import numpy as np

    from minidl import nn
    from minidl.training.config import Evaluate, Predict
    from minidl.training.display import Display
    from minidl.training.targets import Classification, Regression
    from minidl.training.trainer import BaseTrainer


class Task(Protocol):
    """A kind of run.

    `name` is used for the command and in config.json, `run` in messages. `data_sets` are the names that `--data`
    accepts; `files` are those that only runs of this kind have. `updates` counts optimizer steps in a training step.
    """

    name: str
    run: str
    settings: type[Any]
    data_sets: Mapping[str, str]
    files: tuple[str, ...] = ()
    updates: int = 1
    convolves: bool = False
    generates: bool = False

    def read(self, name: str, **options: Any) -> Any:
        """The data set of a name or from the user's files, without torch: bad data is told at once. Raises DataError.

        It has the splits `train`, `validation` and `test`.
        """
        ...

    def options(self, config: Any) -> dict[str, Any]:
        """Those of `read` by the settings. Raises ConfigError for flags that the data does not take."""
        ...

    def fingerprint(self, dataset: Any) -> str:
        """SHA-256 of every example with its target and split: a run is continued on the same data only."""
        ...

    def prepare(self, config: Any, dataset: Any) -> Experiment:
        """Raises DataError when no feature is left, ConfigError for flags that do not fit the data."""
        ...

    def predictor(self, config: Any, document: Callable[[str], str]) -> Predictor:
        """The model of the finished run in `config.out`; `document` reads one of the run's documents by its name.

        Raises ConfigError for runs that make no predictions, DamagedError for a missing or invalid file.
        """
        ...

    def load(self, config: Any) -> Any:
        """The data set that the settings name. Raises DataError, ConfigError."""
        return self.read(config.data, **self.options(config))

    def as_text(self, report: dict[str, Any]) -> str:
        """The text of a report of training or of an evaluation."""
        from minidl.training import reports

        return reports.as_text(report)


class Experiment(Protocol):
    """One training: what a task made of its settings and a data set."""

    @property
    def introduction(self) -> str:
        """A description of the data, for display."""
        ...

    @property
    def documents(self) -> dict[str, str]:
        """The JSON files needed to use the model, by name."""
        ...

    @property
    def model(self) -> dict[str, Any] | None:
        """The settings of its networks, None if they follow from those of the run."""
        ...

    @property
    def batch_size(self) -> int:
        """Examples in a full batch."""
        ...

    def trainer(self, display: Display, state: dict[str, Any], hint: str) -> BaseTrainer:
        """Networks, optimizers and batches, all determined by the settings and the seed.

        `state` is stored with every checkpoint; `hint` is the command that continues the run.
        """
        ...

    def advice(self, steps: int) -> str | None:
        """Advice before a training with this many steps per epoch, None if there is none."""
        ...

    def report(self, trainer: Any, device: str) -> dict[str, Any]:
        """The content of report.json, once `trainer` has run. Only this reads the test split."""
        ...

    def plot(self, trainer: Any, report: dict[str, Any]) -> None:
        """Draw the plots of the run; matplotlib is installed."""
        ...

    def ending(self) -> str:
        """The last line shown: where the results are."""
        ...


class Predictor(Protocol):
    """The model of a finished run, its features of inputs and its answers."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def targets(self) -> Classification | Regression:
        """The meaning of the outputs."""
        ...

    def chunks(self, config: Predict) -> Iterable[Any]:
        """The inputs of a command, a few at a time. Raises ConfigError for flags that the run does not support."""
        ...

    def answers(self, chunk: Any, top: int) -> list[dict[str, Any]]:
        """One answer per input, with the `top` best labels. Raises DataError for an invalid input."""
        ...

    def before_fault(self, chunk: Any) -> Iterable[Any]:
        """The parts of a chunk before its invalid input."""
        ...

    def check_columns(self, config: Evaluate) -> None:
        """Raises ConfigError when an evaluation names columns of data without a choice of columns."""
        ...

    def labelled(self, config: Evaluate) -> tuple[Any, np.ndarray, dict[str, Any]]:
        """(features, targets, source) of the user's own data, `config.data`. Raises DataError."""
        ...

    def test(self, dataset: Any, config: Evaluate) -> tuple[Any, np.ndarray]:
        """(features, targets) of a data set's test split. Raises DataError when it does not fit the model."""
        ...


def only_for_files(name: str, options: Mapping[str, Any], why: str) -> None:
    """Raises ConfigError when an option is given that the data set of this name does not take."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"{flag(option)} is for your own file; {name} takes none: {why}")
