"""Reductions and scans.

A reduction folds a block in two until one element is left, so its order, and with it every bit, depends on the size of
the block alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidl.cpu.loops import Nest
from minidl.cpu.ttir import Operation
from minidl.cpu.values import ZERO, Index, Indices, Value, buffer, c_type, linear, name, size_of

if TYPE_CHECKING:
    from minidl.cpu.translate import Translator


def number(translator: Translator, value: Value) -> Value:
    """Return a value of no dimensions in a variable."""
    variable = translator.code.fresh("s")
    translator.code.write(f"{c_type(value.element)} {variable};")
    translator.nest((), lambda nest, at: nest.write(f"{variable} = {nest.value(value, ())};"))
    return name(variable, value.element)


def _combine(translator: Translator, operation: Operation, left: list[str], right: list[str]) -> list[str]:
    """Write the region of a reduction for two elements; return C for the results."""
    region = operation.regions[0]
    elements = [kind.element for _, kind in region.arguments]
    for (each, _), text, element in zip(region.arguments, left + right, elements, strict=True):
        translator.values[each] = name(text, element)
    return [translator.number(value) for value in translator.block(region.operations)]


def reduce(translator: Translator, operation: Operation) -> list[Value]:
    args = [translator.get(each) for each in operation.operands[: len(operation.results)]]
    axis, shape = operation.integer("axis"), args[0].shape
    n = shape[axis]
    result = shape[:axis] + shape[axis + 1 :]
    if n == 1:
        return [
            _result(translator, each.viewed(result, lambda at: (*at[:axis], ZERO, *at[axis:])), result) for each in args
        ]
    half = (*shape[:axis], n // 2, *shape[axis + 1 :])
    memory = [translator.memory(each.element, half) for each in args]
    shift = Index(constant=n // 2)

    def fold(nest: Nest, at: Indices) -> None:
        other = (*at[:axis], at[axis].plus(shift), *at[axis + 1 :])
        left = [nest.value(each, at) for each in args]
        right = [nest.value(each, other) for each in args]
        _write(translator, nest, operation, memory, at, left, right)

    translator.nest(half, fold)
    _fold(translator, operation, memory, half, axis)
    strides = memory[0].data[1]
    rest = strides[:axis] + strides[axis + 1 :]
    return [_result(translator, buffer(each.data[0], each.element, result, rest), result) for each in memory]


def _result(translator: Translator, value: Value, shape: tuple[int, ...]) -> Value:
    return value if shape else number(translator, value)


def _write(
    translator: Translator, nest: Nest, operation: Operation, memory: list[Value], at: Indices,
    left: list[str], right: list[str],
) -> None:  # fmt: skip
    outer, translator.code.lines = translator.code.lines, nest.levels[-1]
    results = _combine(translator, operation, left, right)
    for each, text in zip(memory, results, strict=True):
        name_, strides = each.data
        translator.code.write(f"{name_}[{linear(at, strides)}] = {text};")
    translator.code.lines = outer


def _fold(translator: Translator, operation: Operation, memory: list[Value], shape: tuple[int, ...], axis: int) -> None:
    """Fold the buffers along an axis until one element is left."""
    code, n, inner = translator.code, shape[axis], size_of(shape[axis + 1 :])
    if n == 1:
        return
    o, h, i = (code.fresh(each) for each in "ohi")
    code.write(f"for (int {o} = 0; {o} < {size_of(shape[:axis])}; {o}++)")
    code.write(f"for (int {h} = {n // 2 * inner}; {h} >= {inner}; {h} >>= 1) {{")
    code.write("#pragma GCC ivdep")
    code.write(f"for (int {i} = 0; {i} < {h}; {i}++) {{")
    at = f"{o} * {n * inner} + {i}"
    left = [code.assign(f"{each.data[0]}[{at}]", each.element) for each in memory]
    right = [code.assign(f"{each.data[0]}[{at} + {h}]", each.element) for each in memory]
    for each, text in zip(memory, _combine(translator, operation, left, right), strict=True):
        code.write(f"{each.data[0]}[{at}] = {text};")
    code.write("}")
    code.write("}")


def scan(translator: Translator, operation: Operation) -> list[Value]:
    args = [translator.get(each) for each in operation.operands[: len(operation.results)]]
    axis, shape, code = operation.integer("axis"), args[0].shape, translator.code
    memory = [translator.memory(each.element, shape) for each in args]
    for value, target in zip(args, memory, strict=True):
        translator.copy(value, target)
    n, inner = shape[axis], size_of(shape[axis + 1 :])
    o, k, i = (code.fresh(each) for each in "oki")
    code.write(f"for (int {o} = 0; {o} < {size_of(shape[:axis])}; {o}++)")
    is_reversed = "reverse = true" in operation.text
    steps = f"{k} = {n - 2}; {k} >= 0; {k}--" if is_reversed else f"{k} = 1; {k} < {n}; {k}++"
    code.write(f"for (int {steps}) {{")
    code.write("#pragma GCC ivdep")
    code.write(f"for (int {i} = 0; {i} < {inner}; {i}++) {{")
    at = f"({o} * {n} + {k}) * {inner} + {i}"
    before = f"{at} + {inner}" if is_reversed else f"{at} - {inner}"
    left = [code.assign(f"{each.data[0]}[{before}]", each.element) for each in memory]
    right = [code.assign(f"{each.data[0]}[{at}]", each.element) for each in memory]
    for each, text in zip(memory, _combine(translator, operation, left, right), strict=True):
        code.write(f"{each.data[0]}[{at}] = {text};")
    code.write("}")
    code.write("}")
    return memory
