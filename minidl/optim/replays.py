"""Settings that a captured step cannot change without being captured again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minidl.kernels.update import Update


def launched(of: Update) -> dict[str, Any]:
    """Return the settings that determine the launches of a step."""
    return {
        "weight_decay": of.decay, "nesterov": of.nesterov, "maximize": of.maximize, "dampening": of.dampened,
        "centered or amsgrad": of.third, "states": tuple(of.states), "parameters": len(of.shapes),
        "iterations": of.newton, "max_norm": of.max_norm, "skip_nonfinite": of.skip, "sharded": of.part is not None,
    }  # fmt: skip


def check(name: str, of: Update, captured: Mapping[str, Any]) -> None:
    """Raise ValueError if a graph has other launches than a step would have now."""
    for key, now in launched(of).items():
        then = captured[key]
        if now == then or (key == "weight_decay" and then):
            continue
        if key == "weight_decay":
            raise ValueError(
                f"{name}: weight_decay was 0 when the step was captured, so the graph has none: capture the step "
                "again, or start with a weight_decay above 0"
            )
        raise ValueError(f"{name}: {key} changed from {then} to {now} since the step was captured: capture it again")
