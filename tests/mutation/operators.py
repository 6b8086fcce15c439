"""What is changed in a kernel: masks, bounds, strides, loops and accumulation, never the arithmetic of values.

An operator looks at one node of a function's syntax tree and gives what could stand in its place by mistake. Whether an
expression is an index or a value is told by the names of the house (b_* are blocks of values, o_*, i_*, m_*, p_* and
s_* are offsets, indices, masks, pointers and strides) and by what values are assigned to.
"""

import ast
import copy
import dataclasses
from collections.abc import Iterator

INDICES = ("o_", "i_", "m_", "p_", "s_", "d_")
# They tell the compiler something, or check it while compiling; nothing is computed.
HINTS = ("assume", "multiple_of", "max_contiguous", "max_constancy", "static_assert", "device_assert", "debug_barrier")
STRICTER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
# What the other end of a comparison becomes, so that it is moved the way that its strictness does not move it.
BEHIND = {ast.Lt: ast.Sub, ast.LtE: ast.Add, ast.Gt: ast.Add, ast.GtE: ast.Sub}
EXTREMES = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
MEMORY = ("load", "store", "atomic_add", "atomic_max", "atomic_cas")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change to one function of a file; `occurrence` counts the equal ones in the function."""

    file: str
    function: str
    operator: str
    before: str
    after: str
    occurrence: int
    line: int
    statement: int  # the line of the statement that the change is in
    site: int = dataclasses.field(compare=False, repr=False)
    node: ast.AST = dataclasses.field(compare=False, repr=False)

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies it, whatever the lines above it."""
        return self.file, self.function, self.operator, self.before, self.after, str(self.occurrence)

    @property
    def family(self) -> str:
        """The file or folder of minidl/kernels that it is in."""
        return self.file.removeprefix("minidl/kernels/").split("/")[0].removesuffix(".py")


def mutants(file: str, function: ast.FunctionDef) -> list[Mutant]:
    """Every mutant of a function, in the order of its source."""
    for number, node in enumerate(ast.walk(function)):
        if isinstance(node, ast.expr | ast.stmt):  # all others may be one object in all trees
            node.site = number
    found: list[Mutant] = []
    seen: dict[tuple[str, str, str], int] = {}
    for node, statement, operator, other in _Visitor(function).found():
        other = ast.copy_location(copy.copy(other), node)  # it may be a part of the node, whose place is another
        before, after = _text(node), _text(other)
        number = seen[operator, before, after] = seen.get((operator, before, after), -1) + 1
        found.append(
            Mutant(
                file, function.name, operator, before, after, number, node.lineno, statement.lineno, node.site, other
            )
        )
    return found


def mutated(function: ast.FunctionDef, mutant: Mutant) -> ast.FunctionDef:
    """A copy of the function with the change."""

    class Put(ast.NodeTransformer):
        def visit(self, node):
            if getattr(node, "site", None) == mutant.site:
                return ast.copy_location(copy.deepcopy(mutant.node), node)
            return self.generic_visit(node)

    return ast.fix_missing_locations(Put().visit(copy.deepcopy(function)))


def _text(node: ast.AST) -> str:
    """The source of a node; of a loop only its first line."""
    if isinstance(node, ast.For):
        return f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:"
    return ast.unparse(node)


Found = tuple[ast.AST, ast.stmt, str, ast.AST]


