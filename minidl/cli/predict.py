"""`minidl predict`."""

from __future__ import annotations

import sys
from typing import Any

from minidl.cli.options import command, taken
from minidl.cli.profiling import ProfilingOfRun, profiled
from minidl.training import device, predict, runs, saved_run
from minidl.training.config import Predict
from minidl.training.outputs import check_different


def _predict(given: dict[str, Any]) -> None:
    profiling = taken(given, ProfilingOfRun)
    check_different(file=given.get("file"), trace=profiling.trace)
    config = Predict(**given)
    runs.check_not_data(saved_run.finished_run(config.run).config, trace=profiling.trace)
    with predict.reading(config) as begun:
        device.prepare(config.device, "minidl.training.forward")
        with profiled(profiling, config.run / "trace-predict.json"):
            predict.answer(begun, config, sys.stdout)


add_to = command("predict", Predict, _predict, ProfilingOfRun)
