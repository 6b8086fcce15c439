"""Operations on blocks: loads and stores, shapes and products."""

from __future__ import annotations

import re

from minidl.cpu import operations, products
from minidl.cpu.translator import Handler, Translator
from minidl.cpu.ttir import Operation, Type
from minidl.cpu.values import ZERO, Index, Indices, Value, buffer, c_type, constant, contiguous, linear, name


def _constant(translator: Translator, operation: Operation) -> list[Value]:
    kind = (operation.result_types or [Type("i1")])[0]
    match = re.match(r"\s*(?:dense<([^\[>]+)>|([^\s{]+))", operation.text)
    if match is None:
        raise NotImplementedError("a constant of several numbers")
    text = operations.literal((match[1] or match[2]).strip(), kind.element)
    return [constant(text, kind.element, kind.shape)]


def _program(translator: Translator, operation: Operation) -> list[Value]:
    return [name(f"{'i' if 'id' in operation.name else 'n'}{operation.text.strip()[0]}", "i32")]


def _range(translator: Translator, operation: Operation) -> list[Value]:
    return [Value("range", "i32", operation.result_types[0].shape, data=operation.integer("start"))]


def _splat(translator: Translator, operation: Operation) -> list[Value]:
    value, kind = translator.values[operation.operands[0]], operation.result_types[-1]
    result = value.viewed(kind.shape, lambda at: (ZERO,) * len(value.shape))
    return [result if kind.shape else translator.variable(result)]


def _expand(translator: Translator, operation: Operation) -> list[Value]:
    value, axis = translator.values[operation.operands[0]], operation.integer("axis")
    return [value.viewed(operation.result_types[-1].shape, lambda at: at[:axis] + at[axis + 1 :])]


def _broadcast(translator: Translator, operation: Operation) -> list[Value]:
    value = translator.values[operation.operands[0]]

    def at_ones(at: Indices) -> Indices:
        return tuple(ZERO if size == 1 else index for index, size in zip(at, value.shape, strict=True))

    return [value.viewed(operation.result_types[-1].shape, at_ones)]


def _transpose(translator: Translator, operation: Operation) -> list[Value]:
    value = translator.values[operation.operands[0]]
    match = re.search(r"order = array<i32: ([\d, ]+)>", operation.text)
    order = [int(part) for part in match[1].split(",")] if match else list(reversed(range(len(value.shape))))
    inverse = [order.index(d) for d in range(len(order))]
    return [value.viewed(operation.result_types[-1].shape, lambda at: tuple(at[d] for d in inverse))]


def _reshape(translator: Translator, operation: Operation) -> list[Value]:
    value, shape = translator.values[operation.operands[0]], operation.result_types[-1].shape
    if sum(size > 1 for size in value.shape) <= 1:
        strides = contiguous(shape)
        return [
            value.viewed(shape, lambda at: tuple(linear(at, strides) if size > 1 else ZERO for size in value.shape))
        ]
    if [size for size in value.shape if size > 1] == [size for size in shape if size > 1]:
        return [value.viewed(shape, lambda at: _spread(at, shape, value.shape))]
    block = translator.force(value)
    if block.data[1] != contiguous(block.shape):
        source, block = block, translator.memory(value.element, value.shape)
        translator.copy(source, block)
    return [buffer(block.data[0], value.element, shape, contiguous(shape))]


def _spread(at: Indices, shape: tuple[int, ...], target: tuple[int, ...]) -> Indices:
    """Return the indices of dimensions above 1 in the dimensions above 1 of `target`."""
    rest = iter([index for index, size in zip(at, shape, strict=True) if size > 1])
    return tuple(next(rest) if size > 1 else ZERO for size in target)


def _split(translator: Translator, operation: Operation) -> list[Value]:
    value, shape = translator.values[operation.operands[0]], operation.result_types[-1].shape
    return [value.viewed(shape, lambda at, i=i: (*at, Index(constant=i))) for i in range(2)]  # type: ignore[misc]


def _join(translator: Translator, operation: Operation) -> list[Value]:
    first, second = (translator.values[each] for each in operation.operands)
    return [Value("join", first.element, operation.result_types[-1].shape, (first, second))]


def _gather(translator: Translator, operation: Operation) -> list[Value]:
    value, index = (translator.values[each] for each in operation.operands)
    if len(value.shape) > 1:
        raise NotImplementedError("tt.gather of several dimensions")
    memory, (stride,) = translator.force(value).data
    target = translator.memory(value.element, index.shape)
    translator.nest(
        index.shape, lambda nest, at: nest.assign(target, at, f"{memory}[{nest.value(index, at)} * {stride}]")
    )
    return [translator.owned(target)]


