"""What can go wrong in a command, by whose turn it is."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting, or a combination of them, that cannot be used. The message names the flag and what it takes."""


class RunError(RuntimeError):
    """A run that cannot be started, continued or read. The message names the file and what to do."""


class DamagedError(RunError):
    """A file of a run that is not what minidl wrote."""


class Interrupted(Exception):  # noqa: N818  (an outcome, not an error)
    """Training stopped on request, everything saved. The message says how to continue."""
