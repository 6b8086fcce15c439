"""Run folders: creating, replacing and continuing them; `saved_run` reads them.

    config.json       command, settings, checksums of the data and of the documents; written first
    environment.json  what else the result depends on: versions, device, BLAS and its threads, precision, tile tables,
                      estimates
    labels.json, vocabulary.json | hashing.json | schema.json | pictures.json    the documents, needed to use the model
    metrics.jsonl     a line per epoch
    checkpoints/      while and after training: last and best state
    samples/          of a GAN: a grid of pictures per epoch
    model.safetensors, report.txt, *.png, *.gif   when finished
    manifest.json     the SHA-256 of all of them, and of the last one:
    report.json       with it the run is finished

`--overwrite` renames the old run to NAME.previous and deletes it once the new one is finished, so a complete run exists
at every moment. One process at a time writes to a run, see `locks`; nothing outside of its folder is written or
deleted, whatever is linked there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from minidl.common import write_files
from minidl.common.console import one_line
from minidl.errors import ConfigError, DamagedError, RunError
from minidl.training.run_folder import checkpoints, file_names, files, folder_lock, manifest, provenance
from minidl.training.run_folder.outputs import cannot_write, check_different
from minidl.training.run_folder.saved_run import (
    DATA,
    FORMAT,
    REPLACED,
    REPORT,
    VERSION,
    is_finished,
    previous,
    read_config,
    read_run,
    resume_command,
    saved_settings,
)
from minidl.training.settings.command import Session
from minidl.training.settings.declaration import differences
from minidl.training.tasks import TASKS
from minidl.version import __version__

_STARTERS = "starters"  # in config.json, where several processes were started together


def finished_report(config: Session) -> str | None:
    """The text report if the run to continue is finished, else None. Raises DamagedError when the report is missing."""
    if not config.resume or not is_finished(config.out):
        return None
    run = read_run(config.out)
    raw = run.files.read("report.txt")
    # A process that was killed at its very end may have left files.
    kept = None
    with contextlib.suppress(OSError), folder_lock.held(config.out):
        check_links(config.out)
        sweep(config.out)
        kept = finish(config.out)
    text = files.as_text(raw, config.out / "report.txt")
    *told, last = [one_line(line) for line in (*(f"note: {note}" for note in run.notes), str(config.out), kept or "")]
    return "\n".join(told) + f" is already finished:\n\n{text}" + (f"{last}\n" if last else "")


def is_started_by(folder: Path, starters: Sequence[str]) -> bool:
    """Whether the run in a folder was begun by processes that one of these has started (`workers.starter`)."""
    with contextlib.suppress(OSError, ConfigError, DamagedError):
        saved = read_config(folder)[1].get(_STARTERS)
        return isinstance(saved, list) and any(each in saved for each in starters)
    return False


def settings(kind: str, given: dict[str, Any]) -> Any:
    """The settings of a training command from the flags that were given.

    With `resume` all other settings are those of the run. Raises ConfigError for invalid settings, for flags that
    differ from the run to continue, and for a folder that must not be overwritten; RunError for a damaged run.
    """
    cls = TASKS[kind].settings
    check_different(**{name: given.get(name) for name in DATA})
    session = {name: given[name] for name in cls.of_process().model_fields if name in given}
    own = {name: value for name, value in given.items() if name not in session}
    checked = cls.of_process()(**session)
    try:
        checked.out.exists()
    except OSError as error:
        raise ConfigError(cannot_write(checked.out, error)) from None
    folder_lock.check_free(checked.out)
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
                "Remove these flags to continue it, or choose another --out"
            )
        config = saved_settings(run, session)
        _check_outside(config, TASKS[kind].data_sets)
        return config
    if "data" not in own and checked.resume:
        raise ConfigError(f"--resume: there is no run in {checked.out}; name its folder, or start a run with --data")
    if "data" not in own:
        raise ConfigError("--data is missing: name a data set or a file")
    config = cls(**own, **session)
    _check_outside(config, TASKS[kind].data_sets)
    check_out(config)
    return config


def _check_outside(config: Any, data_sets: Container[str]) -> None:
    """Raises ConfigError for a run inside a folder of its data, of which it would be a class."""
    out = Path(os.path.realpath(config.out))
    for name in DATA:
        folder = getattr(config, name, None)
        if folder is None or folder in data_sets or not files.is_folder(Path(folder)):
            continue
        if out.is_relative_to(os.path.realpath(folder)):
            raise ConfigError(f"--out {config.out} is inside --{name} {folder}: choose a folder outside it")


def check_out(config: Session) -> None:
    """Raises ConfigError when a new run would overwrite what is in `out`."""
    folder = config.out
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file: give the name of a folder")
    if config.resume or _is_new(folder):
        return
    try:
        read_config(folder)
    except (ConfigError, DamagedError) as error:
        if not config.overwrite:
            raise ConfigError(f"--out {folder} exists and is not empty: choose another folder") from None
        raise ConfigError(f"--overwrite replaces runs only; {error}") from None
    if not config.overwrite:
        goes_on = "" if is_finished(folder) else "continue the run in it with --resume, "
        raise ConfigError(
            f"--out {folder} exists and is not empty: choose another folder, {goes_on}or replace the run in it with "
            "--overwrite"
        )


def start(
    config: Session, kind: str, data_sha256: str, documents: dict[str, str], model: dict[str, Any] | None = None,
    starters: Sequence[str] = (),
) -> str:  # fmt: skip
    """Create the folder of a new run with its config.json and the JSON texts in `documents`; returns its identity.

    `model` are the settings of its model, where they differ from those of the run; `starters` see `is_started_by`. An
    existing run is moved aside, see `finish`. Raises RunError when the folder cannot be written.
    """
    folder, settings = config.out, config.identity()
    identity = manifest.identity(kind, settings, data_sha256)
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
            "config": settings,
            "data_sha256": data_sha256,
            manifest.OF_RUN: identity,
            "documents": _checksums(documents),
            **({} if model is None else {"model": model}),
            **({_STARTERS: [*starters]} if starters else {}),
        }
        # First, as it marks the folder as a run; --resume rewrites the documents.
        files.write_json(folder / "config.json", saved, sealed=True)
        for name, text in documents.items():
            files.write_text(folder / name, text)
    except BaseException as error:  # a Ctrl-C, too
        if moved:
            abandon(folder)
        if not isinstance(error, OSError):
            raise
        raise RunError(cannot_write(folder, error)) from None
    return identity


def complete(folder: Path, identity: str, report: dict[str, Any], text: str) -> None:
    """Write the report, as JSON and as text, and the manifest of all files: the run is finished."""
    contents = {REPORT: files.json_bytes(report), "report.txt": files.text_bytes(text)}
    names = [name for name in file_names.written(folder) if name not in (manifest.FILE, *contents)]
    manifest.write(folder, identity, names, contents)
    files.write_bytes(folder / "report.txt", contents["report.txt"])
    # Last: with it the run is finished, and --resume makes nothing that is missing.
    files.write_bytes(folder / REPORT, contents[REPORT])


@contextlib.contextmanager
def adding(folder: Path, *names: str) -> Iterator[None]:
    """Hold the lock of a run's folder while a command writes these files into it, and put them into its manifest.

    Raises ConfigError when another process writes there.
    """
    with folder_lock.held(folder), write_files.fixed(folder):
        yield
        manifest.add(folder, names)


@contextlib.contextmanager
def writing(config: Session) -> Iterator[None]:
    """Hold the lock of a run's folder, and make the one above it.

    Raises ConfigError when another process writes there or has made a run in the meantime, or when a folder of the run
    is a link; RunError when nothing can be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(write_files.folder_for(config.out.parent))
            stack.enter_context(folder_lock.held(config.out))
        except OSError as error:
            raise RunError(cannot_write(config.out, error)) from None
        check_out(config)
        check_links(config.out)
        yield


