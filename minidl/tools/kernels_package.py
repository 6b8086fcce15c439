"""The operators of `minidl.torch` as a package of their own, in the form of Hugging Face's `kernels`.

    python -m minidl.tools.kernels_package dist/kernels

writes `build.toml` and `torch-ext/minidl_kernels`, a copy of the modules that `minidl.torch` imports and of their data.
Imports within it are relative, so that it works from any folder and under any name, several of it beside one another:
operators are registered under the name that it is loaded by. It needs torch and triton and nothing else.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import shutil
from pathlib import Path

from minidl.common.console import echo
from minidl.version import __version__

NAME = "minidl_kernels"
ROOT = Path(__file__).parents[1]  # of minidl
_FIRST = "minidl.torch"
_DATA = ("runtime/cost_model/constants", "runtime/tiles")
_BUILD = f"""[general]
name = "{NAME}"
universal = true
"""
_INIT = '''"""minidl {version}'s kernels as operators of torch, for https://github.com/huggingface/kernels."""

from . import runtime as _runtime  # decides where kernels run, before Triton is imported
from .torch import *
from .torch import __all__

__version__ = "{version}"
'''


def write(folder: Path) -> Path:
    """Write the package into a folder, in place of what was there before; where it is."""
    target = folder / "torch-ext" / NAME
    shutil.rmtree(target, ignore_errors=True)
    for module in sorted(_needed(_FIRST) - {"minidl"}):
        path = _path(module)
        assert path is not None
        to = target / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(_relative(path.read_text(), module, path))
    for name in _DATA:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "__init__.py").write_text(_INIT.format(version=__version__))
    (folder / "build.toml").write_text(_BUILD)
    return target


def _path(module: str) -> Path | None:
    """The file of a module of minidl."""
    at = ROOT.joinpath(*module.split(".")[1:])
    found = (path for path in (at / "__init__.py", at.with_suffix(".py")) if path.is_file())
    return next(found, None)


def _needed(first: str) -> set[str]:
    """A module and all those of minidl that it imports, also those that others import when they are called."""
    found: set[str] = set()
    waiting = [first]
    while waiting:
        module = waiting.pop()
        path = _path(module)
        if module in found or path is None:
            continue
        found.add(module)
        waiting += [module.rpartition(".")[0]] if "." in module else []
        if module != "minidl":  # which imports all else by name
            for node in _imports(path.read_text()):
                names = [alias.name for alias in node.names]
                base = node.module if isinstance(node, ast.ImportFrom) else None
                waiting += names if base is None else [base, *(f"{base}.{name}" for name in names)]
    return found


@functools.cache
def _imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    """Statements that import from minidl, also those of functions."""
    found: list[ast.Import | ast.ImportFrom] = []
    waiting: list[ast.stmt] = [*ast.parse(text).body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            absolute = isinstance(node, ast.Import) or not node.level
            found += [node] if absolute and any(name.partition(".")[0] == "minidl" for name in names) else []
        for block in ("body", "orelse", "finalbody", "handlers"):
            waiting += getattr(node, block, [])
    return found


def _relative(text: str, module: str, path: Path) -> str:
    """The text of a module with relative imports. Raises ValueError for one that cannot be written so."""
    dots = "." * (module.count(".") + (path.name == "__init__.py"))
    lines = text.splitlines(keepends=True)
    for node in _imports(text):
        line = lines[node.lineno - 1]
        if isinstance(node, ast.ImportFrom):
            made = re.sub(r"from minidl\.?", f"from {dots}", line, count=1)
        else:
            made = re.sub(r"import minidl\.(\w+)(?=\s|$)", rf"from {dots} import \1", line, count=1)
        if made == line:
            raise ValueError(f"{path}:{node.lineno}: {line.strip()!r} cannot be made relative")
        lines[node.lineno - 1] = made
    return "".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the operators as a package of Hugging Face's kernels.")
    parser.add_argument("folder", type=Path)
    echo(str(write(parser.parse_args(arguments).folder)))


if __name__ == "__main__":
    main()
