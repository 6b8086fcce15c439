"""All that a kernel module needs of `minidl.runtime`, under one name: `launch.run`, `launch.tile`, `launch.acc`, ...

This module has only imports. The package's docstring says which module defines what.
"""
# ruff: noqa: I001

from minidl.runtime.kernel_launch import NO_BFLOAT16 as NO_BFLOAT16, NO_CPU as NO_CPU, cdiv as cdiv, run as run
from minidl.runtime.launch_hooks import (
    before_changes as before_changes, for_other_target as for_other_target, handed_over as handed_over,
    record as record, runs as runs, settle as settle, settled_by as settled_by, watch as watch,
)  # fmt: skip
from minidl.runtime.launch_tape import note_indirect as note_indirect
from minidl.runtime.precision import (
    PRECISIONS as PRECISIONS, acc as acc, acc_torch as acc_torch, float32_precision as float32_precision,
    in_precision as in_precision, precision as precision, set_float32_precision as set_float32_precision,
)  # fmt: skip
from minidl.runtime.prepared_launch import Prepared as Prepared
from minidl.runtime.target import (
    COMPILED_CPU as COMPILED_CPU, INTERPRETED as INTERPRETED, ON_CPU as ON_CPU, TARGETS as TARGETS,
    architecture as architecture, boxes as boxes, device_target as device_target, is_gpu as is_gpu,
    processors as processors, target as target,
)  # fmt: skip
from minidl.runtime.tiles import (
    Tile as Tile, cached as cached, families as families, force as force, forget as forget,
    register_cache as register_cache, table as table, tile as tile, tile_of as tile_of, tiles as tiles,
    tiles_for as tiles_for, use_tables as use_tables,
)  # fmt: skip
