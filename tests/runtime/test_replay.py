"""Calls that are replayed: what tells them apart, what is never replayed, and what is launched."""

import threading
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.backends.nvidia.driver as nvidia
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.kernels import elementwise
from minidl.runtime import launch
from minidl.runtime.launch_cache import fast_launch, recorded_call, replay
from minidl.runtime.launch_cache.replay import MISSING, Calls
from minidl.tensors import default_device


def _x(*shape):
    return torch.randn(*shape, device=default_device())


@pytest.fixture(autouse=True)
def at_once():
    with replay.replaying(True, at_once=True):
        yield


def _twice(function, first, second=None):
    """Whether the call with `second` is replayed after that with `first`; if so, the results are compared."""
    calls = Calls(function)
    calls.first(first)
    second = first if second is None else second
    found = calls.again(second)
    if found is not MISSING:
        assert torch.equal(found, function(*second))
    return found is not MISSING


def _sum(a, b, *_):
    return elementwise.add(a, b)


def test_other_memory_is_replayed_and_what_lies_otherwise_is_not():
    a, b = _x(4, 6), _x(4, 6)
    assert _twice(_sum, (a, b), (_x(4, 6), _x(4, 6)))
    assert not _twice(_sum, (a, b), (_x(6, 4), _x(6, 4)))
    assert not _twice(_sum, (a, b), (_x(6, 4).T, _x(4, 6)))
    assert not _twice(_sum, (a, b), (a.double(), b.double()))
    assert not _twice(_sum, (a, b), (_x(25)[1:].view(4, 6), b)), "4 bytes after a multiple of 16"


def test_one_tensor_twice_is_another_call():
    a, b = _x(8), _x(8)
    assert not _twice(_sum, (a, a), (a, b))
    assert not _twice(_sum, (a, b), (a, a))
    assert _twice(_sum, (a, a), (b, b))


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ((1, 0.0), (1, -0.0)), ("a", None), ((1,), (1, 1)), (torch.int8, torch.int16)],
)
def test_settings_that_python_or_a_kernel_tells_apart(one, other):
    a, b = _x(8), _x(8)
    assert not _twice(_sum, (a, b, one), (a, b, other))
    assert _twice(_sum, (a, b, one), (b, a, one))
    assert _twice(_sum, (a, b, float("nan")), (b, a, float("nan")))


def test_tensors_of_one_memory_are_not_watched():
    whole = _x(16)
    parts = whole[:8], whole[8:]
    assert not _twice(_sum, parts, (_x(8), _x(8)))
    assert _twice(_sum, (_x(8), _x(8)), parts)


def test_what_more_than_launches_is_never_replayed():
    kept = _x(8)
    a, b = _x(8), _x(8)
    assert not _twice(lambda a, b: elementwise.add(a, b.clone()), (a, b)), "a copy by torch"
    assert not _twice(lambda a, b: elementwise.add(a, kept), (a, b)), "a tensor that is not given"
    assert not _twice(lambda a, b: elementwise.add(a, b) if a.sum() > 0 else b, (a, b)), "a look at values"
    assert not _twice(lambda a, b: (launch.pointed_at(lambda: [b]), elementwise.add(a, b))[1], (a, b)), "addresses"


def test_results_lie_as_they_did_and_may_be_what_was_given():
    def results(x):
        y = elementwise.add(x, x)
        return y.permute(1, 0), None, [x, y[1:]]

    calls = Calls(results)
    x, other = _x(4, 6), _x(4, 6)
    calls.first((x,))
    first, second = calls.again((other,)), results(other)
    assert first is not MISSING
    assert first[1] is None
    assert first[2][0] is other
    for one, two in ((first[0], second[0]), (first[2][1], second[2][1])):
        assert torch.equal(one, two)
        assert one.stride() == two.stride()


def test_the_first_call_is_not_watched_by_default_and_settings_forget():
    calls = Calls(_sum)
    with replay.replaying(True):
        for seen in (MISSING, MISSING, None):
            found = calls.again((_x(8), _x(8)))
            assert (found is MISSING) == (seen is MISSING)
            calls.first((_x(8), _x(8)))
        launch.forget()
        assert calls.again((_x(8), _x(8))) is MISSING
    with replay.replaying(False):
        calls.first((_x(8), _x(8)))
        assert not calls.known


