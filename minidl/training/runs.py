"""Run folders: creating, replacing, continuing and reading them.

    config.json       command, settings, checksums of the data and of the documents; written first
    environment.json  what else the result depends on: versions, device, BLAS and its threads, precision, tile tables
    labels.json, vocabulary.json | schema.json | pictures.json      the documents, needed to use the model
    metrics.jsonl     a line per epoch
    checkpoints/      while and after training: last and best state
    samples/          of a GAN: a grid of pictures per epoch
    model.safetensors, report.json, report.txt, *.png, *.gif   when finished; report.json is written last

`--overwrite` renames the old run to NAME.previous and deletes it once the new one is finished, so a complete run exists
at every moment. One process at a time writes to a run, see `locks`; nothing outside of its folder is written or
deleted, whatever is linked there.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from minidl.data.parsing import cut
from minidl.training import checkpoints, files, locks
from minidl.training.config import Session
from minidl.training.errors import ConfigError, DamagedError, RunError, damaged, missing
from minidl.training.outputs import cannot_write
from minidl.training.settings import differences
from minidl.training.tasks import TASKS
from minidl.version import __version__

FORMAT, VERSION = "minidl-run", 1
# A file in a run that is being replaced, which says of which folder and by what name; only such a run is deleted.
_REPLACED = "replaced"
_DATA = ("data", "validation", "test")  # the settings that name files of the user's
_COMMON_FILES = (
    "config.json", "environment.json", "metrics.jsonl", "model.safetensors", "report.json", "report.txt", "loss.png",
    "scores.png",
)  # fmt: skip
# Written by --profile; nothing depends on them.
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
    """The run in `folder`. Raises ConfigError when there is none, DamagedError for an invalid config.json."""
    path = folder / "config.json"
    what = None
    if not files.is_folder(folder):
        what = "it is not a folder"
    elif files.is_folder(path):
        what = "its config.json is a folder"
    elif not path.exists():
        what = "it has no config.json"
    if what is not None:
        raise ConfigError(f"{folder} is not a minidl run: {what}; give a folder that `minidl train` made")
    saved = files.read_json(path)
    if saved.get("format") != FORMAT:
        raise ConfigError(f"{folder} is not a minidl run: another program wrote its config.json")
    if saved.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {cut(saved.get('version'), 60)}, this minidl reads {VERSION}; update minidl"
        )
    kind, config, checksum = saved.get("kind"), saved.get("config"), saved.get("data_sha256")
    documents = saved.get("documents", {})
    if not isinstance(kind, str) or kind not in TASKS:
        raise damaged(path, f"kind is {kind!r}, expected {' or '.join(TASKS)}")
    if not isinstance(config, dict):
        raise damaged(path, f"config is {config!r}, expected the settings")
    if not isinstance(checksum, str):
        raise damaged(path, f"data_sha256 is {checksum!r}, expected the checksum of the data")
    if not isinstance(documents, dict):
        raise damaged(path, f"documents is {documents!r}, expected checksums by file name")
    return SavedRun(folder, kind, config, checksum, documents, _report(folder) is not None)


def finished_run(folder: Path) -> SavedRun:
    """`read_run` of a finished run. Raises ConfigError for an unfinished one, with the command that continues it."""
    run = read_run(folder)
    if not run.finished:
        raise ConfigError(f"{folder} is not finished; continue it with: {resume_command(run.kind, folder)}")
    return run


def saved_settings(run: SavedRun) -> Any:
    """The settings of a run. Raises DamagedError."""
    return _saved_settings(run, {"out": run.folder})


def _saved_settings(run: SavedRun, session: dict[str, Any]) -> Any:
    try:
        return TASKS[run.kind].settings(**{**run.config, **session})
    except ConfigError as error:
        raise damaged(run.folder / "config.json", error) from None


def document(run: SavedRun, name: str) -> str:
    """The text of a document of a run. Raises DamagedError when it is missing or was changed."""
    path = run.folder / name
    text = _required(path)
    if name in run.documents and run.documents[name] != files.text_checksum(text):
        raise damaged(path, "its content does not match its checksum in config.json")
    return text


def finished_report(config: Session) -> str | None:
    """The text report if the run to continue is finished, else None. Raises DamagedError when the report is missing."""
    if not config.resume or _report(config.out) is None:
        return None
    text = _required(config.out / "report.txt")
    # A process that was killed at its very end may have left files.
    kept = None
    with contextlib.suppress(OSError), locks.held(config.out):
        check_links(config.out)
        sweep(config.out)
        kept = finish(config.out)
    return f"{config.out} is already finished:\n\n{text}" + (f"{kept}\n" if kept else "")


def resume_command(kind: str, folder: Path) -> str:
    """The command that continues a run, which has all other settings."""
    return shlex.join(["minidl", "train", kind, "--out", str(folder), "--resume"])


def settings(kind: str, given: dict[str, Any]) -> Any:
    """The settings of a training command from the flags that were given.

    With `resume` all other settings are those of the run. Raises ConfigError for invalid settings, for flags that
    differ from the run to continue, and for a folder that must not be overwritten; RunError for a damaged run.
    """
    cls = TASKS[kind].settings
    session = {name: given[name] for name in Session.model_fields if name in given}
    own = {name: value for name, value in given.items() if name not in session}
    checked = Session(**session)
    try:
        checked.out.exists()
    except OSError as error:
        raise ConfigError(cannot_write(checked.out, error)) from None
    locks.check_free(checked.out)
    if checked.resume and not _is_new(checked.out):
        run = read_run(checked.out)
        if run.kind != kind:
            raise ConfigError(
                f"{run.folder} is {TASKS[run.kind].run}; continue it with: {resume_command(run.kind, run.folder)}"
            )
        changed = differences(run.config, own)
        if changed:
            raise ConfigError(
                f"{checked.out} was started with other settings: {'; '.join(changed)}. "
                "Leave these flags out to continue it, or choose another --out"
            )
        config = _saved_settings(run, session)
        _check_outside(config, TASKS[kind].data_sets)
        return config
    if "data" not in own:
        raise ConfigError("--data is missing: name a data set or a file")
    config = cls(**own, **session)
    _check_outside(config, TASKS[kind].data_sets)
    check_out(config)
    return config


def _check_outside(config: Any, data_sets: Container[str]) -> None:
    """Raises ConfigError for a run inside a folder of its data, of which it would be a class."""
    out = Path(os.path.realpath(config.out))
    for name in _DATA:
        folder = getattr(config, name, None)
        if folder is None or folder in data_sets or not files.is_folder(Path(folder)):
            continue
        if out.is_relative_to(os.path.realpath(folder)):
            raise ConfigError(f"--out {config.out} is inside of --{name} {folder}: give a folder outside of it")


def check_not_data(config: Mapping[str, Any], **outputs: Path | None) -> None:
    """Raises ConfigError when a flag, given without its dashes, names a file that a run with these settings reads."""
    for name in _DATA:
        for output, path in outputs.items():
            if path is not None and config.get(name) and os.path.realpath(path) == os.path.realpath(config[name]):
                raise ConfigError(f"--{output} {path} is the file that the run reads as --{name}: give another name")


def check_out(config: Session) -> None:
    """Raises ConfigError when a new run would overwrite what is in `out`."""
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
    """Create the folder of a new run with its config.json and the JSON texts in `documents`.

    `model` are the settings of its model, where they differ from those of the run. An existing run is moved aside, see
    `finish`. Raises RunError when the folder cannot be written.
    """
    folder = config.out
    moved = False
    try:
        files.make_folder(folder.parent, parents=True)
        tempfile.TemporaryFile(dir=folder if folder.is_dir() else folder.parent).close()  # where none can be made
        if config.overwrite and not _is_new(folder):
            moved = _move_aside(folder)
        files.make_folder(folder)
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
        # First, as it marks the folder as a run; --resume rewrites the documents.
        files.write_json(folder / "config.json", saved, sealed=True)
        for name, text in documents.items():
            files.write_text(folder / name, text)
    except OSError as error:
        if moved:
            abandon(folder)
        raise RunError(cannot_write(folder, error)) from None


@contextlib.contextmanager
def writing(config: Session) -> Iterator[None]:
    """Hold the lock of a run's folder, and make the one above it.

    Raises ConfigError when another process writes there or has made a run in the meantime, or when a folder of the run
    is a link; RunError when nothing can be written.
    """
    try:
        files.make_folder(config.out.parent, parents=True)
        lock = locks.held(config.out)
        lock.__enter__()
    except OSError as error:
        raise RunError(cannot_write(config.out, error)) from None
    with contextlib.ExitStack() as stack:
        stack.push(lock)
        check_out(config)
        check_links(config.out)
        yield


def check_links(folder: Path) -> None:
    """Raises ConfigError when a folder of a run is a link: what it names is not the run's to write or delete."""
    for part in (folder / checkpoints.FOLDER, folder / "samples"):
        if part.is_symlink():
            raise ConfigError(
                f"{part} is a link to {os.path.realpath(part)}, and minidl writes only inside {folder}: "
                "put the folder itself in its place"
            )