def check_links(folder: Path) -> None:
    """Raises ConfigError when a folder of a run is a link: what it names is not the run's to write or delete."""
    for part in (folder / name for name in file_names.FOLDERS):
        if part.is_symlink():
            raise ConfigError(
                f"{part} is a link to {os.path.realpath(part)}, and minidl writes only inside {folder}: "
                "put the folder itself in its place"
            )


def sweep(folder: Path) -> None:
    """Delete the unfinished files of a killed process, before its run continues, and its mark on a run that stayed."""
    for part in (folder, *(folder / name for name in file_names.FOLDERS)):
        files.sweep(part)
    _unmark(folder)


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
    aside = previous(folder)
    if not _is_replaced(aside):
        return False
    with contextlib.suppress(OSError):
        file_names.delete(folder)
        aside.rename(folder)
        with contextlib.suppress(OSError):
            files.flush_folder(folder.parent)
        _unmark(folder)
        return True
    return False


def finish(folder: Path) -> str | None:
    """Delete the run that `start` moved aside. Returns a note if it contains files that minidl did not write."""
    aside = previous(folder)
    if not _is_replaced(aside):
        return None
    file_names.delete(aside)
    return f"the replaced run contained other files; they are kept in {aside}" if _holds(aside) else None


def cannot_save(config: Session, kind: str, error: OSError, begun: bool = True, is_back: bool = False) -> RunError:
    """The error for a write that failed: before the run has `begun`, or during training; `is_back` after a run that was
    to be replaced is put back."""
    folder = config.out
    what = f"{error.filename or folder} cannot be written: {error.strerror or error}"
    if is_back or not begun:
        kept = f"; the previous run is back in {folder}" if is_back else ""
        return RunError(f"{what}{kept}. Free some space, then run the command again")
    if is_finished(folder):
        return RunError(f"{what}; the run in {folder} is complete nevertheless")
    saved = any((folder / checkpoints.FOLDER / name).exists() for name in checkpoints.JSON_FILES)
    kept = "the last checkpoint is kept" if saved else "no checkpoint yet"
    return RunError(f"{what}; {kept}. Free some space, then continue with: {resume_command(kind, folder)}")


