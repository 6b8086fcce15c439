"""Constants and errors of distributed training, without importing torch."""

from __future__ import annotations

import os

USUAL = 8  # shards of several processes
TIMEOUT = 600.0  # seconds to wait for other processes


def is_started() -> bool:
    """Return whether torchrun or a similar launcher has started several processes."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


class DistributedError(RuntimeError):
    """Processes cannot work together. The message names the difference or the missing process."""


class LostError(DistributedError):
    """Another process ended, or did not answer in time."""
