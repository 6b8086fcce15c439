"""The settings of a training command, with those of the run that it continues."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path
from typing import Any

from minidl.errors import ConfigError
from minidl.training.run_folder import files, folder_lock
from minidl.training.run_folder.outputs import cannot_write, check_different
from minidl.training.run_folder.saved_run import DATA
from minidl.training.run_folder.training_folder import TrainingFolder
from minidl.training.settings.declaration import differences
from minidl.training.tasks import TASKS


def train_settings(kind: str, flags: dict[str, Any]) -> Any:
    """Return the settings of a training command from the flags on its command line.

    With `resume` all other settings are those of the run. Raises ConfigError for invalid settings, for flags that
    differ from the run to continue, and for a folder that must not be overwritten; RunError for a damaged run.
    """
    task = TASKS[kind]
    session_class = task.settings.of_process()
    check_different(**{name: flags.get(name) for name in DATA})
    session = {name: flags[name] for name in session_class.model_fields if name in flags}
    of_run = {name: value for name, value in flags.items() if name not in session}
    checked = session_class(**session)
    try:
        checked.out.exists()
    except OSError as error:
        raise ConfigError(cannot_write(checked.out, error)) from None
    folder_lock.check_free(checked.out)
    folder = TrainingFolder(checked.out)
    if checked.resume and not folder.is_new:
        run = folder.read()
        if run.kind != kind:
            raise ConfigError(f"{run.folder} is {run.task.run}; continue it with: {run.resume_command}")
        changed = differences(run.config, of_run)
        if changed:
            raise ConfigError(
                f"{checked.out} was started with other settings: {'; '.join(changed)}. "
                "Remove these flags to continue it, or choose another --out"
            )
        config = run.settings(session)
        _check_outside(config, task.data_sets)
        return config
    if "data" not in of_run and checked.resume:
        raise ConfigError(f"--resume: there is no run in {checked.out}; name its folder, or start a run with --data")
    if "data" not in of_run:
        raise ConfigError("--data is missing: name a data set or a file")
    config = task.settings(**of_run, **session)
    _check_outside(config, task.data_sets)
    folder.check_out(config.resume, config.overwrite)
    return config


def _check_outside(config: Any, data_sets: Container[str]) -> None:
    """Raise ConfigError for a run inside a folder of its data, in which the run would be a class."""
    out = Path(os.path.realpath(config.out))
    for name in DATA:
        folder = getattr(config, name, None)
        if folder is None or folder in data_sets or not files.is_folder(Path(folder)):
            continue
        if out.is_relative_to(os.path.realpath(folder)):
            raise ConfigError(f"--out {config.out} is inside --{name} {folder}: choose a folder outside it")
