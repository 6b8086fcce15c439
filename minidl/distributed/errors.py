"""What goes wrong between processes. Imports neither torch nor Triton."""

from __future__ import annotations


class DistributedError(RuntimeError):
    """Processes that cannot work together. The message names what differs or who is missing."""


class LostError(DistributedError):
    """Another process ended, or did not answer in time."""
