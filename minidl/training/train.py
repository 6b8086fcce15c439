"""`minidl train`: from settings and a data set to a finished run."""

from __future__ import annotations

from typing import Any

from minidl.training import files, memory, plots, runs, session
from minidl.training.checkpoints import Checkpoint
from minidl.training.display import Display
from minidl.training.task import Experiment, Task
from minidl.training.tasks import TASKS


def train(kind: str, config: Any, dataset: Any, checksum: str) -> dict[str, Any]:
    """Train, test and report: the run in `config.out` is finished afterwards. Returns the content of report.json.

    `checksum` is the data's fingerprint, kept in the run.

    Raises DataError, ConfigError, RunError, Interrupted.
    """
    task, display = TASKS[kind], Display(config.quiet)
    with session.failures(config, kind, config.batch_size):
        session.check_precision(config.precision)
        experiment = task.prepare(config, dataset)
        display.note(experiment.introduction)
        with runs.writing(config):
            return session.in_run(
                config, kind, checksum, experiment.documents, display,
                lambda checkpoint: _fit(task, config, experiment, checkpoint, display), experiment.model,
            )  # fmt: skip


def _fit(
    task: Task, config: Any, experiment: Experiment, checkpoint: Checkpoint | None, display: Display
) -> dict[str, Any]:
    described = session.prepare(config, config.precision, checkpoint, task.convolves)
    state = {"config": config.identity(), "environment": described}
    trainer = experiment.trainer(display, state, runs.resume_command(task.name, config.out))
    resumed: dict[str, Any] = {}
    if checkpoint is not None:
        trainer.restore(checkpoint)
        resumed = session.resumed(checkpoint, described, trainer.progress.place, display)
        trainer.state.update(resumed)
        display.note(f"going on after {trainer.progress.place}")
    else:
        display.notes(experiment.advice(trainer.steps))
    # A graph keeps the memory of its own that its first steps took outside of it.
    share = 0.5 if trainer.captured else 1.0
    smaller = memory.BATCH_SIZE if checkpoint is None else memory.NEW_RUN
    memory.guarded(trainer.run, experiment.batch_size, trainer.attempt, share, smaller)

    report = {**experiment.report(trainer, described["device"]), **resumed}
    files.write_tensors(config.out / "model.safetensors", trainer.model.state_dict())
    plotted = None
    if config.plots and plots.available():
        experiment.plot(trainer, report)
    elif config.plots:
        plotted = plots.MISSING
    text = task.as_text(report)
    files.write_text(config.out / "report.txt", text)
    # Last: with it the run is finished, and --resume makes nothing that is missing.
    files.write_json(config.out / "report.json", report)
    display.notes("\n" + text, plotted, runs.finish(config.out), experiment.ending())
    return report
