"""Run folders: made, replaced, continued, and read again.

    config.json       what the run is: command, settings, a checksum of the data
    environment.json  versions, device, threads
    labels.json, vocabulary.json | schema.json
    metrics.jsonl     a line per epoch
    checkpoints/      while and after training: last and best state
    model.safetensors, report.json, report.txt, *.png   when finished; report.json is written last

`--overwrite` moves the run aside, to the same name with `.previous`, and deletes it when the new one is finished:
a complete run is there at every moment.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidl import __version__
from minidl.training import files
from minidl.training.config import Session, TrainTable, TrainText, differences, from_saved
from minidl.training.errors import ConfigError, DamagedError, RunError

FORMAT, VERSION = "minidl-run", 1
KINDS = {"text": TrainText, "table": TrainTable}
# Stands in a run that is being replaced: a folder without it is never deleted.
_REPLACED = "replaced"
_OWN_FILES = (
    "config.json", "environment.json", "labels.json", "vocabulary.json", "schema.json", "metrics.jsonl",
    "model.safetensors", "report.json", "report.txt", "loss.png", "scores.png", "confusion.png", "predictions.png",
    _REPLACED,
)  # fmt: skip


@dataclass(frozen=True)
class SavedRun:
    """The parts of config.json of a run that exists."""

    folder: Path
    kind: str
    config: dict[str, Any]
    data_sha256: str
    finished: bool


def read_run(folder: Path) -> SavedRun:
    """What the run in `folder` is. Raises ConfigError when there is none, DamagedError when it is not whole."""
    path = folder / "config.json"
    try:
        saved = files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        what = "is no folder" if not folder.is_dir() else "has no config.json"
        raise ConfigError(f"{folder} is no minidl run: it {what}; give a folder that `minidl train` made") from None
    except IsADirectoryError:
        raise ConfigError(f"{folder} is no minidl run: its config.json is a folder") from None
    if saved.get("format") != FORMAT:
        raise ConfigError(f"{folder} is no minidl run: its config.json is of another program")
    if saved.get("version") != VERSION:
        raise ConfigError(f"{path} has version {saved.get('version')}, this minidl reads {VERSION}; update minidl")
    kind, config, checksum = saved.get("kind"), saved.get("config"), saved.get("data_sha256")
    if kind not in KINDS or not isinstance(config, dict) or not isinstance(checksum, str):
        raise DamagedError(f"{path} is damaged; restore it or train again")
    return SavedRun(folder, kind, config, checksum, (folder / "report.json").exists())


def finished_run(folder: Path) -> SavedRun:
    """`read_run` of a run that was trained to its end. Raises ConfigError with the command that continues another."""
    run = read_run(folder)
    if not run.finished:
        raise ConfigError(f"{folder} is not trained to its end; continue it with: {resume_command(run.kind, folder)}")
    return run


def saved_settings(run: SavedRun) -> Any:
    """The TrainText or TrainTable of a run. Raises DamagedError."""
    try:
        return from_saved(KINDS[run.kind], run.config, {"out": run.folder})
    except (ConfigError, TypeError) as error:
        raise DamagedError(f"{run.folder / 'config.json'} is damaged ({error}); restore it or train again") from None


def finished_report(config: Session) -> str | None:
    """The text report of the run to continue when there is nothing left to do."""
    if not config.resume or not (config.out / "report.json").exists():
        return None
    return f"{config.out} is finished already:\n\n" + (config.out / "report.txt").read_text()


def resume_command(kind: str, folder: Path) -> str:
    """The command that continues a run: every setting is in the run."""
    return shlex.join(["minidl", "train", kind, "--out", str(folder), "--resume"])


def settings(kind: str, given: dict[str, Any]) -> Any:
    """The settings of a training command from the flags that were given.

    With `resume` in an existing run the others are the run's. Raises ConfigError for bad settings, for flags that
    differ from the run to continue, and for a folder that must not be written to; RunError for a damaged run.
    """
    cls = KINDS[kind]
    session = {name: given[name] for name in Session.__dataclass_fields__ if name in given}
    own = {name: value for name, value in given.items() if name not in session}
    checked = Session(**session)
    if checked.resume:
        run = _run_to_resume(kind, checked.out)
        if run is not None:
            changed = differences(run.config, own)
            if changed:
                raise ConfigError(
                    f"{checked.out} was started with other settings: {'; '.join(changed)}. "
                    "Leave these flags out to continue it, or choose another --out"
                )
            try:
                return from_saved(cls, run.config, session)
            except (ConfigError, TypeError) as error:
                raise DamagedError(f"{run.folder / 'config.json'} is damaged ({error}); train again") from None
    if "data" not in own:
        raise ConfigError("--data is missing: name a data set or a file")
    config = cls(**own, **session)
    check_out(config)
    return config


def check_out(config: Session) -> None:
    """Raises ConfigError when a new run must not be written to `out`."""
    folder = config.out
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file: give the name of a folder")
    if config.resume or not folder.exists() or not any(folder.iterdir()):
        return
    if not config.overwrite:
        raise ConfigError(
            f"--out {folder} exists and is not empty: choose another folder, continue the run in it with --resume, "
            "or replace it with --overwrite"
        )
    try:
        read_run(folder)
    except (ConfigError, DamagedError) as error:
        raise ConfigError(f"--overwrite replaces runs only; {error}") from None


def start(config: TrainText | TrainTable, kind: str, data_sha256: str, documents: dict[str, Any]) -> None:
    """Make the folder of a new run with its config.json and the JSON texts in `documents`.

    A run there is moved aside, see `finish`. Raises RunError when the folder cannot be written.
    """
    folder = config.out
    moved = False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _probe(folder if folder.is_dir() else folder.parent)
        if config.overwrite and folder.is_dir() and any(folder.iterdir()):
            moved = _move_aside(folder)
        folder.mkdir(exist_ok=True)
        for name, text in documents.items():
            files.write_text(folder / name, text)
        saved = {
            "format": FORMAT,
            "version": VERSION,
            "minidl": __version__,
            "kind": kind,
            "config": config.identity(),
            "data_sha256": data_sha256,
        }
        files.write_json(folder / "config.json", saved)
    except OSError as error:
        if moved:
            abandon(folder)
        raise RunError(_cannot_write(folder, error)) from None


def abandon(folder: Path) -> bool:
    """Undo `start` when nothing worth keeping was made: the run that was moved aside comes back; tells if it did."""
    aside = _previous(folder)
    if not (aside / _REPLACED).exists():
        return False
    with contextlib.suppress(OSError):
        _delete_run(folder)
        aside.rename(folder)
        files.remove(folder / _REPLACED)
        return True
    return False


def finish(folder: Path) -> str | None:
    """Delete the run that `start` moved aside. Returns a sentence when it holds files that are not a run's."""
    aside = _previous(folder)
    if not (aside / _REPLACED).exists():
        return None
    _delete_run(aside)
    return f"the replaced run had files of yours: they are in {aside}" if aside.exists() else None


