"""Replayed calls: their keys, the calls that are never replayed, and the launches."""

import threading
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.backends.nvidia.driver as nvidia
import triton.language as tl
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
    """Return whether the call with `second` replays the call with `first`; if so, compare the results."""
    calls = Calls(function)
    calls.call(first)
    second = first if second is None else second
    result = calls.replay(second)
    if result is not MISSING:
        assert torch.equal(result, function(*second))
    return result is not MISSING


def _sum(a, b, *_):
    return elementwise.add(a, b)


def test_only_tensors_of_the_same_layout_are_replayed():
    a, b = _x(4, 6), _x(4, 6)
    assert _twice(_sum, (a, b), (_x(4, 6), _x(4, 6)))
    assert not _twice(_sum, (a, b), (_x(6, 4), _x(6, 4)))
    assert not _twice(_sum, (a, b), (_x(6, 4).T, _x(4, 6)))
    assert not _twice(_sum, (a, b), (a.double(), b.double()))
    assert not _twice(_sum, (a, b), (_x(25)[1:].view(4, 6), b)), "4 bytes after a multiple of 16"


def test_the_same_tensor_twice_is_a_different_call():
    a, b = _x(8), _x(8)
    assert not _twice(_sum, (a, a), (a, b))
    assert not _twice(_sum, (a, b), (a, a))
    assert _twice(_sum, (a, a), (b, b))


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ((1, 0.0), (1, -0.0)), ("a", None), ((1,), (1, 1)), (torch.int8, torch.int16)],
)
def test_arguments_that_are_equal_but_not_interchangeable(one, other):
    a, b = _x(8), _x(8)
    assert not _twice(_sum, (a, b, one), (a, b, other))
    assert _twice(_sum, (a, b, one), (b, a, one))
    assert _twice(_sum, (a, b, float("nan")), (b, a, float("nan")))


def test_calls_with_inputs_that_share_memory_are_not_recorded():
    x = _x(16)
    halves = x[:8], x[8:]
    assert not _twice(_sum, halves, (_x(8), _x(8)))
    assert _twice(_sum, (_x(8), _x(8)), halves)


def test_calls_that_do_more_than_launch_are_never_replayed():
    captured = _x(8)
    a, b = _x(8), _x(8)
    assert not _twice(lambda a, b: elementwise.add(a, b.abs()), (a, b)), "arithmetic by torch"
    assert not _twice(lambda a, b: elementwise.add(a, captured.clone()), (a, b)), "a copy of a tensor that is no input"
    assert not _twice(lambda a, b: elementwise.add(a, captured), (a, b)), "a tensor that is no input"
    assert not _twice(lambda a, b: elementwise.add(a, b) if a.sum() > 0 else b, (a, b)), "a choice by values"
    assert not _twice(lambda a, b: (launch.note_indirect(lambda: [b]), elementwise.add(a, b))[1], (a, b)), "addresses"


def test_copies_and_fills_by_torch_are_replayed():
    def copied(a, b):
        total = torch.full((8, 4), 1.5, device=a.device)
        total[2:6].copy_(elementwise.add(a, b).T.contiguous())  # of memory that buffers share
        return total, elementwise.mul(a.t().contiguous(), 2.5), b.clone()

    calls = Calls(copied)
    calls.call((_x(4, 4), _x(4, 4)))
    args = torch.cat([_x(2, 4), _x(4, 4)])[2:], _x(4, 4)  # the first one begins after the start of its memory
    result = calls.replay(args)
    assert result is not MISSING
    for one, two in zip(result, copied(*args), strict=True):
        assert torch.equal(one, two)
        assert one.stride() == two.stride()
        assert one._base is None


def test_zeros_are_replayed():
    def padded(a):
        rows = torch.zeros(6, 4, device=a.device)
        rows[1:3].copy_(a)
        rows[3:5].fill_(0.5)
        columns = torch.empty_like(rows)
        columns[:, :3].copy_(rows[:, :3])
        columns[:, 3:].zero_()
        return elementwise.add(rows, columns), a.new_zeros(3), torch.zeros_like(a)

    calls = Calls(padded)
    calls.call((_x(2, 4),))
    a = _x(2, 4)
    result = calls.replay((a,))
    assert result is not MISSING
    assert all(map(torch.equal, result, padded(a)))


def test_copies_into_an_input_are_replayed_as_changes():
    calls = Calls(lambda a, b: a.copy_(b))
    calls.call((_x(8), _x(8)))
    a, b = _x(8), _x(8)
    assert calls.replay((a, b)) is a
    assert torch.equal(a, b)
    assert a._version > 0