class _Visitor:
    def __init__(self, function: ast.FunctionDef) -> None:
        self.function = function
        self.values: set[str] = set()
        for _ in range(2):
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and self.is_value(node.value):
                    self.values |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        self.values = {name for name in self.values if not name.startswith(INDICES)}

    def found(self) -> Iterator[Found]:
        for statement in self.function.body:
            yield from self.visit(statement, statement, False)

    def is_value(self, node: ast.AST) -> bool:
        """Whether floating-point numbers (or their bits) are computed, and not indices."""
        if isinstance(node, ast.Call) and _name(node) in ("load", "dot", "zeros", "full", "where", "zeros_like"):
            return _name(node) != "where" or any(map(self.is_value, node.args[1:]))
        if isinstance(node, ast.Name):
            return node.id.startswith("b_") or node.id in self.values
        if isinstance(node, ast.Constant):
            return isinstance(node.value, float)
        return any(map(self.is_value, ast.iter_child_nodes(node)))

    def visit(self, node: ast.AST, statement: ast.stmt, address: bool) -> Iterator[Found]:
        """What can be changed in a node and below; `address` says that all there is about places."""
        if isinstance(node, ast.Call) and _name(node) in HINTS:
            return
        for operator, other in self.changes(node, address):
            yield node, statement, operator, other
        for field, child in _children(node):
            if field == "test" and _is_switch(child):
                continue
            inside = address or (isinstance(node, ast.Call) and _name(node) in MEMORY and child is node.args[0])
            if isinstance(node, ast.keyword):
                inside = inside or node.arg == "mask"
            if isinstance(node, ast.Assign | ast.AugAssign) and field == "value":
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                inside = isinstance(target, ast.Name) and target.id.startswith(INDICES)
            yield from self.visit(child, child if isinstance(child, ast.stmt) else statement, inside)

    def changes(self, node: ast.AST, address: bool) -> Iterator[tuple[str, ast.AST]]:
        if isinstance(node, ast.AugAssign):
            yield from self.accumulation(node)
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
            yield from self.loop(node)
        elif isinstance(node, ast.Call):
            yield from self.call(node, address)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for i in range(len(node.values)):
                rest = node.values[:i] + node.values[i + 1 :]
                yield "mask side", rest[0] if len(rest) == 1 else ast.BoolOp(ast.And(), rest)
        elif not address and self.is_value(node):
            return
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in STRICTER:
            kind, left, right = type(node.ops[0]), node.left, node.comparators[0]
            yield "strictness", ast.Compare(left, [STRICTER[kind]()], [right])
            yield "bound", ast.Compare(left, [kind()], [_moved(right, BEHIND[kind], 1)])
        elif isinstance(node, ast.BinOp):
            yield from self.arithmetic(node)

    def accumulation(self, node: ast.AugAssign) -> Iterator[tuple[str, ast.AST]]:
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        if name.startswith(INDICES) or not (self.is_value(node.target) or self.is_value(node.value)):
            yield "offset", ast.Pass()
        elif isinstance(node.op, ast.Add):
            yield "accumulate", ast.Assign([node.target], node.value)

    def loop(self, node: ast.For) -> Iterator[tuple[str, ast.AST]]:
        bounds = node.iter.args
        if _name(node.iter) not in ("range", "static_range") or not bounds:
            return
        start = bounds[0] if len(bounds) > 1 else ast.Constant(0)
        end = bounds[1] if len(bounds) > 1 else bounds[0]
        step = bounds[2] if len(bounds) > 2 else ast.Constant(1)
        for operator, ends in (
            ("first iteration", [_sum(start, ast.Add, step), end, step]),
            ("last iteration", [start, _sum(end, ast.Sub, step), step]),
            ("one iteration more", [start, _sum(end, ast.Add, step), step]),
        ):
            loop = ast.Call(node.iter.func, ends, node.iter.keywords)
            yield operator, ast.For(node.target, loop, node.body, node.orelse)

    def call(self, node: ast.Call, address: bool) -> Iterator[tuple[str, ast.AST]]:
        name, there = _name(node), {k.arg for k in node.keywords}
        if name in MEMORY and "mask" in there:
            yield "mask", ast.Call(node.func, node.args, [k for k in node.keywords if k.arg not in ("mask", "other")])
        if name in MEMORY and "other" in there:
            yield "other", ast.Call(node.func, node.args, [k for k in node.keywords if k.arg != "other"])
        if name == "dot" and len(node.args) > 2:
            yield "accumulate", ast.Call(node.func, node.args[:2], node.keywords)
        if name == "where" and len(node.args) == 3 and not self.is_value(node.args[0]):
            yield "where", node.args[1]
        if name == "cdiv":
            count, size = node.args
            yield "floor", ast.BinOp(count, ast.FloorDiv(), size)
            for kind in (ast.Sub, ast.Add):
                yield "bound", ast.Call(node.func, [_moved(count, kind, 1), size], [])
        if name in EXTREMES and len(node.args) == 2 and not node.keywords and (address or not self.is_value(node)):
            func = copy.deepcopy(node.func)
            if isinstance(func, ast.Attribute):
                func.attr = EXTREMES[name]
            else:
                func.id = EXTREMES[name]
            yield "min or max", ast.Call(func, node.args, [])

    def arithmetic(self, node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
        kind, left, right = type(node.op), node.left, node.right
        if kind is ast.BitAnd and not any(isinstance(side, ast.Constant) for side in (left, right)):
            yield "mask side", left
            yield "mask side", right
        elif kind is ast.Mult:
            if not (isinstance(left, ast.Constant) and left.value == 0):
                yield "stride", left
        elif kind is ast.FloorDiv:
            yield "ceiling", ast.Call(ast.parse("tl.cdiv", mode="eval").body, [left, right], [])
            yield "quotient", ast.BinOp(left, ast.Mod(), right)
        elif kind is ast.Mod:
            yield "quotient", ast.BinOp(left, ast.FloorDiv(), right)
        elif kind in (ast.Add, ast.Sub):
            if isinstance(right, ast.Constant) and isinstance(right.value, int):
                yield "offset", left
            yield from _swapped(node)


def _swapped(node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
    """a * s + b * t with the strides exchanged; the nearest two products of a longer sum."""
    left = node.left.right if isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Add) else node.left
    pair = left, node.right
    if not all(isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult) for side in pair):
        return
    if ast.dump(left.right) == ast.dump(node.right.right):
        return
    one = ast.BinOp(left.left, ast.Mult(), node.right.right)
    other = ast.BinOp(node.right.left, ast.Mult(), left.right)
    first = one if left is node.left else ast.BinOp(node.left.left, ast.Add(), one)
    yield "swapped strides", ast.BinOp(first, node.op, other)


def _moved(node: ast.AST, kind: type, by: int) -> ast.AST:
    return _sum(node, kind, ast.Constant(by))


def _sum(node: ast.AST, kind: type, by: ast.AST) -> ast.AST:
    if isinstance(node, ast.Constant) and isinstance(by, ast.Constant):
        return ast.Constant(node.value + by.value if kind is ast.Add else node.value - by.value)
    return ast.BinOp(node, kind(), by)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "target", "targets", "ctx", "op", "ops"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield field, child


def _is_switch(test: ast.AST) -> bool:
    """Whether a condition chooses code while compiling: only constants, types, and whether there is an operand."""
    if isinstance(test, ast.BoolOp | ast.UnaryOp):
        return all(map(_is_switch, test.values if isinstance(test, ast.BoolOp) else [test.operand]))
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot):
        return True
    if any(isinstance(node, ast.Attribute) and node.attr in ("dtype", "type") for node in ast.walk(test)):
        return True
    records = {id(n.value) for n in ast.walk(test) if isinstance(n, ast.Attribute) and n.attr.isupper()}
    names = (node for node in ast.walk(test) if isinstance(node, ast.Name) and id(node) not in records)
    return all(name.id.isupper() or name.id == "tl" for name in names)
