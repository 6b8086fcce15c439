"""The errors of a command, by the action that they require."""

from __future__ import annotations

from pathlib import Path

from minidl.common.console import cut


class ConfigError(ValueError):
    """A setting, or a combination of settings, is invalid. The message names the option and its valid values."""


class RunError(RuntimeError):
    """A run cannot be started, continued or read. The message names the file and the remedy."""


class DamagedError(RunError):
    """A file of a run was changed or damaged after minidl wrote it."""


class DivergedError(RunError):
    """Training diverged: `what` names the value that is NaN or infinite, `remedy` the options to change."""

    def __init__(self, what: str, remedy: str = "a smaller --lr or --weight-decay") -> None:
        super().__init__(f"training diverged: {what}; train again with {remedy}")


def damaged(path: Path, what: object) -> DamagedError:
    """Return the error for a damaged file of a run; `what` describes the damage."""
    return DamagedError(f"{path} is damaged ({cut(what)}); restore it or train again with --overwrite")


def missing(path: object) -> DamagedError:
    """Return the error for a missing file of a run."""
    return DamagedError(f"{path} is missing; restore it or train again with --overwrite")


class Interrupted(Exception):  # noqa: N818  (an outcome, not an error)
    """Training was stopped by the user, and all is saved. The message says how to continue."""
