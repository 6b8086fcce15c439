"""What is known of several processes before torch is imported, and what goes wrong between them."""

from __future__ import annotations

import os

USUAL = 8  # shards where several processes start
TIMEOUT = 600.0  # seconds that a process waits for the others


def is_started() -> bool:
    """Whether torchrun, or who does as it does, has started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


class DistributedError(RuntimeError):
    """Processes that cannot work together. The message names what differs or who is missing."""


class LostError(DistributedError):
    """Another process ended, or did not answer in time."""
