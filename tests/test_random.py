"""The process's source of random numbers."""

import threading

import pytest
import torch

from minidl import random


@pytest.fixture(autouse=True)
def unchanged():
    """Leave the state as other tests expect it."""
    before = random.get_state()
    yield
    random.set_state(before)


def test_a_seed_starts_at_stream_0_and_every_draw_takes_the_next():
    random.manual_seed(5)
    assert [random.key() for _ in range(3)] == [(5, 0), (5, 1), (5, 2)]
    assert random.key()[1] == 3


def test_a_given_seed_leaves_the_state_alone():
    random.manual_seed(5)
    assert random.key(9) == (9, 0)
    assert random.get_state() == {"seed": 5, "stream": 0}


def test_a_state_set_again_repeats_what_followed():
    random.manual_seed(5)
    random.key()
    state = random.get_state()
    following = [random.key() for _ in range(3)]
    random.manual_seed(6)
    random.set_state(state)
    assert [random.key() for _ in range(3)] == following


def test_threads_share_no_stream():
    random.manual_seed(0)
    taken = []
    threads = [threading.Thread(target=lambda: taken.extend(random.key()[1] for _ in range(500))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(2000))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: random.manual_seed(-1), ValueError, "seed is -1"),
        (lambda: random.manual_seed(2**63), ValueError, "seed is 9223372036854775808"),
        (lambda: random.manual_seed(1.5), TypeError, "integer"),
        (lambda: random.key("a"), TypeError, "integer"),
        (lambda: random.set_state({"seed": 1}), ValueError, r"has \['seed'\], expected \['seed', 'stream'\]"),
        (lambda: random.set_state({"seed": 1, "stream": -1}), ValueError, "stream is -1"),
    ],
)
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_streams_numbered_on_the_device_are_taken_as_others(device):
    key = torch.tensor([5, 7], device=device)
    random.set_state({"seed": 5, "stream": 7})
    with random.numbered_by(key):
        taken = [random.key()[1] for _ in range(2)]
        assert random.key(9) == (9, 0)
        with pytest.raises(RuntimeError, match="set it outside the step"):
            random.manual_seed(0)
    assert [stream.offset for stream in taken] == [0, 1]
    assert all(stream.key is key for stream in taken)
    assert random.key() == (5, 9)
    random.skip(3)
    assert random.get_state() == {"seed": 5, "stream": 13}
