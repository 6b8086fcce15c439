"""`minidl evaluate`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from minidl.cli.options import command, extract
from minidl.cli.profiling import ProfilingOfRun, profiled
from minidl.common.console import echo
from minidl.errors import ConfigError
from minidl.generation.config import BUILT_IN, EvaluateGan
from minidl.training.process import device, environment
from minidl.training.run_folder import files
from minidl.training.run_folder.folder import RunFolder
from minidl.training.settings.command import Evaluate


def _evaluate(options: dict[str, Any]) -> None:
    profiling = extract(options, ProfilingOfRun)
    of_generator: dict[str, Any] = {name: options.pop(name) for name in ("samples", "evaluator") if name in options}
    config = Evaluate(**options)
    trace = None
    if (config.run / "config.json").is_file():
        trace = config.run / "trace-evaluate.json"
    profiler = profiled(profiling, trace)
    if _is_generator(config.run):
        _evaluate_generator(config, of_generator, profiler)
        return
    for name in of_generator:
        raise ConfigError(f"--{name} requires a generator; {config.run} is not one")
    work = device.prepare(config.device, "minidl.training.prediction.predict")
    from minidl.training.report import report_files

    with profiler:
        echo(report_files.as_text(work.evaluate(config)), end="")


def _evaluate_generator(config: Evaluate, options: dict[str, Any], profiler: AbstractContextManager[None]) -> None:
    if config.text_column or config.label_column:
        raise ConfigError("--text-column and --label-column are for text runs")
    if config.devices != 1:
        raise ConfigError("--devices cannot be used with a generator: scoring its pictures takes a second")
    model = str(config.run) if _is_built_in(config.run) else str(config.run.absolute())
    settings = EvaluateGan(model=model, data=config.data, json_file=config.json_file, **options)
    work = device.prepare(config.device, "minidl.generation.evaluate")
    environment.fix_threads(environment.thread_count())

    with profiler:
        echo(work.as_text(work.evaluate(settings)), end="")


def _is_generator(run: Path) -> bool:
    if _is_built_in(run):
        return True
    if files.is_folder(run):
        return RunFolder(run).read_finished().task.generates
    return run.suffix == ".safetensors"


def _is_built_in(run: Path) -> bool:
    """Return whether this is the name of a built-in generator; a run in a folder of that name has precedence."""
    return str(run) in BUILT_IN and not (run / "config.json").is_file()


add_to = command("evaluate", Evaluate, _evaluate, EvaluateGan, ProfilingOfRun, leave_out=("model", "json_file"))
