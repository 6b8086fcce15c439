"""A captured step's first call: launches wait, and nothing sees that they do."""

import threading
from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from minidl import models, ops
from minidl.compilation.capture import capture
from minidl.compilation.first_call import delayed_launches
from minidl.ops.join import cat
from minidl.optim import SGD
from minidl.runtime import kernel_launch, launch
from minidl.tensors import Tensor, default_device
from tests.graphs import graphs, same_random  # noqa: F401 (fixtures)

DEVICE = torch.device(default_device())


@triton.jit
def doubled(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2.0 * tl.load(x + at))


@pytest.fixture
def order(monkeypatch):
    """The names of kernels as they are launched, and "|" where the code asks for it."""
    found, run = [], kernel_launch._run_by_triton

    def noted(kernel, *rest):
        found.append(kernel.__name__)
        run(kernel, *rest)

    monkeypatch.setattr(kernel_launch, "_run_by_triton", noted)
    monkeypatch.setattr(kernel_launch.fast_launch, "launch", lambda *launched: False)
    return found


def numbers(*shape):
    return Tensor(torch.rand(*shape, device=DEVICE) + 0.5)


def test_launches_wait_for_the_end(order):
    x = numbers(16)
    with delayed_launches(DEVICE):
        y = ops.exp(x)
        z = ops.sum(ops.log(y))
        order.append("|")
    assert order[0] == "|"
    assert len(order) > 3
    assert torch.allclose(z.data, x.data.sum())


@pytest.mark.parametrize(
    "see",
    [
        lambda y: y.item(),
        lambda y: y.data.to("cpu").to(torch.float64).item(),
        lambda y: y.data.clone().add_(1.0),
        lambda y: y.data.zero_(),
        lambda y: torch.zeros(1, device=DEVICE).copy_(y.data).item(),
        lambda y: torch.stack([y.data]),
        lambda y: y.data.detach().view(1, 1).add(1.0),
        lambda y: y.__dlpack__(),
        lambda y: torch.from_dlpack(y.data.__dlpack__()).clone().item(),
        torch.inference_mode()(lambda y: y.data.to(torch.float64)),
        torch.inference_mode()(lambda y: y.data.expand(2).contiguous()),
        lambda y: torch.eye(1, device=DEVICE).to_sparse() @ y.data[:, None],
    ],
)
def test_they_run_before_torch_sees_what_they_use(order, see):
    x = numbers(1)
    with delayed_launches(DEVICE):
        y = ops.exp(x)
        see(y)
        order.append("|")
    assert len(order) > 1
    assert order[-1] == "|"


