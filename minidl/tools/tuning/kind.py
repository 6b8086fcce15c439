"""The kinds of problems of a family: a target, a dtype and the precision of float32 products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minidl.runtime import launch
from minidl.runtime.tile_tables import Table
from minidl.testing.specs import Case, Make
from minidl.tools.tuning.problem import Problem, Start, operation
from minidl.tools.tuning.space import CPU, PRODUCTS

Inputs = Callable[[Make], Case]
# Elements of a problem of rows: more than a GPU's L2 cache holds, few for the interpreter.
ELEMENTS, ELEMENTS_INTERPRETED = 2**25, 2**18


def target() -> str:
    """Return the target whose tables are tuned in this process."""
    return CPU if launch.COMPILED_CPU else launch.target()


def recorded(target: str) -> str | None:
    """Return the target that `launch.record` takes: None stands for the target of this process."""
    return None if target == CPU else target


def rules_of(table: Table, target: str) -> list[dict[str, Any]]:
    """Return the rules of a table; a table without rules for the CPU returns those that its plans use."""
    if target in table or target != CPU:
        return list(table[target])
    return [
        {name: value for name, value in rule.items() if name not in ("warps", "stages")}
        for rule in table[launch.target()]
    ]


class Kind(NamedTuple):
    """A family's table for a target, with a dtype and the precision of float32 products."""

    family: str
    target: str
    dtype: torch.dtype
    precision: str = "ieee"

    @property
    def small(self) -> bool:
        """Return whether problems run on a CPU."""
        return self.target in ("interpreted", CPU)

    def rest(self, size: int = 1) -> int:
        """Return the factor by which `size` gives the elements of a problem of rows."""
        return max(1, (ELEMENTS_INTERPRETED if self.small else ELEMENTS) // size)

    def extents(self, **usual: int) -> list[tuple[int, ...]]:
        """Return the sizes to tune at, in the order of `usual`.

        They are the sizes in each rule's conditions (the others from `usual`), `usual` itself, and twice the largest
        size that a rule holds up to.
        """
        conditions = [rule.get("when", {}) for rule in rules_of(launch.table(self.family), self.target)]
        sizes = [{name[:-4]: when[name] for name in when if name[-4:] in ("_max", "_min")} for when in conditions]
        largest = {name: 2 * max(size.get(name, 0) for size in sizes) for name in usual}
        all_sizes = (*sizes, {}, *({name: size} for name, size in largest.items() if size))
        return list(dict.fromkeys(tuple(size.get(name, usual[name]) for name in usual) for size in all_sizes))

    def problem(self, label: str, start: Start, inputs: Inputs, **options: Any) -> Problem:
        """Return the problem of calls that `start` makes from `inputs`."""
        name = f"{label} {str(self.dtype).removeprefix('torch.')}"
        name += f" {self.precision}" if self.precision != "ieee" else ""
        return Problem(name, self.dtype, inputs, start, self.precision, **options)

    def operation(self, label: str, spec: str, wrt: tuple[int, ...], inputs: Inputs) -> Problem:
        """Return the problem of a spec's operation, or of its gradients by the arguments at `wrt`."""
        return self.problem(label, operation(spec, wrt), inputs, spec=spec, wrt=wrt)


def kinds(family: str, target: str) -> list[Kind]:
    """Return the kinds of a family: float16 (bfloat16 uses its tiles), float32 by precision, and dtypes in rules."""
    rules = rules_of(launch.table(family), target)
    if not rules:
        return []
    if target in ("interpreted", CPU):
        return [Kind(family, target, torch.float32)]
    names = {name for rule in rules for name in rule.get("when", {}).get("dtype", ())}
    products = family in PRODUCTS or family.startswith(("conv_fft", "conv_split"))
    precisions = launch.PRECISIONS if products else ("ieee",)
    return [
        Kind(family, target, torch.float16),
        *(Kind(family, target, torch.float32, precision) for precision in precisions),
        *([Kind(family, target, torch.float64)] if "float64" in names else []),
        *([Kind(family, target, torch.float8_e4m3fn)] if "float8_e4m3fn" in names else []),
    ]