def sweep(folder: Path) -> None:
    """Delete the unfinished files of a killed process, before its run continues."""
    for part in (folder, folder / checkpoints.FOLDER, folder / "samples"):
        files.sweep(part)


def restore_documents(folder: Path, documents: dict[str, str]) -> list[str]:
    """Rewrite the documents of a run to continue from its data and settings; returns the names of changed ones."""
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
    """Undo `start` before a first checkpoint: put the run that was moved aside back. Returns whether there was one."""
    aside = _previous(folder)
    if not _is_replaced(aside):
        return False
    with contextlib.suppress(OSError):
        _delete_run(folder)
        aside.rename(folder)
        with contextlib.suppress(OSError):
            files.flush_folder(folder.parent)
        (folder / _REPLACED).unlink(missing_ok=True)
        return True
    return False


def finish(folder: Path) -> str | None:
    """Delete the run that `start` moved aside. Returns a note if it contains files that minidl did not write."""
    aside = _previous(folder)
    if not _is_replaced(aside):
        return None
    _delete_run(aside)
    return f"the replaced run contained other files; they are kept in {aside}" if _holds(aside) else None


def own_data(run: SavedRun) -> Any:
    """The data set of a run. Raises ConfigError when it is no longer the same, DataError, DamagedError."""
    task = TASKS[run.kind]
    dataset = task.load(saved_settings(run))
    same_data(run, task.fingerprint(dataset))
    return dataset


