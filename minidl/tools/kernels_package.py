"""Write the operators of `minidl.torch` as a package in the form of Hugging Face's `kernels`.

    python -m minidl.tools.kernels_package dist/kernels

writes `build.toml` and `torch-ext/minidl_kernels`, a copy of the modules that `minidl.torch` imports and of their data.
Its imports are relative, so that it works from any folder and under any name, and several copies can be loaded:
operators are registered under the name of the copy. It needs only torch and triton.
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
    """Write the package into a folder, replacing an earlier one, and return its path."""
    target = folder / "torch-ext" / NAME
    shutil.rmtree(target, ignore_errors=True)
    for module in sorted(_imported(_FIRST) - {"minidl"}):
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
    """Return the file of a module of minidl."""
    at = ROOT.joinpath(*module.split(".")[1:])
    return next((path for path in (at / "__init__.py", at.with_suffix(".py")) if path.is_file()), None)


def _imported(first: str) -> set[str]:
    """Return a module and all modules of minidl that it imports, also inside functions."""
    modules: set[str] = set()
    queue = [first]
    while queue:
        module = queue.pop()
        path = _path(module)
        if module in modules or path is None:
            continue
        modules.add(module)
        queue += [module.rpartition(".")[0]] if "." in module else []
        if module != "minidl":  # it imports all other modules by name
            for node in _imports(path.read_text()):
                names = [alias.name for alias in node.names]
                base = node.module if isinstance(node, ast.ImportFrom) else None
                queue += names if base is None else [base, *(f"{base}.{name}" for name in names)]
    return modules


@functools.cache
def _imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the statements that import from minidl, also inside functions."""
    imports: list[ast.Import | ast.ImportFrom] = []
    queue: list[ast.stmt] = [*ast.parse(text).body]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            absolute = isinstance(node, ast.Import) or not node.level
            imports += [node] if absolute and any(name.partition(".")[0] == "minidl" for name in names) else []
        for block in ("body", "orelse", "finalbody", "handlers"):
            queue += getattr(node, block, [])
    return imports


def _relative(text: str, module: str, path: Path) -> str:
    """Return the text of a module with relative imports. Raises ValueError for an import that cannot be relative."""
    dots = "." * (module.count(".") + (path.name == "__init__.py"))
    lines = text.splitlines(keepends=True)
    for node in _imports(text):
        line = lines[node.lineno - 1]
        if isinstance(node, ast.ImportFrom):
            relative = re.sub(r"from minidl\.?", f"from {dots}", line, count=1)
        else:
            relative = re.sub(r"import minidl\.(\w+)(?=\s|$)", rf"from {dots} import \1", line, count=1)
        if relative == line:
            raise ValueError(f"{path}:{node.lineno}: {line.strip()!r} cannot be made relative")
        lines[node.lineno - 1] = relative
    return "".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the operators as a package of Hugging Face's kernels.")
    parser.add_argument("folder", type=Path)
    echo(str(write(parser.parse_args(arguments).folder)))


if __name__ == "__main__":
    main()
