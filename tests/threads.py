"""Work in several threads at the same time."""

import contextlib
import functools
import sys
import threading

import pytest
import torch

from minidl.runtime import launch
from minidl.tensors import Tensor, default_device

THREADS = 4


@pytest.fixture(autouse=True)
def often():
    """Threads give way to each other as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@contextlib.contextmanager
def stream_of_its_own():
    """On a GPU a stream, which begins after what was queued before, and has ended at the end."""
    if launch.INTERPRETED:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def same_stream():
    """A context for other threads: on a GPU the stream of this one."""
    if launch.INTERPRETED:
        return contextlib.nullcontext
    return functools.partial(torch.cuda.stream, torch.cuda.current_stream())


def at_once(*works, context=stream_of_its_own):
    """What works give, each in a thread; they begin together. Raises what one of them raises."""
    begin, results, errors = threading.Barrier(len(works)), [None] * len(works), []

    def run(place, work):
        try:
            with context():
                begin.wait(60)
                results[place] = work()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def numbers(*shape, seed=0):
    return Tensor(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device()))


def whole_numbers(*shape, seed=0):
    """Sums of these are exact, in whatever order they are added."""
    made = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
    return Tensor(made.float().to(default_device()))
