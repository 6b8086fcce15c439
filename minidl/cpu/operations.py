"""Operations on elements: TTIR's name -> C, for the types of its operands.

Integers wrap: sums and products are computed without sign. Floating-point values of 16 bits are floats that are rounded
after each operation.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

from minidl.cpu.values import bytes_of, c_type

_SYMBOLS = {
    "addf": "+", "subf": "-", "mulf": "*", "divf": "/", "addi": "+", "subi": "-", "muli": "*", "andi": "&", "ori": "|",
    "xori": "^", "shli": "<<", "shrui": ">>", "divui": "/", "remui": "%",
}  # fmt: skip
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_FLOATS = ("f32", "f64", "f16", "bf16")
# Functions of libm by their names in TTIR.
_LIBM = {"absf": "fabs", "roundeven": "rint", "powf": "pow"}
_SAME = "acos asin atan atan2 cbrt ceil copysign cos cosh erf exp exp2 expm1 floor fma log log10 log1p log2 round sin"
_LIBM |= {name: name for name in f"{_SAME} sinh sqrt tan tanh trunc".split()}
_OURS = {"exp", "exp2", "log", "log2"}  # of prelude.h, for float

Format = Callable[..., str]


def element_wise(operation: str, text: str, source: str, target: str) -> Format | None:
    """Return C for an operation on elements, None if it is none of these.

    `text` is the operation's text, `source` the element type of its first operand, `target` that of its result.
    """
    dialect, _, name = operation.partition(".")
    if operation in ("tt.precise_divf", "tt.precise_sqrt"):
        dialect, name = ("arith", "divf") if name.endswith("divf") else ("math", "sqrt")
    if dialect == "arith":
        return _arithmetic(name, text, source, target)
    if dialect == "math":
        return _function(name, target)
    if operation == "tt.mulhiui":
        wide, bits = ("uint64_t", 32) if target == "i32" else ("unsigned __int128", 64)
        return lambda a, b: f"({c_type(target)})(({wide})(u{c_type(target)}){a} * (u{c_type(target)}){b} >> {bits})"
    if operation == "tt.bitcast":
        return _bitcast(source, target)
    if operation in ("tt.int_to_ptr", "tt.ptr_to_int"):
        return lambda a: f"({c_type(target)}){a}"
    if operation == "tt.addptr":
        size = bytes_of(target[4:-1])
        return lambda a, b: f"{a} + (int64_t){b} * {size}"
    return None


def _arithmetic(name: str, text: str, source: str, target: str) -> Format | None:
    if name == "select":
        return lambda c, a, b: chosen(c, a, b, target)
    if name in ("cmpf", "cmpi"):
        return _comparison(text.split(",")[0].strip(), source, name == "cmpf")
    if name in ("maxnumf", "maximumf", "minnumf", "minimumf"):
        sign = ">" if name.startswith("max") else "<"
        if name.endswith("imumf"):  # NaN if one is NaN
            return lambda a, b: chosen(f"({a} {sign} {b}) | ({a} != {a})", a, b, target)
        return lambda a, b: chosen(f"({a} {sign} {b}) | ({b} != {b})", a, b, target)
    if name in ("maxsi", "minsi", "maxui", "minui"):
        kind = "" if name.endswith("si") else f"(u{c_type(target)})"
        sign = ">" if name.startswith("max") else "<"
        return lambda a, b: f"{kind}{a} {sign} {kind}{b} ? {a} : {b}"
    if name == "negf":
        return lambda a: f"-{a}"
    if name in ("divsi", "remsi"):
        wide = "i64" if source == "i64" else "i32"
        return lambda a, b: f"{name[:3]}_{wide}({a}, {b})"
    if name == "shrsi":
        return lambda a, b: f"{a} >> {b}"
    if name in ("divui", "remui"):
        return lambda a, b: f"{b} == 0 ? 0 : {_binary(_SYMBOLS[name], target)(a, b)}"
    if name in _SYMBOLS:
        return _binary(_SYMBOLS[name], target)
    if name in ("extf", "truncf", "sitofp", "uitofp", "extsi", "extui", "trunci", "fptosi", "fptoui"):
        return _conversion(name, source, target)
    return None


def _binary(symbol: str, target: str) -> Format:
    if target in _FLOATS:
        return lambda a, b: rounded(f"{a} {symbol} {b}", target)
    kind = c_type(target)
    if symbol in "&|^":
        return lambda a, b: f"{a} {symbol} {b}"
    if symbol in ("<<", ">>"):
        return lambda a, b: f"({kind})((u{kind}){a} {symbol} {b})"
    return lambda a, b: f"({kind})((u{kind}){a} {symbol} (u{kind}){b})"


def _comparison(predicate: str, source: str, floating: bool) -> Format:
    if predicate in ("eq", "ne"):
        return lambda a, b: f"{a} {_COMPARISONS[predicate]} {b}"
    kind, symbol = predicate[0], _COMPARISONS.get(predicate[1:])
    if not floating:
        cast = "" if kind == "s" else f"(u{c_type(source)})"
        return lambda a, b: f"{cast}{a} {symbol} {cast}{b}"
    if predicate in ("ord", "uno"):
        return lambda a, b: f"({a} == {a}) & ({b} == {b})" if kind == "o" else f"({a} != {a}) | ({b} != {b})"
    if predicate == "one":
        return lambda a, b: f"({a} < {b}) | ({a} > {b})"
    if predicate == "ueq":
        return lambda a, b: f"!(({a} < {b}) | ({a} > {b}))"
    if kind == "o" or predicate == "une":
        return lambda a, b: f"{a} {symbol} {b}"
    opposite = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}[symbol or ""]
    return lambda a, b: f"!({a} {opposite} {b})"


def _conversion(name: str, source: str, target: str) -> Format:
    kind = c_type(target)
    if name == "uitofp" or name == "extui":
        if source == "i1":
            return lambda a: rounded(f"({kind})({a} & 1)", target)
        return lambda a: rounded(f"({kind})(u{c_type(source)}){a}", target)
    if source == "i1" and name in ("sitofp", "extsi"):
        return lambda a: rounded(f"({kind})-({a} & 1)", target)
    if name == "trunci" and target == "i1":
        return lambda a: f"{a} & 1"
    if name == "fptoui":
        return lambda a: f"({kind})(u{kind}){a}"
    return lambda a: rounded(f"({kind}){a}", target)


def _bitcast(source: str, target: str) -> Format:
    to_bits = {"f32": "bits_f32", "f64": "bits_f64", "f16": "store_f16", "bf16": "store_bf16"}.get(source, "")
    of_bits = {"f32": "f32_bits", "f64": "f64_bits", "f16": "load_f16", "bf16": "load_bf16"}.get(target, "")
    return lambda a: f"{of_bits or f'({c_type(target)})'}({to_bits}({a}))"


def _function(name: str, target: str) -> Format | None:
    if name == "absi":
        return lambda a: f"{a} < 0 ? ({c_type(target)})(-(u{c_type(target)}){a}) : {a}"
    if name in _OURS and target != "f64":
        return lambda a: rounded(f"{name}_f32({a})", target)
    suffix = "" if target == "f64" else "f"
    if name == "rsqrt":
        return lambda a: rounded(f"1.{suffix} / sqrt{suffix}({a})", target)
    if name not in _LIBM:
        return None
    return lambda *a: rounded(f"{_LIBM[name]}{suffix}({', '.join(a)})", target)


def chosen(condition: str, a: str, b: str, element: str) -> str:
    """Return C for the first of two values where a condition is 1, else the second."""
    kind = (
        "f64" if element == "f64" else "f32" if element in _FLOATS else "i64" if c_type(element) == "int64_t" else "i32"
    )
    return f"select_{kind}({condition}, {a}, {b})"


def rounded(text: str, element: str) -> str:
    """Return C for a value in the type of `element`."""
    return f"round_{element}({text})" if element in ("f16", "bf16") else text


def literal(text: str, element: str) -> str:
    """Return C for a constant of TTIR."""
    if element not in _FLOATS:
        return {"true": "1", "false": "0", "-9223372036854775808": "INT64_MIN"}.get(text, text)
    value = _from_bits(int(text, 16), element) if text.startswith("0x") else float(text)
    if value != value:
        return "NAN"
    if value in (float("inf"), -float("inf")):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    if element in ("f16", "bf16"):
        return rounded(f"{value!r}f", element)
    if element == "f32":
        value = ctypes.c_float(value).value
    return f"({value.hex()}{'f' if element == 'f32' else ''})"


def _from_bits(bits: int, element: str) -> float:
    if element == "bf16":
        bits, element = bits << 16, "f32"
    formats = {"f16": ("H", "e"), "f32": ("I", "f"), "f64": ("Q", "d")}[element]
    value: float = struct.unpack(formats[1], struct.pack(formats[0], bits))[0]
    return value
