"""The tables that the host builds for the kernels of an update: addresses, lists of blocks, and tiles.

They are one list of int64 numbers on the device, rebuilt only if a tensor has a new address.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton.language as tl

from minidl.kernels.update import kernels
from minidl.kernels.update.device_list import DeviceList, capturing, outside_capture
from minidl.runtime import launch

# The row length of tensors without row gradients, for the tile table.
WIDE = 2**31


@dataclass(frozen=True)
class Rows:
    """The gradient of a matrix by rows: `values` [U, C] belong to the distinct `rows` int32 [U].

    A negative row is padding: its values must be 0, since the norm counts them.
    """

    rows: torch.Tensor
    values: torch.Tensor


class Part(Protocol):
    """The part of states and updates that belongs to one of several processes, see `distributed.zero`."""

    first: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a tensor."""

    def whole(self, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the complete tensor from the parts of all processes."""

    def join(self, params: Sequence[torch.Tensor]) -> None:
        """Send the parameters that each process has updated to all processes."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a launch: start and length of their list in the table, and the start of the table's rows."""

    tile: launch.Tile
    slots: int
    start: int
    count: int


@dataclass(frozen=True)
class Plan:
    """The launches for the parameters of one dtype, that of `like`."""

    like: torch.Tensor
    rows: tl.constexpr
    measure: Blocks
    update: Blocks


class Plans:
    """Builds the table of a step and its launches, and reuses them until an address changes.

    `states` are tensors by column of the table and `masters` tensors or None, one per parameter; with a `part` they are
    parts. The table then has a second row for each parameter, for the part that is updated.
    """

    def __init__(
        self,
        states: Mapping[tl.constexpr, Sequence[torch.Tensor]],
        masters: Sequence[torch.Tensor | None],
        device: torch.device,
        lazy: bool,
        part: Part | None,
    ) -> None:
        self._states, self._masters, self._device, self._lazy, self._part = states, masters, device, lazy, part
        self._positions: dict[int, torch.Tensor] = {}
        self._table = DeviceList(device)
        self._key: Any = None
        self._cached: tuple[list[Plan], torch.Tensor] = ([], torch.empty(0, dtype=torch.int64, device=device))

    def __call__(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | Rows | None]
    ) -> tuple[list[Plan], torch.Tensor]:
        """Return the launches per dtype, and the table with their lists of blocks."""
        slots, targets = array("q"), params
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            slots.extend(self._slot(index, param, grad))
        if self._part is not None:
            targets = [self._part.of(param) for param in params]
            parts = [self._part.of(grad) if isinstance(grad, torch.Tensor) else None for grad in grads]
            for index, (param, grad) in enumerate(zip(targets, parts, strict=True)):
                slots.extend(self._slot(index, param, grad))
        in_graph = capturing(self._device)
        tiles = {dtype: _tiles(dtype, params, grads) for dtype in dict.fromkeys(param.dtype for param in params)}
        key = (slots, tiles)
        if not in_graph and key == self._key:
            return self._cached
        values = array("q", slots)
        plans = []
        for dtype, pair in tiles.items():
            used = [i for i, param in enumerate(params) if param.dtype == dtype and grads[i] is not None]
            if used:
                plans.append(self._plan(used, params, targets, grads, pair, values))
        if in_graph:
            return plans, self._table.captured(values)
        self._key, self._cached = key, (plans, self._table.hold(values))
        return self._cached

    def _slot(self, index: int, param: torch.Tensor, grad: torch.Tensor | Rows | None) -> list[int]:
        """Return the parameter's row of the table."""
        master = self._masters[index]
        memory = {kernels.PARAM: param, kernels.MASTER: param if master is None else master}
        memory.update({column: states[index] for column, states in self._states.items()})
        slot = [0] * kernels.COLUMNS.value
        slot[kernels.NUMEL.value] = param.numel()
        width = 0
        if isinstance(grad, Rows):
            memory[kernels.GRAD] = grad.values
            width = grad.values.shape[1]
            slot[kernels.WIDTH.value] = width
            slot[kernels.SEEN.value] = len(grad.rows)
            slot[kernels.ROWS.value] = grad.rows.data_ptr()
            slot[kernels.POSITION.value] = 0 if self._lazy else self._position(index, param).data_ptr()
        elif grad is not None:
            memory[kernels.GRAD] = grad
        if grad is not None:
            slot[kernels.USED.value] = 1
            slot[kernels.GRAD_NUMEL.value] = memory[kernels.GRAD].numel()
        for column, tensor in memory.items():
            slot[column.value] = tensor.data_ptr()
        return slot

    def _position(self, index: int, param: torch.Tensor) -> torch.Tensor:
        if index not in self._positions:
            # Inside a capture, the zeros would be written at each replay, and not before the first.
            with outside_capture(self._device) if capturing(self._device) else contextlib.nullcontext():
                self._positions[index] = torch.zeros(param.shape[0], dtype=torch.int32, device=self._device)
        return self._positions[index]

    def _plan(
        self,
        used: list[int],
        params: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | Rows | None],
        tiles: tuple[launch.Tile, launch.Tile],
        values: array[int],
    ) -> Plan:
        """Return the launches for the parameters `used`; append their lists of blocks to `values`."""
        by_rows = {i: grad.values for i in used if isinstance(grad := grads[i], Rows)}
        measured = {i: by_rows.get(i, params[i]) for i in used}
        updated = measured if self._lazy else {i: targets[i] for i in used}
        part_slots = 0 if self._part is None else len(params) * kernels.COLUMNS.value
        lists = []
        for tile, visited, slots in zip(tiles, (measured, updated), (0, part_slots), strict=True):
            start = len(values)
            for i, tensor in visited.items():
                slot = slots + i * kernels.COLUMNS.value
                vectorised = _is_vectorised(values[slot : slot + kernels.COLUMNS.value], tile["BLOCK_V"])
                _add_blocks(values, i, tensor.numel(), by_rows[i].shape[1] if i in by_rows else 0, vectorised, tile)
            lists.append(Blocks(tile, slots, start, len(values) - start))
            # Align lists to 16 bytes: Triton compiles another variant for unaligned pointers.
            values.extend([0] * (len(values) % 2))
        rows = (kernels.LAZY if self._lazy else kernels.DENSE_MOMENTS) if by_rows else kernels.NO_ROWS
        return Plan(params[used[0]], rows, measure=lists[0], update=lists[1])


