"""`minidl train`: from settings and a data set to a finished run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from minidl.common import timing, write_files
from minidl.common.console import escaped, one_line
from minidl.data.saved import Checked, validate
from minidl.distributed.group import current
from minidl.errors import ConfigError, Interrupted, RunError, damaged
from minidl.runtime import launch
from minidl.training.process import environment, memory_limit, out_of_memory
from minidl.training.process.compile_ahead import compile_ahead
from minidl.training.process.display import Display
from minidl.training.report import page, plot_processes, report_files
from minidl.training.run_folder import create, files, manifest
from minidl.training.run_folder.checkpoints import FOLDER, Checkpoint, Checkpoints, is_writing
from minidl.training.run_folder.saved_run import is_finished, read_run, resume_command
from minidl.training.settings.command import Session
from minidl.training.settings.declaration import changed
from minidl.training.task import Experiment, Task
from minidl.training.tasks import TASKS


@dataclass
class Resumption(Checked):
    """Where a run was continued in another environment: `changes` are what each entry was and is."""

    after: str
    changes: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]


def train(kind: str, config: Any, dataset: Any) -> dict[str, Any]:
    """Train, test and report: the run in `config.out` is finished afterwards. Returns the content of report.json.

    Raises DataError, ConfigError, RunError, Interrupted.
    """
    group = current()
    task, display = TASKS[kind], Display(config.quiet or not group.leads)
    begun = False
    try:
        if config.precision == "bfloat16" and launch.INTERPRETED:
            raise ConfigError(launch.NO_BFLOAT16.replace("use float32", "use --precision float32"))
        config = task.settled(config, dataset)
        _check_shards(config)
        with out_of_memory.used_for("the features", "less data"), timing.timed("vectorise"):
            experiment = task.prepare(config, dataset)
        display.show(experiment.introduction)
        out_of_memory.check_networks(experiment.networks, config, experiment.scaled_by)
        data_sha256 = next(task.fingerprints(dataset))
        group.check_same(data=data_sha256)
        if not group.leads:
            # The run is written by the first process; the others read where it goes on.
            identity, goes_on = group.from_leader(None, "the start of the run")
            return _fit(
                task, config, experiment, identity, last_checkpoint(config, identity) if goes_on else None, display
            )
        # Linux kills a process that takes more than its control group may; compiled kernels have the GPU's memory.
        with create.writing(config), out_of_memory.within(memory_limit.in_groups() if launch.INTERPRETED else None):
            begun = config.resume and (config.out / "config.json").exists()
            if begun:
                create.sweep(config.out)
                run = read_run(config.out)
                checkpoint = last_checkpoint(config, run.identity)
                Checkpoints(config.out / FOLDER).drop_unnamed()
                for name in create.restore_documents(config.out, experiment.documents):
                    display.note(f"note: {name} was missing or changed and was rewritten from the data")
                with write_files.fixed(config.out), resumable(config, kind):
                    return _fit(task, config, experiment, run.identity, checkpoint, display)
            identity = create.start(config, kind, data_sha256, experiment.documents, experiment.model, group.starters)
            begun = True
            with replacing(config, kind, display), write_files.fixed(config.out), resumable(config, kind):
                return _fit(task, config, experiment, identity, None, display)
    except Exception as error:
        # For work outside of the steps, which `memory.guarded` covers.
        short = out_of_memory.read(error)
        if short is None and isinstance(error, OSError) and _is_of(config.out, error):
            raise create.cannot_save(config, kind, error, begun) from None
        if short is None:
            raise
        raise RunError(f"{short}; {out_of_memory.advice(short)}") from None


def _is_of(out: Path, error: OSError) -> bool:
    """Whether a file of a run, or one next to it, was written, and not one of a library."""
    return error.filename is None or Path(os.fsdecode(error.filename)).is_relative_to(out.parent)


@contextmanager
def resumable(config: Session, kind: str) -> Iterator[None]:
    """Says how to go on after a signal that the loop did not take: one while testing or plotting, or a second one."""
    try:
        yield
    except KeyboardInterrupt:
        if is_finished(config.out):
            raise Interrupted(f"interrupted; the run in {one_line(str(config.out))} is complete") from None
        if not (config.out / FOLDER / "last.json").exists():
            raise
        then = resume_command(kind, config.out)
        raise Interrupted(f"interrupted; the last checkpoint is kept. To continue:\n  {then}") from None


@contextmanager
def replacing(config: Session, kind: str, display: Display) -> Iterator[None]:
    """Puts the run that a new one is to replace back, if this fails before its first checkpoint is saved or being
    written."""
    folder = config.out
    try:
        yield
    except BaseException as error:
        # A checkpoint still being written must not end up in the run that is put back.
        nothing = not is_writing(folder / FOLDER) and not (folder / FOLDER / "last.json").exists()
        if nothing and create.abandon(folder):
            display.note(f"the previous run is back in {folder}")
            if isinstance(error, OSError):
                raise create.cannot_save(config, kind, error, is_back=True) from None
        raise


def last_checkpoint(config: Session, identity: str) -> Checkpoint | None:
    """The last checkpoint of a run, None before the first. Raises DamagedError, also for one of another run."""
    checkpoint = Checkpoints(config.out / FOLDER).last()
    if checkpoint is None:
        return None
    saved, settings = checkpoint.state.get("config"), config.identity()
    if not isinstance(saved, dict):
        raise damaged(checkpoint.path, "it has no settings")
    others = changed(saved, settings)
    if others:
        raise damaged(config.out / "config.json", f"{', '.join(others)} differ from those in {checkpoint.path}")
    if checkpoint.state.get(manifest.OF_RUN, identity) != identity:
        raise damaged(checkpoint.path, "it is of another run, on other data")
    described = checkpoint.state.get("environment")
    threads = described.get("threads") if isinstance(described, dict) else None
    if type(threads) is not int or not 1 <= threads <= environment.MOST_THREADS:
        raise damaged(checkpoint.path, f"environment.threads is {threads!r}, expected a number of threads")
    return checkpoint


def _fit(
    task: Task, config: Any, experiment: Experiment, identity: str, checkpoint: Checkpoint | None, display: Display
) -> dict[str, Any]:
    group = current()
    if group.leads:
        group.from_leader([identity, checkpoint is not None], "the start of the run")
    described = _prepare(config, checkpoint, task.convolves)
    group.check_same(environment=files.json_checksum({name: described[name] for name in environment.DECIDING}))
    state = {manifest.OF_RUN: identity, "config": config.identity(), "environment": described}
    with experiment.alongside() if group.leads else nullcontext():
        trainer, again = _trainer(task, config, experiment, state, checkpoint, display)
        # A graph keeps the memory of its own that its first steps took outside of it.
        share = 0.5 if trainer.captured else 1.0
        smaller = out_of_memory.BATCH_SIZE if checkpoint is None else out_of_memory.NEW_RUN
        run = out_of_memory.used_for(f"a step of {experiment.batch_size:,} examples")(trainer.run)
        with timing.timed("train"):
            out_of_memory.guarded(
                run, experiment.batch_size, trainer.attempt if group.size == 1 else None, share, smaller
            )
        if not group.leads:
            return {}
        report = {**experiment.report(trainer, described["device"]), **again}
        if config.shards:
            report.update(shards=config.shards, processes=group.size, **trainer.pace())
    with timing.timed("write"):
        files.write_tensors(config.out / manifest.MODEL, trainer.model.state_dict(), {manifest.OF_RUN: identity})
    undrawn: Iterable[str] = [plot_processes.MISSING] if config.plots else []
    if config.plots and plot_processes.available():
        with (
            out_of_memory.used_for("the plots", "--no-plots"),
            timing.timed("plots"),
            plot_processes.elsewhere() as undrawn,
        ):
            experiment.plot(trainer, report)
    report.update(phases=timing.current().taken(), memory=out_of_memory.peaks())
    text = escaped(task.as_text(report))
    with out_of_memory.used_for("the page", "less data"):
        shown = page.as_html(
            config.out, report, trainer.progress.history, config.identity(), described, experiment.mistakes(trainer)
        )
    files.write_text(config.out / page.FILE, shown)
    create.complete(config.out, identity, report, text)
    display.show("\n" + text)
    display.summary(report_files.summary(report))
    display.note(*undrawn, experiment.advice(trainer, report), create.finish(config.out), experiment.ending())
    return report


def _check_shards(config: Any) -> None:
    """Raises ConfigError for shards that the other settings have no room for."""
    count = config.shards or 1
    if config.batch_size < count:
        raise ConfigError(
            f"--batch-size {config.batch_size} is less than --shards {count}: each shard needs an example"
        )
    if (count > 1 or config.zero) and getattr(config, "lazy", False):
        raise ConfigError("--lazy cannot be combined with --shards or --zero")
    if count == 1 and getattr(config, "sync_batch_norm", None):
        raise ConfigError("--sync-batch-norm requires --shards, such as --shards 8")
    if current().size > count:
        raise ConfigError(
            f"{current().size} processes are more than the {count} shards of the run: start at most {count}, or a new "
            "run with more --shards"
        )


def _trainer(
    task: Task,
    config: Any,
    experiment: Experiment,
    state: dict[str, Any],
    checkpoint: Checkpoint | None,
    display: Display,
) -> tuple[Any, dict[str, Any]]:
    """The trainer, continued from the checkpoint if there is one, and what of that the report tells."""
    with out_of_memory.used_for("the data", "less data"), timing.timed("copy"):
        experiment.load()
    compile_ahead(lambda: experiment.trainer(display, state, "").rehearse(), display)
    with out_of_memory.used_for("the networks and their optimizers", "a smaller model"), timing.timed("copy"):
        trainer = experiment.trainer(display, state, resume_command(task.name, config.out))
    if checkpoint is None:
        return trainer, {}
    trainer.restore(checkpoint)
    again = resumed(checkpoint, state["environment"], trainer.progress.place, display)
    trainer.state.update(again)
    display.note(f"continuing after {trainer.progress.place}")
    return trainer, again


def _prepare(config: Any, checkpoint: Checkpoint | None, convolves: bool) -> dict[str, Any]:
    """Set threads, as in the checkpoint, and precision; writes environment.json and returns its content."""
    if checkpoint is not None:
        threads = checkpoint.state["environment"]["threads"]
    elif convolves and launch.INTERPRETED:
        # Interpreted convolutions are many small products: they gain nothing from a second thread, which waits where
        # other processes run (measured: 1.0 s a step instead of 0.36 s).
        threads = environment.wanted_threads(1)
    else:
        threads = environment.wanted_threads()
    environment.fix_threads(threads)
    launch.set_float32_precision("tf32" if config.precision == "tf32" else "tf32x3")
    described = environment.describe(threads)
    if current().leads:
        files.write_json(config.out / "environment.json", described)
    return described


def resumed(checkpoint: Checkpoint, described: dict[str, Any], after: str, display: Display) -> dict[str, Any]:
    """{"resumed": [{"after", "changes"}, ...]}: where the run was continued in another environment; {} if nowhere.

    It becomes part of later checkpoints and of the report. If the environment `described` differs from that of the
    checkpoint, a warning is shown. Raises DamagedError.
    """
    entries = checkpoint.state.get("resumed", [])
    try:
        validate(list[Resumption], entries)
    except ValueError as error:
        raise damaged(checkpoint.path, f"resumed: {error}") from None
    changes = environment.changes(checkpoint.state["environment"], described)
    if changes:
        entries = [*entries, {"after": after, "changes": changes}]
        lines = [
            f"  {name}: {environment.shown(was)} then, {environment.shown(now)} now"
            for name, (was, now) in changes.items()
        ]
        warning = [one_line(f"warning: {checkpoint.path} was written in another environment:"), *lines]
        advice = "Training continues, but its results may differ in the last bits from those of an uninterrupted run."
        display.show("\n".join([*warning, advice]))
    return {"resumed": entries} if entries else {}
