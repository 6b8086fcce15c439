"""The packages of the trial, and what an AST says of their kernels."""

import ast
from dataclasses import dataclass
from pathlib import Path

# Folders and files with kernels for other devices, or of other languages than Triton's.
ELSEWHERE = frozenset(("backends", "cutile", "cute", "cutedsl", "triton_ascend", "triton_ascend.py", "gluon.py"))
VENDORS = "runtime/backend/_"


@dataclass(frozen=True)
class Package:
    """`name` is its module of cases here; `needs` are what it imports beside torch and Triton."""

    name: str
    distribution: str
    version: str
    folder: str
    needs: tuple[str, ...] = ()


PACKAGES = (
    Package("liger", "liger-kernel", "0.8.5", "liger_kernel"),
    Package("fla", "fla-core", "0.6.0", "fla", ("einops==0.8.2",)),
    Package("conch", "conch-triton-kernels", "1.3", "conch"),
    Package("cce", "cut-cross-entropy", "25.1.1", "cut_cross_entropy"),
    Package("mlstm", "mlstm-kernels", "2.0.6", "mlstm_kernels", ("einops==0.8.2",)),
    Package("xform", "xformers", "0.0.35", "xformers"),
    Package("gems", "flag-gems", "5.0.2", "flag_gems"),
)


def kernels(folder):
    """How many functions under triton.jit no other of them calls: those that are launched."""
    found, called = [], set()
    for path in sorted(Path(folder).rglob("*.py")):
        inner = path.relative_to(folder)
        other_vendor = VENDORS in str(inner) and f"{VENDORS}nvidia" not in str(inner)
        if other_vendor or ELSEWHERE & set(inner.parts):
            continue
        for function in filter(_is_compiled, ast.walk(ast.parse(path.read_text()))):
            found.append(function.name)
            calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
            called |= {call.id for call in calls if isinstance(call, ast.Name)}
    return sum(name not in called for name in found)


def _is_compiled(node):
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
