"""Drawings of a graph of operations, as DOT text or as SVG that needs no other program."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minidl.autograd import Node
from minidl.common import write_files

if TYPE_CHECKING:
    from minidl.nn.module import Module
    from minidl.tensors import Tensor

_BOX_HEIGHT, _GAP_X, _GAP_Y, _CHARACTER = 34, 18, 34, 6.6
_COLOURS = {"operation": "#dbe9f6", "leaf": "#fdecc8", "result": "#d5f0d3"}


@dataclass(frozen=True)
class _Box:
    title: str
    note: str
    kind: str


@dataclass(frozen=True)
class Drawing:
    """A graph as boxes and arrows from inputs to results; a notebook displays it."""

    boxes: tuple[_Box, ...]
    arrows: tuple[tuple[int, int], ...]

    @property
    def dot(self) -> str:
        """Return the graph in Graphviz's DOT language."""
        lines = ["digraph {", '  node [shape=box, style="rounded,filled", fontname="Helvetica"];']
        for index, box in enumerate(self.boxes):
            label = (box.title + "\n" + box.note).strip().replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            lines.append(f'  n{index} [label="{label}", fillcolor="{_COLOURS[box.kind]}"];')
        lines += [f"  n{a} -> n{b};" for a, b in self.arrows]
        return "\n".join([*lines, "}"]) + "\n"

    @property
    def svg(self) -> str:
        """Return the graph as an SVG picture with the inputs at the top."""
        width, height, positions = self._layout()
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"',
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif" text-anchor="middle">',
            '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">',
            '<path d="M0,0 L7,3 L0,6 z" fill="#666"/></marker></defs>',
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        ]
        for a, b in self.arrows:
            (xa, ya, _), (xb, yb, _) = positions[a], positions[b]
            top, bottom = ya + _BOX_HEIGHT / 2, yb - _BOX_HEIGHT / 2
            middle = (top + bottom) / 2
            parts.append(
                f'<path d="M{xa:.1f},{top:.1f} C{xa:.1f},{middle:.1f} {xb:.1f},{middle:.1f} {xb:.1f},{bottom:.1f}" '
                'fill="none" stroke="#666" marker-end="url(#head)"/>'
            )
        for box, (x, y, w) in zip(self.boxes, positions, strict=True):
            parts.append(
                f'<rect x="{x - w / 2:.1f}" y="{y - _BOX_HEIGHT / 2:.1f}" width="{w:.1f}" height="{_BOX_HEIGHT}" '
                f'rx="5" fill="{_COLOURS[box.kind]}" stroke="#888"/>'
                f'<text x="{x:.1f}" y="{y - 2:.1f}" font-size="12" font-weight="bold">{html.escape(box.title)}</text>'
                f'<text x="{x:.1f}" y="{y + 12:.1f}" font-size="10" fill="#444">{html.escape(box.note)}</text>'
            )
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _layout(self) -> tuple[float, float, list[tuple[float, float, float]]]:
        """Return width, height, and (x, y, width) of every box: a row per distance from the inputs."""
        above: list[list[int]] = [[] for _ in self.boxes]
        below: list[list[int]] = [[] for _ in self.boxes]
        for a, b in self.arrows:
            above[b].append(a)
            below[a].append(b)
        row: list[int] = []
        for sources in above:
            row.append(max((row[s] + 1 for s in sources), default=0))
        for index, results in enumerate(below):
            if results and not above[index]:
                row[index] = min(row[b] for b in results) - 1
        widths = [max(len(box.title), len(box.note)) * _CHARACTER + 20 for box in self.boxes]
        rows: list[list[int]] = [[] for _ in range(max(row, default=0) + 1)]
        for index, r in enumerate(row):
            rows[r].append(index)
        total = max(sum(widths[i] + _GAP_X for i in r) for r in rows) + _GAP_X if self.boxes else 0.0
        positions = [(0.0, 0.0, 0.0)] * len(self.boxes)
        for r, members in enumerate(rows):
            # Each box is near the middle of its inputs, so that few arrows cross.
            members.sort(key=lambda i: sum(positions[s][0] for s in above[i]) / len(above[i]) if above[i] else 0.0)
            x = (total - sum(widths[i] + _GAP_X for i in members)) / 2 + _GAP_X / 2
            for i in members:
                positions[i] = (x + widths[i] / 2, _GAP_Y + r * (_BOX_HEIGHT + _GAP_Y), widths[i])
                x += widths[i] + _GAP_X
        return total, len(rows) * (_BOX_HEIGHT + _GAP_Y) + _GAP_Y, positions

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> Path:
        """Write the picture as SVG or DOT, by the suffix of the name; creates missing folders.

        Raises ValueError for another suffix.
        """
        path = Path(path)
        if path.suffix not in (".svg", ".dot"):
            raise ValueError(f"draw: cannot write {path.name!r}; the name must end in .svg or .dot")
        write_files.make_folder(path.parent, parents=True)
        write_files.write_bytes(path, (self.svg if path.suffix == ".svg" else self.dot).encode())
        return path


def draw(result: Tensor, names: Module | Mapping[str, Tensor] | None = None) -> Drawing:
    """Draw how `result` was computed, down to the leaves with a gradient; call it before backward().

    `names` labels the leaves: a Module (its parameters' names) or a dict from name to Tensor. The returned Drawing has
    `.dot`, `.svg` and `.save(path)`; a notebook displays it. Raises RuntimeError when nothing was recorded.
    """
    last = result._edge_node()
    if last is None:
        raise RuntimeError("draw: nothing was recorded for this tensor; set requires_grad=True on its inputs")
    named = () if names is None else names.items() if isinstance(names, Mapping) else names.named_parameters()
    labels = {id(tensor): name for name, tensor in named}
    nodes: set[Node] = set()
    stack = [last]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack.extend(edge[0] for edge in node.edges if edge is not None and isinstance(edge[0], Node))
    boxes: list[_Box] = []
    arrows: list[tuple[int, int]] = []
    number: dict[int, int] = {}
    # A node always comes after its inputs.
    for node in sorted(nodes, key=lambda n: n.sequence):
        sources = []
        for source in (edge[0] for edge in node.edges if edge is not None):
            if not isinstance(source, Node) and id(source) not in number:
                number[id(source)] = len(boxes)
                boxes.append(_Box(labels.get(id(source), source.name or "leaf"), _shape(source.data.shape), "leaf"))
            sources.append(number[id(source)])
        number[id(node)] = len(boxes)
        kind = "result" if node is last else "operation"
        boxes.append(_Box(_title(node), ", ".join(_shape(s) for s in node.outputs), kind))
        arrows += [(s, number[id(node)]) for s in sources]
    return Drawing(tuple(boxes), tuple(arrows))


def _title(node: Node) -> str:
    """Return the name of the operation, with the operations fused into its kernel."""
    act, added = (getattr(node.context, name, None) for name in ("act", "added"))
    act = act[0] if isinstance(act, tuple) else act
    return node.name + " + sum" * bool(added) + (f", {act}" if act else "")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