def same_data(run: SavedRun, data_sha256: str) -> None:
    """Raises ConfigError when a run was started on other data."""
    if run.data_sha256 != data_sha256:
        names = [str(run.config[name]) for name in ("data", "validation", "test") if run.config.get(name)]
        raise ConfigError(
            f"the data of {run.folder} ({', '.join(names)}) is not what the run was started on; "
            "restore the data, or train again with --overwrite"
        )


def cannot_save(config: Session, kind: str, error: OSError, is_back: bool = False) -> RunError:
    """The error for a write that failed during training; `is_back` after a run that was to be replaced is put back."""
    folder = config.out
    saved = any((folder / checkpoints.FOLDER / name).exists() for name in checkpoints.JSON_FILES)
    kept = "the last checkpoint is kept" if saved else "no checkpoint yet"
    then = f"continue with: {resume_command(kind, folder)}"
    if is_back:
        kept, then = f"the previous run is back in {folder}", "run the command again"
    return RunError(
        f"{error.filename or folder} cannot be written: {error.strerror or error}; {kept}. Free some space, then {then}"
    )


def check_not_own(name: str, path: Path, in_run: bool = False) -> None:
    """Raises ConfigError when a flag names a file of a run; with `in_run` the run is yet to be created there."""
    if path.name not in (*_own_files(), _REPLACED, checkpoints.FOLDER):
        return
    if not in_run:
        try:
            read_run(path.parent)
        except (ConfigError, DamagedError):
            return
    what = "the folder of checkpoints" if path.name == checkpoints.FOLDER else "a file"
    raise ConfigError(f"{name} {path} is {what} of the run in {path.parent}: give another name")


