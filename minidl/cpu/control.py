"""Control flow: loops and branches.

A number that changes is a variable of C, a block that changes two buffers, the old one and the new one. A block of
integers or pointers to which every turn of a loop adds the same stays an expression of the turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from minidl.cpu import operations
from minidl.cpu.translator import Handler, Translator
from minidl.cpu.ttir import Operation, Region, Type
from minidl.cpu.values import Value, c_type, name


class Variable:
    """A value that a loop or a branch changes: a variable of C, or two buffers that change roles."""

    def __init__(self, translator: Translator, element: str, shape: tuple[int, ...]) -> None:
        self.translator = translator
        if shape:
            self.value, self.next = (translator.memory(element, shape) for _ in range(2))
        else:
            self.value = name(translator.code.fresh("s"), element)
            translator.code.write(f"{c_type(element)} {self.value.data} = 0;")

    def set(self, value: Value) -> None:
        """Give the variable its first value."""
        if self.value.shape:
            self.translator.copy(value, self.value)
        else:
            self.translator.code.write(f"{self.value.data} = {self.translator.number(value)};")


def update(translator: Translator, variables: Sequence[Variable], values: Sequence[Value]) -> None:
    """Give variables new values, which may depend on all old ones."""
    code, numbers, swaps = translator.code, [], []
    for variable, value in zip(variables, values, strict=True):
        if value is variable.value:
            continue
        if variable.value.shape:
            translator.copy(value, variable.next)
            swaps.append((variable.value.data[0], variable.next.data[0]))
        else:
            new = code.assign(translator.number(value), value.element)
            numbers.append(f"{variable.value.data} = {new};")
    for line in numbers:
        code.write(line)
    for first, second in swaps:
        code.write(f"{{ void *t = {first}; {first} = {second}; {second} = t; }}")


def _for(translator: Translator, operation: Operation) -> list[Value]:
    code, region = translator.code, operation.regions[0]
    head = re.match(r"\s*(%[\w.$-]+) = (%\S+) to (%\S+) step (%[\w.$#-]+)", operation.text)
    if head is None:
        raise NotImplementedError("this form of scf.for")
    variable, *limits = head.groups()
    low, high, step = (translator.values[each] for each in limits)
    pairs = operation.carried
    counter, turn = code.fresh("k"), code.fresh("t")
    growth = {each: _growth(translator, region, each, i) for i, (each, _) in enumerate(pairs)}
    carried: dict[str, Variable] = {}
    for each, start in pairs:
        first = translator.values[start]
        if growth[each] is None:
            carried[each] = Variable(translator, first.element, first.shape)
            carried[each].set(first)
    kind = c_type(low.element)
    code.write(f"int64_t {turn} = 0;")
    begin, end, more = (translator.number(each) for each in (low, high, step))
    code.write(f"for ({kind} {counter} = {begin}; {counter} < {end}; {counter} += {more}, {turn}++) {{")

    def body() -> None:
        translator.values[variable] = name(counter, low.element)
        for each, start in pairs:
            if growth[each] is None:
                translator.values[each] = translator.owned(carried[each].value)
            else:
                translator.values[each] = _grown(translator.values[start], growth[each], turn)
        results = translator.block(region.operations)
        update(translator, list(carried.values()), [
            value for value, (each, _) in zip(results, pairs, strict=True) if each in carried
        ])  # fmt: skip

    translator.scoped(body)
    code.write("}")
    return [
        carried[each].value if each in carried else _grown(translator.values[start], growth[each], turn)
        for each, start in pairs
    ]


def _growth(translator: Translator, region: Region, argument: str, position: int) -> Value | None:
    """Return what each turn of a loop adds to a block of integers or pointers, if it is the same in all turns."""
    terminator = region.operations[-1]
    result = terminator.operands[position] if terminator.name == "scf.yield" else ""
    last = next((each for each in region.operations if result in each.results), None)
    if last is None or last.name not in ("arith.addi", "tt.addptr") or last.operands[0] != argument:
        return None
    return _invariant(translator, region, last.operands[1]) if Type.parse(last.types.split(", ")[0]).shape else None


def _invariant(translator: Translator, region: Region, value: str) -> Value | None:
    """Return a value that is the same in all turns of a loop, None for any other; it is computed before the loop."""
    if value not in translator.values:
        source = next((each for each in region.operations if value in each.results), None)
        if source is None or not (source.name == "tt.splat" or source.name.startswith("arith.")):
            return None
        if any(_invariant(translator, region, each) is None for each in source.operands):
            return None
        translator.values.update(zip(source.results, translator.operation(source), strict=True))
    return translator.values[value]


def _grown(start: Value, growth: Value | None, turn: str) -> Value:
    assert growth is not None
    kind = "i64" if start.element.startswith("ptr") else start.element
    args = growth, name(turn, "i64")
    turns = Value("compute", kind, growth.shape, args, lambda a, b: f"({c_type(kind)})({a} * {b})", "muli")
    operation = "tt.addptr" if start.element.startswith("ptr") else "arith.addi"
    form = operations.element_wise(operation, "", start.element, start.element)
    return Value("compute", start.element, start.shape, (start, turns), form, operation.partition(".")[2])


def _if(translator: Translator, operation: Operation) -> list[Value]:
    code = translator.code
    types = operation.result_types if operation.results else []
    variables = [Variable(translator, each.element, each.shape) for each in types]
    code.write(f"if ({translator.number(translator.values[operation.operands[0]])}) {{")

    def branch(region: Region) -> None:
        for variable, value in zip(variables, translator.block(region.operations), strict=True):
            variable.set(value)

    for i, region in enumerate(operation.regions):
        if i:
            code.write("} else {")
        translator.scoped(lambda region=region: branch(region))  # type: ignore[misc]
    code.write("}")
    return [variable.value for variable in variables]


def _while(translator: Translator, operation: Operation) -> list[Value]:
    code, (before, after) = translator.code, operation.regions
    pairs = operation.carried
    starts = [translator.values[start] for _, start in pairs]
    carried = [Variable(translator, each.element, each.shape) for each in starts]
    for variable, start in zip(carried, starts, strict=True):
        variable.set(start)
    results = [Variable(translator, kind.element, kind.shape) for kind in operation.result_types]
    code.write("while (1) {")

    def body() -> None:
        for (each, _), variable in zip(pairs, carried, strict=True):
            translator.values[each] = variable.value
        translator.block(before.operations[:-1])
        condition, *passed = (translator.values[each] for each in before.operations[-1].operands)
        code.write(f"if (!({translator.number(condition)})) {{")
        for variable, value in zip(results, passed, strict=True):
            variable.set(value)
        code.write("break; }")
        for (each, _), value in zip(after.arguments, passed, strict=True):
            translator.values[each] = value
        update(translator, carried, translator.block(after.operations))

    translator.scoped(body)
    code.write("}")
    return [variable.value for variable in results]


HANDLERS: dict[str, Handler] = {"scf.for": _for, "scf.if": _if, "scf.while": _while}
