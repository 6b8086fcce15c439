"""One declaration of an operation, and the lists that follow from it."""

import ast
import inspect
from pathlib import Path

import torch

import minidl
from minidl import Tensor, ops
from minidl.nn import functional
from minidl.ops import registry


def test_the_top_level_lists_the_operations_that_torch_has_there():
    assert list(minidl._OPERATIONS) == registry.on_top_level(ops.__all__)


def test_functional_has_every_operation():
    assert functional.__all__ == ops.__all__
    assert all(getattr(functional, name) is getattr(ops, name) for name in ops.__all__)


def test_a_method_is_its_operation():
    methods = [name for name in ops.__all__ if hasattr(torch.Tensor, name) and name not in registry._NO_METHOD]
    assert [name for name in methods if Tensor.__dict__[name] is not getattr(ops, name)] == []


def test_exceptions_are_operations_that_torch_has():
    names = registry._NO_METHOD | registry._NOT_ON_TOP_LEVEL
    assert names <= set(ops.__all__)
    assert all(hasattr(torch.Tensor, name) for name in registry._NO_METHOD)
    assert all(hasattr(torch, name) for name in registry._NOT_ON_TOP_LEVEL)


def test_every_attached_method_has_a_type():
    files = Path(inspect.getfile(Tensor)).parent.glob("*.py")
    declared = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.FunctionDef):
            declared.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            declared |= {target.id for target in targets if isinstance(target, ast.Name)}
    attached = [name for name, value in Tensor.__dict__.items() if callable(value) and not name.startswith("__")]
    assert sorted(set(attached) - declared) == []
