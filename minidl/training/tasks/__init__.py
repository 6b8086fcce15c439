"""The kinds of runs: one file or folder each, and one line below.

Read `table` first, which is the shortest, then `text`, `images` and `gan`.
"""

from __future__ import annotations

from typing import Any

from minidl.training.task import Task
from minidl.training.tasks.gan import GanTask
from minidl.training.tasks.images import ImagesTask
from minidl.training.tasks.table import TableTask
from minidl.training.tasks.text import TextTask

TASKS: dict[str, Task[Any]] = {
    "text": TextTask(),
    "table": TableTask(),
    "images": ImagesTask(),
    "gan": GanTask(),
}
