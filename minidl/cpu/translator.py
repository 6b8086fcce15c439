"""The state of a translation: the values of TTIR's names, the memory of blocks, and the code so far.

Numbers become variables at once. Blocks stay expressions (`values`) until they are stored, reduced or multiplied, or
until a loop carries them; `loops` writes these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from minidl.cpu import operations
from minidl.cpu.code import Code
from minidl.cpu.deferral import deferrable
from minidl.cpu.loops import Nest
from minidl.cpu.ttir import Function, Operation, Type
from minidl.cpu.values import Indices, Value, buffer, c_type, contiguous, name, size_of

HEAVY = {
    "exp", "exp2", "log", "log2", "erf", "sin", "cos", "tanh", "pow", "rsqrt", "sqrt", "divf", "precise_divf",
    "precise_sqrt",
}  # fmt: skip
DIVISIONS = {"divsi", "remsi", "divui", "remui"}  # never vectorised: computed once, outside of the loops that use them
REFUSAL = " is not supported on the CPU"
IGNORED = {
    "tt.return", "llvm.intr.assume", "tt.assert", "tt.print", "tt.grid_dependency_wait",
    "tt.grid_dependency_launch_dependents",
}  # fmt: skip


class Translator:
    """Translates the operations of a function, those in `handlers` by these functions."""

    def __init__(self, function: Function, handlers: Mapping[str, Handler], defers: bool = True) -> None:
        """defers: loads need no memory where `deferral` allows it."""
        self.function, self.handlers = function, handlers
        self.code = Code()
        self.values: dict[str, Value] = {}
        self.uses: dict[str, int] = {}
        self.forced: dict[Value, Value] = {}
        self.products: set[str] = set()
        self.scope = object()
        self.owners: dict[Value, object] = {}
        bodies = [function.body]
        for body in bodies:
            for operation in body:
                for operand in operation.operands:
                    self.uses[operand] = self.uses.get(operand, 0) + 1
                bodies += [region.operations for region in operation.regions]
        self.deferred = deferrable(function, bodies, self.uses) if defers else set()

    # Blocks and numbers

    def number(self, value: Value) -> str:
        """Return C for a number."""
        return str(self.variable(value).data)

    def variable(self, value: Value) -> Value:
        """Return a number in a variable of C, or a constant."""
        if value.kind in ("name", "constant"):
            return value
        return self.scalar(value.element, lambda nest, at: nest.value(value, at))

    def scalar(self, element: str, text: Callable[[Nest, Indices], str]) -> Value:
        """Return a number whose text is written in a variable of C."""
        variable = self.code.fresh("s")
        self.code.write(f"{c_type(element)} {variable};")
        self.nest((), lambda nest, at: nest.write(f"{variable} = {text(nest, at)};"))
        return name(variable, element)

    def nest(
        self, shape: tuple[int, ...], body: Callable[[Nest, Indices], None], pointers: Sequence[Value] = ()
    ) -> None:
        """Write loops over a shape."""
        Nest(self.code, shape, pointers).run(body)

    def memory(self, element: str, shape: tuple[int, ...]) -> Value:
        """Return a new buffer as a block."""
        return buffer(self.code.memory(element, size_of(shape)), element, shape, contiguous(shape))

    def copy(self, value: Value, target: Value) -> None:
        """Write a block to a buffer of its shape."""
        self.nest(value.shape, lambda nest, at: nest.assign(target, at, nest.value(value, at)), value.pointers())

    def force(self, value: Value) -> Value:
        """Return a block in memory, with any strides."""
        if value.kind == "buffer":
            return value
        if value not in self.forced:
            result = self.memory(value.element, value.shape)
            self.copy(value, result)
            self.forced[value] = result
        return self.forced[value]

    def scoped(self, region: Callable[[], None]) -> None:
        """Run `region`; buffers that it makes are free afterwards, and what it put into memory is forgotten."""
        before, used, scope = dict(self.forced), self.code.bytes, self.scope
        self.scope = object()
        region()
        self.forced, self.code.bytes, self.scope = before, used, scope

    def owned(self, value: Value) -> Value:
        """Note that a buffer has nothing but this value, in this scope, so that its last use may overwrite it."""
        self.owners[value] = self.scope
        return value

    def is_last_use(self, operand: str, value: Value) -> bool:
        """Return whether the memory of a value may be overwritten by the operation that uses it."""
        return self.owners.get(value) is self.scope and self.uses[operand] == 1

    # Operations

    def block(self, body: Sequence[Operation]) -> list[Value]:
        """Translate operations; return the operands of the terminator."""
        for operation in body:
            if operation.name in ("scf.yield", "tt.reduce.return", "tt.scan.return"):
                return [self.values[operand] for operand in operation.operands]
            if operation.name in IGNORED:
                continue
            try:
                results = self.operation(operation)
            except NotImplementedError as error:
                if str(error).endswith(REFUSAL):  # of an operation in a region of this one
                    raise
                raise NotImplementedError(f"{self.function.line_of(operation)}: {error}{REFUSAL}") from None
            self.values.update(zip(operation.results, results, strict=True))
        return []

    def operation(self, operation: Operation) -> list[Value]:
        """Translate one operation; return its results."""
        handler = self.handlers.get(operation.name)
        return [self.compute(operation)] if handler is None else handler(self, operation)

    def compute(self, operation: Operation) -> Value:
        """Translate an operation on elements."""
        args = [self.values[operand] for operand in operation.operands]
        result = result_type(operation)
        source = args[0] if operation.name != "arith.select" else args[1]
        form = operations.element_wise(operation.name, operation.text, source.element, result.element)
        if form is None:
            raise NotImplementedError(operation.name)
        kind = operation.name.partition(".")[2]
        if kind in ("cmpi", "cmpf"):
            kind = operation.text.split(",")[0].strip()
        value = Value("compute", result.element, result.shape, tuple(args), form, kind)
        if not result.shape:
            return name(self.code.assign(form(*map(self.number, args)), result.element), result.element)
        is_reused = kind in HEAVY and self.uses.get(operation.results[0], 0) > 1
        if size_of(value.shape) > 1 and (is_reused or kind in DIVISIONS):
            return self.force(value)
        return value


def result_type(operation: Operation) -> Type:
    """Return the type of the result of an operation on elements."""
    types = operation.result_types
    if not types:
        raise NotImplementedError(operation.name)
    if operation.name in ("arith.cmpi", "arith.cmpf"):
        return Type("i1", types[0].shape)
    if operation.name == "tt.addptr":
        return types[0]
    return types[-1]


Handler = Callable[[Translator, Operation], list[Value]]
