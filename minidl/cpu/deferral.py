"""Loads that need no memory: the loop that uses their elements loads them.

A load qualifies if each element is used once, by a chain of operations on elements that ends in a store or in the next
value of a loop, with no store in between. Its mask is that of the store, if it has one; the loads of a next value have
one mask. If the store writes to the tensor that is loaded, it is at the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minidl.cpu.ttir import Operation


def deferrable(body: Sequence[Operation], uses: Mapping[str, int]) -> set[str]:
    """Return the results of the loads of a body that qualify."""
    users = {operand: i for i, operation in enumerate(body) for operand in operation.operands}
    makers = {result: operation for operation in body for result in operation.results}
    chains: dict[str, list[list[str]]] = {}  # operands and results of loads, by the value at the end of their chain
    for i, load in enumerate(body):
        if load.name == "tt.load" and load.result_types[-1].is_tensor and (end := _end(body, i, users, uses)):
            pointer, mask, *_ = *load.operands, ""
            chains.setdefault(end, []).append([pointer, mask, *load.results])
    result = set()
    for end, loads in chains.items():
        if body[users[end]].name == "tt.store":
            to, _, mask = (*body[users[end]].operands, "")[:3]
            loads = [
                load for load in loads
                if load[1] in ("", mask) and (load[0] == to or _root(load[0], makers) != _root(to, makers))
            ]  # fmt: skip
        elif len({mask for _, mask, _ in loads}) > 1:
            continue
        result |= {load[2] for load in loads}
    return result


def _end(body: Sequence[Operation], start: int, users: Mapping[str, int], uses: Mapping[str, int]) -> str:
    """Return the value at the end of a load's chain, "" if the load does not qualify."""
    shape, value = body[start].result_types[-1].shape, body[start].results[0]
    while uses.get(value) == 1 and value in users:
        user = body[users[value]]
        if user.name == "scf.yield" or (user.name == "tt.store" and user.operands[1] == value):
            names = {each.name for each in body[start + 1 : users[value]]}
            return (
                "" if any(name.startswith("scf.") or "store" in name or "atomic" in name for name in names) else value
            )
        if not user.name.startswith(("arith.", "math.")) or user.result_types[-1].shape != shape:
            return ""
        value = user.results[0]
    return ""


def _root(value: str, makers: Mapping[str, Operation]) -> str:
    """Return the value, of a parameter or from outside of the body, that a pointer is computed from."""
    while value in makers and makers[value].operands:
        value = makers[value].operands[0]
    return value
