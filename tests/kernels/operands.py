"""What Triton's interpreter makes of operators and operands of all kinds; as a script, without our short ways."""

import itertools
import json
import operator

OPERATORS = (
    "add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor", "floordiv", "mod",
)  # fmt: skip
DTYPES = (
    "float16", "float32", "float64", "int1", "int8", "int32", "int64", "uint8", "uint32", "uint64", "bfloat16",
)  # fmt: skip
NUMBERS = (0, -2, 2**40, -(2**63), -0.0, 0.1, 65520.0, 1e-40, 1e300, float("inf"), float("nan"), True)
SHAPES = ((), (1,), (4,), (4, 1), (1, 2), (4, 2))


def outcomes():
    """(label, type and bytes of the result, or the kind of its error) for every combination."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def tensor(name, shape, first=1):
        element = getattr(tl, name)
        kind = np.dtype(interpreter._get_np_dtype(element))
        bits = np.random.default_rng(first).integers(0, 2 if name == "int1" else 256, (*shape, kind.itemsize), np.uint8)
        data = bits.view(kind).reshape(shape or (1,))
        return tl.tensor(
            interpreter.TensorHandle(data, element), tl.block_type(element, list(shape)) if shape else element
        )

    def outcome(operation, *operands):
        try:
            with np.errstate(all="ignore"):
                result = operation(*operands)
            data = np.ascontiguousarray(result.handle.data)
            sizes = [int(getattr(size, "value", size)) for size in result.shape]
            return [
                str(result.type),
                str(result.dtype),
                sizes,
                str(result.handle.dtype),
                str(data.dtype),
                data.tobytes().hex(),
            ]
        except Exception as error:  # noqa: BLE001 (whichever it is, both interpreters must raise it)
            return type(error).__name__

    for name, (one, other) in itertools.product(OPERATORS, itertools.product(DTYPES, repeat=2)):
        operation = getattr(operator, name)
        for shapes in ((SHAPES[5], SHAPES[5]), (SHAPES[3], SHAPES[4]), (SHAPES[0], SHAPES[2]), (SHAPES[4], SHAPES[1])):
            operands = tensor(one, shapes[0]), tensor(other, shapes[1], 2)
            yield f"{name} {one} {shapes[0]} {other} {shapes[1]}", outcome(operation, *operands)
    for name, dtype, number, shape in itertools.product(OPERATORS, DTYPES, NUMBERS, SHAPES[::3]):
        operation = getattr(operator, name)
        # Twice, since the first makes what the second finds; the second time as a constant of a kernel.
        for turn, value in enumerate((number, tl.constexpr(number))):
            yield f"{name} {dtype} {shape} {number!r} {turn}", outcome(operation, tensor(dtype, shape), value)
            yield f"{number!r} {turn} {name} {dtype} {shape}", outcome(operation, value, tensor(dtype, shape))
    for pointee, offsets in itertools.product(("float16", "int1", "int64"), DTYPES):
        for shapes in itertools.product(SHAPES, repeat=2):
            pointers = tensor("uint64", shapes[0])
            kind = tl.pointer_type(getattr(tl, pointee))
            handle = interpreter.TensorHandle(pointers.handle.data, kind)
            pointers = tl.tensor(handle, tl.block_type(kind, list(shapes[0])) if shapes[0] else kind)
            label = f"{pointee}* {shapes[0]} + {offsets} {shapes[1]}"
            yield label, outcome(operator.add, pointers, tensor(offsets, shapes[1], 2))


if __name__ == "__main__":
    from minidl.interpreter import operators

    operators.install = lambda: None
    from minidl.runtime import launch

    assert launch.INTERPRETED
    print(json.dumps(dict(outcomes())))
