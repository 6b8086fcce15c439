"""A model changed after, or before, `accelerate` or the backend of `torch.compile` computes what torch's does."""

import copy
import functools
import random
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import minidl.torch as mt
from minidl.runtime import launch

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="layers leave CPU tensors to torch")
SCALE = {"global": 1.0}


def accelerated(model):
    return mt.accelerate(model)


def fused(model):
    torch._dynamo.reset()
    return torch.compile(model, backend=mt.backend)


def both(model):
    return fused(accelerated(model))


WAYS = pytest.mark.parametrize("way", [accelerated, fused, both])


def chain():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1),
        nn.GELU(), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 4), nn.Softmax(1),
    )  # fmt: skip


def module(body, **members):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Conv2d(3, 4, 3, padding=1)
            for name, value in members.items():
                setattr(self, name, value)

    Reads.forward = body
    return Reads


def replaced(index):
    """Replace a layer's forward, as libraries' hooks do."""

    def change(model):
        before = model[index].forward
        model[index].forward = lambda z: before(z) * 0.5 + 1

    return change


def around(self, input, weight, bias):
    z = F.pad(F.pad(input, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1))
    return F.conv2d(z, weight, bias, self.stride, 0, self.dilation, self.groups)


def _doubled(owner, name):
    """Patch a function for all of its callers."""

    def change(model, patch):
        before = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: before(*args, **kwargs) * 2)

    return change


def _wrap(f):
    @functools.wraps(f)
    def wrapped(self, x):
        return f(self, x)

    return wrapped


def _tried(self, x):
    try:
        return torch.relu(self.c(x)) * self.table["k"]
    except KeyError:
        return self.c(x)


class Property(module(lambda s, x: torch.relu(s.c(x)) * s.alpha, _a=1.0)):
    alpha = property(lambda s: s._a * 2)


class Default(module(lambda s, x: torch.relu(s.c(x)) * s.gain)):
    gain = 1.0


LAYERS = {
    "another activation": lambda m: m.__setitem__(2, nn.Tanh()),
    "no activation": lambda m: m.__setitem__(2, nn.Identity()),
    "slope": lambda m: setattr(m[2], "negative_slope", 0.9),
    "approximate": lambda m: setattr(m[5], "approximate", "tanh"),
    "eps": lambda m: setattr(m[1], "eps", 0.5),
    "eps of rows": lambda m: setattr(m[7], "eps", 0.5),
    "stride": lambda m: (setattr(m[0], "stride", (2, 2)), setattr(m[3], "kernel_size", 1), setattr(m[3], "stride", 1)),
    "dilation": lambda m: (setattr(m[0], "dilation", (2, 2)), setattr(m[0], "padding", (2, 2))),
    "dim": lambda m: setattr(m[9], "dim", 0),
    "padding_mode": lambda m: setattr(m[0], "padding_mode", "circular"),
    "_conv_forward": lambda m: setattr(m[0], "_conv_forward", around.__get__(m[0])),
    "statistics of the batch": lambda m: (setattr(m[1], "running_mean", None), setattr(m[1], "running_var", None)),
    "weights exchanged": lambda m: setattr(m[8], "weight", nn.Parameter(m[8].weight.detach() + 1)),
    "weights by data": lambda m: m[0].weight.data.mul_(2),
    "parametrized": lambda m: parametrize.register_parametrization(m[4], "weight", nn.Tanh()),
    "pruned": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
    "hook": lambda m: m[1].register_forward_hook(lambda module, args, y: y * 2),
    "hook before the model": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    **{f"forward of {i}": replaced(i) for i in (0, 1, 2, 3, 5, 7, 8, 9)},
}
READS = {
    "property": (Property, lambda m: setattr(m, "_a", 3.0)),
    "default of the class": (Default, lambda m: setattr(m, "gain", 3.0)),
    "getattr": (module(lambda s, x: torch.relu(s.c(x)) * getattr(s, "k"), k=1.0), lambda m: setattr(m, "k", 3.0)),  # noqa: B009
    "comprehension": (
        module(lambda s, x: sum([torch.relu(s.c(x)) * s.k for _ in range(2)]), k=1.0), lambda m: setattr(m, "k", 3.0)
    ),
    "decorated": (module(_wrap(lambda s, x: torch.relu(s.c(x)) * s.k), k=1.0), lambda m: setattr(m, "k", 3.0)),
    "tuple": (
        module(lambda s, x: F.interpolate(torch.relu(s.c(x)), size=s.size), size=(4, 4)),
        lambda m: setattr(m, "size", (9, 9)),
    ),
    "function": (module(lambda s, x: s.act(s.c(x)), act=torch.relu), lambda m: setattr(m, "act", torch.tanh)),
    "config": (
        module(lambda s, x: torch.relu(s.c(x)) * s.cfg.k, cfg=types.SimpleNamespace(k=1.0)),
        lambda m: setattr(m.cfg, "k", 3.0),
    ),
    "attribute of a child": (
        module(lambda s, x: torch.relu(s.c(x)) * s.c.out_channels), lambda m: setattr(m.c, "out_channels", 7)
    ),
    "dict": (module(lambda s, x: s.c(x) * s.d.get("k", 1.0), d={}), lambda m: m.d.update(k=3.0)),
    "is": (module(lambda s, x: s.c(x) if s.k is None else s.c(x) * 2, k=None), lambda m: setattr(m, "k", 1)),
    "try": (module(_tried, table={}), lambda m: m.table.update(k=3.0)),
    "list": (module(lambda s, x: torch.relu(s.c(x)) * s.ks[-1], ks=[1.0]), lambda m: m.ks.append(3.0)),
    "global": (module(lambda s, x: s.c(x) * SCALE["global"]), lambda m: SCALE.update({"global": 3.0})),
}  # fmt: skip
PATCHES = {
    "forward of a class": _doubled(nn.Conv2d, "forward"),
    "method of a class": _doubled(nn.Conv2d, "_conv_forward"),
    "forward of norms": _doubled(nn.BatchNorm2d, "forward"),
    "a function of layers": _doubled(F, "linear"),
    "a function of norms": _doubled(F, "layer_norm"),
}


