"""Constants of a compiled float64 kernel that were float32 on their way.

To Triton a Python number is a float32 where it does not meet a tensor of another type: in `tl.where(m, 0.1, 0.2)`, and
up to 3.7 also in `tl.maximum(x, 0.1)` and `x < 0.1`. It is rounded, and then widened to the float64 that it meets. The
interpreter rounds nothing, so no test on a CPU sees it. `x * 0.1`, `tl.where(m, x, 0.1)` and `tl.full(shape, 0.1,
dtype)` are exact.
"""

from __future__ import annotations

import math
import re
import struct

# The number of bits from the first to the last that is set. A number that is meant has few; of those rounded to the 24
# of a float32, one in 2^8 has as few.
BITS = 16
# The smallest divisor of binary cross-entropy's gradient is torch's, which is a float32 in float64, too.
MEANT = {9.999999960041972e-13}
_CONSTANT = re.compile(
    r"(%[\w.$-]+) = arith\.constant (?:dense<)?([-+.\deE]+|0x[\dA-F]+)>? : (?:tensor<[\dx]+x)?(f32|f64)\b"
)
_NAME = re.compile(r"%[\w.$-]+")
_ARGUMENT = re.compile(r"(%[\w.$-]+): f32\b")


def rounded(ttir: str) -> list[str]:
    """What float64 values of a kernel are computed with: numbers that are float32, and names of such arguments."""
    found: dict[str, None] = {}
    narrow: dict[str, str] = {}  # float32 values, and what they are computed of
    for located in ttir.splitlines():
        if "tt.func" in located:
            narrow = {name: name[1:] for name in _ARGUMENT.findall(located)}
            continue
        line = located.partition(" loc(")[0]
        constant = _CONSTANT.search(line)
        if constant is not None:
            name, written, kind = constant.groups()
            value = _value(written, kind)
            if _many_bits(value) and value not in MEANT:
                if kind == "f64":
                    found[f"{value:.9g}"] = None
                else:
                    narrow[name] = f"{value:.9g}"
            continue
        made, _, computed = line.partition(" = ")
        of = next((narrow[name] for name in _NAME.findall(computed) if name in narrow), None)
        if of is not None and "arith.extf" in computed and computed.endswith(("f64", "f64>")):
            found[of] = None
        elif of is not None and computed.endswith(("f32", "f32>")):
            narrow[made.strip()] = of
    return list(found)


def _value(written: str, kind: str) -> float:
    size, letter = (16, "d") if kind == "f64" else (8, "f")
    packed = (
        bytes.fromhex(written[2:].zfill(size))
        if written.startswith("0x")
        else struct.pack(f">{letter}", float(written))
    )
    value: float = struct.unpack(f">{letter}", packed)[0]
    return value


def _many_bits(value: float) -> bool:
    """Whether this is a float32 of more than BITS."""
    if not math.isfinite(value):
        return False
    whole = int(math.ldexp(math.frexp(abs(value))[0], 53))
    bits = 53 - ((whole & -whole).bit_length() - 1)
    return BITS < bits <= 24
