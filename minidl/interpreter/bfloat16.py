"""Arithmetic of bfloat16 in Triton's interpreter, which stores 16 bits and computes with them as integers.

Operands are widened to float32, and a result is rounded to the nearest bfloat16. NaN keep their highest bits.
"""

import re

import triton.language as tl
from triton.runtime import interpreter

np = interpreter.np

_COMPUTING = re.compile(
    r"create_(f(add|sub|mul|div|rem|ma|cmp\w+)|precise_\w+|(min|max)\w+f|clampf|cos|sin|exp2?|log2?|r?sqrt|erf|floor"
    r"|ceil|dot)$"
)


def install() -> None:
    """Replace the functions of the interpreter that compute. Call once."""
    builder = interpreter.InterpreterBuilder
    for name in dir(builder):
        if _COMPUTING.match(name):
            setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.cast_impl = _from_any(builder.cast_impl)


def _in_float32(function):
    def compute(builder, *operands):
        if not any(map(_is_narrow, operands)):
            return function(builder, *operands)
        result = function(builder, *map(_widened, operands))
        return _narrowed(result.data) if result.data.dtype == np.float32 and _all_narrow(operands) else result

    return compute


def _from_any(cast):
    """Wrap `cast`, which converts bfloat16 only from and to float32."""

    def cast_impl(builder, operand, kind):
        other = operand.dtype.scalar not in (tl.float32, tl.bfloat16)
        if kind.scalar == tl.bfloat16 and other:
            return _narrowed(operand.data.astype(np.float32))
        return cast(builder, operand, kind)

    return cast_impl


def _is_narrow(operand):
    return isinstance(operand, interpreter.TensorHandle) and operand.dtype.scalar == tl.bfloat16


def _all_narrow(operands):
    return all(_is_narrow(each) for each in operands if isinstance(each, interpreter.TensorHandle))


def _widened(operand):
    if not _is_narrow(operand) or operand.data.dtype != np.uint16:
        return operand
    bits = operand.data.astype(np.uint32) << np.uint32(16)
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _narrowed(values):
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    nearest = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    upper = np.where(np.isnan(values), bits, nearest) >> np.uint32(16)
    return interpreter.TensorHandle(upper.astype(np.uint16), tl.bfloat16)
