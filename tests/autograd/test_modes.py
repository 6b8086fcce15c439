"""What is recorded: no_grad and enable_grad, nested, decorating, and in threads."""

import threading

import pytest

from minidl.autograd import enable_grad, is_grad_enabled, no_grad
from tests.autograd.functions import Add, Square, grad_of, leaf


def test_no_grad_as_context_and_decorator():
    x = leaf(1.0)
    with no_grad():
        assert not is_grad_enabled()
        assert not Square.apply(x).requires_grad
    assert is_grad_enabled()

    @no_grad()
    def quiet(value):
        return Square.apply(value)

    assert not quiet(x).requires_grad
    assert Square.apply(x).requires_grad


def test_modes_nest():
    with no_grad():
        with enable_grad():
            assert is_grad_enabled()
            with no_grad():
                assert not is_grad_enabled()
            assert is_grad_enabled()
        assert not is_grad_enabled()
    assert is_grad_enabled()


def test_one_context_entered_twice():
    mode = no_grad()
    with mode:
        with mode:
            pass
        assert not is_grad_enabled()
    assert is_grad_enabled()


def test_a_mode_ends_with_an_exception():
    with pytest.raises(KeyError), no_grad():
        raise KeyError
    assert is_grad_enabled()


def test_recursion_in_a_decorated_function():
    @no_grad()
    def down(depth):
        if depth:
            down(depth - 1)
        return is_grad_enabled()

    assert down(5) is False
    assert is_grad_enabled()


def test_threads_have_their_own_mode():
    seen = []
    with no_grad():
        thread = threading.Thread(target=lambda: seen.append(is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_one_decorated_function_in_two_threads():
    """The second call enters while recording is off and leaves after the first one has left."""
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    after = {}

    @no_grad()
    def wait(entered, leave):
        entered.set()
        assert leave.wait(20)

    def first():
        wait(first_is_in, second_is_in)
        after["first"] = is_grad_enabled()
        first_is_out.set()

    def second():
        with no_grad():
            assert first_is_in.wait(20)
            wait(second_is_in, first_is_out)
            after["second"] = is_grad_enabled()

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert after == {"first": True, "second": False}


def test_backward_in_threads():
    grads = [None] * 4

    def work(i):
        x = leaf(float(i))
        y = x
        for _ in range(50):
            y = Add.apply(y, x)
        y.backward()
        grads[i] = grad_of(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert grads == [[51.0]] * 4


def test_nothing_is_recorded_during_backward():
    recorded = []

    class Look(Square):
        @staticmethod
        def backward(ctx, dy):
            recorded.append(is_grad_enabled())
            return Square.backward(ctx, dy)

    x = leaf(1.0)
    Look.apply(x).backward()
    assert recorded == [False]
    assert not x.grad.requires_grad
