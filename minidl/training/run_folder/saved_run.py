"""A run that exists: its settings, files and data, each checked to be the run's own."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidl.common import console
from minidl.common.console import cut
from minidl.distributed import workers
from minidl.errors import ConfigError, DamagedError, damaged, missing
from minidl.training.run_folder import files, manifest
from minidl.training.run_folder.manifest import RunFiles
from minidl.training.tasks import TASKS

FORMAT, VERSION = "minidl-run", 1
CONFIG, REPORT = "config.json", "report.json"
# A file in a run that is being replaced, which says of which folder and by what name; only such a run is deleted.
REPLACED = "replaced"
DATA = ("data", "validation", "test")  # the settings that name files of the user's


@dataclass(frozen=True)
class SavedRun:
    """What config.json says of a run that exists, and its `files`.

    `documents` are checksums by file name (older runs have none). `notes` tell of a report that was edited, and of a
    run whose files cannot be checked.
    """

    folder: Path
    kind: str
    config: dict[str, Any]
    data_sha256: str
    identity: str
    documents: dict[str, str]
    finished: bool
    files: RunFiles
    notes: tuple[str, ...]


def read_run(folder: Path) -> SavedRun:
    """The run in `folder`. Raises ConfigError when there is none, DamagedError for an invalid config.json, and for one
    that is not of the finished run in the folder."""
    path = folder / CONFIG
    raw, saved = read_config(folder)
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
    identity = manifest.identity(kind, config, checksum)
    if saved.get(manifest.OF_RUN, identity) != identity:
        raise damaged(path, "its settings are not those of its run")
    report, notes, sums = _report(folder), [], None
    if report is not None:
        found = manifest.read(folder)
        if found is None:
            # An earlier version wrote config.json without the identity, and no manifest.
            if manifest.OF_RUN in saved:
                raise missing(folder / manifest.FILE)
            notes.append(
                f"{folder} was written by an earlier version of minidl and has no {manifest.FILE}: files "
                "of another run cannot be detected"
            )
        else:
            sums = found.files
    own = RunFiles(folder, identity, documents, sums)
    if not own.is_own(CONFIG, raw):
        raise manifest.changed(path)
    if report is not None and not own.is_own(REPORT, report):
        notes.append(f"{folder / REPORT} was changed after training")
    config = {**TASKS[kind].settings.earlier, **config}
    return SavedRun(folder, kind, config, checksum, identity, documents, report is not None, own, tuple(notes))


def finished_run(folder: Path) -> SavedRun:
    """`read_run` of a finished run. Raises ConfigError for an unfinished one, with the command that continues it."""
    run = read_run(folder)
    if not run.finished:
        aside = previous(folder)
        kept = f" (the run that it is to replace is still in {aside})" if (aside / REPLACED).is_file() else ""
        raise ConfigError(f"{folder} is not finished{kept}; continue it with: {resume_command(run.kind, folder)}")
    return run


def previous(folder: Path) -> Path:
    """Where a run waits while another one that is to replace it is trained."""
    return folder.with_name(folder.name + ".previous")


def tell(notes: Iterable[str]) -> None:
    """Show notes of a run on standard error: standard output has answers."""
    for note in notes:
        console.note(note)


def is_finished(folder: Path) -> bool:
    """Whether the report of the run in a folder is there, which is written last."""
    return _report(folder) is not None


def saved_settings(run: SavedRun, session: dict[str, Any] | None = None) -> Any:
    """The settings of a run, with those that concern one process. Raises DamagedError."""
    try:
        return TASKS[run.kind].settings(**{**run.config, **(session or {"out": run.folder})})
    except ConfigError as error:
        raise damaged(run.folder / CONFIG, error) from None


def resume_command(kind: str, folder: Path) -> str:
    """The command that continues a run, which has all other settings; in as many processes, where --devices started
    them."""
    count = workers.started_together()
    devices = ["--devices", str(count)] if count > 1 else []
    return console.one_line(shlex.join(["minidl", "train", kind, "--out", str(folder), "--resume", *devices]))


def own_data(run: SavedRun) -> Any:
    """The data set of a run. Raises ConfigError when it is no longer the same, DataError, DamagedError."""
    dataset = TASKS[run.kind].load(saved_settings(run))
    check_data(run, dataset)
    return dataset


def check_data(run: SavedRun, dataset: Any) -> None:
    """Raises ConfigError when a run was started on other data."""
    if run.data_sha256 not in TASKS[run.kind].fingerprints(dataset):
        names = [str(run.config[name]) for name in DATA if run.config.get(name)]
        raise ConfigError(
            f"the data of {run.folder} ({', '.join(names)}) is not what the run was started on; "
            "restore the data, or train again with --overwrite"
        )


def read_config(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The content of a run's config.json. Raises ConfigError when the folder is not a run, DamagedError."""
    path = folder / CONFIG
    what = None
    if not files.is_folder(folder):
        what = "it is not a folder"
    elif files.is_folder(path):
        what = "its config.json is a folder"
    elif not path.exists():
        what = "it has no config.json"
    if what is not None:
        raise ConfigError(f"{folder} is not a minidl run: {what}; name a folder written by `minidl train`")
    raw = files.read_bytes(path)
    saved = files.as_json(raw, path)
    if saved.get("format") != FORMAT:
        raise ConfigError(f"{folder} is not a minidl run: another program wrote its config.json")
    if saved.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {cut(saved.get('version'), 60)}, this minidl reads {VERSION}; update minidl"
        )
    return raw, saved


def _report(folder: Path) -> bytes | None:
    """The content of report.json; None if it is missing, empty or invalid, as the run is unfinished then."""
    path = folder / REPORT
    try:
        raw = files.read_bytes(path)
        return raw if files.as_json(raw, path) else None
    except (FileNotFoundError, NotADirectoryError, DamagedError):
        return None
