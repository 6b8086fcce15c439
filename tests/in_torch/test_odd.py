"""Odd input and odd uses of operators and accelerated models: torch's result, or one clear error."""

import copy
import io
import os
import random
import subprocess
import sys
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import minidl
import minidl.torch as mt
from minidl import runtime
from tests.in_torch.test_accelerate import Residual, _close, _same
from tests.in_torch.test_operators import _randn


def small():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip


def two(model, device):
    """The same model accelerated and as it is."""
    torch.manual_seed(0)
    theirs = model().double().to(device)
    return mt.accelerate(copy.deepcopy(theirs)), theirs


def _within_roundings(one, other, steps):
    """Two results of which each of so many steps was rounded to float16 once, to either side."""
    within = steps * torch.finfo(torch.float16).eps * float(other.detach().abs().max())
    torch.testing.assert_close(one, other, rtol=0, atol=within)


x, w, ones = _randn(2, 3, 5, 5), _randn(4, 3, 3, 3), _randn(4).abs()
WRONG = {
    "channels": (lambda: mt.conv2d(x[:, :2], w), "input has 2 channels"),
    "channels of groups": (lambda: mt.conv1d(x[..., 0], w[:, :1, 0], groups=3), "multiple of groups"),
    "transposed channels": (lambda: mt.conv_transpose2d(x, w), "weight's first size, 4"),
    "volumes": (lambda: mt.conv3d(x[:, None], w[:, :2, None]), "input has 1 channels"),
    "bias": (lambda: mt.conv2d(x, w, ones[:3]), r"bias has shape \[3\], expected \[4\]"),
    "scale": (lambda: mt.conv2d(x, w, ones, scale=ones[:1]), r"scale has shape \[1\]"),
    "a sum of sequences": (lambda: mt.conv1d(x[..., 0], w[..., 0], added=x[..., 0]), "added has shape"),
    "a weight of another rank": (lambda: mt.conv1d(x[..., 0], w), "weight has 4 dimensions, expected 3"),
    "an image of no axes": (lambda: mt.conv2d(x[0, 0, 0], w), r"expected \[N, C, H, W\]"),
    "a sum after a norm": (lambda: mt.batch_norm(x, None, None, training=True, added=x[:1]), "added is"),
    "and in inference": (lambda: mt.batch_norm(x, ones[:3], ones[:3], added=x[..., :4]), "added is"),
    "rows": (lambda: mt.layer_norm(x, 5, ones), r"layer_norm: weight is \[4\]"),
    "rows by RMS": (lambda: mt.rms_norm(x, 5, ones), r"rms_norm: weight is \[4\]"),
    "groups": (lambda: mt.group_norm(x, 3, ones[:3], ones), r"group_norm: bias is \[4\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_do_not_fit_are_refused(name):
    """Kernels would read outside of their tensors."""
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 3, 2, 4)])
def test_each_rows_loss_of_logits_that_lie_in_another_order(shape, device):
    logits = _randn(*reversed(shape)).permute(*range(len(shape) - 1, -1, -1))
    classes, dy = torch.ones(shape[0], *shape[2:], dtype=torch.int64, device=device), _randn(shape[0], *shape[2:])
    grads = []
    for loss in (mt.cross_entropy, F.cross_entropy):
        leaf = logits.detach().requires_grad_()
        loss(leaf, classes, reduction="none").backward(dy)
        grads.append(leaf.grad)
    _close(*grads)
    assert grads[0].stride() == grads[1].stride()


def test_an_accelerated_model_refuses_other_channels_and_takes_no_images(device):
    for training in (True, False):
        ours, theirs = (m.train(training) for m in two(lambda: Residual(3, 4, 2), device))
        images = torch.randn(0, 3, 6, 6, dtype=torch.float64, device=device)
        _same(ours, theirs, images)
        with pytest.raises(ValueError, match="input has 2 channels"):
            ours(torch.randn(2, 2, 6, 6, dtype=torch.float64, device=device))


def test_parametrized_afterwards_computed_once_a_call_and_restored(device):
    """Spectral norms change with each read of a weight."""
    ours, theirs = two(small, device)
    images = torch.randn(2, 3, 6, 6, dtype=torch.float64, device=device)
    for model in (ours, theirs):
        torch.manual_seed(1)
        parametrizations.spectral_norm(model[0])
    for _ in range(2):
        _same(ours, theirs, images)
    mt.restore(ours)
    assert [type(m).__mro__[1:] for m in ours.modules()] == [type(m).__mro__[1:] for m in theirs.modules()]
    _same(ours, theirs, images)


@pytest.mark.parametrize("training", [True, False])
def test_a_sum_has_torchs_dtype_under_autocast(device, training):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.plain = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            y = self.norm(self.conv(x))
            y += x  # in place: y's dtype
            return F.relu(self.norm(self.conv(x)) + x), self.plain(x) + x, self.norm(x) + x.half(), F.relu(y)

    torch.manual_seed(0)
    theirs = Sums().to(device).train(training)
    ours, images = mt.accelerate(copy.deepcopy(theirs)), torch.randn(2, 3, 4, 4, device=device)
    with torch.autocast(device.type, torch.float16):
        results = ours(images), theirs(images)
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        _within_roundings(one, other, 3)  # of the convolution, the norm and the sum


