"""Loops over the elements of a block, in C.

Every part of an expression stands in the outermost loop that has its indices, once. The inner loop runs over the
dimension in which addresses are consecutive. A mask that compares the inner index with a bound, as in
`o_n < N`, ends the loop there; a second loop fills in what a load has behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minidl.cpu.code import Code
from minidl.cpu.operations import chosen
from minidl.cpu.values import MEMORY, ZERO, Index, Indices, Value, bytes_of, c_type, conjuncts, integer, linear

Factor = int | str | None
# Preferences for the inner loop: addresses that are consecutive, the same, at a distance; any others are worst.
_SCORES: dict[Factor, int] = {1: 4, 0: 1, None: -2}


class Nest:
    """Loops over the indices of `shape`; `body(nest, indices)` writes the statements of an element.

    All accesses of a nest have one mask, which `deferral` ensures.
    """

    def __init__(self, code: Code, shape: tuple[int, ...], pointers: Sequence[Value] = ()) -> None:
        self.code = code
        self.indices: Indices = tuple(Index(((code.fresh("i"), 1),)) if size > 1 else ZERO for size in shape)
        variables = [index.terms[0][0] if index.terms else "" for index in self.indices]
        order = [d for d in range(len(shape)) if shape[d] > 1]
        if order:
            inner = max(order, key=lambda d: (self._score(variables[d], pointers), d))
            order = [*(d for d in order if d != inner), inner]
        self.order = order
        self.variables = [variables[d] for d in order]
        self.sizes = [shape[d] for d in order]
        self.inner = self.variables[-1] if order else ""
        self.levels: list[list[str]] = [[] for _ in range(len(order) + 1)]
        self.computed: dict[tuple[Value, Indices], tuple[str, int]] = {}
        self.pointers: dict[tuple[Value, Indices], str] = {}  # at the first inner index
        self.bounds: list[str] = []
        self.guards: list[str] = []
        self.beyond = False  # in the loop behind the first false element of a mask

    def _score(self, variable: str, pointers: Sequence[Value]) -> int:
        return sum(_SCORES.get(self.factor(each, self.indices, variable, dry=True), 0) for each in pointers)

    def run(self, body: Callable[[Nest, Indices], None]) -> None:
        """Write the loops."""
        last = len(self.order)
        body(self, self.indices)
        fast = self.levels[last]
        slow: list[str] | None = None
        if self.bounds or self.guards:
            slow = []
            self.beyond = True
            self.levels[last] = slow
            self.computed = {key: value for key, value in self.computed.items() if value[1] < last}
            body(self, self.indices)
        self._write(fast, slow)

    def _write(self, fast: list[str], slow: list[str] | None) -> None:
        write = self.code.write
        if not self.order:
            for line in fast:
                write(line)
            return
        for line in self.levels[0]:
            write(line)
        for level, (variable, size) in enumerate(zip(self.variables, self.sizes, strict=True), 1):
            if level < len(self.order):
                write(f"for (int {variable} = 0; {variable} < {size}; {variable}++) {{")
                for line in self.levels[level]:
                    write(line)
        size, end = self.sizes[-1], str(self.sizes[-1])
        if self.guards:
            write(f"if ({' & '.join(dict.fromkeys(self.guards))}) {{")
        if self.bounds:
            end = self.code.fresh("n")
            write(f"int64_t {end} = {size};")
            for bound in self.bounds:
                write(f"{end} = ({bound}) < {end} ? ({bound}) : {end};")
            write(f"{end} = {end} < 0 ? 0 : {end};")
        self._inner("0", end, fast)
        if slow and self.bounds:
            self._inner(end, str(size), slow)
        if self.guards:
            write("} else {")
            self._inner("0", str(size), slow or [])
            write("}")
        for _ in self.order[1:]:
            write("}")

    def _inner(self, start: str, end: str, lines: list[str]) -> None:
        if not lines:
            return
        if int(self.sizes[-1]) >= 4:
            self.code.write("#pragma GCC ivdep")
        kind = "int64_t" if self.bounds else "int"
        self.code.write(f"for ({kind} {self.inner} = {start}; {self.inner} < {end}; {self.inner}++) {{")
        for line in lines:
            self.code.write(line)
        self.code.write("}")

    def write(self, line: str) -> None:
        """Add a statement to the innermost loop."""
        self.levels[-1].append(line)

    def assign(self, target: Value, indices: Indices, text: str) -> None:
        """Write an element of a buffer."""
        self.write(f"{target.data[0]}[{linear(indices, target.data[1])}] = {text};")

    # Expressions

    def value(self, value: Value, indices: Indices) -> str:
        """Return C for an element of a value, a name or a number."""
        return self._value(value, indices)[0]

    def _level(self, indices: Indices) -> int:
        variables = {name for index in indices for name, _ in index.terms}
        return max((self.variables.index(name) + 1 for name in variables), default=0)

    def _value(self, value: Value, indices: Indices) -> tuple[str, int]:
        if value.kind in ("name", "constant"):
            return value.data, 0
        if value.kind == "view":
            return self._value(value.args[0], value.data(indices))
        key = value, indices
        if key not in self.computed:
            self.computed[key] = self._compute(value, indices)
        return self.computed[key]

    def _compute(self, value: Value, indices: Indices) -> tuple[str, int]:
        if value.kind == "range":
            return str(indices[0].plus(Index(constant=value.data))), self._level(indices)
        if value.kind == "buffer":
            name, strides = value.data
            at = linear(indices, strides)
            level = self._level((at,))
            return self._variable(f"{name}[{at}]", value.element, level), level
        if value.kind == "join":
            first, second = (self._value(each, indices[:-1]) for each in value.args)
            level = max(first[1], second[1], self._level(indices[-1:]))
            if not indices[-1].terms:
                return second if indices[-1].constant else first
            text = chosen(str(indices[-1]), second[0], first[0], value.element)
            return self._variable(text, value.element, level), level
        if value.kind == "load":
            pointer, mask, other = value.data
            return self.load(pointer, mask, other, indices), len(self.order)
        parts = [self._value(each, indices) for each in value.args]
        level = max((each[1] for each in parts), default=0)
        return self._variable(value.data(*(each[0] for each in parts)), value.element, level), level

    def _variable(self, text: str, element: str, level: int) -> str:
        variable = self.code.fresh("v")
        self.levels[level].append(f"const {c_type(element)} {variable} = {text};")
        return variable

    # Memory

    def load(self, pointer: Value, mask: Value | None, other: Value | None, indices: Indices) -> str:
        """Return the name of a loaded element, `other` (or 0) where the mask is false."""
        kind = pointer.element[4:-1]
        if self.beyond:
            return self.value(other, indices) if other else "0"
        address = self.address(pointer, indices, kind)
        text = f"{address} != 0" if kind == "i1" else f"load_{kind}({address})" if kind in MEMORY else address
        condition = self.condition(mask, indices)
        if condition:
            text = f"{condition} ? {text} : {self.value(other, indices) if other else '0'}"
        return self._variable(text, kind, len(self.order))

    def store(self, pointer: Value, text: str, mask: Value | None, indices: Indices) -> None:
        """Store an element where the mask is true."""
        if self.beyond:
            return
        kind = pointer.element[4:-1]
        text = f"store_{kind}({text})" if kind in MEMORY and kind != "i1" else text
        condition = self.condition(mask, indices)
        guard = f"if ({condition}) " if condition else ""
        self.write(f"{guard}{self.address(pointer, indices, kind)} = {text};")

    def address(self, pointer: Value, indices: Indices, kind: str) -> str:
        """Return C for the element at a pointer."""
        memory = f"{MEMORY.get(kind) or c_type(kind)} *"
        factor = self.factor(pointer, indices, self.inner) if self.inner else 0
        if factor is None:
            return f"*({memory})({self.value(pointer, indices)})"
        origin = tuple(index.without(self.inner) for index in indices)
        text, level = self._value(pointer, origin)
        key = pointer, origin
        if key not in self.pointers:
            self.pointers[key] = self.code.fresh("p")
            self.levels[level].append(f"{memory}{self.pointers[key]} = ({memory})({text});")
        offset = self.inner if factor == 1 else "0" if factor == 0 else f"{self.inner} * {factor}"
        return f"{self.pointers[key]}[{offset}]"

    def condition(self, mask: Value | None, indices: Indices) -> str:
        """Return C for a mask, "" if it is true wherever the loop in `run` goes."""
        if mask is None:
            return ""
        texts = []
        for part, at in conjuncts(mask, indices):
            if integer(part) not in (None, 0):
                continue
            bound = self._bound(part, at) if self.inner else None
            if self.inner and all(not index.factor(self.inner) for index in at):
                self.guards.append(self.value(part, at))
            elif bound is None:
                texts.append(self.value(part, at))
            elif bound not in self.bounds:
                self.bounds.append(bound)
        return " & ".join(dict.fromkeys(texts))

    def _bound(self, part: Value, indices: Indices) -> str | None:
        """Return the inner index at which a part of a mask becomes false, None if it has another form."""
        if part.kind != "compute" or part.operation not in ("slt", "sle", "sgt", "sge"):
            return None
        low, high = part.args if part.operation[1] == "l" else part.args[::-1]
        step = self.factor(low, indices, self.inner)
        if not isinstance(step, int) or step < 1 or self.factor(high, indices, self.inner) != 0:
            return None
        origin = tuple(index.without(self.inner) for index in indices)
        distance = f"(int64_t){self.value(high, origin)} - {self.value(low, origin)}"
        if part.operation.endswith("e"):
            distance += " + 1"
        return distance if step == 1 else f"({distance} + {step - 1}) / {step}"

    @staticmethod
    def _of_other_elements(value: Value, factor: Factor) -> Factor:
        """Return the factor of pointers that were cast from those to elements of another size."""
        before, after = (bytes_of(each.element[4:-1]) for each in (value.args[0], value))
        if before == after or factor == 0:
            return factor
        return factor * before // after if isinstance(factor, int) and factor * before % after == 0 else None

    def factor(self, value: Value, indices: Indices, variable: str, dry: bool = False) -> Factor:
        """Return by how much a value grows with a loop variable: an integer, C for one, or None if it is not linear.

        For pointers, in elements. With `dry`, C is only "?".
        """
        if all(not index.factor(variable) for index in indices):
            return 0
        if value.kind in ("name", "constant"):
            return 0
        if value.kind == "view":
            return self.factor(value.args[0], value.data(indices), variable, dry)
        if value.kind == "range":
            return indices[0].factor(variable)
        if value.kind != "compute":
            return None
        if value.operation == "extsi":
            return self.factor(value.args[0], indices, variable, dry)
        if value.operation == "bitcast" and value.element.startswith("ptr<"):
            return self._of_other_elements(value, self.factor(value.args[0], indices, variable, dry))
        if value.operation not in ("addi", "subi", "muli", "addptr"):
            return None
        a, b = (self.factor(each, indices, variable, dry) for each in value.args)
        if a is None or b is None:
            return None
        if value.operation != "muli":
            return _sum(a, b, "-" if value.operation == "subi" else "+")
        if a == 0 and b == 0:
            return 0
        if a != 0 and b != 0:
            return None
        step, other = (a, value.args[1]) if b == 0 else (b, value.args[0])
        number = integer(other)
        if number is not None and isinstance(step, int):
            return step * number
        if dry:
            return "?"
        origin = tuple(index.without(variable) for index in indices)
        return f"({step} * (int64_t){self.value(other, origin)})"


def _sum(a: int | str, b: int | str, sign: str) -> int | str:
    if isinstance(a, int) and isinstance(b, int):
        return a + b if sign == "+" else a - b
    return a if b == 0 else f"({a} {sign} {b})"
