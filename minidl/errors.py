"""The errors of a command, by who has to act."""

from __future__ import annotations

from pathlib import Path

from minidl.common.console import cut


class ConfigError(ValueError):
    """A setting, or a combination of them, that cannot be used. The message names the flag and what it takes."""


class RunError(RuntimeError):
    """A run that cannot be started, continued or read. The message names the file and what to do."""


class DamagedError(RunError):
    """A file of a run whose content minidl did not write."""


class DivergedError(RunError):
    """Training diverged: `what` names the value that is NaN or infinite, `remedy` the flags to change."""

    def __init__(self, what: str, remedy: str = "a smaller --lr or --weight-decay") -> None:
        super().__init__(f"training diverged: {what}; train again with {remedy}")


def damaged(path: Path, what: object) -> DamagedError:
    """The error for a file of a run, with what is wrong in it."""
    return DamagedError(f"{path} is damaged ({cut(what)}); restore it or train again with --overwrite")


def missing(path: object) -> DamagedError:
    """The error for a file of a run that does not exist."""
    return DamagedError(f"{path} is missing; restore it or train again with --overwrite")


class Interrupted(Exception):  # noqa: N818  (an outcome, not an error)
    """Training stopped on request with everything saved. The message says how to continue."""