def _required(path: Path) -> str:
    """The text of a file of a run. Raises DamagedError when it is missing."""
    try:
        return files.read_text(path)
    except FileNotFoundError:
        raise missing(path) from None


def _is_new(folder: Path) -> bool:
    """Whether the folder is missing or empty, apart from a lock and an unfinished config.json of a killed process."""
    if not folder.exists():
        return True
    own = (locks.INSIDE, ".config.json.*.part")
    return folder.is_dir() and all(any(fnmatch(path.name, name) for name in own) for path in folder.iterdir())


def _report(folder: Path) -> dict[str, Any] | None:
    """The content of report.json; None if it is missing, empty or invalid, as the run is unfinished then."""
    try:
        return files.read_json(folder / "report.json") or None
    except (FileNotFoundError, NotADirectoryError, DamagedError):
        return None


def _checksums(documents: dict[str, str]) -> dict[str, str]:
    return {name: files.text_checksum(text) for name, text in documents.items()}


def mark(folder: Path, name: str) -> dict[str, Any]:
    """What tells a replaced run from a copy of one, or from one that was given another name."""
    return {"folder": folder.stat().st_ino, "name": name}


def _is_replaced(aside: Path) -> bool:
    """Whether `_move_aside` gave a folder its name."""
    if aside.is_symlink():
        return False
    try:
        return files.read_json(aside / _REPLACED) == mark(aside, aside.name)
    except (FileNotFoundError, NotADirectoryError, DamagedError):
        return False


def _previous(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")


def _holds(folder: Path) -> bool:
    """Whether the path is more than an empty folder, which a replaced run may leave behind."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def _move_aside(folder: Path) -> bool:
    """Rename the run to FOLDER.previous; True if `abandon` can bring one back.

    An interrupted replacement may have left a FOLDER.previous: of the two, the finished run is kept.
    """
    aside = _previous(folder)
    if _is_replaced(aside):
        if _report(folder) is None:
            _delete_run(folder)
            return True
        _delete_run(aside)
    if _holds(aside):
        raise RunError(f"{aside} exists: move or delete it, then try again")
    files.write_json(folder / _REPLACED, mark(folder, aside.name))
    try:
        folder.rename(aside)
    except OSError:
        (folder / _REPLACED).unlink(missing_ok=True)
        raise
    try:
        # Before the new run: a power cut must not leave it in the folder of the old one.
        files.flush_folder(folder.parent)
    except OSError:
        aside.rename(folder)
        raise
    return True


def _delete_run(folder: Path) -> None:
    """Delete what training writes, and the folder if nothing else is in it."""
    checkpoints.delete(folder / checkpoints.FOLDER)
    files.remove_folder(folder / "samples", lambda name: fnmatch(name, "epoch-*.png"))
    # config.json after the others: until then the folder is known as a run. Last the mark: while it is there, the next
    # process deletes the rest of a run that was replaced.
    for name in (*_TRACES, *reversed(_own_files()), _REPLACED):
        (folder / name).unlink(missing_ok=True)
    files.sweep(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _own_files() -> list[str]:
    """All files that training and evaluation write into runs; config.json first."""
    return list(dict.fromkeys([*_COMMON_FILES, *(name for task in TASKS.values() for name in task.files)]))