def test_models_of_a_stack_get_gradients_from_outside_of_vmap(device):
    images, classes = torch.randn(3, 3, 6, 6, dtype=torch.float64, device=device), torch.tensor([0, 2, 1]).to(device)
    gradients = []
    for model, loss in zip(two(small, device), (mt.cross_entropy, F.cross_entropy), strict=True):
        values, buffers = torch.func.stack_module_state([model.eval(), copy.deepcopy(model)])

        def of(v, b, model=model, loss=loss):
            return loss(torch.func.functional_call(model, (v, b), images), classes)

        torch.vmap(of)(values, buffers).sum().backward()
        gradients.append([v.grad for v in values.values()])
    for one, other in zip(*gradients, strict=True):
        _close(one, other)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_traces_of_torchscript_have_operators_and_scripts_are_refused(device):
    ours, theirs = (m.eval() for m in two(small, device))
    images = torch.randn(2, 3, 6, 6, dtype=torch.float64, device=device)
    traced, file = torch.jit.trace(ours, images, check_trace=False), io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    _same(torch.jit.load(file), theirs, images[:1].contiguous())
    with pytest.raises(NotImplementedError, match="restore"):
        torch.jit.script(ours)


def test_other_dtypes_and_tensors_afterwards(device):
    ours, theirs = (m.eval() for m in two(small, device))
    images = torch.randn(2, 3, 6, 6, dtype=torch.float64, device=device)
    values = {name: v * 1.5 if v.is_floating_point() else v for name, v in theirs.state_dict().items()}
    with torch.no_grad():
        ours(images), ours(images)
        for model in (ours, theirs):
            model.load_state_dict(copy.deepcopy(values), assign=True)
        for _ in range(2):
            _close(ours(images), theirs(images))
        # Of images, convolution, norm, mean and the last layer, and of the three layers' weights.
        _within_roundings(ours.half()(images.half()), theirs.half()(images.half()), 8)
        assert ours.to("meta")(images.half().to("meta")).shape == (2, 3)


NO_GPU = """
import torch
import minidl.torch as mt
from minidl.runtime import launch
model = mt.accelerate(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()))
x = torch.ones(1, 3, 4, 4)
model(x).sum().backward()  # by torch's kernels
assert "minidl" not in str(model(x).grad_fn)
for call in (lambda: mt.softmax(x, 1), lambda: torch.ops.minidl.softmax(x, 1, False), launch.target):
    try:
        call()
    except (TypeError, RuntimeError) as error:
        assert "compiled for CUDA" in str(error) and "TRITON_INTERPRET=1" in str(error), error
    else:
        raise AssertionError(call)
"""


def test_a_cpu_without_the_interpreter_is_told():
    done = subprocess.run(
        [sys.executable, "-c", NO_GPU], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_old_triton_is_told(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "3.5.1")
    with pytest.raises(ImportError, match=r"Triton 3\.6 or newer, got 3\.5\.1; run pip"):
        runtime._check_version()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_of_minidl_are_refused_by_operators(requires_grad):
    tensor = minidl.zeros(2, 3, requires_grad=requires_grad)
    for call in (lambda: mt.softmax(tensor, 1), lambda: mt.linear(x[0, 0, :2, :3].float(), tensor)):
        with pytest.raises(TypeError, match=r"got a minidl Tensor; use torch's with x\.to_torch"):
            call()


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)


class KnownTwice(Odd):
    def forward(self, x):
        y = self.norm(self.conv(x))
        z = y
        z += x
        z *= 2
        return F.relu(y)


class WithoutGradients(Odd):
    def forward(self, x):
        with torch.no_grad():
            y = self.norm(self.conv(x))
        return F.relu(y + x)


class NeverWithGradients(Odd):
    @torch.no_grad()
    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class OneNormTwice(Odd):
    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + self.norm(self.conv(x * 2)))


class Noise(Odd):
    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + torch.rand((), device=x.device, dtype=x.dtype) * random.random())


def test_random_numbers_are_drawn_at_each_call(device):
    torch.manual_seed(1)
    random.seed(1)
    ours, theirs = two(Noise, device)
    images, results = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=device), []
    for model in (ours, theirs):
        torch.manual_seed(2)
        random.seed(2)
        results += [model(images), model(images)]
    _close(results[:2], results[2:])
    state = torch.get_rng_state(), random.getstate()
    mt.accelerate(theirs)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


class Counts(Odd):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        y = self.norm(self.conv(x))
        return F.relu(y) if self.calls < 4 else y


class Scales(Counts):
    def forward(self, x):
        self.calls.mul_(0.5).add_(1)
        return F.relu(self.norm(self.conv(x)) * self.calls)


def test_arguments_that_are_none(device):
    class Masked(Odd):
        def forward(self, x, mask):
            y = F.relu(self.norm(self.conv(x)))
            return y if mask is None else y * mask

    ours, theirs = two(Masked, device)
    images = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=device)
    for mask in (None, images):
        _close(ours(images, mask), theirs(images, mask))


@pytest.mark.parametrize("kind", [KnownTwice, WithoutGradients, NeverWithGradients, OneNormTwice, Counts, Scales])
def test_what_a_trace_would_forget(kind, device):
    """Changes in place of aliases, modes of gradients, the order of running statistics."""
    ours, theirs = two(kind, device)
    images = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=device)
    if kind is not NeverWithGradients:
        _same(ours, theirs, images)
    _close(ours(images), theirs(images))
    assert ours(images).requires_grad == theirs(images).requires_grad
