"""Loads that need no memory: the loop that uses their elements loads them.

A load qualifies if each element is used once, by a chain of operations on elements that ends in a store or in the next
value of a loop, with no store in between. Its mask is that of the store, if it has one; the loads of a next value have
one mask. The store is by another parameter of the kernel, whose tensor must not overlap, or be the same with each
element at one address. minidl's kernels are launched so; those of others need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from minidl.cpu.ttir import Function, Operation

Body = Sequence[Operation]


def deferrable(function: Function, bodies: Sequence[Body], uses: Mapping[str, int]) -> set[str]:
    """Return the results of the loads that qualify in all bodies of a function."""
    root = _roots(bodies, {name for name, _ in function.parameters})
    return {load for body in bodies for load in _of_body(body, uses, root)}


def _roots(bodies: Sequence[Body], parameters: set[str]) -> Callable[[str], str]:
    """Return a function from a pointer to the parameter that it is computed from, "" if that is not known."""
    parents: dict[str, str] = {}
    loops: list[tuple[str, str, str]] = []  # of each value that a loop carries: its name, first and next value

    for operation in (operation for body in bodies for operation in body):
        if operation.name == "scf.for":
            pairs = operation.carried
            following = operation.regions[0].operations[-1].operands
            for (name, start), result, after in zip(pairs, operation.results, following, strict=bool(pairs)):
                parents |= {name: start, result: name}
                loops.append((name, start, after))
        elif not operation.regions and operation.operands:
            parents |= dict.fromkeys(operation.results, operation.operands[0])

    def root(value: str) -> str:
        seen = set()
        while value in parents and value not in seen:
            seen.add(value)
            value = parents[value]
        return value if value in parameters else ""

    while other := [name for name, start, after in loops if parents[name] and root(after) != root(start)]:
        parents |= dict.fromkeys(other, "")
    return root


def _of_body(body: Body, uses: Mapping[str, int], root: Callable[[str], str]) -> Iterator[str]:
    users = {operand: i for i, operation in enumerate(body) for operand in operation.operands}
    chains: dict[str, list[list[str]]] = {}  # operands and results of loads, by the value at the end of their chain
    for i, load in enumerate(body):
        if load.name == "tt.load" and load.result_types[-1].shape and (end := _end(body, i, users, uses)):
            pointer, mask, *_ = *load.operands, ""
            chains.setdefault(end, []).append([pointer, mask, *load.results])
    for end, loads in chains.items():
        if body[users[end]].name == "tt.store":
            to, _, mask = (*body[users[end]].operands, "")[:3]
            loads = [load for load in loads if load[1] in ("", mask) and "" != root(load[0]) != root(to) != ""]
        elif len({mask for _, mask, _ in loads}) > 1:
            continue
        yield from (load[2] for load in loads)


def _end(body: Body, start: int, users: Mapping[str, int], uses: Mapping[str, int]) -> str:
    """Return the value at the end of a load's chain, "" if the load does not qualify."""
    shape, value = body[start].result_types[-1].shape, body[start].results[0]
    while uses.get(value) == 1 and value in users:
        user = body[users[value]]
        if user.name == "scf.yield" or (user.name == "tt.store" and user.operands[1] == value):
            between = " ".join(each.name for each in body[start + 1 : users[value]])
            return "" if any(word in between for word in ("scf.", "store", "atomic")) else value
        if not user.name.startswith(("arith.", "math.")) or user.result_types[-1].shape != shape:
            return ""
        value = user.results[0]
    return ""