def _tiles(
    dtype: torch.dtype, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | Rows | None]
) -> tuple[launch.Tile, launch.Tile]:
    """Return the tiles of `measure` and `update`, for the widest row gradient; BLOCK_V values are 16 bytes."""
    widths = [g.values.shape[1] for p, g in zip(params, grads, strict=True) if p.dtype == dtype and isinstance(g, Rows)]
    extents = {"C": max(widths, default=WIDE), "V": 16 // dtype.itemsize}
    return launch.tile("update_measure", dtype, **extents), launch.tile("update", dtype, **extents)


def _is_vectorised(slot: array[int], vector: int) -> bool:
    """Return whether all memory of a parameter is aligned and divisible into vectors of `vector` values."""
    counts = (slot[kernels.NUMEL.value], slot[kernels.WIDTH.value])
    addresses = (kernels.PARAM, kernels.MASTER, kernels.STATE_0, kernels.STATE_1, kernels.STATE_2, kernels.GRAD)
    return vector == 1 or (
        all(count % vector == 0 for count in counts) and all(slot[column.value] % 16 == 0 for column in addresses)
    )


def _add_blocks(values: array[int], index: int, numel: int, width: int, vectorised: bool, tile: launch.Tile) -> None:
    """Append the blocks of `numel` values in rows of `width`; large ones if they fill at least half of one."""
    width = width or tile["BLOCK_C"]
    large = vectorised and 2 * numel >= tile["BLOCK_R"] * tile["BLOCK_C"]
    rows = launch.cdiv(launch.cdiv(numel, width), tile["BLOCK_R" if large else "BLOCK_R_SMALL"])
    first = (index << 32) + large * kernels.LARGE.value
    values.extend(range(first, first + rows * launch.cdiv(width, tile["BLOCK_C"])))
