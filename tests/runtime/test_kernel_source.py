"""Triton gets the lines of kernels that `inspect` finds."""

import functools
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from types import FunctionType, ModuleType

import pytest

import minidl.kernels.check
from minidl.runtime import kernel_source

SOURCE = """
def plain(x):
    return x


def ends_with_comments(x):
    y = [
        x,
    ]  # no return
    # the last line

    # or this one
# outside


@staticmethod
def nested(x):
    return (lambda y: (
        y
    ))(x)
"""


def functions():
    """Yield every function of Triton in the package."""
    for module in pkgutil.walk_packages(minidl.kernels.__path__, "minidl.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(getattr(value, "fn", None), FunctionType):
                yield value.fn


def test_the_lines_of_every_kernel_are_those_of_inspect():
    compared = [kernel_source.source_lines(function) == inspect.getsourcelines(function) for function in functions()]
    assert len(compared) > 250
    assert all(compared)


def test_comments_nested_functions_and_decorators(tmp_path, monkeypatch):
    path = tmp_path / "lines.py"
    path.write_text(SOURCE)
    module = ModuleType("minidl.lines")
    monkeypatch.setitem(sys.modules, "minidl.lines", module)
    module.__file__ = str(path)
    exec(compile(SOURCE, str(path), "exec"), vars(module))
    for function in (module.plain, module.ends_with_comments, module.nested.__func__):
        assert kernel_source.source_lines(function) == inspect.getsourcelines(function)


def test_other_functions_are_left_to_inspect():
    assert kernel_source.source_lines(functions) == inspect.getsourcelines(functions)
    namespace = {"__name__": "minidl.nowhere"}
    exec("def without_a_file(): pass", namespace)
    with pytest.raises(OSError, match=r"could not get source code|source code not available"):
        kernel_source.source_lines(namespace["without_a_file"])


def test_functions_without_a_module_and_wrappers_are_left_to_inspect(tmp_path, monkeypatch):
    path = tmp_path / "lines.py"
    path.write_text(SOURCE)
    namespace = {}
    exec(compile(SOURCE, str(path), "exec"), namespace)
    assert namespace["plain"].__module__ in (None, "builtins")
    assert kernel_source.source_lines(namespace["plain"])[0] == ["def plain(x):\n", "    return x\n"]

    @functools.wraps(minidl.kernels.check.floating)
    def wrapper():
        pass

    assert kernel_source.source_lines(wrapper) == inspect.getsourcelines(minidl.kernels.check.floating)


def test_a_module_that_is_loaded_again_has_its_new_lines(tmp_path, monkeypatch):
    path = tmp_path / "lines.py"
    for number in (1, 2):
        path.write_text(f"def kernel():\n    return {number}{number * ' '}\n")
        namespace = {"__name__": "minidl.lines"}
        exec(compile(path.read_text(), str(path), "exec"), namespace)
        assert f"return {number}" in kernel_source.source_lines(namespace["kernel"])[0][1]


SOURCES = """
import hashlib
from minidl.kernels.conv.cubes import conv_cube_tile
from minidl.kernels.conv.boxed import conv_box_kernel
conv_cube_tile.parse()
print(hashlib.sha256((conv_cube_tile.src + conv_box_kernel.src).encode()).hexdigest())
"""


def test_python_without_positions_falls_back_to_inspect(tmp_path):
    sources = set()
    for number, flags in enumerate(((), ("-X", "no_debug_ranges"))):
        environment = {"TRITON_INTERPRET": "0", "PYTHONPYCACHEPREFIX": str(tmp_path / str(number))}
        command = [sys.executable, *flags, "-c", SOURCES]
        sources.add(subprocess.run(command, capture_output=True, check=True, env=os.environ | environment).stdout)
    assert len(sources) == 1
