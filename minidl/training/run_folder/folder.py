"""The folder of a training run: its files, and how they are read, added and deleted.

    config.json       command, settings, checksums of the data and of the documents; written first
    environment.json  what else the result depends on: versions, device, BLAS and its threads, precision, tile tables,
                      estimates
    labels.json, vocabulary.json | hashing.json | schema.json | pictures.json    the documents, needed to use the model
    metrics.jsonl     a line per epoch
    checkpoints/      while and after training: last and best state
    samples/          of a GAN: a grid of pictures per epoch
    model.safetensors, calibration.json, report.txt, *.png, *.gif   when finished
    manifest.json     the SHA-256 of all of them, and of the last one:
    report.json       with it the run is finished

Nothing outside of the folder is written or deleted, whatever is linked there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from minidl.common import write_files
from minidl.common.console import cut
from minidl.errors import ConfigError, DamagedError, damaged, missing
from minidl.training.run_folder import files, folder_lock, provenance
from minidl.training.run_folder.checkpoints import FOLDER, Checkpoints, is_own
from minidl.training.run_folder.manifest import CONFIG, MANIFEST, MODEL, OF_RUN, REPORT, Manifest, changed, run_identity
from minidl.training.run_folder.saved_run import SavedRun
from minidl.training.tasks import TASKS

FORMAT, VERSION = "minidl-run", 1
TRACES = ("trace.json", "trace-evaluate.json", "trace-predict.json")  # written by --profile; nothing depends on them
REPLACED = "replaced"  # a file in a run that is being replaced: the folder's inode and name
_COMMON = (
    CONFIG, "environment.json", "metrics.jsonl", MODEL, MANIFEST, REPORT, "report.txt", "report.html", "loss.png",
    "scores.png",
)  # fmt: skip
# The subfolders of a run, and which of the names in them belong to it.
_SUBFOLDERS: dict[str, Callable[[str], bool]] = {FOLDER: is_own, "samples": lambda name: fnmatch(name, "epoch-*.png")}


def file_names() -> list[str]:
    """Return the names of all files that training and evaluation write into runs, except those in subfolders."""
    return list(dict.fromkeys([*_COMMON, *(name for task in TASKS.values() for name in task.files)]))


class RunFolder:
    """The folder of a training run; it need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / FOLDER)
        # The run to be replaced, while the new one is trained.
        self.previous = path.parent / (path.name + ".previous")
        self.subfolders = [path / name for name in _SUBFOLDERS]

    def read(self) -> SavedRun:
        """Return the run, checked against its manifest. Raises ConfigError if there is none, DamagedError."""
        path = self.path / CONFIG
        raw, saved = self.read_config()
        kind, config = saved.get("kind"), saved.get("config")
        data_sha256, documents = saved.get("data_sha256"), saved.get("documents", {})
        if not isinstance(kind, str) or kind not in TASKS:
            raise damaged(path, f"kind is {kind!r}, expected {' or '.join(TASKS)}")
        if not isinstance(config, dict):
            raise damaged(path, f"config is {config!r}, expected the settings")
        if not isinstance(data_sha256, str):
            raise damaged(path, f"data_sha256 is {data_sha256!r}, expected the checksum of the data")
        if not isinstance(documents, dict):
            raise damaged(path, f"documents is {documents!r}, expected checksums by file name")
        identity = run_identity(kind, config, data_sha256)
        if saved.get(OF_RUN, identity) != identity:
            raise damaged(path, "its settings are not those of its run")
        report, notes = self._report(), []
        manifest = None if report is None else Manifest.read(self.path)
        if report is not None and manifest is None:
            # Earlier versions wrote config.json without the identity, and no manifest.
            if OF_RUN in saved:
                raise missing(self.path / MANIFEST)
            notes.append(
                f"{self.path} was written by an earlier version of minidl and has no {MANIFEST}: files of another run "
                "cannot be detected"
            )
        sums, config = None if manifest is None else manifest.files, config | {**TASKS[kind].settings.earlier, **config}
        run = SavedRun(self.path, identity, documents, sums, kind, config, data_sha256, report is not None, notes)
        if not run.is_own(CONFIG, raw):
            raise changed(path)
        if report is not None and not run.is_own(REPORT, report):
            notes.append(f"{self.path / REPORT} was changed after training")
        return run

    def read_finished(self) -> SavedRun:
        """Return the run. Raises also ConfigError for an unfinished one, with the command that continues it."""
        run = self.read()
        if not run.finished:
            old = self.previous
            state = f" (the run that it is to replace is still in {old})" if (old / REPLACED).is_file() else ""
            raise ConfigError(f"{self.path} is not finished{state}; continue it with: {run.resume_command}")
        return run

    def read_config(self) -> tuple[bytes, dict[str, Any]]:
        """Return the content of config.json. Raises ConfigError if the folder is not a run, DamagedError."""
        path, problem = self.path / CONFIG, None
        if not files.is_folder(self.path):
            problem = "it is not a folder"
        elif files.is_folder(path):
            problem = "its config.json is a folder"
        elif not path.exists():
            problem = "it has no config.json"
        if problem is not None:
            raise ConfigError(f"{self.path} is not a minidl run: {problem}; name a folder written by `minidl train`")
        raw = files.read_bytes(path)
        saved = files.as_json(raw, path)
        if saved.get("format") != FORMAT:
            raise ConfigError(f"{self.path} is not a minidl run: another program wrote its config.json")
        if saved.get("version") != VERSION:
            raise ConfigError(
                f"{path} has version {cut(saved.get('version'), 60)}, this minidl reads {VERSION}; update minidl"
            )
        return raw, saved

    @property
    def is_finished(self) -> bool:
        """Whether the run has a report, which is written last."""
        return self._report() is not None

    def _report(self) -> bytes | None:
        """Return the content of report.json; None if it is missing, empty or invalid, as the run is unfinished then."""
        path = self.path / REPORT
        with suppress(FileNotFoundError, NotADirectoryError, DamagedError):
            raw = files.read_bytes(path)
            return raw if files.as_json(raw, path) else None
        return None

    @contextmanager
    def add_files(self, *names: str) -> Iterator[None]:
        """Hold the lock while a command writes these files, then put them into the manifest of a finished run.

        Raises ConfigError when another process writes to the folder.
        """
        with folder_lock.lock(self.path), write_files.pin_folder(self.path):
            yield
            if manifest := Manifest.read(self.path):
                Manifest(manifest.run, {**manifest.files, **self.checksums(names)}).write(self.path)

    def checksums(self, names: Iterable[str]) -> dict[str, str]:
        """Return the SHA-256 of files by name."""
        return {name: files.sha256(self.path / name) for name in names}

    def check_not_own(self, flag: str, name: str, will_exist: bool = False) -> None:
        """Raise ConfigError when `flag` names a file of the run, which exists or `will_exist`."""
        if name not in (*file_names(), REPLACED, FOLDER):
            return
        if not will_exist:
            try:
                self.read_config()
            except (ConfigError, DamagedError):
                return
        kind = "the folder of checkpoints" if name == FOLDER else "a file"
        raise ConfigError(f"{flag} {self.path / name} is {kind} of the run in {self.path}: give another name")

    def own_files(self) -> Iterator[str]:
        """Yield the names of the files in the folder that minidl wrote, by their names and their content.

        The content has the SHA-256 of a document or of an entry in the manifest, or is of a kind that minidl writes.
        Links are left out.
        """
        sums: list[Mapping[str, str]] = []
        with suppress(DamagedError, ConfigError, OSError):
            documents = self.read_config()[1].get("documents")
            sums += [documents] if isinstance(documents, dict) else []
            sums += [manifest.files] if (manifest := Manifest.read(self.path)) else []
        inside = [
            f"{folder}/{path.name}"
            for folder, belongs in _SUBFOLDERS.items() for path in (self.path / folder).glob("*") if belongs(path.name)
        ]  # fmt: skip
        for name in [*inside, *TRACES, *reversed(file_names())]:
            path = self.path / name
            if path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
                expected = {each[name] for each in sums if name in each}
                if provenance.is_of_run(path) or (expected and files.sha256(path) in expected):
                    yield name

    def delete(self) -> None:
        """Delete the files that minidl wrote, and the folder if no other file is in it."""
        # config.json after the others: until then the folder is known as a run; before it the manifest, which lists the
        # run's files. Last the mark: while it exists, the next process deletes the rest of a replaced run.
        last = (MANIFEST, CONFIG)
        names = [name for name in self.own_files() if name not in last]
        for name in (*names, *last, REPLACED):
            if name in names or provenance.is_of_run(self.path / name):
                write_files.remove(self.path / name)
        for folder in (*self.subfolders, self.path):
            if not folder.is_symlink():
                files.sweep(folder)
                with suppress(OSError):
                    folder.rmdir()
