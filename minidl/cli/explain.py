"""`minidl explain`."""

from __future__ import annotations

from typing import Any

from minidl.cli.options import command
from minidl.common.console import echo
from minidl.data.parsing import encoded
from minidl.training.prediction import inputs
from minidl.training.process import device
from minidl.training.settings.command import Explain


def _explain(options: dict[str, Any]) -> None:
    config = Explain(**options)
    device.prepare(config.device, "minidl.training.loop.forward")
    from minidl.training.prediction import explain

    total = unrecognized = 0
    for text, labels in explain.explain(config):
        total, unrecognized = total + 1, unrecognized + (not labels[0].terms)
        if config.as_json:
            echo(encoded(explain.as_json(text, labels)))
        else:
            echo(explain.as_text(text, labels, config.terms), end="")
    inputs.note_unknown(unrecognized, total)


add_to = command("explain", Explain, _explain)
