"""What training commands share: the run folder, the last checkpoint, threads and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from minidl.runtime import launch
from minidl.training import environment, files, memory, runs
from minidl.training.checkpoints import FOLDER, Checkpoint, Checkpoints, is_writing
from minidl.training.config import Session
from minidl.training.display import Display
from minidl.training.errors import ConfigError, RunError, damaged
from minidl.training.settings import changed

T = TypeVar("T")


@contextmanager
def failures(config: Session, kind: str, batch_size: int) -> Iterator[None]:
    """Turns a full disk and a lack of memory into RunError with advice."""
    try:
        yield
    except OSError as error:
        raise runs.cannot_save(config.out, kind, error) from None
    except Exception as error:
        # For work outside of the steps, which `memory.guarded` covers.
        short = memory.read(error)
        if short is None:
            raise
        raise RunError(f"{short}; {memory.advice(short, batch_size)}") from None


def check_precision(precision: str) -> None:
    """Raises ConfigError for a precision that this machine does not support."""
    if precision == "bfloat16" and launch.INTERPRETED:
        raise ConfigError(launch.NO_BFLOAT16.replace("use float32", "use --precision float32"))


def in_run(
    config: Session,
    kind: str,
    checksum: str,
    documents: dict[str, str],
    display: Display,
    fit: Callable[[Checkpoint | None], T],
    model: dict[str, Any] | None = None,
) -> T:
    """The result of `fit`, called in the folder of a new run with None, or of a run to continue with its checkpoint.

    `checksum` is that of the data, `documents` are files of the run, `model` is written to its config.json. If a new
    run fails before its first checkpoint is saved or being written, the run that it was to replace is put back.
    """
    if config.resume and (config.out / "config.json").exists():
        runs.sweep(config.out)
        checkpoint = last_checkpoint(config)
        Checkpoints(config.out / FOLDER).drop_unnamed()
        for name in runs.restore_documents(config.out, documents):
            display.note(f"note: {name} was missing or changed and was rewritten from the data")
        return fit(checkpoint)
    runs.start(config, kind, checksum, documents, model)
    try:
        return fit(None)
    except BaseException as error:
        # A checkpoint still being written must not end up in the run that is put back.
        nothing = not is_writing(config.out / FOLDER) and not (config.out / FOLDER / "last.json").exists()
        if nothing and runs.abandon(config.out):
            display.note(f"the previous run is back in {config.out}")
            if isinstance(error, OSError):
                raise runs.cannot_begin(config.out, error) from None
        raise


def last_checkpoint(config: Session) -> Checkpoint | None:
    """The last checkpoint of a run, None before the first. Raises DamagedError, also for one with other settings."""
    checkpoint = Checkpoints(config.out / FOLDER).last()
    if checkpoint is None:
        return None
    saved, identity = checkpoint.state.get("config"), config.identity()
    if not isinstance(saved, dict):
        raise damaged(checkpoint.path, "it has no settings")
    others = changed(saved, identity)
    if others:
        raise damaged(config.out / "config.json", f"{', '.join(others)} differ from those in {checkpoint.path}")
    described = checkpoint.state.get("environment")
    threads = described.get("threads") if isinstance(described, dict) else None
    if type(threads) is not int or not 1 <= threads <= environment.MOST_THREADS:
        raise damaged(checkpoint.path, f"environment.threads is {threads!r}, expected a number of threads")
    return checkpoint


def prepare(config: Session, precision: str, checkpoint: Checkpoint | None, convolves: bool) -> dict[str, Any]:
    """Set threads, as in the checkpoint, and precision; writes environment.json and returns its content."""
    threads = checkpoint.state["environment"]["threads"] if checkpoint else _threads(convolves)
    environment.fix_threads(threads)
    launch.set_float32_precision("tf32" if precision == "tf32" else "tf32x3")
    described = environment.describe(threads)
    files.write_json(config.out / "environment.json", described)
    return described


def resumed(
    checkpoint: Checkpoint, described: dict[str, Any], after: str, display: Display
) -> dict[str, list[dict[str, Any]]]:
    """{"resumed": [{"after", "changes"}, ...]}: where the run was continued in another environment; {} if nowhere.

    It becomes part of later checkpoints and of the report. If the environment `described` differs from that of the
    checkpoint, a warning is shown. Raises DamagedError.
    """
    entries = checkpoint.state.get("resumed", [])
    if not _are_resumptions(entries):
        raise damaged(checkpoint.path, f"resumed is {entries!r:.60}, expected a list of changes of the environment")
    changes = environment.changes(checkpoint.state["environment"], described)
    if changes:
        entries = [*entries, {"after": after, "changes": changes}]
        lines = [
            f"  {name}: {environment.shown(was)} then, {environment.shown(now)} now"
            for name, (was, now) in changes.items()
        ]
        warning = [f"warning: {checkpoint.path} was written in another environment:", *lines]
        advice = "Training goes on, but its results may differ in their last bits from those of an uninterrupted run."
        display.note("\n".join([*warning, advice]))
    return {"resumed": entries} if entries else {}


def _are_resumptions(entries: Any) -> bool:
    return isinstance(entries, list) and all(
        isinstance(entry, dict)
        and entry.keys() == {"after", "changes"}
        and isinstance(entry["after"], str)
        and isinstance(entry["changes"], dict)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in entry["changes"].values())
        for entry in entries
    )


def _threads(convolves: bool) -> int:
    """One for interpreted convolutions, whose many small products gain nothing from a second thread, which waits where
    other processes run (measured: 1.0 s a step instead of 0.36 s)."""
    return environment.wanted_threads(1) if convolves and launch.INTERPRETED else environment.wanted_threads()
