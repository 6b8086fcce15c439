"""The plan of the house: imports point downward, there are no circles, and no module hides a public function."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def modules(package: Path) -> dict[str, Path]:
    """The files of a package by module name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: set[str]) -> Iterator[str]:
    """The modules of the package that a file imports, anywhere in it: for types and inside functions, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in submodules]
        else:
            continue
        yield from (name for name in names if name in known)


def arrows(package: Path) -> dict[str, set[str]]:
    """What each module imports."""
    files = modules(package)
    return {name: set(imports(path, set(files))) - {name} for name, path in files.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan, SIAM J. Comput. 1, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in order:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def upward(graph: dict[str, set[str]], layers: list[str]) -> list[str]:
    """Arrows between rooms that the layers (highest first, those of equal height joined by "|") do not allow."""
    height = {room.strip(): -i for i, layer in enumerate(layers) for room in layer.split("|")}
    wrong = []
    for name, targets in graph.items():
        for target in targets:
            here, there = (module.split(".")[1] if "." in module else "" for module in (name, target))
            if here in (there, "", "__main__"):  # the package itself names what is loaded when it is used
                continue
            if there == "" or height[here] <= height[there]:
                wrong.append(f"{name} -> {target}")
    return sorted(wrong)


def layers() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return next(c["layers"] for c in settings["tool"]["importlinter"]["contracts"] if c["id"] == "layers")


def test_there_are_no_circles():
    assert circles(arrows(ROOT / "minidl")) == []


def test_imports_point_downward():
    assert upward(arrows(ROOT / "minidl"), layers()) == []


PLANTED = {
    "circle": {"house/low/a.py": "from house.low import b\n", "house/low/b.py": "from house.low.a import x\n"},
    "circle of types": {
        "house/low/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.low.b import B\n",
        "house/low/b.py": "import house.low.a\n",
    },
    "circle inside a function": {
        "house/low/a.py": "def f():\n    from house.low.b import g\n",
        "house/low/b.py": "from house.low import a\n",
    },
    "upward": {"house/low/a.py": "from house.high.b import x\n", "house/high/b.py": ""},
    "upward for types": {
        "house/low/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.high import b\n",
        "house/high/b.py": "",
    },
    "through the package": {"house/low/a.py": "from house import name\n", "house/high/b.py": ""},
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_arrows_are_found(planted, tmp_path):
    files = {"house/__init__.py": "", "house/low/__init__.py": "", "house/high/__init__.py": "", **PLANTED[planted]}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    graph = arrows(tmp_path / "house")
    if planted.startswith("circle"):
        assert circles(graph) == [["house.low.a", "house.low.b"]]
    else:
        assert len(upward(graph, ["high", "low"])) == 1


HIDDEN = """
import importlib, inspect, pkgutil
import minidl
found = [info.name for info in pkgutil.walk_packages(minidl.__path__, "minidl.")]
names = [name for name in found if not name.endswith("__main__")]
packages = [minidl, *map(importlib.import_module, names)]
for package in packages:
    for name in getattr(package, "__all__", ()):
        value = getattr(package, name)
        told = f"{package.__name__}.{name}"
        if inspect.ismodule(value):
            assert value.__name__ == told, f"{told} is the module {value.__name__}"
        else:
            assert told not in names, f"the module {told} bears the name of a public function"
"""


def test_no_module_hides_a_public_name():
    """Importing a submodule sets the package's attribute: every public name stays what it is, whatever was imported."""
    subprocess.run([sys.executable, "-c", HIDDEN], cwd=ROOT, check=True)


def test_scikit_learn_is_not_imported_beside_torch():
    """It asks a torch that is only begun for its types, and fails: wherever data is read, it waits."""
    bare = []
    for path in sorted((ROOT / "minidl" / "data").glob("*.py")):
        tree = ast.parse(path.read_text())
        imports = [
            node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "sklearn" in (node.module or "")
        ]
        blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
        waiting = [b for node in blocks if ast.unparse(node.items[0]) == "import_lock.LOCK" for b in node.body]
        bare += [f"{path.name}:{node.lineno}" for node in imports if node not in waiting]
    assert bare == []


def test_files_and_kernels_stay_short():
    """At most 300 lines in a file, and 16 parameters of a kernel: more of them are argument records."""
    long, wide, kernels = {}, {}, 0
    for path in modules(ROOT / "minidl").values():
        text = path.read_text()
        if (lines := len(text.splitlines())) > 300:
            long[str(path)] = lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                kernels += 1
                if (parameters := len(node.args.args)) > 16:
                    wide[node.name] = parameters
    assert kernels > 250
    assert (long, wide) == ({}, {})


SLOW_TORCH = """
import sys, threading, time
from minidl.common import import_lock
from minidl.data.terms import Analyzer
def torch():
    with import_lock.LOCK:
        import torch
thread = threading.Thread(target=torch)
thread.start()
while "torch" not in sys.modules:
    time.sleep(0.01)
Analyzer("a", True, "english", 1).function()
thread.join()
"""


def test_stop_words_are_read_while_torch_is_being_imported(tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(4)\nclass Tensor: pass\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SLOW_TORCH], check=False, capture_output=True, text=True, env=environment
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
