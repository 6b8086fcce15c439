"""`minidl train ...`: a command for each task."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import Any

import typer

from minidl.cli.common import Group, examples
from minidl.cli.options import command, extract
from minidl.cli.profiling import Profiling, profiled
from minidl.common import timing
from minidl.common.console import echo
from minidl.compilation import compiler_processes
from minidl.data.workers import available
from minidl.distributed import started, workers
from minidl.errors import ConfigError
from minidl.training.process import device, environment, helpers
from minidl.training.run_folder.train_settings import train_settings
from minidl.training.run_folder.training_folder import TrainingFolder
from minidl.training.tasks import TASKS

_MANY = 4  # processors; with fewer, more processes only delay the first
_EXTRA = 20.0  # seconds
_RESTARTS = 3  # of a run whose processes are killed


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        cls=Group,
        no_args_is_help=True,
        help="Train a model and report how good it is.",
        epilog=examples(
            "minidl train text --data docstrings --out runs/first",
            "minidl train table --data houses.csv --target price --out runs/houses",
        ),
    )
    for kind, task in TASKS.items():
        command(kind, task.settings, functools.partial(_train, kind), Profiling)(group)
    app.add_typer(group, name="train")


def _train(kind: str, options: dict[str, Any]) -> None:
    timing.begin()
    profiling = extract(options, Profiling)
    ranks = workers.ranks()
    if ranks is not None and (ranks.world > 1 or workers.starter()):
        _train_together(kind, options, profiling, ranks)
        return
    count = device.processes(options.get("devices", 1), options.get("device", "auto"))
    if count > 1:
        # The first process checks the options. The others notice a stopped process before this limit.
        stopped = options.get("timeout", started.TIMEOUT) + _EXTRA
        workers.run(workers.own_command(), count, _RESTARTS, first=True, together=True, stopped=stopped)
        return
    config = train_settings(kind, options)
    report = TrainingFolder(config.out).finished_report() if config.resume else None
    if report is not None:
        if not config.quiet:
            echo(report, end="")
        return
    processors = min(available(), config.workers or available())
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(compiler_processes.started(kind, config.device))
        if gpu and processors >= _MANY:  # without a GPU, training uses the processors
            stack.enter_context(helpers.start_processes(processors))
        _run(kind, config, profiling)


def _train_together(kind: str, options: dict[str, Any], profiling: Profiling, ranks: workers.Ranks) -> None:
    """Train as one of several processes: the first checks the options and writes the run, the others follow it."""
    if message := workers.missing_address():
        raise ConfigError(message)
    gpus = 0 if options.get("device") == "cpu" else workers.gpus()
    if 0 < gpus < ranks.local_world:
        raise ConfigError(f"{ranks.local_world} processes of this host share {gpus} GPUs: start one process per GPU")
    os.environ |= workers.only(ranks.local)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # minidl reports lost connections itself
    module = device.prepare(options.get("device", "auto"), "minidl.distributed.group")
    group = module.init(max(1.0, options.get("timeout", started.TIMEOUT)))  # the first process checks the option
    group.check_same(version=environment.code(), command=json.dumps(options, default=str, sort_keys=True))
    group.starters = [*filter(None, group.gathered(workers.starter(), "the comparison of the processes"))]
    config = message_to_all = None
    if group.leads:
        if TrainingFolder(options["out"]).is_started_by(group.starters):  # a restart
            options |= {"resume": True, "overwrite": False}
        config = train_settings(kind, options)
        if config.shards is None and not (config.resume and (config.out / "config.json").exists()):
            config = config.model_copy(update={"shards": started.USUAL})
        report = TrainingFolder(config.out).finished_report() if config.resume else None
        message_to_all = [config.identity(), report is None]
        if report is not None and not config.quiet:
            echo(report, end="")
    identity, is_unfinished = group.from_leader(message_to_all, "the settings")
    if not is_unfinished:
        return
    if not group.leads:
        settings = TASKS[kind].settings
        of_process = {name: options[name] for name in settings.of_process().model_fields if name in options}
        config, profiling = settings(**{**settings.earlier, **identity, **of_process}), Profiling()
    _run(kind, config, profiling)


def _run(kind: str, config: Any, profiling: Profiling) -> None:
    task = TASKS[kind]
    import numpy as np  # noqa: F401 (before the thread, which also imports it)

    # The import of torch takes some seconds; meanwhile the data is read.
    wait = helpers.in_thread(lambda: device.prepare(config.device, "minidl.training.train"))
    with timing.timed("read"):
        dataset = task.load(config)
    if config.resume and (config.out / "config.json").exists():
        TrainingFolder(config.out).read().check_data(dataset)
    with timing.timed("import"):
        wait()
        from minidl.training.train import train
    with profiled(profiling, config.out / "trace.json", task.updates):
        train(kind, config, dataset)
    if profiling.profile:
        echo(timing.table(timing.current().phases()), error=True, end="")
