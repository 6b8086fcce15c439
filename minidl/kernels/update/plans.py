"""The tables that the host makes for the kernels of an update: addresses, lists of blocks, and tiles.

They are one list of int64 numbers on the device, made again only when memory has moved.
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

# The extent of memory without rows, for the tile table.
WIDE = 2**31


@dataclass(frozen=True)
class Rows:
    """The gradient of a matrix by rows: `values` [U, C] belong to the distinct `rows` int32 [U].

    A negative row is padding: its values must be 0, since the norm counts them.
    """

    rows: torch.Tensor
    values: torch.Tensor


class Part(Protocol):
    """What one of several processes keeps of the states and updates of the parameters, see `distributed.zero`."""

    first: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its part of a tensor."""

    def whole(self, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The tensor of the parts of all."""

    def join(self, params: Sequence[torch.Tensor]) -> None:
        """Give all processes the parameters that each has updated."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a launch: the start and length of its list in the table, and where the rows of the table start."""

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
    """Makes the table of a step and its launches, and reuses them until memory moves.

    `states` are tensors by their column of the table and `masters` tensors or None, one per parameter each; with a
    `part` they are parts. Then the table has a second row for each parameter, of the part that is updated.
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
        self._made_for: Any = None
        self._made: tuple[list[Plan], torch.Tensor] = ([], torch.empty(0, dtype=torch.int64, device=device))

    def __call__(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | Rows | None]
    ) -> tuple[list[Plan], torch.Tensor]:
        """The launches per dtype, and the table with their lists of blocks."""
        slots, own = array("q"), params
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            slots.extend(self._slot(index, param, grad))
        if self._part is not None:
            own = [self._part.of(param) for param in params]
            parts = [self._part.of(grad) if isinstance(grad, torch.Tensor) else None for grad in grads]
            for index, (param, grad) in enumerate(zip(own, parts, strict=True)):
                slots.extend(self._slot(index, param, grad))
        in_graph = capturing(self._device)
        tiles = {dtype: _tiles(dtype, params, grads) for dtype in dict.fromkeys(param.dtype for param in params)}
        key = (slots, tiles)
        if not in_graph and key == self._made_for:
            return self._made
        values = array("q", slots)
        plans = []
        for dtype, pair in tiles.items():
            used = [i for i, param in enumerate(params) if param.dtype == dtype and grads[i] is not None]
            if used:
                plans.append(self._plan(used, params, own, grads, pair, values))
        if in_graph:
            return plans, self._table.captured(values)
        self._made_for, self._made = key, (plans, self._table.hold(values))
        return self._made

    def _slot(self, index: int, param: torch.Tensor, grad: torch.Tensor | Rows | None) -> list[int]:
        """The parameter's row of the table."""
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
            # In a graph, the zeros would be written at each replay, and not before the first.
            with outside_capture(self._device) if capturing(self._device) else contextlib.nullcontext():
                self._positions[index] = torch.zeros(param.shape[0], dtype=torch.int32, device=self._device)
        return self._positions[index]

    def _plan(
        self,
        used: list[int],
        params: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | Rows | None],
        tiles: tuple[launch.Tile, launch.Tile],
        values: array[int],
    ) -> Plan:
        """The launches for the parameters `used`; their lists of blocks are added to `values`."""
        by_rows = {i: grad.values for i in used if isinstance(grad := grads[i], Rows)}
        measured = {i: by_rows.get(i, params[i]) for i in used}
        updated = measured if self._lazy else {i: own[i] for i in used}
        second = 0 if self._part is None else len(params) * kernels.COLUMNS.value
        lists = []
        for tile, visited, slots in zip(tiles, (measured, updated), (0, second), strict=True):
            start = len(values)
            for i, tensor in visited.items():
                slot = slots + i * kernels.COLUMNS.value
                whole = _whole(values[slot : slot + kernels.COLUMNS.value], tile["BLOCK_V"])
                _add_blocks(values, i, tensor.numel(), by_rows[i].shape[1] if i in by_rows else 0, whole, tile)
            lists.append(Blocks(tile, slots, start, len(values) - start))
            # Lists begin at multiples of 16 bytes: Triton compiles a variant for pointers that do not.
            values.extend([0] * (len(values) % 2))
        rows = (kernels.LAZY if self._lazy else kernels.DENSE_MOMENTS) if by_rows else kernels.NO_ROWS
        return Plan(params[used[0]], rows, measure=lists[0], update=lists[1])


def _tiles(
    dtype: torch.dtype, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | Rows | None]
) -> tuple[launch.Tile, launch.Tile]:
    """Tiles of `measure` and `update`, for the widest gradient by rows; BLOCK_V values make 16 bytes."""
    widths = [g.values.shape[1] for p, g in zip(params, grads, strict=True) if p.dtype == dtype and isinstance(g, Rows)]
    extents = {"C": max(widths, default=WIDE), "V": 16 // dtype.itemsize}
    return launch.tile("update_measure", dtype, **extents), launch.tile("update", dtype, **extents)


def _whole(slot: array[int], vector: int) -> bool:
    """Whether all memory of a parameter is made of whole vectors of that many values."""
    counts = (slot[kernels.NUMEL.value], slot[kernels.WIDTH.value])
    addresses = (kernels.PARAM, kernels.MASTER, kernels.STATE_0, kernels.STATE_1, kernels.STATE_2, kernels.GRAD)
    return vector == 1 or (
        all(count % vector == 0 for count in counts) and all(slot[column.value] % 16 == 0 for column in addresses)
    )


def _add_blocks(values: array[int], index: int, numel: int, width: int, whole: bool, tile: launch.Tile) -> None:
    """Add the blocks of `numel` values in rows of `width`; large ones where at least half of one is filled."""
    width = width or tile["BLOCK_C"]
    large = whole and 2 * numel >= tile["BLOCK_R"] * tile["BLOCK_C"]
    rows = launch.cdiv(launch.cdiv(numel, width), tile["BLOCK_R" if large else "BLOCK_R_SMALL"])
    first = (index << 32) + large * kernels.LARGE.value
    values.extend(range(first, first + rows * launch.cdiv(width, tile["BLOCK_C"])))
