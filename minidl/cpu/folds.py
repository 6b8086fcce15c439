"""Reductions and scans.

A reduction folds a block in two until one element is left, so its order, and with it every bit, depends on the size of
the block alone.
"""

from __future__ import annotations

from minidl.cpu.loops import Nest
from minidl.cpu.translator import Handler, Translator
from minidl.cpu.ttir import Operation
from minidl.cpu.values import ZERO, Index, Indices, Value, buffer, name, size_of


def _combine(translator: Translator, operation: Operation, left: list[str], right: list[str]) -> list[str]:
    """Write the region of a reduction for two elements; return C for the results."""
    region = operation.regions[0]
    for (each, kind), text in zip(region.arguments, left + right, strict=True):
        translator.values[each] = name(text, kind.element)
    return [translator.number(value) for value in translator.block(region.operations)]


def _reduce(translator: Translator, operation: Operation) -> list[Value]:
    args = [translator.values[each] for each in operation.operands[: len(operation.results)]]
    axis, shape = operation.integer("axis"), args[0].shape
    n, result = shape[axis], shape[:axis] + shape[axis + 1 :]
    if n == 1:
        values = [each.viewed(result, lambda at: (*at[:axis], ZERO, *at[axis:])) for each in args]
        return values if result else list(map(translator.variable, values))
    half = (*shape[:axis], n // 2, *shape[axis + 1 :])
    memory = [translator.memory(each.element, half) for each in args]
    shift = Index(constant=n // 2)

    def fold(nest: Nest, at: Indices) -> None:
        other = (*at[:axis], at[axis].plus(shift), *at[axis + 1 :])
        left = [nest.value(each, at) for each in args]
        right = [nest.value(each, other) for each in args]
        outer, translator.code.lines = translator.code.lines, nest.levels[-1]
        for each, text in zip(memory, _combine(translator, operation, left, right), strict=True):
            nest.assign(each, at, text)
        translator.code.lines = outer

    translator.nest(half, fold)
    inner = size_of(shape[axis + 1 :])
    if n > 2:
        o, h, i = (translator.code.fresh(each) for each in "ohi")
        translator.code.write(f"for (int {o} = 0; {o} < {size_of(shape[:axis])}; {o}++)")
        translator.code.write(f"for (int {h} = {n // 4 * inner}; {h} >= {inner}; {h} >>= 1) {{")
        at = f"{o} * {n // 2 * inner} + {i}"
        _run(translator, operation, memory, f"{i} = 0; {i} < {h}; {i}++", (at, f"{at} + {h}", at))
    strides = memory[0].data[1]
    rest = strides[:axis] + strides[axis + 1 :]
    values = [buffer(each.data[0], each.element, result, rest) for each in memory]
    return values if result else list(map(translator.variable, values))


def _scan(translator: Translator, operation: Operation) -> list[Value]:
    args = [translator.values[each] for each in operation.operands[: len(operation.results)]]
    axis, shape = operation.integer("axis"), args[0].shape
    memory = [translator.memory(each.element, shape) for each in args]
    for value, target in zip(args, memory, strict=True):
        translator.copy(value, target)
    n, inner = shape[axis], size_of(shape[axis + 1 :])
    o, k, i = (translator.code.fresh(each) for each in "oki")
    is_reversed = "reverse = true" in operation.text
    steps = f"{k} = {n - 2}; {k} >= 0; {k}--" if is_reversed else f"{k} = 1; {k} < {n}; {k}++"
    translator.code.write(f"for (int {o} = 0; {o} < {size_of(shape[:axis])}; {o}++)")
    translator.code.write(f"for (int {steps}) {{")
    at = f"({o} * {n} + {k}) * {inner} + {i}"
    before = f"{at} {'+' if is_reversed else '-'} {inner}"
    _run(translator, operation, memory, f"{i} = 0; {i} < {inner}; {i}++", (before, at, at))
    return memory


def _run(
    translator: Translator, operation: Operation, memory: list[Value], loop: str, at: tuple[str, str, str]
) -> None:
    """Write a loop, the inner one of two, that combines the elements at two indices into a third."""
    code = translator.code
    code.write("#pragma GCC ivdep")
    code.write(f"for (int {loop}) {{")
    left, right = ([code.assign(f"{each.data[0]}[{one}]", each.element) for each in memory] for one in at[:2])
    for each, text in zip(memory, _combine(translator, operation, left, right), strict=True):
        code.write(f"{each.data[0]}[{at[2]}] = {text};")
    code.write("}")
    code.write("}")


HANDLERS: dict[str, Handler] = {"tt.reduce": _reduce, "tt.scan": _scan}
