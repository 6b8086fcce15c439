"""What every training command does around its own work: the run folder, the last checkpoint, threads, failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from minidl.kernels import launch
from minidl.training import environment, files, memory, runs
from minidl.training.checkpoints import FOLDER, Checkpoint, Checkpoints, is_writing
from minidl.training.config import Session
from minidl.training.display import Display
from minidl.training.errors import ConfigError, RunError, damaged

T = TypeVar("T")


@contextmanager
def failures(config: Session, kind: str, batch_size: int) -> Iterator[None]:
    """Turns a full disk and full memory into RunError with what to do."""
    try:
        yield
    except OSError as error:
        raise runs.cannot_save(config.out, kind, error) from None
    except Exception as error:
        # Outside of the steps, which `memory.guarded` looks after.
        short = memory.read(error)
        if short is None:
            raise
        raise RunError(f"{short}; {memory.advice(short, batch_size)}") from None


def check_precision(precision: str) -> None:
    """Raises ConfigError for one that this machine does not compute in."""
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
    """What `fit` makes in the folder of a new run, or of the one to continue with the state to go on from.

    `checksum` is the data's, `documents` are files of the run, `model` stands in its config.json. A new run that comes
    to nothing leaves the one that it was to replace, unless its first state is still being written.
    """
    if config.resume and (config.out / "config.json").exists():
        runs.sweep(config.out)
        checkpoint = last_checkpoint(config)
        Checkpoints(config.out / FOLDER).drop_unnamed()
        for name in runs.restore_documents(config.out, documents):
            display.note(f"note: {name} was missing or changed; it is written again from the data")
        return fit(checkpoint)
    runs.start(config, kind, checksum, documents, model)
    try:
        return fit(None)
    except BaseException as error:
        # What is still being written must not get into the run that comes back.
        nothing = not is_writing(config.out / FOLDER) and not (config.out / FOLDER / "last.json").exists()
        if nothing and runs.abandon(config.out):
            display.note(f"{config.out} is again the run that was to be replaced")
            if isinstance(error, OSError):
                raise runs.cannot_begin(config.out, error) from None
        raise


def last_checkpoint(config: Session) -> Checkpoint | None:
    """The state to go on from, None before there is one. Raises DamagedError, also for one of other settings."""
    checkpoint = Checkpoints(config.out / FOLDER).last()
    if checkpoint is None:
        return None
    saved, identity = checkpoint.state.get("config"), config.identity()
    if not isinstance(saved, dict):
        raise damaged(checkpoint.path, "it has no settings")
    changed = sorted(name for name in saved.keys() | identity.keys() if saved.get(name) != identity.get(name))
    if changed:
        raise damaged(config.out / "config.json", f"{', '.join(changed)} differ from those in {checkpoint.path}")
    described = checkpoint.state.get("environment")
    threads = described.get("threads") if isinstance(described, dict) else None
    if type(threads) is not int or not 1 <= threads <= environment.MOST_THREADS:
        raise damaged(checkpoint.path, f"environment.threads is {threads!r}, expected a number of threads")
    return checkpoint


def prepare(config: Session, precision: str, checkpoint: Checkpoint | None, convolves: bool) -> dict[str, Any]:
    """Threads and precision of this process, as the checkpoint has them; returns, and writes, environment.json."""
    threads = checkpoint.state["environment"]["threads"] if checkpoint else _threads(convolves)
    environment.fix_threads(threads)
    launch.set_float32_precision("tf32" if precision == "tf32" else "tf32x3")
    described = environment.describe(threads)
    files.write_json(config.out / "environment.json", described)
    return described


def resumed(
    checkpoint: Checkpoint, described: dict[str, Any], after: str, display: Display
) -> dict[str, list[dict[str, Any]]]:
    """{"resumed": [{"after", "changes"}, ...]}: where the run went on under another environment than it had before.

    It goes into the checkpoints to come and into the report. Empty where there was no such change. A change from the
    checkpoint to what is `described` is told. Raises DamagedError.
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
        told = [f"warning: {checkpoint.path} was made in another environment:", *lines]
        advice = "Training goes on, but its results may differ in their last bits from those of an uninterrupted run."
        display.note("\n".join([*told, advice]))
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
    """Interpreted convolutions make many small products: a second thread gains nothing there, and where other processes
    run it waits for them (measured: 1.0 s a step in place of 0.36 s)."""
    return environment.wanted_threads(1) if convolves and launch.INTERPRETED else environment.wanted_threads()
