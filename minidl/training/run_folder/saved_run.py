"""A run that was read from its folder."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidl.common import console
from minidl.distributed import workers
from minidl.errors import ConfigError, damaged
from minidl.training.run_folder.manifest import CONFIG, RunFiles
from minidl.training.task import Predictor, Task
from minidl.training.tasks import TASKS

DATA = ("data", "validation", "test")  # the settings that name files of the user


@dataclass(frozen=True)
class SavedRun(RunFiles):
    """The content of a run's config.json, and its files.

    `notes` say that the report was edited, or that the files cannot be checked.
    """

    kind: str
    config: dict[str, Any]
    data_sha256: str
    finished: bool
    notes: list[str]

    @property
    def task(self) -> Task[Any]:
        """The task of the run."""
        return TASKS[self.kind]

    @property
    def resume_command(self) -> str:
        """The command that continues the run."""
        return resume_command(self.kind, self.folder)

    def show_notes(self) -> None:
        """Print the notes on standard error, as commands print results on standard output."""
        for note in self.notes:
            console.note(note)

    def settings(self, session: dict[str, Any] | None = None) -> Any:
        """Return the settings of the run, with those of this process. Raises DamagedError."""
        try:
            return self.task.settings(**{**self.config, **(session or {"out": self.folder})})
        except ConfigError as error:
            raise damaged(self.folder / CONFIG, error) from None

    def predictor(self) -> Predictor[Any]:
        """Return the predictor of the run. Raises the errors of `Task.predictor`, and DamagedError."""
        return self.task.predictor(self.settings(), self)

    def load_data(self) -> Any:
        """Return the data set of the run. Raises ConfigError if it is no longer the same, DataError, DamagedError."""
        dataset = self.task.load(self.settings())
        self.check_data(dataset)
        return dataset

    def check_data(self, dataset: Any) -> None:
        """Raise ConfigError if the run was started on other data."""
        if self.data_sha256 not in self.task.fingerprints(dataset):
            names = [str(self.config[name]) for name in DATA if self.config.get(name)]
            raise ConfigError(
                f"the data of {self.folder} ({', '.join(names)}) is not what the run was started on; "
                "restore the data, or train again with --overwrite"
            )


def resume_command(kind: str, folder: Path) -> str:
    """Return the command that continues a run with its settings, in as many processes as --devices started."""
    count = workers.started_together()
    devices = ["--devices", str(count)] if count > 1 else []
    return console.one_line(shlex.join(["minidl", "train", kind, "--out", str(folder), "--resume", *devices]))