def _load(translator: Translator, operation: Operation) -> list[Value]:
    pointer, *rest = (translator.values[each] for each in operation.operands)
    mask, other = (*rest, None, None)[:2]
    element = pointer.element[4:-1]
    if not operation.types.strip().startswith("tensor<"):
        return [translator.scalar(element, lambda nest, at: nest.load(pointer, mask, other, at))]
    if operation.results[0] in translator.deferred:
        return [Value("load", element, pointer.shape, data=(pointer, mask, other))]
    target = translator.memory(element, pointer.shape)
    translator.nest(
        pointer.shape, lambda nest, at: nest.assign(target, at, nest.load(pointer, mask, other, at)), [pointer]
    )
    return [translator.owned(target)]


def _store(translator: Translator, operation: Operation) -> list[Value]:
    pointer, value, *rest = (translator.values[each] for each in operation.operands)
    mask = rest[0] if rest else None
    pointers = [pointer, *value.pointers()]
    translator.nest(pointer.shape, lambda nest, at: nest.store(pointer, nest.value(value, at), mask, at), pointers)
    return []


def _dot(translator: Translator, operation: Operation) -> list[Value]:
    left, right, total = (translator.values[each] for each in operation.operands[:3])
    element = total.element
    if element not in ("f32", "f64"):
        raise NotImplementedError(f"tt.dot with sums in {element}")
    *batch, rows, depth = left.shape
    columns = right.shape[-1]
    a, b = (_as(translator, each, element) for each in (left, right))
    if b.data[1][-1] != 1:
        packed = translator.memory(element, b.shape)
        translator.copy(b, packed)
        b = packed
    result = total
    if not translator.is_last_use(operation.operands[2], total):
        result = translator.memory(element, total.shape)
        translator.copy(total, result)
    function = products.function(translator.products, element, rows, columns)
    loop = f"for (int z = 0; z < {batch[0]}; z++) " if batch else ""
    *_, am, ak = a.data[1]
    *_, bk, _ = b.data[1]
    matrices = [f"{each.data[0]} + z * {each.data[1][0]}" if batch else each.data[0] for each in (a, b, result)]
    translator.code.write(f"{loop}{function}({depth}, {matrices[0]}, {am}, {ak}, {matrices[1]}, {bk}, {matrices[2]});")
    return [translator.owned(result)]


def _as(translator: Translator, value: Value, element: str) -> Value:
    """Return a block in memory as float or double."""
    if value.kind == "view":
        value = _strided(value) or value
    if c_type(value.element) == c_type(element):
        return translator.force(value)
    converted = Value("compute", element, value.shape, (value,), lambda a: f"({c_type(element)}){a}", "convert")
    return translator.force(converted)


def _strided(value: Value) -> Value | None:
    """Return a view of a buffer as a buffer with other strides, None if it is none."""
    source = _strided(value.args[0]) if value.args[0].kind == "view" else value.args[0]
    if source is None or source.kind != "buffer":
        return None
    memory, strides = source.data
    at = tuple(Index(((f"?{d}", 1),)) for d in range(len(value.shape)))
    index = linear(value.data(at), strides)
    if index.constant:
        return None
    return buffer(memory, value.element, value.shape, tuple(index.factor(f"?{d}") for d in range(len(value.shape))))


def _assembly(translator: Translator, operation: Operation) -> list[Value]:
    if "griddepcontrol" in operation.text:
        return [constant("0", operation.result_types[0].element)]
    if '"mov.b32 $0, $1;"' in operation.text:
        return [translator.values[operation.operands[0]]]
    raise NotImplementedError("this inline assembly")


HANDLERS: dict[str, Handler] = {
    "arith.constant": _constant, "tt.get_program_id": _program, "tt.get_num_programs": _program,
    "tt.make_range": _range, "tt.splat": _splat, "tt.unsplat": _splat, "tt.expand_dims": _expand,
    "tt.broadcast": _broadcast, "tt.trans": _transpose, "tt.reshape": _reshape, "tt.split": _split, "tt.join": _join,
    "tt.gather": _gather, "tt.load": _load, "tt.store": _store, "tt.dot": _dot, "tt.elementwise_inline_asm": _assembly,
}  # fmt: skip
