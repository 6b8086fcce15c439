"""The functions of minidl/kernels that Triton runs: their source, and how another source is put in their place."""

import ast
import copy
import functools
import importlib
import itertools
import pkgutil
from pathlib import Path

from triton.runtime.interpreter import ASTTransformer, InterpretedFunction

from minidl import kernels, runtime
from tests.mutation.operators import Mutant, mutants

ROOT = Path(__file__).parents[2]

# Functions of values: no index, mask, bound or loop over data is in them.
ARITHMETIC = {
    "minidl/kernels/activation.py": "functions of one value",
    "minidl/kernels/elementwise/functions.py": "functions of up to three values",
    "minidl/kernels/philox.py": "numbers from the bits of a counter",
    "minidl/kernels/activation.py:log1p": "the terms of a series",
    "minidl/kernels/gemm/parts.py:nearest_tf32": "the bits of a value",
}
# Functions that do nothing in the interpreter.
NEVER_INTERPRETED = {
    "minidl/runtime/dependent_launch.py:wait": "waits for the previous kernel on a GPU; the interpreter runs none",
}


def functions() -> dict[str, InterpretedFunction]:
    """Every function with @triton.jit under minidl/kernels and minidl/runtime, by "file:name"."""
    found = {}
    packages = ((package.__path__, f"{package.__name__}.") for package in (kernels, runtime))
    for info in itertools.chain.from_iterable(itertools.starmap(pkgutil.walk_packages, packages)):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, InterpretedFunction) and value.fn.__module__ == info.name:
                found[f"{Path(module.__file__).relative_to(ROOT)}:{name}"] = value
    return dict(sorted(found.items()))


@functools.cache
def trees(file: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file (relative to the repository) by name."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def tree(name: str) -> ast.FunctionDef:
    """The syntax tree of a function, by "file:name"."""
    file, function = name.split(":")
    return trees(file)[function]


def reason_not_mutated(name: str) -> str | None:
    """Why a function has no mutants, None if it may have."""
    return NEVER_INTERPRETED.get(name) or ARITHMETIC.get(name) or ARITHMETIC.get(name.split(":")[0])


def all_mutants() -> list[Mutant]:
    """Every mutant of every function, in the order of files and lines."""
    return [
        mutant
        for name in functions()
        if reason_not_mutated(name) is None
        for mutant in mutants(name.split(":")[0], tree(name))
    ]


def put(function: InterpretedFunction, source: ast.FunctionDef) -> None:
    """Let the interpreter run `source` for a function from now on, in this process."""
    function.rewrite()
    source = copy.deepcopy(source)
    source.decorator_list = []
    module = ast.fix_missing_locations(ASTTransformer().visit(ast.Module([source], [])))
    space = dict(function.kwargs)
    exec(compile(module, function.fn.__code__.co_filename, "exec"), function.fn.__globals__, space)
    InterpretedFunction.rewritten_fn[function.fn] = space[source.name]


def shown(mutant: Mutant) -> tuple[str, str]:
    """The line of a mutant as it is and as it becomes, without its indentation."""
    lines = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines()
    node = next(n for n in ast.walk(trees(mutant.file)[mutant.function]) if getattr(n, "site", None) == mutant.site)
    first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
    if isinstance(node, ast.For):
        return first.strip(), mutant.after
    start, end = first[: _characters(first, node.col_offset)], last[_characters(last, node.end_col_offset) :]
    middle = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    after = f"({mutant.after})" if isinstance(mutant.node, ast.BinOp | ast.BoolOp) and start.strip() else mutant.after
    return " ".join(middle.split()), " ".join((start + after + end).split())


def _characters(line: str, octets: int) -> int:
    return len(line.encode()[:octets].decode())
