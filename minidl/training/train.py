"""`minidl train`: train a model from settings and a data set, and write the finished run."""

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
from minidl.training.report import calibration, page, plot_processes, report_files
from minidl.training.run_folder import files, manifest
from minidl.training.run_folder.checkpoints import Checkpoint
from minidl.training.run_folder.saved_run import resume_command
from minidl.training.run_folder.training_folder import TrainingFolder
from minidl.training.settings.command import Session, TrainSettings
from minidl.training.settings.declaration import changed
from minidl.training.task import Experiment, Task
from minidl.training.tasks import TASKS


@dataclass
class Resumption(Checked):
    """A resumption of a run in another environment: `changes` has the old and the new value of each entry."""

    after: str
    changes: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]


def train(kind: str, config: TrainSettings, dataset: Any) -> dict[str, Any]:
    """Train, test and report, which finishes the run in `config.out`; return the content of report.json.

    Raises DataError, ConfigError, RunError, Interrupted.
    """
    group = current()
    task, display = TASKS[kind], Display(config.quiet or not group.leads)
    folder, begun = TrainingFolder(config.out), False
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
            # The first process writes the run; the others read its last checkpoint.
            identity, has_checkpoint = group.from_leader(None, "the start of the run")
            checkpoint = last_checkpoint(config, identity) if has_checkpoint else None
            return _fit(task, config, experiment, identity, checkpoint, display)
        # Linux kills a process that exceeds its control group's limit; compiled kernels use the GPU's memory.
        limit = memory_limit.in_groups() if launch.ON_CPU else None
        with folder.lock(config.resume, config.overwrite), out_of_memory.within(limit):
            begun = config.resume and (config.out / "config.json").exists()
            if begun:
                folder.sweep()
                run = folder.read()
                checkpoint = last_checkpoint(config, run.identity)
                folder.checkpoints.drop_unnamed()
                for name in folder.restore_documents(experiment.documents):
                    display.note(f"note: {name} was missing or changed and was rewritten from the data")
                with write_files.pin_folder(config.out), resumable(config, kind):
                    return _fit(task, config, experiment, run.identity, checkpoint, display)
            identity = folder.start(config, kind, data_sha256, experiment.documents, experiment.model, group.starters)
            begun = True
            with replacing(config, kind, display), write_files.pin_folder(config.out), resumable(config, kind):
                return _fit(task, config, experiment, identity, None, display)
    except Exception as error:
        # Steps handle their own shortages, see `out_of_memory.guarded`.
        short = out_of_memory.read(error)
        if short is None and isinstance(error, OSError) and _is_of(config.out, error):
            raise folder.write_error(kind, error, begun) from None
        if short is None:
            raise
        raise RunError(f"{short}; {out_of_memory.advice(short)}") from None


def _is_of(out: Path, error: OSError) -> bool:
    """Return whether the error is of a file of a run, or next to it, and not of a library's file."""
    return error.filename is None or Path(os.fsdecode(error.filename)).is_relative_to(out.parent)


@contextmanager
def resumable(config: Session, kind: str) -> Iterator[None]:
    """Print how to resume after a signal outside of the training loop, while testing or plotting, or a second one."""
    try:
        yield
    except KeyboardInterrupt:
        folder = TrainingFolder(config.out)
        if folder.is_finished:
            raise Interrupted(f"interrupted; the run in {one_line(str(config.out))} is complete") from None
        if not folder.checkpoints.exist:
            raise
        then = resume_command(kind, config.out)
        raise Interrupted(f"interrupted; the last checkpoint is kept. To continue:\n  {then}") from None


@contextmanager
def replacing(config: Session, kind: str, display: Display) -> Iterator[None]:
    """Restore the previous run in the folder if the new one fails before its first checkpoint is being written."""
    folder = TrainingFolder(config.out)
    try:
        yield
    except BaseException as error:
        # A checkpoint still being written must not end up in the run that is put back.
        if not folder.checkpoints.is_writing and not folder.checkpoints.exist and folder.restore_previous():
            display.note(f"the previous run is back in {config.out}")
            if isinstance(error, OSError):
                raise folder.write_error(kind, error, is_back=True) from None
        raise