@triton.jit
def _pair_kernel(pair, p_y, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    m = o < n
    tl.store(p_y + o, tl.load(pair[0] + o, mask=m) + tl.load(pair[1] + o, mask=m), mask=m)


def _sum_of_pair(a, b):
    y = torch.empty_like(a)
    launch.run(_pair_kernel, (1,), (a, b), y, len(a), BLOCK=16)
    return y


def test_launches_with_tensors_in_a_tuple_are_not_replayed():
    assert not _twice(_sum_of_pair, (_x(8), _x(8)), (_x(8), _x(8)))


def test_results_keep_their_layout_and_may_be_inputs():
    def results(x):
        y = elementwise.add(x, x)
        return y.permute(1, 0), None, [x, y[1:]]

    calls = Calls(results)
    x, other = _x(4, 6), _x(4, 6)
    calls.call((x,))
    first, second = calls.replay((other,)), results(other)
    assert first is not MISSING
    assert first[1] is None
    assert first[2][0] is other
    for one, two in ((first[0], second[0]), (first[2][1], second[2][1])):
        assert torch.equal(one, two)
        assert one.stride() == two.stride()


def test_the_first_call_is_not_recorded_by_default_and_forget_drops_recordings():
    calls = Calls(_sum)
    with replay.replaying(True):
        for seen in (MISSING, MISSING, None):
            result = calls.replay((_x(8), _x(8)))
            assert (result is MISSING) == (seen is MISSING)
            calls.call((_x(8), _x(8)))
        launch.forget()
        assert calls.replay((_x(8), _x(8))) is MISSING
    with replay.replaying(False):
        calls.call((_x(8), _x(8)))
        assert not calls.recorded


def test_recorded_and_watched_launches_are_not_replayed():
    calls = Calls(_sum)
    args = _x(8), _x(8)
    calls.call(args)
    assert calls.replay(args) is not MISSING
    with launch.record(lambda *_: None):
        assert calls.replay(args) is MISSING
    seen = []
    with launch.watch(lambda kernel, grid, args, meta, go: (seen.append(kernel), go())):
        calls.call(args)
    assert seen


def test_launches_of_other_threads_are_not_recorded_with_a_call():
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
    calls.call((_x(8), _x(8)))
    thread.join()
    (recorded,) = calls.recorded.values()
    assert len(recorded.launches) == 1


def test_compiled_kernels_get_addresses(monkeypatch):
    launched = []
    compiled = SimpleNamespace(launch=lambda *how: launched.append(how))
    monkeypatch.setattr(recorded_call.fast_launch, "usable", lambda kernels: True)
    monkeypatch.setattr(recorded_call.fast_launch, "stream", lambda: 7)
    calls = Calls(_sum)
    calls.call((_x(64), _x(64)))
    ((key, recorded),) = calls.recorded.items()
    launches = tuple(each._replace(compiled=compiled, unpacked=None) for each in recorded.launches)
    calls.recorded[key] = recorded._replace(launches=launches, kernels=((recorded.launches[0].kernel, None),))
    a, b = _x(64), _x(64)
    y = calls.replay((a, b))
    ((grid, stream, args),) = launched
    assert (grid, stream) == (recorded.launches[0].grid, 7)
    assert [value for value in args[:4] if value is not None][:2] == [a.data_ptr(), b.data_ptr()]
    assert y.data_ptr() in args


def test_buffers_that_are_no_results_share_one_allocation():
    def chain(x):
        for _ in range(4):
            x = elementwise.add(x, x)
        return x

    assert _twice(chain, (_x(300),), (_x(300),))
    calls = Calls(chain)
    calls.call((_x(300),))
    (recorded,) = calls.recorded.values()
    assert [size for size, *_ in recorded.buffers] == [torch.Size([300]), (2 * 1536,)], (
        "three buffers of 1200 bytes, at most two at a time"
    )

    def tree(a, b):
        parts = [elementwise.add(a, b), elementwise.mul(a, b), elementwise.sub(a, b)]
        return elementwise.add(elementwise.add(parts[0], parts[1]), parts[2])

    assert _twice(tree, (_x(5), _x(5)), (_x(5), _x(5)))


def test_results_that_share_memory_or_are_empty_keep_their_layout():
    def both(x):
        y = elementwise.add(x, x)
        return y, y.T, x.new_empty(0), y[:0]

    calls = Calls(both)
    calls.call((_x(3, 5),))
    x = _x(3, 5)
    y, transposed, none, part = calls.replay((x,))
    assert torch.equal(y, x + x)
    assert torch.equal(transposed, y.T)
    assert (none.shape, part.shape) == ((0,), (0, 5))
    calls = Calls(_sum)
    for _ in range(2):
        a, b = _x(0, 5), _x(0, 5)
        y = calls(a, b)
        assert y.untyped_storage()._cdata not in {each.untyped_storage()._cdata for each in (a, b)}


def test_descriptors_of_addresses_go_through_tritons_launcher(monkeypatch):
    """Triton reads only the address of the tensor in a descriptor."""
    maps, launched = [], []

    def fill(address, *layout):
        maps.append((address, layout))
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
    assert maps[0][0] == 4096
    (arguments,) = launched
    assert "a map" in (arguments if triton.__version__.startswith("3.6") else arguments[-1])
