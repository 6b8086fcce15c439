"""Find constants of a compiled float64 kernel that were rounded to float32.

Triton makes a Python number a float32 unless a tensor gives it another type: in `tl.where(m, 0.1, 0.2)`, and up to
Triton 3.7 also in `tl.maximum(x, 0.1)` and `x < 0.1`. It is rounded, and then widened to float64. A Python number that
a kernel takes as an argument is a float32, too. The interpreter rounds nothing, so no test on a CPU detects this.
`x * 0.1`, `tl.where(m, x, 0.1)` and `tl.full(shape, 0.1, dtype)` are exact.
"""

from __future__ import annotations

import math
import re
import struct

# Numbers with at most this many bits, from the first to the last that is set, are assumed to be intended, as 0.5 and
# 1000 are. Of numbers that were rounded to the 24 bits of a float32, one in 2^8 has as few.
MOST_INTENDED_BITS = 16
# 1e-12 rounded to float32: torch divides binary cross-entropy's gradient by at least this, also in float64.
INTENDED = {9.999999960041972e-13}
_CONSTANT = re.compile(
    r"(%[\w.$-]+) = arith\.constant (?:dense<)?([-+.\deE]+|0x[\dA-F]+)>? : (?:tensor<[\dx]+x)?(f32|f64)\b"
)
_NAME = re.compile(r"%[\w.$-]+")
_ARGUMENT = re.compile(r"(%[\w.$-]+): f32\b")


def rounded(ttir: str) -> list[str]:
    """Return the float32 numbers, and the names of float32 arguments, from which float64 values are computed."""
    sources: dict[str, None] = {}
    narrow: dict[str, str] = {}  # float32 values, with the number or argument they are computed from
    for line in ttir.splitlines():
        if "tt.func" in line:
            narrow = {name: name[1:] for name in _ARGUMENT.findall(line)}
            continue
        statement = line.partition(" loc(")[0]
        constant = _CONSTANT.search(statement)
        if constant is not None:
            name, text, kind = constant.groups()
            value = _value(text, kind)
            if _many_bits(value) and value not in INTENDED:
                if kind == "f64":  # the compiler widened the float32 already
                    sources[f"{value:.9g}"] = None
                else:
                    narrow[name] = f"{value:.9g}"
            continue
        target, _, operation = statement.partition(" = ")
        source = next((narrow[name] for name in _NAME.findall(operation) if name in narrow), None)
        if source is not None and "arith.extf" in operation and operation.endswith(("f64", "f64>")):
            sources[source] = None
        # A comparison has the type of its operands, but its result is no float32.
        elif source is not None and operation.endswith(("f32", "f32>")) and "arith.cmpf" not in operation:
            narrow[target.strip()] = source
    return list(sources)


def _value(text: str, kind: str) -> float:
    """Return the value of a constant, whose text is a decimal number or the bits in hexadecimal."""
    digits, letter = (16, "d") if kind == "f64" else (8, "f")
    packed = bytes.fromhex(text[2:].zfill(digits)) if text.startswith("0x") else struct.pack(f">{letter}", float(text))
    value: float = struct.unpack(f">{letter}", packed)[0]
    return value


def _many_bits(value: float) -> bool:
    """Return whether a value is a float32 of more than MOST_INTENDED_BITS bits."""
    if value == 0.0 or not math.isfinite(value):
        return False
    mantissa = int(math.ldexp(math.frexp(abs(value))[0], 53))
    bits = 53 - ((mantissa & -mantissa).bit_length() - 1)
    return MOST_INTENDED_BITS < bits <= 24