def test_copies_on_the_device_wait_with_them(order):
    """In their order, and of memory as it is at their place in it."""
    x, into = numbers(4), torch.zeros(4, device=DEVICE)
    with delayed_launches(DEVICE):
        y = ops.exp(x)
        joined = torch.cat([y.data, x.data])
        halves = y.data.to(torch.float16)
        turned = y.data.view(2, 2).t().reshape(4)
        before = into._version
        assert into.copy_(joined[:4]) is into
        assert into._version > before
        z = ops.log(Tensor(into))
        copy = into.clone()
        into.copy_(z.data)
        version = into._version
        order.append("|")
    assert order[0] == "|"
    assert into._version == version
    exact = x.data.exp()
    torch.testing.assert_close(joined, torch.cat([exact, x.data]))
    torch.testing.assert_close(halves, exact.half(), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(turned, exact.view(2, 2).t().reshape(4))
    torch.testing.assert_close(copy, exact)
    torch.testing.assert_close(into, x.data)


@pytest.mark.parametrize("name", ["densenet121", "unet"])
def test_a_network_that_joins_waits_for_its_end(order, name):
    """Kernels are compiled in one round."""
    options = {"growth": 4, "first": 4} if name == "densenet121" else {"width": 4, "depth": 1}
    model = models.densenet.DenseNet((2, 2), 3, **options) if name == "densenet121" else models.unet(2, **options)
    x = numbers(2, 3, 32, 32)
    order.clear()
    with delayed_launches(DEVICE):
        ops.sum(model(x)).backward()
        order.append("|")
    assert order[0] == "|"


def test_new_memory_lets_them_wait(order):
    x = numbers(4)
    with delayed_launches(DEVICE):
        y = ops.exp(x)
        torch.empty_like(y.data).fill_(3.0)
        y.data.view(2, 2)
        torch.zeros(3, device=DEVICE)
        order.append("|")
    assert order[0] == "|"


def test_memory_is_known_by_whatever_name_it_has():
    """What came by DLPack has a storage of its own, which begins anywhere in another's."""
    memory = torch.zeros(32, device=DEVICE)
    alias = torch.from_dlpack(memory[16:24].__dlpack__())
    with delayed_launches(DEVICE):
        early, late = ops.exp(Tensor(memory[:8])), ops.exp(Tensor(alias))
        memory[20:].fill_(1.0)
        alias.fill_(2.0)
    assert torch.equal(torch.cat([early.data, late.data]), torch.ones(16, device=DEVICE))


def in_another_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_they_run_before_another_thread_reads_what_they_write(order):
    """Torch's backward calls functions of the user in threads of its own, on a GPU."""
    x, other = numbers(4), numbers(4)
    with delayed_launches(DEVICE):
        y = ops.exp(x)
        apart = in_another_thread(lambda: ops.exp(other))
        order.append("|")
        z = in_another_thread(lambda: ops.log(y))
    assert order.index("|") == 1  # what has other memory is launched at once
    assert len(order) == 4
    assert torch.allclose(z.data, x.data, atol=1e-5)
    assert torch.equal(apart.data, ops.exp(other).data)


def test_those_of_one_thread_wait_at_a_time(order):
    def other():
        with delayed_launches(DEVICE):
            ops.exp(numbers(4))
            return len(order)

    with delayed_launches(DEVICE):
        ops.exp(numbers(4))
        assert in_another_thread(other) == 1
    assert len(order) == 2


def test_they_run_before_launches_go_elsewhere(order):
    x = numbers(4)
    with delayed_launches(DEVICE):
        y = ops.exp(x)
        with launch.watch(lambda kernel, grid, args, meta, go: go()):
            z = ops.log(y)
        assert len(order) == 2
        ops.exp(z)
        assert len(order) == 2
    assert torch.allclose(z.data, x.data, atol=1e-5)


def test_memory_that_they_keep_is_given_back_where_none_is_left(order):
    x, asked = numbers(4), []

    def empty_like(func, args, kwargs):
        asked.append(len(order))
        if len(asked) == 1:
            raise torch.OutOfMemoryError
        return func(*args, **kwargs)

    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            call = empty_like if func is torch.ops.aten.empty_like.default else lambda f, a, k: f(*a, **k)
            return call(func, args, kwargs or {})

    with Full(), delayed_launches(DEVICE):
        ops.exp(x)
        asked.clear()
        y = torch.empty_like(x.data)
    assert asked == [0, 1]
    assert y.shape == x.shape


@pytest.mark.gpu
@pytest.mark.skipif(launch.INTERPRETED, reason="Triton calls no hook where kernels are interpreted")
def test_they_run_before_another_kernel(order):
    x, out = numbers(16), torch.zeros(16, device=DEVICE)
    with delayed_launches(DEVICE):
        y = ops.exp(x)
        doubled[(1,)](y.data, out, BLOCK=16)
        assert order
    assert torch.allclose(out, 2.0 * torch.exp(x.data))


def test_what_was_launched_before_an_error_has_run(order):
    def step():
        with delayed_launches(DEVICE):
            ops.exp(numbers(4))
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        step()
    assert order


def test_a_watcher_sees_launches_at_once():
    seen = []

    def watcher(kernel, grid, args, meta, go):
        seen.append(kernel)
        go()

    with launch.watch(watcher), delayed_launches(DEVICE):
        ops.exp(numbers(4))
        assert seen


def test_a_captured_step_gives_what_it_gives_plain(graphs):  # noqa: F811
    """With memory freed and taken again, results in place, and a value read on the host."""
    weight = numbers(8, 8)

    def step(x):
        y = x
        for _ in range(3):
            y = ops.relu(y @ weight) - 0.25
        weight.data.copy_((weight - y * 0.01).data)
        total = cat([y, y]).sum()
        return total, y

    x = numbers(8, 8)
    before = weight.data.clone()
    plain = [t.data.clone() for t in step(Tensor(x.data.clone()))]
    after = weight.data.clone()
    weight.data.copy_(before)
    for got, wanted in zip(capture(step)(x), plain, strict=True):
        assert torch.equal(got.data, wanted)
    assert torch.equal(weight.data, after)


def test_what_an_update_finds_by_its_address_is_kept():
    """Gradients copied into the order of their weights, whose memory torch then takes; and weights that torch reads."""
    start = torch.rand(8, 16, 4, 5, device=DEVICE)

    def trained(context):
        weights = [Tensor(start.to(memory_format=torch.channels_last), requires_grad=True) for _ in range(2)]
        optimizer = SGD(weights, lr=0.5)
        with context:
            for weight in weights:
                weight.grad = Tensor(start * 2.0)
            optimizer.step()
            optimizer.zero_grad()
            junk = [torch.full(start.shape, 1e9, device=DEVICE) for _ in range(8)]
            seen = weights[1].data.clone()
        del junk
        return seen, weights[0].data

    for got, wanted in zip(trained(delayed_launches(DEVICE)), trained(nullcontext()), strict=True):
        assert torch.equal(got, wanted)
        assert torch.equal(wanted, torch.zeros_like(start))


@pytest.mark.gpu
@pytest.mark.skipif(launch.INTERPRETED, reason="Triton calls no hook where kernels are interpreted")
def test_they_run_on_the_stream_that_they_were_made_on():
    x, other = numbers(2**22), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with delayed_launches(DEVICE):
        y = ops.exp(x)
        with torch.cuda.stream(other):
            z = ops.log(y)
        total = ops.sum(z)
    assert torch.allclose(total.data, x.data.sum(), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(launch.INTERPRETED, reason="kernels are interpreted")
def test_a_first_call_compiles_before_it_launches(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **seen: hits.append(seen["cache_hit"]))
    x, weight = numbers(48, 40).data.half(), numbers(40, 56).data.half()

    def step(x):
        y = ops.gelu(Tensor(x) @ Tensor(weight))
        return ops.softmax(ops.tanh(y), 1), ops.sum(ops.exp(y), 0), ops.max(y, 1).values[0]

    capture(step)(x)
    assert hits
    assert all(hits)