def check_data(config: Session, data_sha256: str) -> None:
    """Raises ConfigError when the run to continue was started on other data."""
    if config.resume and (config.out / "config.json").exists():
        same_data(read_run(config.out), data_sha256)


def same_data(run: SavedRun, data_sha256: str) -> None:
    """Raises ConfigError when a run was started on other data."""
    if run.data_sha256 != data_sha256:
        raise ConfigError(
            f"the data of {run.folder} ({run.config.get('data')}) is not what the run was started on; "
            "restore the data, or train again with --overwrite"
        )


def cannot_save(folder: Path, kind: str, error: OSError) -> RunError:
    """The error for a write that failed during training."""
    kept = "the last checkpoint is kept" if (folder / "checkpoints" / "last.json").exists() else "no checkpoint yet"
    return RunError(
        f"{error.filename or folder} cannot be written: {error.strerror or error}; {kept}. Make room, then continue "
        f"with: {resume_command(kind, folder)}"
    )


def _run_to_resume(kind: str, folder: Path) -> SavedRun | None:
    """The run in a folder, None when the folder is missing or empty (nothing was saved before the interruption)."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    run = read_run(folder)
    if run.kind != kind:
        raise ConfigError(f"{folder} is a {run.kind} run; continue it with: {resume_command(run.kind, folder)}")
    return run


def _previous(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")


def _move_aside(folder: Path) -> bool:
    """The run becomes FOLDER.previous; tells if there is one to come back.

    Where an earlier replacement was stopped there is a FOLDER.previous already: the one that was finished stays.
    """
    aside = _previous(folder)
    if (aside / _REPLACED).exists():
        if not (folder / "report.json").exists():
            _delete_run(folder)
            return True
        _delete_run(aside)
    if aside.exists():
        raise RunError(f"{aside} exists: move or delete it, then try again")
    files.write_text(folder / _REPLACED, "")
    folder.rename(aside)
    return True


def _delete_run(folder: Path) -> None:
    """Delete what training writes, and the folder if nothing else is in it."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    # config.json last: until then the folder is still known as a run.
    for name in reversed(_OWN_FILES):
        files.remove(folder / name)
    files.sweep(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _probe(folder: Path) -> None:
    """Raises OSError when no file can be made in `folder`."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def _cannot_write(folder: Path, error: OSError) -> str:
    return f"--out {folder} cannot be written: {error.strerror or error}; choose another folder or make room in it"
