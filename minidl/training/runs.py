"""Run folders: made, replaced, continued, and read again.

    config.json       what the run is: command, settings, checksums of the data and of the documents; written first
    environment.json  what its bits depend on besides: versions, device, BLAS and its threads, precision, tile tables
    labels.json, vocabulary.json | schema.json | pictures.json      the documents: what a reader of the model needs
    metrics.jsonl     a line per epoch
    checkpoints/      while and after training: last and best state
    samples/          of a GAN: a grid of pictures per epoch
    model.safetensors, report.json, report.txt, *.png, *.gif   when finished; report.json is written last

`--overwrite` moves the run aside, to the same name with `.previous`, and deletes it when the new one is finished:
a complete run is there at every moment.
"""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from minidl import __version__
from minidl.data.parsing import cut
from minidl.training import checkpoints, files
from minidl.training.config import Session, TrainGan, TrainImages, TrainTable, TrainText, differences, from_saved
from minidl.training.errors import ConfigError, DamagedError, RunError, damaged

FORMAT, VERSION = "minidl-run", 1
KINDS = {"text": TrainText, "table": TrainTable, "images": TrainImages, "gan": TrainGan}
# Stands in a run that is being replaced: a folder without it is never deleted.
_REPLACED = "replaced"
_OWN_FILES = (
    "config.json", "environment.json", "labels.json", "vocabulary.json", "schema.json", "pictures.json",
    "metrics.jsonl", "model.safetensors", "report.json", "report.txt", "loss.png", "scores.png", "confusion.png",
    "predictions.png", "mistakes.png", "filters.png", "curves.png", "training.gif",
    "evaluation.json", "nearest.png",
)  # fmt: skip
# What --profile leaves there: nothing depends on them.
_TRACES = ("trace.json", "trace-evaluate.json", "trace-predict.json")


@dataclass(frozen=True)
class SavedRun:
    """The parts of config.json of a run that exists; `documents` are checksums by file name (older runs have none)."""

    folder: Path
    kind: str
    config: dict[str, Any]
    data_sha256: str
    documents: dict[str, str]
    finished: bool


def read_run(folder: Path) -> SavedRun:
    """What the run in `folder` is. Raises ConfigError when there is none, DamagedError when it is not whole."""
    path = folder / "config.json"
    what = None
    if not files.is_folder(folder):
        what = "it is no folder"
    elif files.is_folder(path):
        what = "its config.json is a folder"
    elif not path.exists():
        what = "it has no config.json"
    if what is not None:
        raise ConfigError(f"{folder} is no minidl run: {what}; give a folder that `minidl train` made")
    saved = files.read_json(path)
    if saved.get("format") != FORMAT:
        raise ConfigError(f"{folder} is no minidl run: its config.json is of another program")
    if saved.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {cut(saved.get('version'), 60)}, this minidl reads {VERSION}; update minidl"
        )
    kind, config, checksum = saved.get("kind"), saved.get("config"), saved.get("data_sha256")
    documents = saved.get("documents", {})
    if not isinstance(kind, str) or kind not in KINDS:
        raise damaged(path, f"kind is {kind!r}, expected {' or '.join(KINDS)}")
    if not isinstance(config, dict):
        raise damaged(path, f"config is {config!r}, expected the settings")
    if not isinstance(checksum, str):
        raise damaged(path, f"data_sha256 is {checksum!r}, expected the checksum of the data")
    if not isinstance(documents, dict):
        raise damaged(path, f"documents is {documents!r}, expected checksums by file name")
    return SavedRun(folder, kind, config, checksum, documents, _report(folder) is not None)


def finished_run(folder: Path) -> SavedRun:
    """`read_run` of a run that was trained to its end. Raises ConfigError with the command that continues another."""
    run = read_run(folder)
    if not run.finished:
        raise ConfigError(f"{folder} is not trained to its end; continue it with: {resume_command(run.kind, folder)}")
    return run


