"""Docstrings: every public name has one, and the examples in them run."""

import ast
import functools
import inspect
import textwrap

import torch
import triton
import triton.language as tl

import minidl
import minidl.torch
from minidl import distributed, nn, ops, optim
from minidl.distributed import DataParallel
from minidl.nn import functional as F
from tests.snapshots.make import modules


@functools.cache
def public():
    """{path: object} of the public modules, functions and classes, and the functions and properties of classes."""
    found = {}
    for module in modules():
        found[module.__name__] = module
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.ismodule(value) or not callable(value) or str(value.__module__).startswith("torch"):
                continue
            path = f"{module.__name__}.{name}"
            found[path] = value
            if inspect.isclass(value) and value.__module__.startswith("minidl"):
                members = {f"{path}.{key}": getattr(value, key) for key in vars(value) if not key.startswith("_")}
                found |= {p: v for p, v in members.items() if inspect.isroutine(v) or isinstance(v, property)}
    return found


def text(value):
    """The docstring, none where it is but the signature that a dataclass gets; of a kernel that of its function."""
    if inspect.isclass(value):
        return "" if (value.__doc__ or "").startswith(f"{value.__name__}(") else value.__doc__
    return inspect.getdoc(getattr(value, "fn", value))


def test_every_public_name_has_a_docstring():
    assert len(public()) > 1200
    assert not [path for path, value in public().items() if not text(value)]


def given():
    """What examples use without saying where it is from."""

    @triton.jit
    def my_kernel(p_x, p_y, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_y + at, tl.load(p_x + at, mask=at < n, other=0.0), mask=at < n)

    def train_step(x, y):
        optimizer.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    model, x, y = nn.Linear(4, 3), minidl.randn(6, 4), minidl.as_tensor([0, 1, 2, 0, 1, 2])
    optimizer = optim.AdamW(model.parameters())
    return {
        "minidl": minidl, "nn": nn, "ops": ops, "optim": optim, "distributed": distributed, "F": F,
        "DataParallel": DataParallel, "model": model, "layer": model, "optimizer": optimizer, "batches": [(x, y)] * 2,
        "x": x, "y": y, "loss": ops.cross_entropy(model(x), y), "train_step": train_step,
        "train_some_steps": lambda: train_step(x, y), "my_kernel": my_kernel, "grid": (1,), "n": 6,
    }  # fmt: skip


OTHERWISE = {
    "minidl.torch": lambda: {
        "x": torch.randn(1, 2, 5, 5), "weight": torch.randn(3, 2, 3, 3), "bias": torch.randn(3),
        "model": torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()),
    },
    "minidl.torch.optim": lambda: {"model": torch.nn.Linear(4, 3)},
    "minidl.testing.sanitizer": lambda: {"x": torch.ones(6), "y": torch.empty(6)},
}  # fmt: skip


def examples():
    """(path, code) of the indented parts of docstrings that are Python and call something that is given."""
    known = set(given()) - {"x", "y", "n", "loss", "F"}
    for path, value in public().items():
        for part in inspect.cleandoc(text(value) or "").split("\n\n"):
            part = "\n".join(line for line in part.splitlines() if line.startswith("    "))
            try:
                tree = ast.parse(textwrap.dedent(part))
            except SyntaxError:
                continue
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            if names & known and any(isinstance(node, ast.Call) for node in ast.walk(tree)):
                yield path, textwrap.dedent(part)


def test_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = list(examples())
    for path, code in found:
        print(path, code, sep="\n")
        exec(code, given() | OTHERWISE.get(path, dict)())
    assert len(found) >= 10
