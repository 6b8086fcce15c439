"""Triton gets the lines of kernels that `inspect` finds."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from types import FunctionType, ModuleType

import pytest

import minidl.kernels
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


def test_python_without_positions_falls_back_to_inspect():
    code = "from minidl.kernels.softmax import softmax_kernel; print(len(softmax_kernel.src))"
    lengths = {
        subprocess.run(
            [sys.executable, *flags, "-c", code], capture_output=True, check=True, env={"TRITON_INTERPRET": "0"}
        ).stdout
        for flags in ((), ("-X", "no_debug_ranges"))
    }
    assert len(lengths) == 1
