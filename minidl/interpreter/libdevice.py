"""Features of compiled kernels that Triton's interpreter lacks: typed numbers, lane-wise logic, and libdevice.

A compiled kernel gets a Python float as a float32 scalar and counts loops with an int32 scalar; the interpreter passes
Python numbers. `and`, `or` and `not` of blocks apply to each lane; Python's would apply to the complete block. The
functions of libdevice for floating-point numbers are NumPy's, in the type of their operands.
"""

import ast
import math
import re

import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as of_cuda
from triton.runtime import interpreter

np = interpreter.np


def install() -> None:
    """Replace the interpreter's conversion of arguments and libdevice's functions. Call once."""
    interpreter._implicit_cvt = _with_floats(interpreter._implicit_cvt)
    interpreter.loop_range, interpreter.join_truths, interpreter.negate = _loop_range, _join_truths, _negate
    interpreter.ASTTransformer.visit_For = _count_in_scalars
    interpreter.ASTTransformer.visit_BoolOp = _join_lanes
    interpreter.ASTTransformer.visit_UnaryOp = _negate_lanes
    interpreter.ASTTransformer.visit_Assign = _with_its_value(interpreter.ASTTransformer.visit_Assign)
    tl.range = _as_scalars(tl.range)
    tl.dtype.value = property(lambda dtype: dtype)  # the interpreter passes the value of a constexpr
    interpreter.InterpreterBuilder.create_extern_elementwise = _call_by_symbol
    for name, function in list(vars(of_cuda).items()):
        if tl.core.is_builtin(function):
            bound = _bound(function)
            setattr(of_cuda, name, bound)
            if hasattr(libdevice, name):
                setattr(libdevice, name, bound)


def _with_floats(convert):
    def with_floats(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    return with_floats


class LoopNumber(int):
    """A loop index: an int with the methods of a scalar that kernels call; sums and products of it are the same."""

    __slots__ = ()
    dtype = type = tl.int32

    def to(self, dtype, **how):
        return interpreter._implicit_cvt(int(self)).to(dtype, **how)

    cast = to


def _stay_scalar(name):
    operate = getattr(int, name)

    def operator(self, other):
        result = operate(self, other)
        return LoopNumber(result) if result.__class__ is int else result

    setattr(LoopNumber, name, operator)


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _stay_scalar(f"__{_name}__")
    _stay_scalar(f"__r{_name}__")


def _loop_range(*bounds):
    return map(LoopNumber, range(*bounds))


def _as_scalars(numbers):
    return lambda *bounds, **how: map(LoopNumber, numbers(*bounds, **how))


def _count_in_scalars(transformer, loop):
    """Replace `range` by `loop_range` in a loop."""
    called = getattr(loop.iter, "func", None)
    if isinstance(called, ast.Name) and called.id == "range":
        called.id = "loop_range"
    return transformer.generic_visit(loop)


def _with_its_value(visit):
    """Wrap `visit` of an assignment, which does not visit the assigned value."""

    def visit_assign(transformer, assignment):
        assignment.value = transformer.visit(assignment.value)
        return visit(transformer, assignment)

    return visit_assign


def _join_lanes(transformer, operation):
    """Replace `a and b` by `join_truths("and", lambda: a, lambda: b)`."""
    word = "and" if isinstance(operation.op, ast.And) else "or"
    no_arguments = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    operands = [ast.Lambda(args=no_arguments, body=transformer.visit(value)) for value in operation.values]
    return ast.Call(func=ast.Name("join_truths", ast.Load()), args=[ast.Constant(word), *operands], keywords=[])


def _join_truths(word, *values):
    """Return the `and` or `or` that the compiler computes: lane by lane for tensors, with short-circuit for others."""
    joined = value = None
    for compute in values:
        value = compute()
        if not isinstance(value, tl.tensor):
            if bool(value) == (word == "or"):
                return value
        elif joined is None:
            joined = value
        else:
            joined = joined.logical_and(value) if word == "and" else joined.logical_or(value)
    return value if joined is None else joined


def _negate_lanes(transformer, operation):
    """Replace `not a` by `negate(a)`."""
    transformer.generic_visit(operation)
    if not isinstance(operation.op, ast.Not):
        return operation
    return ast.Call(func=ast.Name("negate", ast.Load()), args=[operation.operand], keywords=[])


def _negate(value):
    return value.__not__() if isinstance(value, tl.tensor) else not value


def _bound(function):
    def bound(*arguments, **named):
        return function(*arguments, **{**named, "_semantic": interpreter.interpreter_semantic})

    return bound


def _call_by_symbol(builder, library, path, symbol, arguments, kind, pure):
    function = _function(symbol)
    if function is None:
        raise NotImplementedError(f"the interpreter has no {symbol}")
    dtype = interpreter._get_np_dtype(kind)
    result = function(*(argument.data for argument in arguments))
    return interpreter.TensorHandle(np.asarray(result).astype(dtype, copy=False), kind.scalar)


def _function(symbol):
    """Return NumPy's function for a symbol such as __nv_tanh, __nv_tanhf or __nv_fast_tanhf, or None."""
    name = re.sub("^__nv_(fast_)?", "", symbol)
    return _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f")) or _FUNCTIONS.get(name.removesuffix("d"))


def _of_each(function):
    return np.vectorize(function, otypes=[np.float64])


def _half_away(x):
    return np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x)


_FUNCTIONS = {
    **{
        name: getattr(np, name)
        for name in (
            "ceil", "floor", "trunc", "rint", "fabs", "sqrt", "cbrt", "exp", "exp2", "expm1", "log", "log2", "log10",
            "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "fmod", "hypot", "copysign", "fmin", "fmax",
            "isnan", "isinf", "signbit",
        )
    },
    "abs": np.abs, "llabs": np.abs, "isfinite": np.isfinite, "finite": np.isfinite, "pow": np.power, "powi": np.power,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "exp10": lambda x: np.power(x.dtype.type(10), x), "rsqrt": lambda x: 1 / np.sqrt(x), "round": _half_away,
    "nearbyint": np.rint, "fma": lambda a, b, c: a * b + c,
    "erf": _of_each(math.erf), "erfc": _of_each(math.erfc), "lgamma": _of_each(math.lgamma),
    "tgamma": _of_each(math.gamma),
    "fdivide": np.divide, "fdiv_rn": np.divide, "ddiv_rn": np.divide, "fsqrt_rn": np.sqrt, "dsqrt_rn": np.sqrt,
    "frcp_rn": np.reciprocal, "drcp_rn": np.reciprocal,
}  # fmt: skip
