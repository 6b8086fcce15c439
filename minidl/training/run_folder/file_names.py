"""The files of a run: their names, which of those in its folder it has written, and their deletion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

from minidl.common import write_files
from minidl.errors import ConfigError, DamagedError
from minidl.training.run_folder import checkpoints, files, manifest, provenance
from minidl.training.run_folder.saved_run import CONFIG, REPLACED, REPORT, read_config
from minidl.training.tasks import TASKS

_COMMON = (
    CONFIG, "environment.json", "metrics.jsonl", manifest.MODEL, manifest.FILE, REPORT, "report.txt", "report.html",
    "loss.png", "scores.png",
)  # fmt: skip
# The folders of a run, and which of the names in them are its own.
FOLDERS: dict[str, Callable[[str], bool]] = {
    checkpoints.FOLDER: checkpoints.is_own,
    "samples": lambda name: fnmatch(name, "epoch-*.png"),
}
# Written by --profile; nothing depends on them.
TRACES = ("trace.json", "trace-evaluate.json", "trace-predict.json")


def named() -> list[str]:
    """The names of all files that training and evaluation write into runs, but for those in its folders."""
    return list(dict.fromkeys([*_COMMON, *(name for task in TASKS.values() for name in task.files)]))


def written(folder: Path) -> Iterator[str]:
    """The files in a run's folder that it has written: their names and their content say so.

    By the SHA-256 of the run's documents, or in its manifest, or by their kind. What is linked into the run is not.
    """
    sums: list[Mapping[str, str]] = []
    with contextlib.suppress(DamagedError, ConfigError, OSError):
        documents = read_config(folder)[1].get("documents")
        sums += [documents] if isinstance(documents, dict) else []
        sums += [recorded.files] if (recorded := manifest.read(folder)) else []
    inside = [
        f"{part}/{path.name}"
        for part, is_own in FOLDERS.items() for path in (folder / part).glob("*") if is_own(path.name)
    ]  # fmt: skip
    for name in [*inside, *TRACES, *reversed(named())]:
        path = folder / name
        if path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
            expected = {each[name] for each in sums if name in each}
            if provenance.is_of_run(path) or (expected and files.sha256(path) in expected):
                yield name


def delete(folder: Path) -> None:
    """Delete what a run has written, and its folder if nothing else is in it."""
    # config.json after the others: until then the folder is known as a run; before it the manifest, which says what is
    # the run's. Last the mark: while it is there, the next process deletes the rest of a run that was replaced.
    last = (manifest.FILE, CONFIG)
    names = [name for name in written(folder) if name not in last]
    for name in (*names, *last, REPLACED):
        if name in names or provenance.is_of_run(folder / name):
            write_files.remove(folder / name)
    for part in (*(folder / name for name in FOLDERS), folder):
        if not part.is_symlink():
            files.sweep(part)
            with contextlib.suppress(OSError):
                part.rmdir()
