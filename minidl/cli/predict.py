"""`minidl predict`."""

from __future__ import annotations

import sys
from typing import Any

from minidl.cli.options import command, extract
from minidl.cli.profiling import ProfilingOfRun, profiled
from minidl.training.prediction import predict
from minidl.training.process import device
from minidl.training.settings.command import Predict


def _predict(options: dict[str, Any]) -> None:
    profiling = extract(options, ProfilingOfRun)
    config = Predict(**options)
    with predict.reading(config) as reader:
        device.prepare(config.device, "minidl.training.loop.forward")
        with profiled(profiling, config.run / "trace-predict.json"):
            predict.answer(reader, config, sys.stdout)


add_to = command("predict", Predict, _predict, ProfilingOfRun)