def saved_settings(run: SavedRun) -> Any:
    """The TrainText, TrainTable, TrainImages or TrainGan of a run. Raises DamagedError."""
    return _saved_settings(run, {"out": run.folder})


def _saved_settings(run: SavedRun, session: dict[str, Any]) -> Any:
    try:
        return from_saved(KINDS[run.kind], run.config, session)
    except (ConfigError, TypeError) as error:
        raise damaged(run.folder / "config.json", error) from None


def document(run: SavedRun, name: str) -> str:
    """The text of a document of a run. Raises DamagedError when it is gone or not what training wrote."""
    path = run.folder / name
    try:
        text = files.read_text(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is gone; restore it or train again with --overwrite") from None
    if name in run.documents and run.documents[name] != files.text_checksum(text):
        raise damaged(path, "its content does not match its checksum in config.json")
    return text


def finished_report(config: Session) -> str | None:
    """The text report of the run to continue when there is nothing left to do. Raises DamagedError when it is gone."""
    if not config.resume or _report(config.out) is None:
        return None
    path = config.out / "report.txt"
    try:
        text = files.read_text(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is gone; restore it or train again with --overwrite") from None
    # What a process that died at its very end has left.
    sweep(config.out)
    kept = finish(config.out)
    return f"{config.out} is finished already:\n\n{text}" + (f"{kept}\n" if kept else "")


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
    try:
        checked.out.exists()
    except OSError as error:
        raise ConfigError(_cannot_write(checked.out, error)) from None
    if checked.resume:
        run = _run_to_resume(kind, checked.out)
        if run is not None:
            changed = differences(run.config, own)
            if changed:
                raise ConfigError(
                    f"{checked.out} was started with other settings: {'; '.join(changed)}. "
                    "Leave these flags out to continue it, or choose another --out"
                )
            return _saved_settings(run, session)
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
    if config.resume or _is_new(folder):
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


def start(
    config: Session, kind: str, data_sha256: str, documents: dict[str, str], model: dict[str, Any] | None = None
) -> None:
    """Make the folder of a new run with its config.json and the JSON texts in `documents`.

    `model` are the settings that make its model, where they are not those of the run.

    A run there is moved aside, see `finish`. Raises RunError when the folder cannot be written.
    """
    folder = config.out
    moved = False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _probe(folder if folder.is_dir() else folder.parent)
        if config.overwrite and not _is_new(folder):
            moved = _move_aside(folder)
        folder.mkdir(exist_ok=True)
        files.sweep(folder)
        saved = {
            "format": FORMAT,
            "version": VERSION,
            "minidl": __version__,
            "kind": kind,
            "config": config.identity(),
            "data_sha256": data_sha256,
            "documents": _checksums(documents),
            **({} if model is None else {"model": model}),
        }
        # First: without it the folder is not known as a run, and --resume writes the documents again.
        files.write_json(folder / "config.json", saved, sealed=True)
        for name, text in documents.items():
            files.write_text(folder / name, text)
    except OSError as error:
        if moved:
            abandon(folder)
        raise RunError(_cannot_write(folder, error)) from None


def sweep(folder: Path) -> None:
    """Delete what a killed process has left of unfinished files, before its run goes on."""
    for part in (folder, folder / checkpoints.FOLDER, folder / "samples"):
        files.sweep(part)


def restore_documents(folder: Path, documents: dict[str, str]) -> list[str]:
    """Write the documents of a run to continue, which follow from its data and settings; names those that differed."""
    changed = []
    for name, text in documents.items():
        try:
            same = files.read_text(folder / name) == text
        except (FileNotFoundError, DamagedError):
            same = False
        if not same:
            files.write_text(folder / name, text)
            changed.append(name)
    saved = files.read_json(folder / "config.json")
    if saved.get("documents") != _checksums(documents):
        files.write_json(folder / "config.json", {**saved, "documents": _checksums(documents)}, sealed=True)
    return changed


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
    return f"the replaced run had files of yours: they are in {aside}" if _holds(aside) else None


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


def cannot_begin(folder: Path, error: OSError) -> RunError:
    """The error for a write that failed before the first state of a run that was to replace another."""
    return RunError(
        f"{error.filename or folder} cannot be written: {error.strerror or error}; {folder} is the run that was there. "
        "Make room, then give the command again"
    )


def cannot_save(folder: Path, kind: str, error: OSError) -> RunError:
    """The error for a write that failed during training."""
    saved = (folder / checkpoints.FOLDER / "last.json").exists()
    kept = "the last checkpoint is kept" if saved else "no checkpoint yet"
    return RunError(
        f"{error.filename or folder} cannot be written: {error.strerror or error}; {kept}. Make room, then continue "
        f"with: {resume_command(kind, folder)}"
    )


def check_not_own(name: str, path: Path, in_run: bool = False) -> None:
    """Raises ConfigError when a flag names a file of a run, or with `in_run` of a run to come in its folder."""
    if path.name not in (*_OWN_FILES, _REPLACED, checkpoints.FOLDER):
        return
    if not in_run:
        try:
            read_run(path.parent)
        except (ConfigError, DamagedError):
            return
    what = "the folder of checkpoints" if path.name == checkpoints.FOLDER else "a file"
    raise ConfigError(f"{name} {path} is {what} of the run in {path.parent}: give another name")


def _run_to_resume(kind: str, folder: Path) -> SavedRun | None:
    """The run in a folder, None when nothing was saved before the interruption."""
    if _is_new(folder):
        return None
    run = read_run(folder)
    if run.kind != kind:
        name = "an image" if run.kind == "images" else f"a {run.kind}"
        raise ConfigError(f"{folder} is {name} run; continue it with: {resume_command(run.kind, folder)}")
    return run


def _is_new(folder: Path) -> bool:
    """Whether the folder is missing or empty, but for what a killed process has left of the first file of a run."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(fnmatch(path.name, ".config.json.*.part") for path in folder.iterdir())


def _report(folder: Path) -> dict[str, Any] | None:
    """The content of a finished run's report.json; None where it is missing, empty or junk: the run is not finished."""
    try:
        return files.read_json(folder / "report.json") or None
    except (FileNotFoundError, NotADirectoryError, DamagedError):
        return None


def _checksums(documents: dict[str, str]) -> dict[str, str]:
    return {name: files.text_checksum(text) for name, text in documents.items()}


def _previous(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")


def _holds(folder: Path) -> bool:
    """Whether something is there: an empty folder may be all of a replaced run that could not be deleted."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def _move_aside(folder: Path) -> bool:
    """The run becomes FOLDER.previous; tells if there is one to come back.

    Where an earlier replacement was stopped there is a FOLDER.previous already: the one that was finished stays.
    """
    aside = _previous(folder)
    if (aside / _REPLACED).exists():
        if _report(folder) is None:
            _delete_run(folder)
            return True
        _delete_run(aside)
    if _holds(aside):
        raise RunError(f"{aside} exists: move or delete it, then try again")
    files.write_text(folder / _REPLACED, "")
    folder.rename(aside)
    return True


def _delete_run(folder: Path) -> None:
    """Delete what training writes, and the folder if nothing else is in it."""
    checkpoints.delete(folder / checkpoints.FOLDER)
    _delete_samples(folder / "samples")
    # config.json after the others: until then the folder is known as a run. Last the mark: while it is there, the next
    # process deletes the rest of a run that was replaced.
    for name in (*_TRACES, *reversed(_OWN_FILES), _REPLACED):
        files.remove(folder / name)
    files.sweep(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _delete_samples(folder: Path) -> None:
    """Delete the grids of a GAN, and their folder if nothing else is in it."""
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.glob("epoch-*.png"):
        files.remove(path)
    files.sweep(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _probe(folder: Path) -> None:
    """Raises OSError when no file can be made in `folder`."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def _cannot_write(folder: Path, error: OSError) -> str:
    return f"--out {folder} cannot be written: {error.strerror or error}; choose another folder or make room in it"
