"""All that a kernel module needs of `minidl.runtime`, under one name: `launch.run`, `launch.tile`, `launch.acc`, ...

This module has only imports. The package's docstring says which module defines what.
"""

from minidl.runtime.kernel_launch import NO_BFLOAT16, NO_CPU, cdiv, run
from minidl.runtime.launch_hooks import (
    before_changes,
    handed_over,
    record,
    recording,
    runs,
    settle,
    settled_by,
    watch,
)  # fmt: skip
from minidl.runtime.launch_tape import note_indirect
from minidl.runtime.precision import (
    PRECISIONS,
    acc,
    acc_torch,
    float32_precision,
    in_precision,
    precision,
    set_float32_precision,
)  # fmt: skip
from minidl.runtime.prepared_launch import Prepared
from minidl.runtime.target import (
    INTERPRETED,
    TARGETS,
    architecture,
    boxes,
    device_target,
    is_gpu,
    processors,
    target,
)  # fmt: skip
from minidl.runtime.tiles import (
    Tile,
    cached,
    families,
    force,
    forget,
    register_cache,
    table,
    tile,
    tile_of,
    tiles,
    tiles_for,
    use_tables,
)  # fmt: skip

__all__ = [
    "INTERPRETED", "NO_BFLOAT16", "NO_CPU", "PRECISIONS", "TARGETS", "Prepared", "Tile", "acc", "acc_torch",
    "architecture", "before_changes", "boxes", "cached", "cdiv", "device_target", "families", "float32_precision",
    "force", "forget", "handed_over", "in_precision", "is_gpu", "note_indirect", "precision", "processors", "record",
    "recording", "register_cache", "run", "runs", "set_float32_precision", "settle", "settled_by", "table", "target",
    "tile", "tile_of", "tiles", "tiles_for", "use_tables", "watch",
]  # fmt: skip