def last_checkpoint(config: Session, identity: str) -> Checkpoint | None:
    """Return the last checkpoint of a run, None before the first. Raises DamagedError, also for another run's."""
    checkpoint = TrainingFolder(config.out).checkpoints.last()
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
    task: Task[Any], config: TrainSettings, experiment: Experiment[Any], identity: str, checkpoint: Checkpoint | None,
    display: Display,
) -> dict[str, Any]:  # fmt: skip
    group = current()
    if group.leads:
        group.from_leader([identity, checkpoint is not None], "the start of the run")
    described = _prepare(config, checkpoint, task.convolves)
    group.check_same(environment=files.json_checksum({name: described[name] for name in environment.DECIDING}))
    state = {manifest.OF_RUN: identity, "config": config.identity(), "environment": described}
    with experiment.background_work() if group.leads else nullcontext():
        trainer, resumption = _trainer(task, config, experiment, state, checkpoint, display)
        # A captured step needs its memory twice: for the first steps, and for the graph.
        share = 0.5 if trainer.captured else 1.0
        smaller = out_of_memory.BATCH_SIZE if checkpoint is None else out_of_memory.NEW_RUN
        run = out_of_memory.used_for(f"a step of {experiment.batch_size:,} examples")(trainer.run)
        with timing.timed("train"):
            out_of_memory.guarded(
                run, experiment.batch_size, trainer.attempt if group.size == 1 else None, share, smaller
            )
        if not group.leads:
            return {}
        report = {**experiment.report(trainer, described["device"]), **resumption}
        if config.shards:
            report.update(shards=config.shards, processes=group.size, **trainer.throughput())
    with timing.timed("write"):
        files.write_tensors(config.out / manifest.MODEL, trainer.model.state_dict(), {manifest.OF_RUN: identity})
        if "calibration" in report:
            temperature = calibration.Temperature(report["calibration"]["temperature"])
            files.write_text(config.out / calibration.FILE, temperature.to_json() + "\n")
    plot_notes: Iterable[str] = [plot_processes.MISSING] if config.plots else []
    if config.plots and plot_processes.available():
        with (
            out_of_memory.used_for("the plots", "--no-plots"),
            timing.timed("plots"),
            plot_processes.in_processes() as plot_notes,
        ):
            experiment.plot(trainer, report)
    report.update(phases=timing.current().phases(), memory=out_of_memory.peaks())
    text = escaped(task.as_text(report))
    with out_of_memory.used_for("the page", "less data"):
        html = page.as_html(
            config.out, report, trainer.progress.history, config.identity(), described, experiment.mistakes(trainer)
        )
    files.write_text(config.out / page.FILE, html)
    folder = TrainingFolder(config.out)
    folder.complete(identity, report, text)
    display.show("\n" + text)
    display.summary(report_files.summary(report))
    display.note(*plot_notes, experiment.advice(trainer, report), folder.delete_previous(), experiment.closing_note())
    return report


def _check_shards(config: TrainSettings) -> None:
    """Raise ConfigError for shards that contradict other settings."""
    count = config.shards or 1
    assert config.batch_size is not None
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
    task: Task[Any], config: TrainSettings, experiment: Experiment[Any], state: dict[str, Any],
    checkpoint: Checkpoint | None, display: Display,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """Return the trainer, resumed from the checkpoint if there is one, and the report's entries on resumptions."""
    with out_of_memory.used_for("the data", "less data"), timing.timed("copy"):
        experiment.load()
    compile_ahead(lambda: experiment.trainer(display, state, "").rehearse(), display)
    with out_of_memory.used_for("the networks and their optimizers", "a smaller model"), timing.timed("copy"):
        trainer = experiment.trainer(display, state, resume_command(task.name, config.out))
    if checkpoint is None:
        return trainer, {}
    trainer.restore(checkpoint)
    resumption = resumed(checkpoint, state["environment"], trainer.progress.text, display)
    trainer.state.update(resumption)
    display.note(f"continuing after {trainer.progress.text}")
    return trainer, resumption


def _prepare(config: TrainSettings, checkpoint: Checkpoint | None, convolves: bool) -> dict[str, Any]:
    """Set threads, as in the checkpoint, and precision; write environment.json and return its content."""
    if checkpoint is not None:
        threads = checkpoint.state["environment"]["threads"]
    elif convolves and launch.INTERPRETED:
        # Interpreted convolutions are many small products, which a second thread slows down if other processes run
        # (measured: 1.0 s a step instead of 0.36 s).
        threads = environment.thread_count(1)
    else:
        threads = environment.thread_count()
    environment.fix_threads(threads)
    launch.set_float32_precision("tf32" if config.precision == "tf32" else "tf32x3")
    described = environment.describe(threads)
    if current().leads:
        files.write_json(config.out / "environment.json", described)
    return described


def resumed(checkpoint: Checkpoint, described: dict[str, Any], after: str, display: Display) -> dict[str, Any]:
    """Return {"resumed": [{"after", "changes"}, ...]}, the resumptions in another environment; {} without any.

    Later checkpoints and the report contain it. Prints a warning if the environment `described` differs from the
    checkpoint's. Raises DamagedError.
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
            f"  {name}: {environment.shown(old)} then, {environment.shown(new)} now"
            for name, (old, new) in changes.items()
        ]
        warning = [one_line(f"warning: {checkpoint.path} was written in another environment:"), *lines]
        advice = "Training continues, but its results may differ in the last bits from those of an uninterrupted run."
        display.show("\n".join([*warning, advice]))
    return {"resumed": entries} if entries else {}