def test_launches_that_others_take_are_not_replayed():
    calls = Calls(_sum)
    args = _x(8), _x(8)
    calls.first(args)
    assert calls.again(args) is not MISSING
    with launch.record(lambda *_: None):
        assert calls.again(args) is MISSING
    seen = []
    with launch.watch(lambda kernel, grid, args, meta, go: (seen.append(kernel), go())):
        calls.first(args)
    assert seen


def test_launches_of_other_threads_are_no_part_of_a_call():
    ready, done = threading.Event(), threading.Event()

    def other():
        ready.wait(10)
        elementwise.mul(_x(8), _x(8))
        done.set()

    def waiting(a, b):
        ready.set()
        done.wait(10)
        return elementwise.add(a, b)

    thread = threading.Thread(target=other)
    thread.start()
    calls = Calls(waiting)
    calls.first((_x(8), _x(8)))
    thread.join()
    (found,) = calls.known.values()
    assert len(found.steps) == 1


def test_compiled_kernels_get_addresses(monkeypatch):
    launched = []
    ready = SimpleNamespace(launch=lambda *how: launched.append(how))
    monkeypatch.setattr(recorded_call.fast_launch, "usable", lambda kernels: True)
    monkeypatch.setattr(recorded_call.fast_launch, "stream", lambda: 7)
    calls = Calls(_sum)
    calls.first((_x(64), _x(64)))
    ((key, found),) = calls.known.items()
    steps = tuple(step._replace(ready=ready, opened=None) for step in found.steps)
    calls.known[key] = found._replace(steps=steps, kernels=((found.steps[0].kernel, None),))
    a, b = _x(64), _x(64)
    y = calls.again((a, b))
    ((grid, stream, args),) = launched
    assert (grid, stream) == (found.steps[0].grid, 7)
    assert [value for value in args[:4] if value is not None][:2] == [a.data_ptr(), b.data_ptr()]
    assert y.data_ptr() in args


def test_memory_that_is_no_result_is_asked_for_once_and_shared_where_it_can_be():
    def chain(x):
        for _ in range(4):
            x = elementwise.add(x, x)
        return x

    assert _twice(chain, (_x(300),), (_x(300),))
    calls = Calls(chain)
    calls.first((_x(300),))
    (found,) = calls.known.values()
    assert [size for size, *_ in found.made] == [torch.Size([300]), (2 * 1536,)], "three of 1200 bytes, two at a time"

    def tree(a, b):
        parts = [elementwise.add(a, b), elementwise.mul(a, b), elementwise.sub(a, b)]
        return elementwise.add(elementwise.add(parts[0], parts[1]), parts[2])

    assert _twice(tree, (_x(5), _x(5)), (_x(5), _x(5)))


def test_results_in_one_memory_and_without_numbers_lie_as_they_did():
    def both(x):
        y = elementwise.add(x, x)
        return y, y.T, x.new_empty(0), y[:0]

    calls = Calls(both)
    calls.first((_x(3, 5),))
    x = _x(3, 5)
    y, turned, none, part = calls.again((x,))
    assert torch.equal(y, x + x)
    assert torch.equal(turned, y.T)
    assert (none.shape, part.shape) == ((0,), (0, 5))
    calls = Calls(_sum)
    for _ in range(2):
        a, b = _x(0, 5), _x(0, 5)
        y = calls(a, b)
        assert y.untyped_storage()._cdata not in {each.untyped_storage()._cdata for each in (a, b)}


def test_descriptors_of_addresses_go_through_tritons_launcher(monkeypatch):
    """What Triton itself makes of a descriptor asks its tensor for the address alone."""
    made, launched = [], []

    def fill(address, *layout):
        made.append((address, layout))
        return "a map"

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils))
    layout = {"swizzle": 0, "elem_size": 2, "elem_type": 6, "block_size": [16, 16], "fp4_padded": False}
    like = TensorDescriptor(torch.zeros(64, 64, dtype=torch.half), [64, 64], [64, 1], [16, 16])
    signature = {0: "*fp16", 1: "tensordesc<fp16[16,16]>", 2: "i32"}
    wrapped = nvidia.wrap_handle_tensordesc(lambda *args: launched.append(args), signature, [layout])
    args = 123, fast_launch.at_address(like, 4096), 5
    before = 1, 1, 1, 7, 8, *[None] * 8  # grid, stream, function; in Triton 3.6 the arguments follow in no tuple
    wrapped(*before, *(args if triton.__version__.startswith("3.6") else (args,)))
    assert made[0][0] == 4096
    (given,) = launched
    assert "a map" in (given if triton.__version__.startswith("3.6") else given[-1])