def check_not_own(name: str, path: Path, in_run: bool = False) -> None:
    """Raises ConfigError when a flag names a file of a run; with `in_run` the run is yet to be created there."""
    if path.name not in (*file_names.named(), REPLACED, checkpoints.FOLDER):
        return
    if not in_run:
        try:
            read_config(path.parent)
        except (ConfigError, DamagedError):
            return
    what = "the folder of checkpoints" if path.name == checkpoints.FOLDER else "a file"
    raise ConfigError(f"{name} {path} is {what} of the run in {path.parent}: give another name")


def _is_new(folder: Path) -> bool:
    """Whether the folder is missing or empty, apart from a lock and an unfinished config.json of a killed process."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(
        path.name == folder_lock.INSIDE or (path.name.startswith(".config.json.") and write_files.is_part(path.name))
        for path in folder.iterdir()
    )


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
        return files.read_json(aside / REPLACED) == mark(aside, aside.name)
    except (FileNotFoundError, NotADirectoryError, DamagedError):
        return False


def _holds(folder: Path) -> bool:
    """Whether the path is more than an empty folder, which a replaced run may leave behind."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def _move_aside(folder: Path) -> bool:
    """Rename the run to FOLDER.previous; True if `abandon` can bring one back.

    An interrupted replacement may have left a FOLDER.previous: of the two, the finished run is kept.
    """
    aside = previous(folder)
    if _is_replaced(aside):
        if not is_finished(folder):
            file_names.delete(folder)
            return True
        file_names.delete(aside)
    if _holds(aside):
        raise RunError(f"{aside} exists: move or delete it, then try again")
    mine = folder / REPLACED
    if mine.exists() and not provenance.is_of_run(mine):
        raise RunError(f"{mine} is not part of the run, but --overwrite needs this name: move it")
    try:
        files.write_json(mine, mark(folder, aside.name))
        folder.rename(aside)
        # Before the new run: a power cut must not leave it in the folder of the old one.
        files.flush_folder(folder.parent)
    except BaseException:  # a Ctrl-C, too
        with contextlib.suppress(OSError):
            if not folder.exists() and _is_replaced(aside):
                aside.rename(folder)
            _unmark(folder)
        raise
    return True


def _unmark(folder: Path) -> None:
    if provenance.is_of_run(folder / REPLACED):
        (folder / REPLACED).unlink(missing_ok=True)