@pytest.fixture(autouse=True)
def _restored():
    yield
    SCALE["global"] = 1.0


def _compare(make, change, way, before, x, training=False):
    torch.manual_seed(0)
    theirs = make().double().train(training)
    ours = copy.deepcopy(theirs)
    if before:
        change(ours)
        change(theirs)
    run = way(ours)
    with torch.set_grad_enabled(training):
        run(x)
        theirs(x)
        if not before:
            change(ours)
            change(theirs)
        torch.testing.assert_close(run(x), theirs(x), rtol=1e-9, atol=1e-9)


X = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("way", [accelerated, fused, pytest.param(both, marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", LAYERS)
def test_layers_that_are_changed(change, way):
    _compare(chain, LAYERS[change], way, False, X)


@pytest.mark.parametrize("change", LAYERS)
def test_layers_that_were_changed_before(change):
    _compare(chain, LAYERS[change], accelerated, True, X)


@WAYS
@pytest.mark.parametrize("read", READS)
def test_values_that_forward_reads(read, way):
    make, change = READS[read]
    _compare(make, change, way, False, X)


# Dynamo takes other methods of torch's classes for unchangeable, with any backend.
SEEN = [(p, way) for p in PATCHES for way in (accelerated, fused, both) if way is accelerated or "method" not in p]


@pytest.mark.parametrize(("patch", "way"), SEEN)
def test_patches_of_classes_and_functions(patch, way, monkeypatch):
    done = []

    def change(model):
        if not done:
            done.append(PATCHES[patch](model, monkeypatch))

    _compare(chain, change, way, False, X)


def drop(draw):
    class Drop(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.rng, self.calls = nn.Conv2d(3, 3, 3, padding=1), random.Random(0), {"n": 0}

        def forward(self, x):
            self.calls["n"] += 1
            y = torch.relu(self.c(x))
            return y + x if draw(self) < 0.2 else y

    return Drop


DRAWS = {
    "NumPy's": lambda m: np.random.rand(),  # noqa: NPY002
    "Python's": lambda m: random.random(),
    "one's own": lambda m: m.rng.random(),
    "torch's": lambda m: torch.rand(()).item(),
}


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@WAYS
@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_and_counters(draw, way):
    torch.manual_seed(0)
    theirs, x = drop(DRAWS[draw])().double().eval(), X[:, :, :4, :4]
    ours = copy.deepcopy(theirs)
    run, sums = way(ours), []
    with torch.no_grad():
        for model in (theirs, run):
            np.random.seed(0)  # noqa: NPY002
            random.seed(0)
            torch.manual_seed(0)
            sums.append([round(float(model(x).sum()), 6) for _ in range(30)])
    assert len(set(sums[0])) == 2
    assert sums[0] == sums[1]
    assert ours.calls == theirs.calls == {"n": 30}


@WAYS
def test_lists_and_dicts_of_tensors(way):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            x = torch.cat(x, 1) if isinstance(x, list | tuple) else x["image"] if isinstance(x, dict) else x
            return torch.relu(self.c(x))

    torch.manual_seed(0)
    theirs = Net().double()
    run = way(copy.deepcopy(theirs))
    for argument in (X, [X[:, :1], X[:, 1:]], (X[:, :2], X[:, 2:]), {"image": X}):
        torch.testing.assert_close(run(argument), theirs(argument), rtol=1e-9, atol=1e-9)


def _lbfgs(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


VIEWS = {
    "LBFGS": _lbfgs,
    "a vector": lambda m: parameters_to_vector(m.parameters()),
    "pruning": lambda m: prune.global_unstructured(
        [(m[0], "weight"), (m[8], "weight")], prune.L1Unstructured, amount=0.5
    ),
    "views": lambda m: [p.view(-1) for p in m.parameters()],
    "bytes": lambda m: [p.detach().numpy().tobytes() for p in m.parameters()],
}


@pytest.mark.parametrize("use", VIEWS)
def test_parameters_lie_as_they_did(use):
    torch.manual_seed(0)
    model = accelerated(chain().double())
    model(X).sum().backward()
    assert all(p.is_contiguous() and p.grad.is_contiguous() for p in model.parameters())
    VIEWS[use](model)


def test_modes_and_subclasses_see_torchs_functions():
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    model, names = accelerated(chain().double()), []
    with Seen():
        model(X)
    assert {"conv2d", "batch_norm", "linear"} <= set(names)
    names.clear()
    model(X.as_subclass(Logged))
    assert {"conv2d", "batch_norm", "linear"} <= set(names)
    launched = []
    with torch.device("cpu"), launch.watch(lambda kernel, grid, args, meta, go: (launched.append(kernel), go())):
        model(X)  # a mode that changes no function
    assert launched


def test_flops_are_counted_as_torchs():
    counts = []
    for model in (chain(), accelerated(chain())):
        with FlopCounterMode(display=False) as counter:
            model(X.float().requires_grad_()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_exported_to_onnx_by_torchs_operators(monkeypatch):
    model = accelerated(chain().eval())
    assert "minidl." in str(torch.export.export(model, (X.float(),)).graph)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    program = torch.export.export(model, (X.float(),))
    assert "minidl." not in str(program.graph)


def test_the_backend_is_known_by_name():
    assert torch._dynamo.lookup_backend("minidl") is mt.backend
