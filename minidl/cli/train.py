"""`minidl train ...`: a command for each task."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import Any

import typer

from minidl.cli.common import Group, examples
from minidl.cli.options import command, taken
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
_LATER = 20.0  # seconds
_RESTARTS = 3  # after which a run whose processes are killed is given up


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


def _train(kind: str, given: dict[str, Any]) -> None:
    timing.begin()
    profiling = taken(given, Profiling)
    place = workers.place()
    if place is not None and (place.world > 1 or workers.starter()):
        _train_together(kind, given, profiling, place)
        return
    count = device.processes(given.get("devices", 1), given.get("device", "auto"))
    if count > 1:
        # With all its checks: the first of these processes makes them.
        # Later than the others notice by themselves.
        stopped = given.get("timeout", started.TIMEOUT) + _LATER
        workers.run(workers.own_command(), count, _RESTARTS, first=True, together=True, stopped=stopped)
        return
    config = train_settings(kind, given)
    done = TrainingFolder(config.out).finished_report() if config.resume else None
    if done is not None:
        if not config.quiet:
            echo(done, end="")
        return
    processors = min(available(), config.workers or available())
    with contextlib.ExitStack() as alongside:
        gpu = alongside.enter_context(compiler_processes.started(kind, config.device))
        if gpu and processors >= _MANY:  # without a GPU the network has the processors
            alongside.enter_context(helpers.start_processes(processors))
        _run(kind, config, profiling)


def _train_together(kind: str, given: dict[str, Any], profiling: Profiling, place: workers.Place) -> None:
    """As one of several processes: the first reads the flags and writes the run, the others follow it."""
    if lacking := workers.missing_address():
        raise ConfigError(lacking)
    there = 0 if given.get("device") == "cpu" else workers.gpus()
    if 0 < there < place.local_world:
        raise ConfigError(f"{place.local_world} processes of this host share {there} GPUs: start one process per GPU")
    os.environ |= workers.only(place.local)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # of lost connections one sentence is said
    module = device.prepare(given.get("device", "auto"), "minidl.distributed.group")
    group = module.init(max(1.0, given.get("timeout", started.TIMEOUT)))  # the flag is checked by the first
    group.check_same(version=environment.code(), command=json.dumps(given, default=str, sort_keys=True))
    group.starters = [*filter(None, group.gathered(workers.starter(), "the comparison of the processes"))]
    config = told = None
    if group.leads:
        if TrainingFolder(given["out"]).is_started_by(group.starters):  # they have been started again
            given |= {"resume": True, "overwrite": False}
        config = train_settings(kind, given)
        if config.shards is None and not (config.resume and (config.out / "config.json").exists()):
            config = config.model_copy(update={"shards": started.USUAL})
        done = TrainingFolder(config.out).finished_report() if config.resume else None
        told = [config.identity(), done is None]
        if done is not None and not config.quiet:
            echo(done, end="")
    identity, goes_on = group.from_leader(told, "the settings")
    if not goes_on:
        return
    if not group.leads:
        settings = TASKS[kind].settings
        own = {name: given[name] for name in settings.of_process().model_fields if name in given}
        config, profiling = settings(**{**settings.earlier, **identity, **own}), Profiling()
    _run(kind, config, profiling)


def _run(kind: str, config: Any, profiling: Profiling) -> None:
    task = TASKS[kind]
    import numpy as np  # noqa: F401 (before the thread, which needs it, too)

    # torch takes some seconds; meanwhile the data is read.
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
        echo(timing.table(timing.current().taken()), error=True, end="")
