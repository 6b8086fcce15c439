"""The lock of an interpreted launch: nothing waits for it without end, whatever interrupts the thread that holds it."""

import os
import signal
import threading
import time

import pytest
import torch
import triton
import triton.language as tl

from minidl.kernels import elementwise
from minidl.runtime import launch

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="kernels are compiled here, nothing is interpreted")

within = []  # what the kernel calls


def call_within():
    for function in within:
        function()


@triton.jit
def programs_kernel(p_y):
    """y[i] = 100 * (the number of programs) + i, with a call in between."""
    first = tl.program_id(0)
    call_within()
    tl.store(p_y + first, 100 * tl.num_programs(0) + tl.program_id(0))


@pytest.fixture
def during():
    """Have a function called by every program of `launched`."""
    yield within.append
    within.clear()


def launched(programs=3):
    y = torch.zeros(programs, dtype=torch.int32)
    launch.run(programs_kernel, (programs,), y)
    return y.tolist()


EXPECTED = [300, 301, 302]


def test_a_launch_within_a_launch(during):
    """As of the handler of a signal, with fewer programs."""
    inner = []

    def again():
        within.clear()
        inner.append(launched(2))

    during(again)
    assert launched() == EXPECTED
    assert inner == [[200, 201]]


def test_a_launch_that_triton_is_asked_for_itself(during):
    """A kernel of a user's own holds the lock, too."""
    during(lambda: time.sleep(0.01))
    found = [torch.zeros(n, dtype=torch.int32) for n in (3, 2, 1, 3)]
    threads = [threading.Thread(target=programs_kernel[(len(y),)], args=(y,)) for y in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [y.tolist() for y in found] == [EXPECTED, [200, 201], [100], EXPECTED]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_in_a_launch_leaves_it_free(during, error):
    def fail():
        raise error

    during(fail)
    with pytest.raises((error, triton.runtime.interpreter.InterpreterError)):
        launched()
    within.clear()
    found = []
    thread = threading.Thread(target=lambda: found.append(launched()))
    thread.start()
    thread.join(60)
    assert found == [EXPECTED]


@pytest.fixture
def busy(during):
    """A thread in a launch, which ends when the event is set."""
    inside, go_on, found = threading.Event(), threading.Event(), []

    def wait():
        if threading.current_thread() is thread:
            inside.set()
            go_on.wait(60)

    during(wait)
    thread = threading.Thread(target=lambda: found.append(launched()))
    thread.start()
    assert inside.wait(60)
    yield go_on
    go_on.set()
    thread.join()
    assert found == [EXPECTED]


def test_waiting_for_another_launch_can_be_interrupted(busy):
    def interrupt():
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launched()
    thread.join()
    busy.set()
    assert launched() == EXPECTED


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_during_a_launch_of_another_thread(busy):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        right = launched() == EXPECTED and elementwise.add(torch.ones(3), 1.0).tolist() == [2.0] * 3
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
