"""The folder of a run as `minidl train` sees it: starting, continuing, finishing and replacing the run.

`--overwrite` renames the old run to NAME.previous and deletes it once the new one is finished, so a complete run exists
at every moment. One process at a time writes to a run, see `folder_lock`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from minidl.common import write_files
from minidl.common.console import one_line
from minidl.errors import ConfigError, DamagedError, RunError
from minidl.training.run_folder import files, folder_lock, provenance
from minidl.training.run_folder.checkpoints import JSON_FILES
from minidl.training.run_folder.folder import FORMAT, REPLACED, VERSION, RunFolder
from minidl.training.run_folder.manifest import CONFIG, MANIFEST, OF_RUN, REPORT, Manifest, run_identity
from minidl.training.run_folder.outputs import cannot_write
from minidl.training.run_folder.saved_run import resume_command
from minidl.training.settings.command import Session
from minidl.version import __version__

_STARTERS = "starters"  # in config.json, if several processes were started together


class TrainingFolder(RunFolder):
    """The folder that a training command writes."""

    def finished_report(self) -> str | None:
        """Return the text report of a finished run and delete what a killed process left; None for an unfinished run.

        Raises DamagedError when the report is missing.
        """
        if not self.is_finished:
            return None
        run = self.read()
        content, note = run.read("report.txt"), None
        with suppress(OSError), folder_lock.lock(self.path):
            self.check_links()
            self.sweep()
            note = self.delete_previous()
        text = files.as_text(content, self.path / "report.txt")
        lines = [one_line(line) for line in (*(f"note: {each}" for each in run.notes), str(self.path))]
        return "\n".join(lines) + f" is already finished:\n\n{text}" + (f"{one_line(note)}\n" if note else "")

    def is_started_by(self, starters: Sequence[str]) -> bool:
        """Return whether processes that one of `starters` has started (`workers.starter`) began the run."""
        with suppress(OSError, ConfigError, DamagedError):
            saved = self.read_config()[1].get(_STARTERS)
            return isinstance(saved, list) and any(starter in saved for starter in starters)
        return False

    def check_out(self, resume: bool, overwrite: bool) -> None:
        """Raise ConfigError when a run with these flags would overwrite the content of the folder."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--out {self.path} is a file: give the name of a folder")
        if resume or self.is_new:
            return
        try:
            self.read_config()
        except (ConfigError, DamagedError) as error:
            if not overwrite:
                raise ConfigError(f"--out {self.path} exists and is not empty: choose another folder") from None
            raise ConfigError(f"--overwrite replaces runs only; {error}") from None
        if not overwrite:
            advice = "" if self.is_finished else "continue the run in it with --resume, "
            raise ConfigError(
                f"--out {self.path} exists and is not empty: choose another folder, {advice}or replace the run in it "
                "with --overwrite"
            )

    def check_links(self) -> None:
        """Raise ConfigError when a subfolder of the run is a link: its target must not be written to."""
        for folder in self.subfolders:
            if folder.is_symlink():
                raise ConfigError(
                    f"{folder} is a link to {os.path.realpath(folder)}, and minidl writes only inside {self.path}: "
                    "put the folder itself in its place"
                )

    @property
    def is_new(self) -> bool:
        """Whether the folder is missing or empty, apart from a lock and an unfinished config.json."""
        if not self.path.exists():
            return True
        return self.path.is_dir() and all(
            path.name == folder_lock.INSIDE or (path.name.startswith(f".{CONFIG}.") and write_files.is_part(path.name))
            for path in self.path.iterdir()
        )

    @contextmanager
    def lock(self, resume: bool, overwrite: bool) -> Iterator[None]:
        """A context that holds the lock of the folder to train in it, and creates its parent.

        Raises ConfigError when another process writes there or has created a run in the meantime, or when a subfolder
        is a link; RunError when nothing can be written.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(write_files.folder_for(self.path.parent))
                stack.enter_context(folder_lock.lock(self.path))
            except OSError as error:
                raise RunError(cannot_write(self.path, error)) from None
            self.check_out(resume, overwrite)
            self.check_links()
            yield

    def start(
        self, config: Session, kind: str, data_sha256: str, documents: Mapping[str, str],
        model: dict[str, Any] | None = None, starters: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """Create the folder of a new run with its config.json and the JSON texts in `documents`; return its identity.

        `model` are the settings of its model, if they differ from those of the run; `starters` see `is_started_by`. An
        existing run is moved to `previous`. Raises RunError when the folder cannot be written.
        """
        path, settings = self.path, config.identity()
        run = run_identity(kind, settings, data_sha256)
        moved = False
        try:
            files.make_folder(path.parent, parents=True)
            tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent).close()  # fails before the run is moved
            if config.overwrite and not self.is_new:
                moved = self._move_to_previous()
            files.make_folder(path)
            files.sweep(path)
            saved = {
                "format": FORMAT,
                "version": VERSION,
                "minidl": __version__,
                "kind": kind,
                "config": settings,
                "data_sha256": data_sha256,
                OF_RUN: run,
                "documents": _checksums(documents),
                **({} if model is None else {"model": model}),
                **({_STARTERS: [*starters]} if starters else {}),
            }
            # First, as it marks the folder as a run; --resume rewrites the documents.
            files.write_json(path / CONFIG, saved, sealed=True)
            for name, text in documents.items():
                files.write_text(path / name, text)
        except BaseException as error:  # a Ctrl-C, too
            if moved:
                self.restore_previous()
            if not isinstance(error, OSError):
                raise
            raise RunError(cannot_write(path, error)) from None
        return run

    def restore_documents(self, documents: Mapping[str, str]) -> list[str]:
        """Rewrite the documents of a run to continue from its data and settings; return the names of changed ones."""
        changed = []
        for name, text in documents.items():
            try:
                is_same = files.read_text(self.path / name) == text
            except (FileNotFoundError, DamagedError):
                is_same = False
            if not is_same:
                files.write_text(self.path / name, text)
                changed.append(name)
        saved = files.read_json(self.path / CONFIG)
        if saved.get("documents") != _checksums(documents):
            files.write_json(self.path / CONFIG, {**saved, "documents": _checksums(documents)}, sealed=True)
        return changed

    def sweep(self) -> None:
        """Delete the unfinished files of a killed process, and its mark on a run that was not replaced."""
        for folder in (self.path, *self.subfolders):
            files.sweep(folder)
        self._unmark()

    def complete(self, identity: str, report: dict[str, Any], text: str) -> None:
        """Write the report, as JSON and as text, and the manifest of all files: the run is finished."""
        contents = {REPORT: files.json_bytes(report), "report.txt": files.text_bytes(text)}
        names = [name for name in self.own_files() if name not in (MANIFEST, *contents)]
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        Manifest(identity, {**self.checksums(names), **sums}).write(self.path)
        files.write_bytes(self.path / "report.txt", contents["report.txt"])
        # Last: with it the run is finished, and --resume writes no missing file.
        files.write_bytes(self.path / REPORT, contents[REPORT])

    def write_error(self, kind: str, error: OSError, begun: bool = True, is_back: bool = False) -> RunError:
        """Return the error for a failed write: before the run has `begun`, or during training; `is_back` after the
        previous run was restored."""
        problem = f"{error.filename or self.path} cannot be written: {error.strerror or error}"
        if is_back or not begun:
            state = f"; the previous run is back in {self.path}" if is_back else ""
            return RunError(f"{problem}{state}. Free some space, then run the command again")
        if self.is_finished:
            return RunError(f"{problem}; the run in {self.path} is complete nevertheless")
        saved = any((self.checkpoints.folder / name).exists() for name in JSON_FILES)
        state = "the last checkpoint is kept" if saved else "no checkpoint yet"
        return RunError(f"{problem}; {state}. Free some space, then continue with: {resume_command(kind, self.path)}")

    # Replacing

    def restore_previous(self) -> bool:
        """Undo `start` before a first checkpoint: move the previous run back. Return whether there was one."""
        if not self._is_replacing:
            return False
        with suppress(OSError):
            self.delete()
            self.previous.rename(self.path)
            with suppress(OSError):
                files.flush_folder(self.path.parent)
            self._unmark()
            return True
        return False

    def delete_previous(self) -> str | None:
        """Delete the run that `start` moved. Return a note if its folder contains files that minidl did not write."""
        if not self._is_replacing:
            return None
        RunFolder(self.previous).delete()
        if self._is_previous_free:
            return None
        return f"the replaced run contained other files; they are kept in {self.previous}"

    @property
    def _is_replacing(self) -> bool:
        """Whether `_move_to_previous` gave the previous run its name."""
        if self.previous.is_symlink():
            return False
        with suppress(FileNotFoundError, NotADirectoryError, DamagedError):
            return files.read_json(self.previous / REPLACED) == mark(self.previous, self.previous.name)
        return False

    @property
    def _is_previous_free(self) -> bool:
        """Whether `previous` is missing or an empty folder, which a replaced run may leave behind."""
        return not self.previous.exists() or (self.previous.is_dir() and not any(self.previous.iterdir()))

    def _move_to_previous(self) -> bool:
        """Rename the run; return True if `restore_previous` can bring one back.

        An interrupted replacement may have left a previous run: of the two, the finished run is kept.
        """
        if self._is_replacing:
            if not self.is_finished:
                self.delete()
                return True
            RunFolder(self.previous).delete()
        if not self._is_previous_free:
            raise RunError(f"{self.previous} exists: move or delete it, then try again")
        marker = self.path / REPLACED
        if marker.exists() and not provenance.is_of_run(marker):
            raise RunError(f"{marker} is not part of the run, but --overwrite needs this name: move it")
        try:
            files.write_json(marker, mark(self.path, self.previous.name))
            self.path.rename(self.previous)
            # Before the new run: a power cut must not leave it in the folder of the old one.
            files.flush_folder(self.path.parent)
        except BaseException:  # a Ctrl-C, too
            with suppress(OSError):
                if not self.path.exists() and self._is_replacing:
                    self.previous.rename(self.path)
                self._unmark()
            raise
        return True

    def _unmark(self) -> None:
        if provenance.is_of_run(self.path / REPLACED):
            (self.path / REPLACED).unlink(missing_ok=True)


def mark(folder: Path, name: str) -> dict[str, Any]:
    """Return the mark of a replaced run, which a copied run, or one that was given another name, does not match."""
    return {"folder": folder.stat().st_ino, "name": name}


def _checksums(documents: Mapping[str, str]) -> dict[str, str]:
    return {name: files.text_checksum(text) for name, text in documents.items()}
